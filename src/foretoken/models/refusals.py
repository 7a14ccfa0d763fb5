"""What a model offers; what it does not get, and how that is said."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_SAID: set[str] = set()


@dataclass(frozen=True)
class Capabilities:
    """What a model offers.

    Attributes:
        tree_mask: scores branching scratch trees in one call.
        keep_path: can keep any path of the scratch (false: only a leading part of a chain).
        rollback: can drop scratch nodes at all (false: plain decoding only).
        taps: hands out hidden states.
        layer_windows: can run a part of its layers.
        missing: for every capability that is absent, the layer type that lacks it, in words.
        prompt_logits: scores the tokens of a prompt (an encoder does not).
    """

    tree_mask: bool = True
    keep_path: bool = True
    rollback: bool = True
    taps: bool = True
    layer_windows: bool = True
    missing: dict[str, str] = field(default_factory=dict)
    prompt_logits: bool = True


class CapabilityError(ValueError):
    """A method needs something that the model cannot do; names the layer type."""


@dataclass(frozen=True)
class Refusal:
    """A faster path, or a promise, that a model does not get.

    Attributes:
        path: its name ("lean forward", "int4 kernel", "CUDA graphs", "bitwise").
        costs: what is lost by it, in words.
    """

    path: str
    why: str
    costs: str

    def __str__(self) -> str:
        """The one line that users see."""
        return f"{self.path}: refused, {self.why}; {self.costs}"


def refusal(path: str, why: str, costs: str) -> Refusal:
    """A refusal that is said once per process, on the library's logger (standard error, unless someone listens)."""
    refused = Refusal(path, why, costs)
    if str(refused) not in _SAID:
        _SAID.add(str(refused))
        logging.getLogger("foretoken").warning("%s", refused)
    return refused


def lost_bits(exact: str, exactness: str, why: str) -> tuple[Refusal, ...]:
    """The refusal of ``exact="bitwise"``, where it was asked for and cannot be kept."""
    if exact != "bitwise" or exactness == "bitwise":
        return ()
    return (refusal("bitwise", why, "near-ties may differ with drafts and in batches"),)
