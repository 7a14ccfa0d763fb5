"""Trees under construction by a draft model, and the capabilities that they require of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.core import Budget, Context
from foretoken.core.sampling import Sampler
from foretoken.methods.drafters.drawn_tree import DrawnTree
from foretoken.methods.trees.base import Candidates
from foretoken.methods.trees.counts import StaticTree
from foretoken.models.base import CapabilityError, LanguageModel, Rows, SequenceState


class Growing(DrawnTree):
    """A tree that a model grows level by level.

    Args:
        shape: the static tree, unless it grows by confidence.
        most: the drafter's maximum number of nodes.
        sequence: the model's, whose scratch holds the nodes that it has read.
        draws: whether tokens are drawn, with their distributions recorded; otherwise the best ones are taken.
        ranker: the sampler by which the best tokens are chosen (:func:`foretoken.methods.drafters.drawing.ranker`).
        tokens: the committed tokens in the model's ids.
        candidates: candidates of a tree that grows by confidence; ``tokens`` and ``parents`` are theirs.
        sharing: requests whose nodes are scored by the same call, as far as the tree may depend on that.

    Attributes:
        races: whether there is such a sampler: candidates win the race on the request's noise, or follow its rules.
        frontier: nodes whose children come next.
        states: features that the model reads with them, if any.
        scratch_of: a node's index in the sequence's scratch.
        likelihood: of the path down to a node, if a stop rule reads hidden states.
        ready: children chosen for the whole batch, by node, with the distribution [V] of drawn ones.
        ranked: the same for a tree that grows by confidence: log-probabilities [n, V] of the frontier's rows, their
            best tokens, and those tokens' values.
    """

    def __init__(
        self,
        context: Context,
        shape: StaticTree,
        budget: Budget,
        most: int,
        sequence: SequenceState,
        *,
        draws: bool,
        ranker: Sampler | None = None,
        tokens: Sequence[int] = (),
        candidates: Candidates | None = None,
        sharing: int = 1,
    ) -> None:
        super().__init__(context, shape, budget, most)
        self.sequence, self.draws, self.committed = sequence, draws, tokens
        self.ranker, self.races = ranker, ranker is not None
        self.candidates, self.sharing = candidates, sharing
        if candidates is not None:  # the same lists: both grow together
            self.tokens, self.parents = candidates.tokens, candidates.parents
        self.frontier = [0]
        self.states: list[Tensor] = []
        self.scratch_of: dict[int, int] = {}
        self.likelihood: dict[int, float] = {0: 1.0}
        self.ready: dict[int, tuple[Tensor | None, list[int]]] = {}
        self.ranked: tuple[Tensor, list[list[int]], list[list[float]]] | None = None

    def length(self, node: int) -> int:
        """Number of tokens before a node's children."""
        return len(self.context.tokens) + len(self.path_of[node])

    def prefixes(self, nodes: Sequence[int]) -> list[Sequence[int]] | None:
        """The tokens down to each node; ``None`` if no distribution depends on them."""
        return None if self.sampler.context_free else [self.prefix(node) for node in nodes]

    def enter(self, root: int) -> list[int]:
        """Append the frontier to the scratch; return the scratch indices of its parents, ``root`` for the tree's
        root."""
        first = len(self.sequence.scratch_tokens)
        self.scratch_of.update({node: first + i for i, node in enumerate(self.frontier)})
        return [self.scratch_of[self.parents[node]] if self.parents[node] else root for node in self.frontier]


def check_growth(model: LanguageModel, branches: bool) -> None:
    """Raise ``CapabilityError`` for a model that cannot draft chains, or trees if ``branches``."""
    for need in ("rollback", "tree_mask", "keep_path")[: 3 if branches else 1]:
        if not getattr(model.capabilities, need):
            raise CapabilityError(
                f"this model cannot be used here as a draft model: {model.capabilities.missing.get(need, need)}"
            )


def cut_back(model: LanguageModel, sequence: SequenceState | None, length: int) -> None:
    """Cut the model's sequence for a request of ``length`` tokens; its last token is always fed again, so it is dropped
    too."""
    if sequence is not None and len(sequence.tokens) >= length:
        model.rewind(sequence, max(length - 1, 0))


def readable(tokens: list[int], size: int, wide: int) -> list[int]:
    """Tokens over ``wide`` ids for a model that has ``size``, with 0 in place of ids that it lacks."""
    return tokens if size >= wide else [token if token < size else 0 for token in tokens]


def widened(logits: Tensor, wide: int) -> Tensor:
    """Logits [n, V'] over ``wide`` tokens, padded with -inf or cut."""
    missing = wide - logits.shape[-1]
    return logits if missing == 0 else functional.pad(logits, (0, missing), value=-torch.inf)


def follow(tree: Growing, row: Rows) -> None:
    """Update the paths' likelihoods with a stop rule that reads the draft model's hidden states."""
    rule = tree.budget.path_stop
    if rule is None or rule.tap not in row.taps or tree.frontier == [0]:  # the root is committed: it is accepted
        return
    above = [tree.likelihood[tree.parents[node]] for node in tree.frontier]
    tree.likelihood.update(zip(tree.frontier, rule.follow(above, row.taps[rule.tap]), strict=True))


def ends_path(tree: Growing, parent: int) -> bool:
    """Whether such a rule ends the draft with the children of ``parent``."""
    rule = tree.budget.path_stop
    return rule is not None and parent in tree.likelihood and rule.ends(tree.likelihood[parent])
