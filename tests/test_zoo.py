"""The built-in models: complete, small, safe to load, and better the bigger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import foretoken as ft
from foretoken.loading import ZOO, check_folder
from foretoken.registry import rows

TRAINED = [row.name for row in rows("drafter") if row.needs_training]
CODE = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push("
PROSE = "It was a cold evening in November, and the old house "


def test_zoo_is_small_and_holds_no_pickles() -> None:
    files = [p for p in ZOO.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 80_000_000
    assert not [p for p in files if p.suffix in (".bin", ".pt", ".pth", ".pkl")]
    for name in ("target", "draft"):
        check_folder(ZOO / name)


def test_cards_state_data_tokens_loss_and_command() -> None:
    for name in ("target", "draft"):
        card = (ZOO / name / "README.md").read_text()
        for word in ("tokens seen", "held-out loss per token", "held-out loss per byte", "foretoken train lm", "Data"):
            assert word in card, (name, word)


def test_target_is_clearly_better_than_its_draft() -> None:
    def report(folder: Path) -> dict[str, float]:
        return json.loads((folder / "training.json").read_text())  # type: ignore[no-any-return]

    target, draft = report(ZOO / "target"), report(ZOO / "draft")
    for key in ("held_loss_nats_per_token", "held_bits_per_byte"):
        assert target[key] < 0.95 * draft[key]


def test_built_in_pair_speculates_and_keeps_the_output() -> None:
    llm = ft.load(dtype="float32")
    for prompt in (CODE, PROSE):
        out = llm.generate(prompt, max_new_tokens=48)
        assert out.token_ids == llm.plain.generate(prompt, max_new_tokens=48).token_ids
        assert out.stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize("name", TRAINED)
def test_trained_drafters_state_their_acceptance_and_how_they_were_made(name: str) -> None:
    card, report = (ZOO / name / "README.md").read_text(), json.loads((ZOO / name / "training.json").read_text())
    for word in (f"foretoken train {name}", "Held-out acceptance", "position 1", "T=1", "tokens seen", "Data"):
        assert word in card, word
    assert report["method"] == name and report["acceptance"]["mean_acceptance_length"] > 1
    assert report["corpus"]["held"]["documents"] > 0


@pytest.mark.parametrize("name", TRAINED)
def test_trained_drafters_guess_for_the_built_in_target(name: str) -> None:
    llm = ft.load(dtype="float32", drafter=name)
    drafted = accepted = 0
    for prompt in (CODE, PROSE):
        out = llm.generate(prompt, max_new_tokens=40)
        assert out.token_ids == llm.plain.generate(prompt, max_new_tokens=40).token_ids
        drafted, accepted = drafted + out.stats.num_draft_tokens, accepted + out.stats.num_accepted_tokens
    assert drafted > 0 and accepted > 2
