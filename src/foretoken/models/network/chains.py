"""Training texts with chains of tokens after some of their positions, read like drafts.

Network, masks and positions are those of a :class:`~foretoken.models.runner.TreeRunner` with the chains as tree nodes.
A float32 model runs under the caller's autocast, other models without; hidden states have the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.models.cache.masks import RowPlan, additive_masks
from foretoken.models.cache.rectangle import growing_cache
from foretoken.models.network.alone import switched_attention
from foretoken.models.network.extra import embedding_rows
from foretoken.models.network.layers import LayerPlan, running
from foretoken.models.network.taps import recording

if TYPE_CHECKING:
    from foretoken.models.forward.network import Network
    from foretoken.models.huggingface import HuggingFaceModel


def joint_states(
    model: HuggingFaceModel, tokens: Tensor, columns: Tensor, chains: Tensor, grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Hidden states after the final norm of texts [b, n, D] and, in the same pass, of chains [b, g, k, D] in them.

    Args:
        model: a network, whose weights receive the gradients.
        tokens: texts [b, n].
        columns: positions [b, g]; a chain sees the text up to its column, and itself.
        chains: token ids [b, g, k].
    """
    (b, n), k = tokens.shape, chains.shape[2]
    ids = torch.cat([tokens, chains.flatten(1)], 1)
    plans = [_with_chains(_text(n), row, k) for row in columns.tolist()]
    plans = [RowPlan(0, plan.parents, plan.depths, ids.shape[1]) for plan in plans]  # all of it is new
    network = model.forwards
    with (
        torch.set_grad_enabled(grad),
        _in_its_dtype(model),
        switched_attention(network),
        recording(model.model, ("last",)) as states,
    ):
        _run_nodes(network, ids, plans, growing_cache())
    last = states["last"]
    return last[:, :n], last[:, n:].view(b, -1, k, last.shape[-1])


