"""Paths below ``~`` in Python and in specs, where no shell replaces it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import foretoken as ft
from foretoken.core.io.checkpoints import resolve
from foretoken.loading import ZOO, load_tokenizer
from foretoken.loading.draft_models import _is_small
from foretoken.methods.drafters.datastore import build_datastore
from foretoken.methods.drafters.ngram_cache import build_static_cache


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


@pytest.mark.parametrize("place", ["target", "draft", "datastore"])
def test_a_user_that_is_unknown_is_one_line(place: str) -> None:
    unknown = "~nobody_of_this_name/model"
    loads = {
        "target": lambda: ft.load(unknown),
        "draft": lambda: ft.load("builtin", drafter=f"model:{unknown}"),
        "datastore": lambda: ft.load("builtin", drafter=f"retrieval:{unknown}"),
    }
    with pytest.raises(ValueError, match="no folder here: write the whole path") as caught:
        loads[place]()
    assert "\n" not in str(caught.value)
