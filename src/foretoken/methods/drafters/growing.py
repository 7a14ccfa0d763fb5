"""Drafts while they grow: a tree under construction, and what a draft model must be able to do for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.core import Budget, Context
from foretoken.core.sampling import Sampler
from foretoken.methods.trees.base import Candidates
from foretoken.methods.trees.counts import Counts
from foretoken.methods.trees.shapes import Choice
from foretoken.models.base import CapabilityError, LanguageModel, Rows, SequenceState


@dataclass
class Growing:
    """A tree under construction."""

    context: Context
    budget: Budget
    sequence: SequenceState
    sampler: Sampler
    tokens: list[int]
    draws: bool  # whether tokens are drawn, and what they are drawn from is kept; else the best ones are taken
    races: bool  # whether the best ones are those of a race on the request's noise
    text: Sequence[int]  # the committed tokens in the draft model's own ids
    counts: Counts  # children per place of the tree
    parents: list[int] = field(default_factory=lambda: [-1])
    q_rows: list[int] = field(default_factory=lambda: [-1])
    distributions: list[Tensor] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [0])
    scratch_of: dict[int, int] = field(default_factory=dict)
    path_of: dict[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})  # node -> tokens below the root
    place_of: dict[int, Choice] = field(default_factory=lambda: {0: ()})  # node -> ranks below the root
    likelihood: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    seen: Candidates | None = None  # of a tree that grows by confidence: ``tokens`` and ``parents`` are its own
    sharing: int = 1  # requests whose nodes are scored by the same call, as far as the tree may depend on that
    # Made for the whole batch: by node its children, and what they were drawn from [V] if they were drawn; and of a
    # tree that grows by confidence, log-probabilities [n, V] of the frontier's rows, their best tokens, and theirs.
    ready: dict[int, tuple[Tensor | None, list[int]]] = field(default_factory=dict)
    looked: tuple[Tensor, list[list[int]], list[list[float]]] | None = None

    def length(self, node: int) -> int:
        """Tokens before the one that follows a node."""
        return len(self.context.tokens) + len(self.path_of[node])


def check_growth(model: LanguageModel, branches: bool) -> None:
    """Raises:
    CapabilityError: the model cannot draft chains, or not trees where ``branches``.
    """
    for need in ("rollback", "tree_mask", "keep_path")[: 3 if branches else 1]:
        if not getattr(model.capabilities, need):
            raise CapabilityError(f"this model cannot draft so: {model.capabilities.missing.get(need, need)}")


def readable(tokens: list[int], own: int, wide: int) -> list[int]:
    """A text over ``wide`` ids for a model that has ``own``: token 0 stands for ids that it lacks."""
    return tokens if own >= wide else [token if token < own else 0 for token in tokens]


def widened(logits: Tensor, wide: int) -> Tensor:
    """Logits [n, V'] over ``wide`` tokens: added ones are impossible, surplus ones go."""
    missing = wide - logits.shape[-1]
    return logits if missing == 0 else functional.pad(logits, (0, missing), value=-torch.inf)


def asks_for_confidence(budget: Budget) -> bool:
    """Whether a stop rule looks at the distribution or at the probability of a drawn token."""
    return budget.min_confidence > 0 or (budget.stop is not None and budget.path_stop is None)


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
