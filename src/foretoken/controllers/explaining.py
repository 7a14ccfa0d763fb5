"""What a plan is, and why, in words and numbers that a reader can check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.controllers.plans import Option


def in_words(plan: Sequence[Option], ranked: Sequence[Option], names: Sequence[str]) -> str:
    """Why a request drafts, or does not, in one line.

    Args:
        plan: options in use, without plain decoding; empty for plain decoding.
        ranked: all options as they were last weighed, plain decoding among them.
        names: of the members.
    """
    plain = _plain(ranked)
    if plain is None:
        return "nothing is measured yet"
    others = [option for option in ranked if option.member >= 0]
    if plan:
        return "drafts: " + "; where it has no guess, ".join(_round(option, plain, names) for option in plan)
    return f"plain: {_round(others[0], plain, names)}" if others else "plain: nothing drafts"


def _round(option: Option, plain: Option, names: Sequence[str]) -> str:
    return (
        f"a round with {option.depth} drafts of {names[option.member]} "
        f"costs {option.seconds / plain.seconds:.2f} plain rounds and brings {option.tokens:.2f} tokens"
    )


def as_report(plan: Sequence[Option], ranked: Sequence[Option], names: Sequence[str], batch: int) -> dict[str, Any]:
    """The cost model's numbers, for JSON.

    ``options`` holds for every member its best length, what a round of it costs in plain rounds (``cost``), what it
    brings (``tokens``), and for which part of the text it has guesses (``share``).  ``predicted_speedup`` is that of
    the plan over plain decoding: 1 for plain decoding.
    """
    plain = _plain(ranked)
    if plain is None:
        return {"batch": batch, "plan": [], "options": [], "predicted_speedup": None, "why": in_words((), (), names)}
    rows = [
        {
            "drafter": names[option.member],
            "depth": option.depth,
            "tokens": round(option.tokens, 3),
            "cost": round(option.seconds / plain.seconds, 3),
            "share": round(option.share, 3),
        }
        for option in ranked
        if option.member >= 0
    ]
    return {
        "batch": batch,
        "plan": [names[option.member] for option in plan],
        "options": rows,
        "predicted_speedup": round(_speedup(plan, plain), 3),
        "why": in_words(plan, ranked, names),
    }


def _speedup(plan: Sequence[Option], plain: Option) -> float:
    """Each option spends the part of the text that those before it have no guesses for."""
    seconds, left = 0.0, 1.0
    for option in [*plan, plain]:
        part = left * (option.share if option.member >= 0 else 1.0)
        seconds += part * option.seconds / option.tokens
        left -= part
    return plain.seconds / plain.tokens / seconds


def _plain(ranked: Sequence[Option]) -> Option | None:
    return next((option for option in ranked if option.member < 0), None)
