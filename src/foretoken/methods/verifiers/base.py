"""The ``Verifier`` protocol: acceptance of draft tokens, and choice of the next token.

A verifier is pure: a function of the tree, the distributions and fresh random numbers. Lossless means that the accepted
tokens plus the next token, continued by plain sampling, have exactly the target's distribution.

Every rule is written once in plain form (:meth:`Verifier.decide`), with all its randomness going through
:class:`Coins`. Tests pass coins that enumerate every outcome with its probability, which gives the rule's exact
distribution. A rule on the hot path has a faster twin in :meth:`Verifier.decide_fast` that must decide the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from foretoken.core import Kind, Rng, Scores, TokenTree, Verdict, is_large
from foretoken.core.outside import is_outside
from foretoken.core.sampling import draw, draws


class Coins:
    """Random decisions of a rule, by the request's uniforms, each used once."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def accept(self, num: float, den: float = 1.0, node: int | None = None) -> bool:
        """True with probability min(1, num / den): tested as ``u * den < num``, so never when ``num`` is 0.

        ``node`` is the tested node, for traces.
        """
        u, tests = self._rng.uniform(), self._rng.tests
        if tests is not None:
            tests.append((u, min(1.0, num / den) if den > 0 else float(num > 0), node))
        return u * den < num

    def accept_lazily(self, bound: float, probability: Callable[[], float], node: int | None = None) -> bool:
        """:meth:`accept` with probability ``probability()``, which is at most ``bound`` and not computed if the bound
        decides."""
        u, tests = self._rng.uniform(), self._rng.tests
        if tests is not None:
            tests.append((u, probability(), node))
        return u < bound and u < probability()

    def draw(self, distribution: Tensor) -> int:
        """A token drawn from a distribution or unnormalised weights [V]."""
        return draw(distribution, self._rng.uniform())


class CheckedCoins(Coins):
    """Coins of a rule from outside: a residual of 0 / 0 or below 0 would draw tokens with wrong probabilities."""

    def __init__(self, rng: Rng, vocab_size: int) -> None:
        super().__init__(rng)
        self._vocab_size = vocab_size

    def draw(self, distribution: Tensor) -> int:
        """As :meth:`Coins.draw`.

        Raises:
            ValueError: weights of another shape than [V], below 0, not finite, or all 0.
        """
        shape = list(distribution.shape) if isinstance(distribution, Tensor) else type(distribution).__name__
        if shape != [self._vocab_size]:
            raise ValueError(
                f"coins.draw got weights of shape {shape}: it must be [{self._vocab_size}], the vocabulary"
            )
        # Comparisons with NaN are false, so test what must be true.
        if not (float(distribution.min()) >= 0.0 and 0.0 < float(distribution.sum()) < inf):
            raise ValueError("coins.draw got weights that are below 0, not finite, or all 0")
        return super().draw(distribution)


class Verifier(ABC):
    """One acceptance rule; its constructor raises ``ValueError`` for an option outside its range.

    Attributes:
        name: registry key.
        lossless: whether the rule keeps the target's distribution; lossy rules need ``allow_lossy=True``.
        kinds: supported proposal kinds.
        chains_only: whether the rule is defined for chains only.
        greedy_only: whether the rule is valid at temperature 0 only.
        races: whether sampled requests need noise (:class:`foretoken.core.noise.Noise`), which drafters then share.
        asks_choices: whether the rule needs only the token after each node of greedy requests and requests with noise.
        reads_logits: whether the rule reads the logits of sampled requests, not only their distributions.
        decides_by: for traces, what the rule decides by: ``tests`` of one draft token after another, ``choices`` of the
            target, which draft tokens must equal, or whole ``paths``.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    kinds: ClassVar[frozenset[Kind]] = frozenset(Kind)
    chains_only: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = False
    races: ClassVar[bool] = False
    asks_choices: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
    decides_by: ClassVar[Literal["tests", "choices", "paths"]] = "tests"
    _is_outside: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._is_outside = is_outside(cls)

    @abstractmethod
    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """The rule in plain form: walk ``tree`` and decide."""

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """The same decision as :meth:`decide` with the same coins, as fast as possible."""
        return self.decide(tree, scores, coins)

    def verify(self, tree: TokenTree, scores: Scores, rng: Rng) -> Verdict:
        """Walk ``tree`` and decide.

        Raises:
            ValueError: a chain rule met a node with two children.
        """
        coins = CheckedCoins(rng, scores.logits.shape[-1]) if self._is_outside else Coins(rng)
        return self.decide_fast(tree, scores, coins)

    def draws_last(self, tree: TokenTree) -> bool:
        """Whether the rule ends with its only draw, whose token goes unread into the verdict. Such draws are batched
        over requests. True without drafts."""
        return len(tree) == 1

    def needs_all(self, scores: Scores) -> bool:
        """Whether the rule reads the distributions of all nodes in any case; it always reads the root's."""
        return False


