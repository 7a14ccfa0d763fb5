"""Exact distributions of drafting and verification, by enumerating every random decision with its probability.

A process takes :class:`~foretoken.methods.verifiers.base.Coins`; :func:`outcomes` runs it once for each string of
decisions that it can meet, depth first, and yields what came out with what probability.  Drafts are enumerated the same
way.  Everything is float64, so a right rule differs from the target's distribution by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from foretoken.core import Kind, Scores, TokenTree, Verdict, argmaxes
from foretoken.methods.verifiers.base import Coins

T = TypeVar("T")
Rule = Callable[[TokenTree, Scores, Coins], Verdict]
Distribution = dict[tuple[int, ...], float]
Drafts = list[tuple[TokenTree, float]]


@dataclass
class _Choice:
    options: list[tuple[int, float]]  # value, probability
    index: int = 0


class EnumeratingCoins(Coins):
    """Coins that replay a string of decisions, and take the first option of each decision beyond it."""

    def __init__(self, script: list[_Choice]) -> None:
        self._script = script
        self._cursor = 0
        self.probability = 1.0

    def accept(self, num: float, den: float = 1.0, node: int | None = None) -> bool:
        chance = 0.0 if num <= 0.0 else 1.0 if num >= den else num / den
        return bool(self._choose([(1, chance), (0, 1.0 - chance)]))

    def accept_lazily(self, bound: float, probability: Callable[[], float], node: int | None = None) -> bool:
        exact = probability()
        assert exact <= bound + 1e-12, "the bound of a lazy test must not be below its chance"
        return self.accept(exact)

    def draw(self, distribution: Tensor) -> int:
        weights = distribution.tolist()
        total = sum(weights)
        return self._choose([(token, weight / total) for token, weight in enumerate(weights)])

    def _choose(self, options: list[tuple[int, float]]) -> int:
        options = [option for option in options if option[1] > 0.0]
        if len(options) == 1:
            return options[0][0]
        if self._cursor == len(self._script):
            self._script.append(_Choice(options))
        choice = self._script[self._cursor]
        self._cursor += 1
        value, probability = choice.options[choice.index]
        self.probability *= probability
        return value


class SharedUniformCoins(EnumeratingCoins):
    """A wrong source that uses one uniform for every decision: enumerates the intervals of that uniform."""

    def __init__(self, script: list[_Choice]) -> None:
        super().__init__(script)
        self._low, self._high = 0.0, 1.0

    def accept(self, num: float, den: float = 1.0, node: int | None = None) -> bool:
        bar = 0.0 if num <= 0.0 else 1.0 if num >= den else num / den
        return bool(self._split([(1, 0.0, bar), (0, bar, 1.0)]))

    def draw(self, distribution: Tensor) -> int:
        cdf = (distribution / distribution.sum()).cumsum(0).tolist()
        return self._split([(token, *edges) for token, edges in enumerate(zip([0.0, *cdf[:-1]], cdf, strict=True))])

    def _split(self, parts: list[tuple[int, float, float]]) -> int:
        width = self._high - self._low
        cut = {value: (max(low, self._low), min(high, self._high)) for value, low, high in parts}
        value = self._choose([(value, (high - low) / width) for value, (low, high) in cut.items()])
        self._low, self._high = cut[value]
        return value


def outcomes(
    process: Callable[[Coins], T], kind_of_coins: type[EnumeratingCoins] = EnumeratingCoins
) -> Iterator[tuple[T, float]]:
    """Every outcome of a random process with its probability."""
    script: list[_Choice] = []
    while True:
        coins = kind_of_coins(script)
        yield process(coins), coins.probability
        while script and script[-1].index == len(script[-1].options) - 1:
            script.pop()
        if not script:
            return
        script[-1].index += 1


class ProbabilitiesAsLogits:
    """A sampling pipeline for scores whose logits are already distributions.

    Args:
        fixed: whether these are one-hot, so that every prefix has one token that follows it.
    """

    greedy = cuts = False
    noise = None
    prompt_length = 0
    context_free = True
    recipe = "as they are"

    def __init__(self, fixed: bool = False) -> None:
        self.fixed = fixed

    def distribution(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        return logits

    def distributions(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        return logits

    def ranking(self, logits: Tensor, lengths: Sequence[int], prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        return logits

    def winners(self, logits: Tensor, lengths: Sequence[int], prefixes: Sequence[Sequence[int]] | None) -> list[int]:
        return argmaxes(logits)[0]


class Tables:
    """A target and a draft "model" on ``size`` tokens: for every prefix one random distribution each, [V] float64.

    Args:
        size: V.
        seed: of the tables.
        closeness: 0 for unrelated distributions, 1 for q = p.
        zeros: how many tokens of each distribution of the draft model have probability zero.
        target_zeros: the same for the target.
        one_hot: whether the target's distributions are point masses (temperature 0).
    """

    def __init__(
        self,
        size: int,
        seed: int = 0,
        closeness: float = 0.3,
        zeros: int = 0,
        target_zeros: int = 0,
        one_hot: bool = False,
    ) -> None:
        self.size = size
        self._seed, self._closeness = seed, closeness
        self._zeros, self._target_zeros, self.one_hot = zeros, target_zeros, one_hot
        self.p: Callable[[tuple[int, ...]], Tensor] = cache(self._p)
        self.q: Callable[[tuple[int, ...]], Tensor] = cache(self._q)

    def _random(self, role: int, prefix: tuple[int, ...], zeros: int) -> Tensor:
        key = role + 2 * self._seed
        for token in prefix:
            key = key * (self.size + 1) + token + 1
        generator = torch.Generator().manual_seed(key * 7919 + 13)
        weights = torch.rand(self.size, generator=generator, dtype=torch.float64) ** 2 + 0.02
        if zeros:
            weights[torch.randperm(self.size, generator=generator)[:zeros]] = 0.0
        return weights / weights.sum()

    def _p(self, prefix: tuple[int, ...]) -> Tensor:
        distribution = self._random(0, prefix, self._target_zeros)
        return torch.nn.functional.one_hot(distribution.argmax(), self.size).double() if self.one_hot else distribution

    def _q(self, prefix: tuple[int, ...]) -> Tensor:
        return self._closeness * self.p(prefix) + (1 - self._closeness) * self._random(1, prefix, self._zeros)


class FixedTables(Tables):
    """The same two distributions after every prefix."""

    def __init__(self, p: Sequence[float], q: Sequence[float]) -> None:
        super().__init__(len(p))
        distributions = torch.tensor([p, q], dtype=torch.float64)
        self.p = lambda prefix: distributions[0]
        self.q = lambda prefix: distributions[1]


def prefixes(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens between the root and every node (the node's own included, the root's not)."""
    return [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(len(tree))]


