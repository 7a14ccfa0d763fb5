"""What a model offers, and what is said where a method needs more."""

from __future__ import annotations

from dataclasses import dataclass, field


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