def branch_states(model: HuggingFaceModel, tokens: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Hidden states [b, g, k, D] after the final norm of k extra tokens, embedded as ``rows`` [k, D], in a chain after
    g positions of every text.  Only ``rows`` receives gradients.  The rest is as in :func:`chain_states`."""
    ids = (model.vocab_size + torch.arange(len(rows), device=tokens.device)).expand(len(tokens), columns.shape[1], -1)
    return chain_states(
        model, tokens, columns, ids, lambda inputs: embedding_rows(model.model, inputs, rows, model.vocab_size)
    )


def chain_states(
    model: HuggingFaceModel,
    tokens: Tensor,
    columns: Tensor,
    ids: Tensor,
    within: Callable[[Tensor], AbstractContextManager[Tensor]],
) -> Tensor:
    """Hidden states [b, g, k, D] after the final norm of chains of k tokens after g positions of every text.

    The text is read once without gradients, then all chains together on its keys and values.

    Args:
        model: the target, with frozen weights (``requires_grad_(False)``).
        tokens: texts [b, n].
        columns: positions [b, g]; chain j sees the text up to and including this column.
        ids: [b, g, k] tokens of the chains.
        within: context for running the chains with ids [b, g k]; yields the input of the network.
    """
    (b, n), (groups, k) = tokens.shape, ids.shape[1:]
    plans = [_with_chains(_text(n), row, k) for row in columns.tolist()]
    cache, network = growing_cache(), model.forwards
    with _in_its_dtype(model), switched_attention(network), recording(model.model, ("last",)) as states:
        with torch.no_grad():
            _run_nodes(network, tokens, [_text(n)] * b, cache)
        with within(ids.flatten(1)) as node_ids:
            _run_nodes(network, node_ids, plans, cache)
    return states["last"].view(b, groups, k, -1)


class Windows:
    """Chains of drafted nodes after positions of texts, in a window of layers that begins with given states.

    Args:
        model: the target, with frozen weights (``requires_grad_(False)``).
        tokens: texts [b, n].
        columns: positions [b, R]; chain j sees the text before this column, and starts with the token in it.
        cache: keys and values of the text in the window's layers.
    """

    def __init__(self, model: HuggingFaceModel, tokens: Tensor, columns: Tensor, plan: LayerPlan, cache: Any) -> None:
        self.model, self.tokens, self.columns, self.plan, self.cache = model, tokens, columns, plan, cache
        self.steps = 0

    def step(self, states: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Hidden states [b, R, D] by tap for one more node of every chain, from its state at ``plan.start``.

        Args:
            states: [b, R, D]; gradients flow to them and to those of earlier steps.
            taps: ``"layer:i"`` inside the window.
        """
        n, count = self.tokens.shape[1], self.columns.shape[1]
        plans = [_grown_chains(n, row, self.steps + 1) for row in self.columns.tolist()]
        ids = self.tokens.new_zeros(self.columns.shape)  # the embeddings are not read
        network, wide = self.model.forwards, states.to(self.model.dtype)
        with running(self.model.model, self.plan, wide), recording(self.model.model, taps) as recorded:
            _run_nodes(network, ids, plans, self.cache)
        self.steps += 1
        return {name: rows[:, -count:] for name, rows in recorded.items()}


@contextmanager
def windows(
    model: HuggingFaceModel, tokens: Tensor, states: Tensor, columns: Tensor, plan: LayerPlan
) -> Iterator[Windows]:
    """Read texts [b, n] in the window without gradients, from their states [b, n, D] at ``plan.start``, then draft
    after ``columns`` [b, R] inside the block."""
    cache = growing_cache()
    with _in_its_dtype(model), switched_attention(model.forwards):
        with torch.no_grad(), running(model.model, plan, states.to(model.dtype)):
            _run_nodes(model.forwards, tokens, [_text(tokens.shape[1])] * len(tokens), cache)
        yield Windows(model, tokens, columns, plan, cache)


def _in_its_dtype(model: HuggingFaceModel) -> AbstractContextManager[Any]:
    return nullcontext() if model.dtype == torch.float32 else torch.autocast(model.device.type, enabled=False)


def _text(length: int) -> RowPlan:
    """A text as new nodes of a tree."""
    return RowPlan(0, range(-1, length - 1), range(length), length)


def _with_chains(plan: RowPlan, columns: Sequence[int], k: int) -> RowPlan:
    """The text, then chains of ``k`` new nodes after the positions ``columns``, chain by chain."""
    parents, depths = list(plan.parents), list(plan.depths)
    for column in columns:
        parents += [column, *range(len(parents), len(parents) + k - 1)]
        depths += range(column + 1, column + 1 + k)
    return RowPlan(0, parents, depths, k * len(columns))


def _grown_chains(length: int, columns: Sequence[int], steps: int) -> RowPlan:
    """A text, then chains of ``steps`` nodes after the positions before ``columns``, step by step."""
    count = len(columns)
    parents, depths = list(range(-1, length - 1)), list(range(length))
    for step in range(steps):
        before = len(parents) - count
        parents += [column - 1 if step == 0 else before + i for i, column in enumerate(columns)]
        depths += [column + step for column in columns]
    return RowPlan(0, parents, depths, count)


def _run_nodes(network: Network, ids: Tensor, plans: Sequence[RowPlan], cache: Any) -> None:
    """One public forward of nodes [b, n] over a growing cache; the caller records its states."""
    width, used = ids.shape[1], len(plans[0].parents)
    masks: Any = additive_masks(plans, network.layer_masks, width, used, network.dtype, network.device)
    network.model(
        input_ids=ids,
        position_ids=torch.tensor([list(plan.depths)[used - width :] for plan in plans], device=ids.device),
        attention_mask=masks[""] if network.single_mask else masks,
        use_cache=True,
        logits_to_keep=1,
        **{network.cache_argument: cache},
    )
