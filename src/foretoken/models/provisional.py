"""Provisional nodes: scored by a part of the layers, and scored again by the next full forward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.models.base import Feed
from foretoken.models.network.layers import LayerPlan


def window_inputs(feeds: Sequence[Feed], plan: LayerPlan) -> list[Tensor]:
    """Input states [n, D] per feed, for a window of layers above the first one or states in place of embeddings; empty
    for other windows."""
    if not plan.start and all(feed.states is None for feed in feeds):
        return []
    states = [feed.states for feed in feeds if feed.states is not None and len(feed.states) == len(feed.tokens)]
    if len(states) < len(feeds):
        raise ValueError(f"layers from {plan.start} on need their input states, one per token")
    return states


def layer_reached(plan: LayerPlan, num_layers: int) -> int:
    """The layer from which provisional nodes can resume; 0 for nodes that the whole network must score again.

    These are nodes after the last layer, which have nothing left to run; nodes of layers with skipped parts; and nodes
    from supplied states, which are approximate.
    """
    guessed = plan.start or plan.skip_attention or plan.skip_mlp
    return 0 if guessed or plan.end(num_layers) == num_layers else plan.end(num_layers)


def comes_before(tap: str, layer: int) -> bool:
    """Whether a tap is a hidden state before the exit layer, which provisional nodes do not store."""
    kind, _, number = tap.partition(":")
    return kind == "layer" and int(number) < layer


def keep_common(feed: Feed) -> None:
    """Drop provisional nodes from the first difference to the feed on."""
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
    """The nodes after the first ``count``, without logits."""
    return Feed(feed.sequence, feed.tokens[count:], feed.parents_behind(0)[count:], wanted=0)
