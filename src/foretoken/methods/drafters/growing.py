"""Drafts while they grow on a model: a tree under construction, and what a draft model must be able to do for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.core import Budget, Context
from foretoken.methods.drafters.drawn_tree import DrawnTree
from foretoken.methods.trees.base import Candidates
from foretoken.methods.trees.counts import StaticTree
from foretoken.models.base import CapabilityError, LanguageModel, Rows, SequenceState


class Growing(DrawnTree):
    """A tree that grows level by level, for whose nodes a model is asked.

    Args:
        places: the shape, unless it grows by confidence.
        most: nodes that the drafter makes at most.
        sequence: the model's, whose scratch holds the nodes that it has read.
        draws: whether tokens are drawn, and what they are drawn from is kept; else the best ones are taken.
        races: whether the best ones are those of a race on the request's noise.
        text: the committed tokens in the model's own ids.
        candidates: what a tree that grows by confidence has looked at; ``tokens`` and ``parents`` are its own.
        sharing: requests whose nodes are scored by the same call, as far as the tree may depend on that.

    Attributes:
        frontier: nodes whose children come next.
        states: features that the model reads with them, if it reads any.
        scratch_of: the place of a node in the sequence's scratch.
        likelihood: of the path down to a node, where a stop rule reads hidden states.
        ready: made for the whole batch: by node its children, and what they were drawn from [V] if they were drawn.
        looked: likewise, of a tree that grows by confidence: log-probabilities [n, V] of the frontier's rows, their
            best tokens, and theirs.
    """

    def __init__(
        self,
        context: Context,
        places: StaticTree,
        budget: Budget,
        most: int,
        sequence: SequenceState,
        *,
        draws: bool,
        races: bool,
        text: Sequence[int] = (),
        candidates: Candidates | None = None,
        sharing: int = 1,
    ) -> None:
        super().__init__(context, places, budget, most)
        self.sequence, self.draws, self.races, self.text = sequence, draws, races, text
        self.candidates, self.sharing = candidates, sharing
        if candidates is not None:
            self.tokens, self.parents = candidates.tokens, candidates.parents
        self.frontier = [0]
        self.states: list[Tensor] = []
        self.scratch_of: dict[int, int] = {}
        self.likelihood: dict[int, float] = {0: 1.0}
        self.ready: dict[int, tuple[Tensor | None, list[int]]] = {}
        self.looked: tuple[Tensor, list[list[int]], list[list[float]]] | None = None

    def length(self, node: int) -> int:
        """Tokens before the one that follows a node."""
        return len(self.context.tokens) + len(self.path_of[node])

    def prefixes(self, nodes: Sequence[int]) -> list[Sequence[int]] | None:
        """The texts down to nodes; ``None`` where no distribution depends on them."""
        return None if self.sampler.context_free else [self.prefix(node) for node in nodes]

    def enter(self, root: int) -> list[int]:
        """Put the frontier behind what is in the scratch; the scratch nodes that it hangs from, ``root`` for the
        tree's root."""
        first = len(self.sequence.scratch_tokens)
        self.scratch_of.update({node: first + i for i, node in enumerate(self.frontier)})
        return [self.scratch_of[self.parents[node]] if self.parents[node] else root for node in self.frontier]


def check_growth(model: LanguageModel, branches: bool) -> None:
    """Raise ``CapabilityError`` for a model that cannot draft chains, or trees where ``branches``."""
    for need in ("rollback", "tree_mask", "keep_path")[: 3 if branches else 1]:
        if not getattr(model.capabilities, need):
            raise CapabilityError(f"this model cannot draft so: {model.capabilities.missing.get(need, need)}")


def cut_back(model: LanguageModel, sequence: SequenceState | None, length: int) -> None:
    """Follow a text that was cut back to ``length`` tokens; the last one is always fed again, so it is not kept."""
    if sequence is not None and len(sequence.tokens) >= length:
        model.rewind(sequence, max(length - 1, 0))


def readable(tokens: list[int], size: int, wide: int) -> list[int]:
    """A text over ``wide`` ids for a model that has ``size``: token 0 stands for ids that it lacks."""
    return tokens if size >= wide else [token if token < size else 0 for token in tokens]


def widened(logits: Tensor, wide: int) -> Tensor:
    """Logits [n, V'] over ``wide`` tokens: added ones are impossible, surplus ones go."""
    missing = wide - logits.shape[-1]
    return logits if missing == 0 else functional.pad(logits, (0, missing), value=-torch.inf)


def follow(tree: Growing, row: Rows) -> None:
    """Tell a rule that reads hidden states what the draft model makes of the tokens that it was just fed."""
    rule = tree.budget.path_stop
    if rule is None or rule.tap not in row.taps or tree.frontier == [0]:  # the root is committed: it is accepted
        return
    above = [tree.likelihood[tree.parents[node]] for node in tree.frontier]
    tree.likelihood.update(zip(tree.frontier, rule.follow(above, row.taps[rule.tap]), strict=True))


def ends_path(tree: Growing, parent: int) -> bool:
    """Whether such a rule ends the draft with the children of ``parent``."""
    rule = tree.budget.path_stop
    return rule is not None and parent in tree.likelihood and rule.ends(tree.likelihood[parent])