def scores_of(tree: TokenTree, tables: Tables) -> Scores:
    """The target's view of a tree."""
    return Scores(
        torch.stack([tables.p(prefix) for prefix in prefixes(tree)]), tree, (0,), ProbabilitiesAsLogits(tables.one_hot)
    )


Draw = Callable[[Tensor, int, Coins], list[int]]


def independent(distribution: Tensor, count: int, coins: Coins) -> list[int]:
    """``count`` tokens drawn with replacement."""
    return [coins.draw(distribution) for _ in range(count)]


def distinct(distribution: Tensor, count: int, coins: Coins) -> list[int]:
    """``count`` tokens drawn without replacement, uniformly once the support is used up."""
    tokens: list[int] = []
    for _ in range(count):
        rest = distribution.clone()
        rest[tokens] = 0.0
        if float(rest.sum()) == 0.0:
            rest = torch.ones_like(distribution)
            rest[tokens] = 0.0
        tokens.append(coins.draw(rest))
    return tokens


def likeliest(distribution: Tensor, count: int, coins: Coins) -> list[int]:
    """The ``count`` most likely tokens: deterministic."""
    return distribution.argsort(descending=True)[:count].tolist()


DRAWS: dict[Kind, Draw] = {Kind.IID: independent, Kind.WITHOUT_REPLACEMENT: distinct, Kind.POINT: likeliest}


