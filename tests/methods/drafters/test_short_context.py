"""A draft model with a shorter context than its target: drafts end where it ends, the output does not."""

from __future__ import annotations

import pytest

import foretoken as ft
from foretoken.methods.drafters.model import ModelDrafter


@pytest.mark.parametrize("prompt_length", [3, 20])
@pytest.mark.parametrize("options", [{"k": 3}, {"tree": "2x2"}])
def test_text_may_outgrow_the_draft_model(prompt_length: int, options: dict[str, object]) -> None:
    target = ft.TableModel.random(6, seed=1, context_length=64)
    draft = ft.TableModel.random(6, seed=1, context_length=12)
    positions: list[int] = []
    original = draft.forward

    def watched(feeds, taps=()):  # type: ignore[no-untyped-def]
        rows = original(feeds, taps)
        positions.extend(len(f.sequence.tokens) + max(f.sequence.scratch_depths) for f in feeds)
        return rows

    draft.forward = watched  # type: ignore[method-assign]
    llm = ft.load(target, drafter=ModelDrafter(draft, **options), controller="constant")  # type: ignore[arg-type]
    prompt = [1, 2, 3] * 7
    out = llm.generate(prompt[:prompt_length], max_new_tokens=30)
    assert out.token_ids == llm.plain.generate(prompt[:prompt_length], max_new_tokens=30).token_ids
    assert all(p < 12 for p in positions)
    assert bool(positions) == (prompt_length < 12)