def draw_all(drawings: Sequence[tuple[Tensor, float]]) -> list[int]:
    """:func:`draw` for several distributions or weights [V] of one size and their uniforms."""
    if len(drawings) < 2 or is_large(drawings[0][0]):
        return [draw(distribution, u) for distribution, u in drawings]
    rows, uniforms = zip(*drawings, strict=True)
    return [token for (token,) in draws(torch.stack(rows), [[u] for u in uniforms])]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm([p - q]+) [V]; ``p`` itself if the residual is empty (p equals q up to rounding)."""
    return _normalised((p - q).clamp_min_(0.0), p)


def without(p: Tensor, token: int) -> Tensor:
    """``p`` [V] with ``token`` zeroed and renormalised: the residual of a point-mass draft.

    ``p`` itself if the residual is empty.
    """
    weights = p.clone()
    weights[token] = 0.0
    return _normalised(weights, p)


def rest_of(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """The residual distribution [V] after the rejection of ``token`` drawn from ``q`` (``None``: a point mass)."""
    return without(p, token) if q is None else residual(p, q)


def leftover(p: Tensor, q: Tensor | None, token: int, budget: float) -> Tensor:
    """[budget * p - q]+ [V], not normalised; ``q`` may be ``None`` for a point mass at ``token``."""
    if q is not None:
        return (p * budget).sub_(q).clamp_min_(0.0)
    weights = p * budget
    weights[token] = 0.0  # a point mass has weight 1 there, which budget * p never exceeds
    return weights


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    total = weights.sum()
    if is_nothing(float(total), weights):
        return otherwise
    return weights.div_(total)


def is_nothing(total: float, weights: Tensor) -> bool:
    """Whether a sum of ``weights`` [V] is zero up to rounding."""
    return total <= torch.finfo(weights.dtype).tiny


def scaled(budget: float, p: float, q: float) -> float:
    """min(1, budget * p / q), and 0 whenever ``p`` is 0."""
    weight = budget * p
    if weight <= 0.0:
        return 0.0
    return 1.0 if weight >= q else weight / q


def drawn_probability(tree: TokenTree, node: int) -> float:
    """q(token) of ``node``: the probability of its token in its distribution (1 for a point mass)."""
    distribution = tree.distribution(node)
    return 1.0 if distribution is None else float(distribution[tree.tokens[node]])


class SiblingDistributions:
    """Distribution of each child given its earlier siblings, drawn without replacement.

    Children that share a row of ``tree.q`` were drawn one after another, without the earlier ones. Another row is
    another drafter's independent sequence. After the support of a row is exhausted, the drafter draws uniformly from
    its remaining tokens.
    """

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._open: dict[tuple[int, int], Tensor] = {}  # (parent, row) -> [V] weights not drawn yet
        self._drawn: dict[tuple[int, int], list[int]] = {}

    def distribution(self, node: int) -> Tensor | None:
        """[V] distribution that ``node`` was drawn from; ``None`` for a point mass."""
        distribution = self._tree.distribution(node)
        if distribution is None:
            return None
        weights = self._open.get(self._key(node))
        if weights is None:  # the first child: the whole distribution
            return distribution
        total = weights.sum()
        if is_nothing(float(total), weights):
            weights = torch.ones_like(weights)
            weights[self._drawn[self._key(node)]] = 0.0
            total = weights.sum()
        return weights / total

    def remove(self, node: int) -> None:
        """Remove a tried node's token from the distribution of later siblings in its row."""
        distribution = self._tree.distribution(node)
        if distribution is None:
            return
        key, token = self._key(node), self._tree.tokens[node]
        if key not in self._open:
            self._open[key] = distribution.clone()
        self._open[key][token] = 0.0
        self._drawn.setdefault(key, []).append(token)

    def _key(self, node: int) -> tuple[int, int]:
        return self._tree.parents[node], self._tree.q_rows[node]


def chain_nodes(tree: TokenTree, name: str) -> list[int]:
    """Draft nodes of a chain in order, without probes. Raises ``ValueError`` where a node has two children."""
    if tree.is_chain:
        return list(range(1, len(tree)))
    nodes = [0]
    while children := tree.children[nodes[-1]]:
        if len(children) > 1:
            raise ValueError(
                f"the verifier {name!r} supports chains only, but node {nodes[-1]} has {len(children)} children"
            )
        nodes.append(children[0])
    return nodes[1:]


def chain_weights(tree: TokenTree, distributions: Tensor) -> tuple[list[float], list[float]]:
    """p(x_i) and q(x_i) of all g drafts of a chain, in one transfer; ``distributions`` are the target's [g+1, V]."""
    count = len(tree) - 1
    drafts = torch.tensor(tree.tokens[1:], device=distributions.device)[:, None]  # [g, 1]
    p_x = distributions[:count].gather(1, drafts)
    if tree.q is None or not tree.q_rows:
        return p_x[:, 0].tolist(), [1.0] * count
    rows = list(tree.q_rows[1:])
    # Row -1 selects the last distribution, which is replaced below.
    q = tree.q if rows == list(range(len(tree.q))) else tree.q[rows]
    p_list, q_list = torch.cat((p_x, q.gather(1, drafts)), 1).T.tolist()
    return p_list, [1.0 if row < 0 else weight for row, weight in zip(rows, q_list, strict=True)]


def walk_down(tree: TokenTree, choose: Callable[[int, Sequence[int]], int]) -> Verdict:
    """From the root, get the token after a node and go to the child that holds it, until no child does.

    Lossless whenever ``choose(node, children)`` has the distribution ``p(node)``, independent of the children or not.
    Siblings that hold the same token (independent draws) are followed together, because they share a prefix. The path
    then runs through the one that leads furthest.
    """
    alive: list[int] = [0]  # nodes with the same prefix
    while True:
        children = [child for node in alive for child in tree.children[node]]
        token = choose(alive[0], children)
        matching = [child for child in children if tree.tokens[child] == token]
        if not matching:
            last = next((node for node in alive if tree.children[node]), alive[0])
            return Verdict(tuple(tree.path(last)[1:]), token, next_is_bonus=not children)
        alive = matching


def verdict_at(tree: TokenTree, path: Sequence[int], token: int) -> Verdict:
    """The verdict that stops after ``path`` with ``token``: a bonus when the path reached a leaf."""
    last = path[-1] if path else 0
    return Verdict(tuple(path), token, next_is_bonus=not tree.children[last])
