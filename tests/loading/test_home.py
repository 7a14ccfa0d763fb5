"""Paths below ``~`` in Python and in specs, where no shell replaces it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

import foretoken as ft
from foretoken.core.io.checkpoints import resolve
from foretoken.loading import ZOO, load_tokenizer, read_profile
from foretoken.loading.draft_models import _is_small
from foretoken.methods.drafters.datastore import build_datastore
from foretoken.methods.drafters.ngram_cache import build_static_cache
from foretoken.server.config import settings_from
from foretoken.training.formats.transfer import import_drafter


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("target", "draft"):
        (tmp_path / name).symlink_to(ZOO / name)
    return tmp_path


def test_a_target_and_its_draft_model() -> None:
    assert ft.load("~/target", drafter="model:~/draft,k=2").generate("def", max_new_tokens=3).text
    assert _is_small("~/draft")


def test_a_tokenizer() -> None:
    tokenizer = load_tokenizer("~/target")
    assert tokenizer is not None and len(tokenizer) == len(load_tokenizer("builtin"))


def test_ids_and_other_paths_stay() -> None:
    assert [resolve(name) for name in ("org/name", "./here/", "/a/~/b")] == ["org/name", "./here/", "/a/~/b"]


def test_files_of_drafters(home: Path) -> None:
    tokenizer = load_tokenizer("builtin")
    (home / "text.txt").write_text("def f(x):\n    return x\n")
    build_datastore([home / "text.txt"], tokenizer, "~/store")
    build_static_cache(["def f(x): return x"], tokenizer, "~/static")
    specs = ("retrieval:~/store", "sam:~/store", "ngram_cache:~/cache,static=~/static,save=true")
    for spec in specs:
        ft.load("builtin", drafter=spec).generate("def", max_new_tokens=3)
    gc.collect()  # a drafter's end writes its file
    assert {"store", "static", "cache"} <= {path.name for path in home.iterdir()} and not (home / "~").exists()


def test_a_profile(home: Path) -> None:
    (home / "tuned.json").write_text('{"drafter": "ngram,k=3"}')
    assert read_profile("~/tuned.json") == {"drafter": "ngram,k=3"}


def test_settings_of_a_server(home: Path) -> None:
    (home / "keys").write_text("secret\n")
    (home / "serve.yaml").write_text("max_running: 3\napi_key_file: ~/keys\n")
    settings = settings_from({}, Path("~/serve.yaml"), {})
    assert (settings.max_running, settings.api_keys) == (3, ("secret",))


UNKNOWN = "~nobody_of_this_name/model"


@pytest.mark.parametrize(
    "load",
    [
        lambda: ft.load(UNKNOWN),
        lambda: ft.load("builtin", profile=UNKNOWN),
        lambda: ft.load("builtin", controller=f"specdec_pp:{UNKNOWN}"),
        lambda: import_drafter(UNKNOWN, "out"),
        lambda: import_drafter("target", UNKNOWN),
        *(
            lambda spec=spec: ft.load("builtin", drafter=spec)
            for spec in (
                f"model:{UNKNOWN}",
                f"eagle3:{UNKNOWN}",
                f"retrieval:{UNKNOWN}",
                f"layer_skip:{UNKNOWN}",
                f"model,tree={UNKNOWN}",
                f"eagle3,tree={UNKNOWN}.json",
                f"model,vocab={UNKNOWN}",
                f"{UNKNOWN}.py:Drafter",
            )
        ),
    ],
)
def test_a_user_that_is_unknown_is_one_line(load: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="no folder here: write the whole path") as caught:
        load()
    assert "\n" not in str(caught.value)
