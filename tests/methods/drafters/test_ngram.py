"""Prompt lookup: golden vectors, and an index that equals a plain search."""

from __future__ import annotations

import random

import pytest

from foretoken.core import Budget, Context, Kind, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.ngram import NgramDrafter
from toys import engine, outputs, tables

GOLDEN = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]


def context(tokens: list[int]) -> Context:
    return Context(0, list(tokens), len(tokens), Sampler(SamplingParams()), Rng(0))


def proposed(drafter: NgramDrafter, tokens: list[int], budget: Budget | None = None) -> list[int]:
    tree = drafter.propose(context(tokens), budget or Budget(20, 64))
    assert tree.kind is Kind.POINT and tree.is_chain and tree.tokens[0] == tokens[-1]
    return list(tree.tokens[1:])


def test_golden_vector() -> None:
    assert proposed(NgramDrafter(n=3, k=4, match="first"), GOLDEN) == [3, 4, 1, 2]
    assert proposed(NgramDrafter(n=3, k=4, match="recent"), GOLDEN) == [5, 6, 1, 2]


@pytest.mark.parametrize(
    ("options", "tokens", "expected"),
    [
        ({}, [7], []),
        ({}, [7, 8, 9], []),
        ({}, [7, 7], [7]),
        ({"n": 2}, [1, 2, 9, 5, 2, 8, 1, 2], [9, 5, 2, 8, 1, 2]),  # longest first: (1, 2), not the newer (2,)
        ({"n": 1}, [1, 2, 9, 5, 2, 8, 1, 2], [8, 1, 2]),
        ({"n": 3, "min_n": 3}, [1, 2, 9, 1, 2], []),
        ({"n": 3, "min_n": 2}, [1, 2, 9, 1, 2], [9, 1, 2]),
        ({"k": 2}, [1, 2, 9, 5, 1, 2], [9, 5]),
        ({"n": 2, "k": 9}, [0, 0, 0, 0], [0]),
    ],
)
def test_small_cases(options: dict[str, int], tokens: list[int], expected: list[int]) -> None:
    assert proposed(NgramDrafter(**options), tokens) == expected


@pytest.mark.parametrize(("depth", "nodes", "count"), [(3, 64, 3), (64, 2, 2), (1, 1, 1)])
def test_the_budget_limits_the_copy(depth: int, nodes: int, count: int) -> None:
    assert len(proposed(NgramDrafter(), GOLDEN, Budget(depth, nodes))) == count


def searched(tokens: list[int], n: int, min_n: int, k: int, match: str) -> list[int]:
    """The same without an index."""
    for size in range(min(n, len(tokens) - 1), min_n - 1, -1):
        suffix = tokens[-size:]
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == suffix]
        if ends:
            end = ends[-1] if match == "recent" else ends[0]
            return tokens[end : end + k]
    return []


@pytest.mark.parametrize("match", ["recent", "first"])
@pytest.mark.parametrize(("n", "min_n"), [(1, 1), (3, 1), (4, 2)])
def test_the_growing_index_equals_a_search(match: str, n: int, min_n: int) -> None:
    generator = random.Random(n)
    drafter = NgramDrafter(n=n, min_n=min_n, k=5, match=match)
    growing = context([generator.randrange(3)])
    drafter.start(growing)
    for _ in range(60):
        tree = drafter.propose(growing, Budget(8, 8))
        assert list(tree.tokens[1:]) == searched(growing.tokens, n, min_n, 5, match)
        growing.tokens.extend(generator.randrange(3) for _ in range(generator.randrange(1, 5)))


def test_requests_have_indices_of_their_own() -> None:
    drafter = NgramDrafter()
    first, second = context([1, 2, 3, 1]), context([1, 9, 9, 1])
    assert drafter.propose(first, Budget()).tokens == (1, 2, 3, 1)
    assert drafter.propose(second, Budget()).tokens == (1, 9, 9, 1)
    assert drafter.propose(first, Budget()).tokens == (1, 2, 3, 1)


def test_repetition_is_drafted() -> None:
    """A model that repeats one block: after the prompt all is copied."""
    target, _ = tables()
    from foretoken.models.other.table import TableModel

    cycle = [0, 1, 2, 3]
    target = TableModel(lambda prefix: [float(token == cycle[len(prefix) % 4]) for token in range(4)], 4)
    speculative = engine(target, NgramDrafter(k=8))
    assert outputs(speculative, [Request(cycle * 3, max_new_tokens=27)]) == [(cycle * 7)[:27]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, "1 <= min_n <= n"),
        ({"n": 2, "min_n": 3}, "1 <= min_n <= n"),
        ({"min_n": 0}, "1 <= min_n <= n"),
        ({"k": 0}, "k >= 1"),
        ({"match": "last"}, "match must be 'recent' or 'first'"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NgramDrafter(**options)  # type: ignore[arg-type]


def test_an_index_that_was_not_asked_for_a_while_catches_up() -> None:
    """Text is read when a guess is wanted, not in every round: the guesses are those of one that always read."""
    rng = random.Random(3)
    late, eager = context([1, 2, 3]), context([1, 2, 3])
    drafters = NgramDrafter(n=3, k=4), NgramDrafter(n=3, k=4)
    for drafter, request in zip(drafters, (late, eager), strict=True):
        drafter.start(request)
    for round_ in range(60):
        token = rng.randrange(4)
        late.tokens.append(token)
        eager.tokens.append(token)
        expected = drafters[1].propose(eager, Budget(4, 4))
        if round_ % 7 == 6:
            assert drafters[0].propose(late, Budget(4, 4)) == expected
