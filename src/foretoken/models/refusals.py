"""Capabilities of models, and refusals of faster paths."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_SAID: set[str] = set()


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a model.

    Attributes:
        tree_mask: it scores branching scratch trees in one call.
        keep_path: it can commit any path of the scratch (false: only a prefix of a chain).
        rollback: it can drop scratch nodes at all (false: plain decoding only).
        taps: it returns hidden states.
        layer_windows: it can run a part of its layers.
        missing: for every absent capability, the reason with the layer type.
        prompt_logits: it scores the tokens of a prompt (an encoder does not).
    """

    tree_mask: bool = True
    keep_path: bool = True
    rollback: bool = True
    taps: bool = True
    layer_windows: bool = True
    missing: dict[str, str] = field(default_factory=dict)
    prompt_logits: bool = True


class CapabilityError(ValueError):
    """A method needs a capability that the model lacks; the message names the layer type."""


@dataclass(frozen=True)
class Refusal:
    """A faster path, or a guarantee, that was refused to a model.

    Attributes:
        path: its name ("lean forward", "int4 kernel", "CUDA graphs", "bitwise").
        costs: description of what that costs.
    """

    path: str
    why: str
    costs: str

    def __str__(self) -> str:
        """The line that users see."""
        return f"{self.path}: refused, {self.why}; {self.costs}"


def refusal(path: str, why: str, costs: str) -> Refusal:
    """A refusal, logged once per process on the library's logger (standard error by default)."""
    refused = Refusal(path, why, costs)
    if str(refused) not in _SAID:
        _SAID.add(str(refused))
        logging.getLogger("foretoken").warning("%s", refused)
    return refused


def check_exact(exact: str) -> None:
    """Raise ``ValueError`` for an unknown kind of exactness."""
    if exact not in ("distribution", "bitwise", "approximate"):
        raise ValueError(f"exact must be 'distribution', 'bitwise' or 'approximate', not {exact!r}")


def lost_bits(exact: str, exactness: str, why: str) -> tuple[Refusal, ...]:
    """The refusal of ``exact="bitwise"``, if it was requested and cannot be guaranteed."""
    if exact != "bitwise" or exactness == "bitwise":
        return ()
    return (refusal("bitwise", why, "near-ties may differ with drafts and in batches"),)
