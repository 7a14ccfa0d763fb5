"""A toy model and a small language whose strings begin each other, for the tests of conditional sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.core.constraints import FiniteLanguage
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.models.other.table import TableModel

END, OTHER_END = 0, 6
STRINGS = [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 4), (4,), (4, 1), (5, 5, 5), (2, 1), (2, 3, 1)]
PROMPT = [3, 1, 5]


def model(ends: Sequence[int] = (END,), seed: int = 1) -> TableModel:
    return TableModel.random(7, seed=seed, order=3, sharpness=1.5, eos_token_ids=ends)


def request(seed: int | None = 0, **more: Any) -> Request:
    options: dict[str, Any] = {
        "params": SamplingParams(temperature=1.0), "max_new_tokens": 8, "language": FiniteLanguage.of(STRINGS), **more
    }  # fmt: skip
    return Request(PROMPT, seed=seed, **options)


class Numbers:
    """Tokens as numbers."""

    def decode(self, ids: Sequence[int], **more: Any) -> str:
        return "".join(f"{token}." for token in ids)
