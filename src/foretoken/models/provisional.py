"""Provisional nodes: scored by a part of the layers, and restated by the whole forward that follows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.models.base import Feed
from foretoken.models.network.layers import LayerPlan


def window_inputs(feeds: Sequence[Feed], plan: LayerPlan) -> list[Tensor]:
    """Per feed the states [n, D] that a window of layers above the first one goes on from; none for other windows."""
    if not plan.start:
        return []
    states = [feed.states for feed in feeds if feed.states is not None and len(feed.states) == len(feed.tokens)]
    if len(states) < len(feeds):
        raise ValueError(f"layers from {plan.start} on need the states that they go on from, one per token")
    return states


def layer_reached(plan: LayerPlan, num_layers: int) -> int:
    """The layer that provisional nodes can go on from; 0 for nodes that the whole network must state anew.

    Those are nodes behind the last layer, where nothing is left to go on with, nodes of layers with skipped parts, and
    nodes that came from states that were handed in: these are guesses.
    """
    guessed = plan.start or plan.skip_attention or plan.skip_mlp
    return 0 if guessed or plan.end(num_layers) == num_layers else plan.end(num_layers)


def comes_before(tap: str, layer: int) -> bool:
    """Whether a tap is a hidden state before the exit layer, which provisional nodes have not kept."""
    kind, _, number = tap.partition(":")
    return kind == "layer" and int(number) < layer


def keep_common(feed: Feed) -> None:
    """Drop provisional nodes from the first one on that the feed does not restate."""
    sequence = feed.sequence
    restated = zip(feed.tokens, feed.parents_behind(0), sequence.scratch_tokens, sequence.scratch_parents, strict=False)
    same = 0
    for token, parent, old_token, old_parent in restated:
        if token != old_token or parent != old_parent:
            break
        same += 1
    same = min(same, len(sequence.exit_states))
    sequence.drop_last(len(sequence.scratch_tokens) - same)


def without_first(feed: Feed, count: int) -> Feed:
    """The nodes behind the first ``count``; no logits wanted."""
    return Feed(feed.sequence, feed.tokens[count:], feed.parents_behind(0)[count:], wanted=0)
