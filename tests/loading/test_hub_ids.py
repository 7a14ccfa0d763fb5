"""A model of the hub without a network: one line at once, or the copy in the cache."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import foretoken as ft
from foretoken.core.io import hub_ids
from foretoken.loading import ZOO, LoadError, load_tokenizer
from training.formats.hub_folders import hub_folder


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    forget = hub_ids._answers.cache_clear
    forget()
    yield
    forget()


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network: every question to the hub itself would be a failure of the test."""
    monkeypatch.setattr(hub_ids, "_answers", lambda endpoint, minute: False)
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("the network was asked"))


def cached(folder: Path, name: str, model: Path) -> None:
    """Lay a model into a cache as the hub's client does."""
    place = folder / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")


@pytest.mark.usefixtures("unreachable")
def test_what_is_neither_here_nor_cached_is_one_line_that_says_what_to_do() -> None:
    for load in (ft.load, load_tokenizer):
        with pytest.raises(LoadError) as error:
            load("org/nothing")
        text = str(error.value)
        assert "\n" not in text
        for words in ("org/nothing", "neither a folder here", "cache", "does not answer", "hf download org/nothing"):
            assert words in text


@pytest.mark.usefixtures("unreachable")
def test_a_cached_model_loads_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path, "org/tiny", ZOO / "target")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub_ids.location_of("org/tiny").startswith(str(tmp_path))
    want = ft.load(drafter=None).generate("def f(", max_new_tokens=8)
    assert ft.load("org/tiny", drafter=None).generate("def f(", max_new_tokens=8).token_ids == want.token_ids


@pytest.mark.usefixtures("unreachable")
def test_a_cached_drafter_is_told_from_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path, "org/tiny-DFlash", hub_folder(tmp_path / "theirs"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match=r"is a drafter \(dflash\) for a model of 4 layers .* import it") as caught:
        ft.load("org/tiny-DFlash", drafter=None)
    assert "\n" not in str(caught.value)


def test_being_offline_by_choice_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(hub_ids.UnreachableError, match="HF_HUB_OFFLINE is set"):
        hub_ids.location_of("org/nothing")


@pytest.mark.parametrize("name", ["a b", "org/name/more", "org/name with spaces", "a:b"])
def test_what_can_be_no_id_is_said(name: str) -> None:
    with pytest.raises(hub_ids.UnreachableError, match="nor a Hugging Face id"):
        hub_ids.location_of(name)


def test_what_is_here_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_ids, "_answers", lambda endpoint, minute: pytest.fail("the hub was asked"))
    assert hub_ids.location_of(str(tmp_path)) == str(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert hub_ids.location_of(tmp_path.name) == tmp_path.name


class Refusing(BaseHTTPRequestHandler):
    """A hub that answers, if only with an error."""

    def do_HEAD(self) -> None:
        self.send_response(503)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_any_answer_means_that_there_is_a_network() -> None:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert hub_ids._answers(f"http://127.0.0.1:{server.server_port}", 0)
    finally:
        server.shutdown()
        server.server_close()


def test_silence_and_refusals_mean_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert not hub_ids._answers(f"http://127.0.0.1:{silent.getsockname()[1]}", 0)
        closed = silent.getsockname()[1]
    assert not hub_ids._answers(f"http://127.0.0.1:{closed}", 1)


def test_a_name_that_is_nearly_one_of_ours_is_told_it(unreachable: None) -> None:
    with pytest.raises(LoadError, match="did you mean smollm2\\? `foretoken models` lists names"):
        ft.load("smolm2")
    with pytest.raises(LoadError) as other:
        ft.load("somebody/another-model")
    assert "foretoken models" not in str(other.value)
