"""Trial of an encoder-decoder model against its own forward, on two short texts.

The trial covers everything that decoding uses: inputs of two lengths in one batch, a chain and a tree.  It catches
families whose forward treats positions, masks or the cache differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.models.base import CapabilityError, Feed, opened
from foretoken.models.checks.cache_trial import HALF_DTYPES, HALF_LIMIT, LIMIT
from foretoken.models.checks.self_test import cause_of, relative

if TYPE_CHECKING:
    from foretoken.models.encoder_decoder import EncoderDecoderModel

INPUTS = ((3, 10, 17, 24, 31), (5, 8))
"""Tokens of two encoder inputs."""
CHAIN = (11, 4, 13)
TREE, PARENTS = (7, 9, 12), (0, 0, 1)
"""After the start tokens: the chain of the first sequence, the tree of the second."""


@torch.inference_mode()
def check_answers(model: EncoderDecoderModel) -> None:
    """Raise ``CapabilityError`` if a model's logits differ from those of its own forward."""
    try:
        logits, reference = _tree_logits(model), _by_its_own_forward(model)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise CapabilityError(f"{model.config.model_type} cannot be decoded here: {cause_of(error)}") from error
    if not reference.isfinite().all():  # damaged weights: decoding reports them, with their location
        return
    difference = relative(logits, reference)
    if not difference <= (HALF_LIMIT if model.dtype in HALF_DTYPES else LIMIT):
        raise CapabilityError(
            f"{model.config.model_type} cannot be decoded here: its logits of a tree differ from those of its own "
            f"forward by {difference:.2g} of their size"
        )


def _ids(model: EncoderDecoderModel, tokens: Sequence[int]) -> list[int]:
    return [token % model.vocab_size for token in tokens]


def _tree_logits(model: EncoderDecoderModel) -> Tensor:
    """[n, V]: the last rows of the chain and of the tree, in one call."""
    start = list(model.answer_start)
    with opened(model, *(_ids(model, tokens) for tokens in INPUTS)) as sequences:
        first = len(start) - 1
        chain = Feed(sequences[0], [*start, *_ids(model, CHAIN)], wanted=len(CHAIN))
        parents = [*range(-1, first), *(first + parent for parent in PARENTS)]
        tree = Feed(sequences[1], [*start, *_ids(model, TREE)], parents, wanted=len(TREE))
        return torch.cat([rows.logits.float() for rows in model.forward([chain, tree])])


def _by_its_own_forward(model: EncoderDecoderModel) -> Tensor:
    """The same rows from complete sequences, without a cache."""
    paths = [(INPUTS[0], CHAIN, 3), *((INPUTS[1], path, 1) for path in ((TREE[0],), (TREE[1],), (TREE[0], TREE[2])))]
    rows = []
    for tokens, answer, count in paths:
        sequence = [*model.answer_start, *_ids(model, answer)]
        encoder_ids, decoder_ids = (torch.tensor([ids], device=model.device) for ids in (_ids(model, tokens), sequence))
        out = model.model(input_ids=encoder_ids, decoder_input_ids=decoder_ids, use_cache=False)
        rows.append(out.logits[0, -count:].float())
    return torch.cat(rows)
