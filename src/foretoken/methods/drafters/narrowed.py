"""Draft models whose vocabulary projection is another: over fewer tokens, or in fewer bits.

The model is asked for the states behind its final norm instead of logits, whatever forward it runs on, and a
:class:`~foretoken.models.forward.heads.draft_head.DraftHead` multiplies these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.models.base import Feed, LanguageModel, Rows
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import TargetParts, storage_of
from foretoken.models.linear.product import QuantisedLinear

STATES = "last"
"""The tap that a vocabulary projection reads."""


def reduced_head(vocab: str, model: LanguageModel, context: BuildContext, quantised: bool = False) -> DraftHead | None:
    """The projection of an option ``vocab``, in 8 bits where the layers are quantised; ``None`` for all tokens.

    Args:
        vocab: the option, see :func:`~foretoken.methods.drafters.draft_vocabulary.chosen_ids`.
        quantised: whether the model's layers are run by other weights than those of its network, in few bits.

    Raises:
        ValueError: no such draft vocabulary.
        CapabilityError: a draft vocabulary for a model that hands out no hidden states.
    """
    ids = chosen_ids(vocab, context, min(model.vocab_size, context.target.vocab_size))
    if ids is None:
        return None
    parts = TargetParts(model)
    return DraftHead(parts, ids, quantised=quantised or storage_of(parts.network).startswith("int"))


def light_head(model: LanguageModel) -> DraftHead | None:
    """The projection in 8 bits of a model with quantised layers whose own shares the weight of the embedding, which
    stays as it is; ``None`` for other models."""
    network = getattr(model, "model", None)
    if network is None or not model.capabilities.taps or not storage_of(network).startswith("int"):
        return None
    parts = TargetParts(model)
    return None if isinstance(parts.head, QuantisedLinear) else DraftHead(parts, quantised=True)


def bytes_read(model: LanguageModel, head: DraftHead | None) -> int:
    """Bytes of a draft model, with the vocabulary projection that it is given instead of its own; 0: not known."""
    num_bytes = model.weight_bytes
    return num_bytes if head is None or not num_bytes else max(num_bytes - head.replaced_bytes, 0) + head.weight_bytes


def described(model: LanguageModel, head: DraftHead | None) -> dict[str, Any]:
    """``weights`` and ``vocabulary`` of a draft model."""
    network = getattr(model, "model", None)
    stored = "" if network is None else storage_of(network)
    vocabulary = model.vocab_size if head is None else head.size
    return {"weights": stored or model.describe()["weights"], "vocabulary": vocabulary}


def projected(
    head: DraftHead | None,
    forward: Callable[[Sequence[Feed], Sequence[str]], list[Rows]],
    feeds: Sequence[Feed],
    taps: Sequence[str] = (),
) -> list[Rows]:
    """The rows of a forward of feeds and taps, with logits [wanted, V_d] of ``head``, if there is one, in place of the
    model's own."""
    if head is None:
        return forward(feeds, taps)
    rows = forward([replace(feed, wanted=0) for feed in feeds], tuple(dict.fromkeys((*taps, STATES))))
    counts = [len(feed.tokens) if feed.wanted is None else feed.wanted for feed in feeds]
    states = [row.taps[STATES][len(row.taps[STATES]) - n :] for row, n in zip(rows, counts, strict=True)]
    logits = head(torch.cat(states) if len(states) > 1 else states[0]).split(counts)
    return [replace(row, logits=part) for row, part in zip(rows, logits, strict=True)]
