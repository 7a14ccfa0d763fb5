"""Provisional nodes: scored by a part of the layers, and restated by the whole forward that follows."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.models.base import Feed


def comes_before(tap: str, layer: int) -> bool:
    """Whether a tap is a hidden state before the exit layer, which provisional nodes have not kept."""
    kind, _, number = tap.partition(":")
    return kind == "layer" and int(number) < layer


def parents_of(feed: Feed) -> Sequence[int]:
    """The parents of its nodes in a scratch that it states from the first node on."""
    return range(-1, len(feed.tokens) - 1) if feed.parents is None else feed.parents


def keep_common(feed: Feed) -> None:
    """Drop provisional nodes from the first one on that the feed does not restate."""
    sequence = feed.sequence
    restated = zip(feed.tokens, parents_of(feed), sequence.scratch_tokens, sequence.scratch_parents, strict=False)
    same = 0
    for token, parent, old_token, old_parent in restated:
        if token != old_token or parent != old_parent:
            break
        same += 1
    same = min(same, len(sequence.exit_states))
    sequence.drop_last(len(sequence.scratch_tokens) - same)


def without_first(feed: Feed, count: int) -> Feed:
    """The nodes behind the first ``count``; no logits wanted."""
    return Feed(feed.sequence, feed.tokens[count:], parents_of(feed)[count:], wanted=0)
