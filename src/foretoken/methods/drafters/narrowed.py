"""Draft models with a replaced vocabulary projection: over fewer tokens, or in fewer bits.

The model returns the states after its final norm instead of logits, with any forward, and a
:class:`~foretoken.models.forward.heads.draft_head.DraftHead` projects them.
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
from foretoken.models.forward.parts import TargetParts, quantised_bits, storage_of
from foretoken.models.linear.product import QuantisedLinear


def reduced_head(vocab: str, model: LanguageModel, context: BuildContext, quantised: bool = False) -> DraftHead | None:
    """The projection of an option ``vocab``, in 8 bits if the layers are quantised; ``None`` for all tokens.

    Args:
        vocab: the option, see :func:`~foretoken.methods.drafters.draft_vocabulary.chosen_ids`.
        quantised: whether quantised weights outside the network run the model's layers.

    Raises:
        ValueError: no such draft vocabulary.
        CapabilityError: a draft vocabulary for a model that returns no hidden states.
    """
    ids = chosen_ids(vocab, context, min(model.vocab_size, context.target.vocab_size))
    if ids is None:
        return None
    parts = TargetParts(model)
    return DraftHead(parts, ids, quantised=quantised or quantised_bits(parts.network) is not None)


def light_head(model: LanguageModel) -> DraftHead | None:
    """An 8-bit projection for a model with quantised layers whose projection shares the embedding's unquantised weight;
    ``None`` for other models."""
    network = model.model
    if network is None or not model.capabilities.taps or quantised_bits(network) is None:
        return None
    parts = TargetParts(model)
    return None if isinstance(parts.head, QuantisedLinear) else DraftHead(parts, quantised=True)


def bytes_read(model: LanguageModel, head: DraftHead | None) -> int:
    """Bytes of a draft model, with ``head`` in place of its vocabulary projection; 0 if unknown."""
    num_bytes = model.weight_bytes
    return num_bytes if head is None or not num_bytes else max(num_bytes - head.replaced_bytes, 0) + head.weight_bytes


def described(model: LanguageModel, head: DraftHead | None) -> dict[str, Any]:
    network = model.model
    stored = "" if network is None else storage_of(network)
    vocabulary = model.vocab_size if head is None else head.size
    return {"weights": stored or model.describe()["weights"], "vocabulary": vocabulary}


def projected(
    head: DraftHead | None,
    forward: Callable[[Sequence[Feed], Sequence[str]], list[Rows]],
    feeds: Sequence[Feed],
    taps: Sequence[str] = (),
) -> list[Rows]:
    """The rows of a forward, with logits [wanted, V_d] of ``head``, if any, in place of the model's."""
    if head is None:
        return forward(feeds, taps)
    rows = forward([replace(feed, wanted=0) for feed in feeds], tuple(dict.fromkeys((*taps, "last"))))
    counts = [feed.num_wanted for feed in feeds]
    states = [row.taps["last"][len(row.taps["last"]) - n :] for row, n in zip(rows, counts, strict=True)]
    logits = head(torch.cat(states) if len(states) > 1 else states[0]).split(counts)
    return [replace(row, logits=part) for row, part in zip(rows, logits, strict=True)]