def grow(tables: Tables, shape: Sequence[int], kind: Kind, coins: Coins, draw: Draw | None = None) -> TokenTree:
    """A tree in which every node of depth d has ``shape[d]`` children, drawn as ``kind`` says (or by ``draw``)."""
    draw = draw or DRAWS[kind]
    tokens, parents, q_rows, distributions = [0], [-1], [-1], []
    level: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for count in shape:
        following = []
        for node, prefix in level:
            distribution = tables.q(prefix)
            distributions.append(distribution)
            for token in draw(distribution, count, coins):
                following.append((len(tokens), (*prefix, token)))
                tokens.append(token)
                parents.append(node)
                q_rows.append(len(distributions) - 1)
        level = following
    if kind is Kind.POINT:
        return TokenTree(tuple(tokens), tuple(parents))
    return TokenTree(tuple(tokens), tuple(parents), kind, torch.stack(distributions), tuple(q_rows))


def drafts(tables: Tables, shape: Sequence[int], kind: Kind, draw: Draw | None = None) -> Drafts:
    """Every draft tree with its probability."""
    return list(outcomes(lambda coins: grow(tables, shape, kind, coins, draw)))


def emitted(
    rule: Rule,
    tables: Tables,
    trees: Iterable[tuple[TokenTree, float]],
    kind_of_coins: type[EnumeratingCoins] = EnumeratingCoins,
) -> Distribution:
    """The distribution of what one round emits: accepted tokens and the next token."""
    distribution: Distribution = {}
    for tree, weight in trees:
        decide = partial(rule, tree, scores_of(tree, tables))
        for verdict, chance in outcomes(decide, kind_of_coins):
            tokens = (*(tree.tokens[node] for node in verdict.path), verdict.next_token)
            distribution[tokens] = distribution.get(tokens, 0.0) + weight * chance
    return distribution


def extended(distribution: Distribution, tables: Tables, length: int) -> Distribution:
    """The distribution of the first ``length`` tokens when the target goes on by itself after what ``distribution``
    emits."""
    result: Distribution = {}
    open_distributions = dict(distribution)
    while open_distributions:
        longer: Distribution = {}
        for tokens, weight in open_distributions.items():
            if len(tokens) >= length:
                result[tokens[:length]] = result.get(tokens[:length], 0.0) + weight
                continue
            for token, chance in enumerate(tables.p(tokens).tolist()):
                longer[(*tokens, token)] = longer.get((*tokens, token), 0.0) + weight * chance
        open_distributions = longer
    return result


def target_distribution(tables: Tables, length: int) -> Distribution:
    """The target's joint distribution of ``length`` tokens."""
    distribution: Distribution = {}
    for tokens in product(range(tables.size), repeat=length):
        distribution[tokens] = 1.0
        for i, token in enumerate(tokens):
            distribution[tokens] *= float(tables.p(tokens[:i])[token])
    return distribution


def total_variation(p: Distribution, q: Distribution) -> float:
    """Half the sum of absolute differences."""
    return 0.5 * sum(abs(p.get(key, 0.0) - q.get(key, 0.0)) for key in {*p, *q})


def bias(
    rule: Rule,
    tables: Tables,
    trees: Iterable[tuple[TokenTree, float]],
    depth: int,
    kind_of_coins: type[EnumeratingCoins] = EnumeratingCoins,
) -> float:
    """Total variation between what drafting, verification and the target produce, and the target alone."""
    distribution = extended(emitted(rule, tables, trees, kind_of_coins), tables, depth + 1)
    return total_variation(distribution, target_distribution(tables, depth + 1))


def mean_accepted(rule: Rule, tables: Tables, trees: Iterable[tuple[TokenTree, float]]) -> float:
    """Expected number of accepted draft tokens per round."""
    return sum((len(tokens) - 1) * chance for tokens, chance in emitted(rule, tables, trees).items())
