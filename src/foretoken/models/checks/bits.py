"""Whether a row's bits depend on the other rows: the basis of :attr:`LanguageModel.exactness`, tested at load.

Speculative output equals plain decoding to the last bit if the logits of a token do not depend on the number of tokens
scored beside it.  Two conditions must hold: the kernels sum each row alone, in an order independent of the others, and
a real text has equal bits when scored in one row, in a chain, in a tree and in a batch.  The first is known for the
layouts and attention functions.  A trial alone could pass by chance where a library chooses its kernel by context
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.models.base import Feed, opened

if TYPE_CHECKING:
    from foretoken.models.huggingface import HuggingFaceModel

READ, STEPS = 8, 2
"""Tokens of the trial text that are committed first, and number of further ones that are scored one by one."""


def exactness_of(owner: HuggingFaceModel, ids: Sequence[int]) -> tuple[str, str]:
    """``"bitwise"`` or ``"rounding"``, with the reason."""
    reason = _order_depends(owner)
    if reason is None:
        reason = _different_bits(owner, ids)
    if reason is not None:
        return "rounding", f"{reason}; near-ties may differ"
    return "bitwise", "one row, a chain, a tree and a batch gave the same bits"


def _order_depends(owner: HuggingFaceModel) -> str | None:
    """Reason why the order of sums depends on the number of rows; ``None`` if it never does."""
    dtype = str(owner.dtype).removeprefix("torch.")
    if owner.exact == "bitwise":
        return None
    if owner.device.type != "cpu":
        return f"kernels on {owner.device.type} are chosen by the number of rows"
    lean = owner.forwards.fast
    if lean is None:
        return f"the public {dtype} forward multiplies and attends in an order that depends on the number of rows"
    loose = lean.row_dependent()
    return None if loose is None else f"{loose} sums {dtype} in an order that depends on the number of rows"


@torch.inference_mode()
def _different_bits(owner: HuggingFaceModel, ids: Sequence[int]) -> str | None:
    """The first case whose bits differ from one row alone; ``None`` if there is none."""
    tokens = [token % owner.vocab_size for token in ids]
    prefix, path = tokens[:READ], tokens[READ : READ + 5]
    if owner.context_length < len(tokens) + len(path):
        return f"a context of {owner.context_length} tokens is too short to test it"
    tree = [*path[:2], *tokens[:6], *path[2:4], *tokens[6:12], path[4]]  # 17 nodes that contain the path
    parents = [-1, 0, -1, 0, 0, 1, 2, 3, 1, 8, 2, 3, 4, 5, 6, 7, 9]
    nodes = [0, 1, 8, 9, 16]
    with opened(owner, prefix, prefix[:5], tokens[3:14]) as (first, second, third):
        alone: list[Tensor] = []
        for token in path[:STEPS]:
            alone.append(owner.forward([Feed(first, [token])])[0].logits)
            owner.commit(first, [0])
        owner.rewind(first, READ)
        owner.prefill(second, prefix[5:])
        chain = owner.forward([Feed(first, path)])[0].logits
        branched = owner.forward([Feed(second, tree, parents)])[0].logits[nodes]
        for sequence in (first, second):
            owner.commit(sequence, [])
        batch = owner.forward([Feed(first, path[:1]), Feed(second, path), Feed(third, tree, parents)])
    if not torch.equal(chain[:STEPS], torch.cat(alone)):
        return "a chain gave different bits from one row at a time"
    if not torch.equal(branched, chain):
        return "a tree gave different bits from a chain"
    if not torch.equal(torch.cat([batch[0].logits, batch[1].logits]), torch.cat([chain[:1], chain])):
        return "a batch gave different bits from a sequence alone"
    return None
