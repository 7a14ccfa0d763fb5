"""The built-in models: complete, small, safe to load, and better the bigger."""

from __future__ import annotations

import json
from pathlib import Path

import foretoken as ft
from foretoken.loading import ZOO, check_folder

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
