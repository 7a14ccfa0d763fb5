"""The numbers in the worked examples of ``docs/methods``, computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from enumeration import FixedTables, drafts, emitted, mean_accepted, outcomes, scores_of

from foretoken import registry
from foretoken.core import Kind, TokenTree
from foretoken.methods.verifiers.kseq import overlap, threshold
from foretoken.methods.verifiers.typical import TypicalVerifier

WOR = Kind.WITHOUT_REPLACEMENT
TABLES = FixedTables([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
PAGES = Path(__file__).parents[3] / "docs" / "methods"


@pytest.mark.parametrize("row", registry.rows("verifier"), ids=lambda row: row.name)
def test_every_verifier_has_a_page(row: registry.Row) -> None:
    text = (PAGES / f"{row.name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {row.name}\n") and "https://arxiv.org/abs/" in text
    assert ("allow_lossy" in text) == (not row.lossless)
    for heading in ("Idea", "Rule", "Worked example", "When to use it", "Pitfalls"):
        assert f"## {heading}\n" in text


@pytest.mark.parametrize(
    ("spec", "shape", "kind", "accepted"),
    [
        ("match", (1,), Kind.IID, 0.29),
        ("match", (2,), Kind.IID, 0.483),
        ("rejection", (1,), Kind.IID, 0.7),
        ("rejection", (1, 1), Kind.IID, 1.19),
        ("rejection", (1, 1, 1), Kind.IID, 1.533),
        ("block", (1, 1), Kind.IID, 1.25),
        ("block", (1, 1, 1), Kind.IID, 1.695),
        ("multi_round", (2,), Kind.IID, 0.76),
        ("multi_round", (3,), Kind.IID, 0.808),
        ("multi_round", (2, 1), Kind.IID, 1.306),
        ("traversal", (2, 1), Kind.IID, 1.352),
        ("kseq", (2,), Kind.IID, 0.791),
        ("kseq", (3,), Kind.IID, 0.859),
        ("without_replacement", (2,), WOR, 0.82),
        ("without_replacement", (3,), WOR, 1.0),
        ("without_replacement", (2, 1), WOR, 1.394),
        ("traversal", (2, 1), WOR, 1.454),
        ("without_replacement", (2, 2), WOR, 1.492),
        ("traversal", (2, 2), WOR, 1.528),
        ("lenient,lenience=0.8", (1,), Kind.IID, 0.75),
        ("lenient,lenience=0.5", (1,), Kind.IID, 0.9),
    ],
)
def test_accepted_tokens(spec: str, shape: tuple[int, ...], kind: Kind, accepted: float) -> None:
    rule = registry.make("verifier", spec).decide
    assert mean_accepted(rule, TABLES, drafts(TABLES, shape, kind)) == pytest.approx(accepted, abs=6e-4)


def paths(name: str, tree: TokenTree, tables: FixedTables = TABLES) -> dict[tuple[tuple[int, ...], int], float]:
    rule = registry.make("verifier", name)
    chances: dict[tuple[tuple[int, ...], int], float] = {}
    for verdict, chance in outcomes(lambda coins: rule.decide(tree, scores_of(tree, tables), coins)):
        path = tuple(tree.tokens[node] for node in verdict.path)
        chances[path, verdict.next_token] = chances.get((path, verdict.next_token), 0.0) + chance
    return chances


def chance_of(chances: dict[tuple[tuple[int, ...], int], float], path: tuple[int, ...]) -> float:
    return sum(chance for (tokens, _), chance in chances.items() if tokens == path)


def test_block_page() -> None:
    q = TABLES.q(()).expand(2, -1)
    assert chance_of(paths("block", TokenTree.chain(0, [2, 0], q)), (2, 0)) == pytest.approx(1.0)
    pair = paths("block", TokenTree.chain(0, [0, 2], q))
    assert chance_of(pair, (0, 2)) == pytest.approx(0.4)
    assert pair[(0,), 0] == pytest.approx(0.6)
    same = paths("block", TokenTree.chain(0, [2, 2], q))
    assert chance_of(same, (2, 2)) == pytest.approx(0.16)
    assert same[(), 0] == pytest.approx(0.84)


def test_traversal_page() -> None:
    q = TABLES.q(()).expand(2, -1)
    tree = TokenTree((0, 2, 0, 0), (-1, 0, 0, 1), Kind.IID, q, (-1, 0, 0, 1))
    assert chance_of(paths("traversal", tree), (2, 0)) == pytest.approx(1.0)
    assert chance_of(paths("multi_round", tree), (0,)) == pytest.approx(0.6)


def test_point_and_without_replacement_pages() -> None:
    chances = paths("point", TokenTree((0, 0, 1), (-1, 0, 0)))
    assert chance_of(chances, (0,)) == pytest.approx(0.5) and chance_of(chances, (1,)) == pytest.approx(0.3)
    assert chances[(), 2] == pytest.approx(0.2)
    tree = TokenTree((0, 2, 1), (-1, 0, 0), WOR, TABLES.q(())[None], (-1, 0, 0))
    chances = paths("without_replacement", tree)
    assert chance_of(chances, (2,)) == pytest.approx(0.4) and chances[(), 0] == pytest.approx(0.6)


def test_greedy_page() -> None:
    after = {(): 5, (5,): 9, (5, 9): 7}
    tables = FixedTables([1.0], [1.0])
    tables.p = lambda prefix: torch.nn.functional.one_hot(torch.tensor(after.get(prefix, 0)), 10).double()
    assert paths("greedy", TokenTree.chain(0, [5, 9, 4]), tables) == {((5, 9), 7): 1.0}
    wider = TokenTree((0, 5, 9, 4, 7), (-1, 0, 1, 2, 2))
    assert paths("greedy", wider, tables) == {((5, 9, 7), 0): 1.0}


def test_kseq_page() -> None:
    p, q = TABLES.p(()), TABLES.q(())
    rho = threshold(p, q, 2)
    assert (rho, overlap(p, q, rho)) == pytest.approx((1.457, 0.543), abs=6e-4)
    assert (p / (rho * q)).clamp_max(1.0).tolist() == pytest.approx([1.0, 0.686, 0.275], abs=6e-4)
    assert threshold(p, q, 3) == pytest.approx(1.793, abs=6e-4)


@pytest.mark.parametrize(("lenience", "distribution"), [(0.8, [0.4125, 0.3375, 0.25]), (0.5, [0.2727, 0.3273, 0.4])])
def test_lenient_page(lenience: float, distribution: list[float]) -> None:
    rule = registry.make("verifier", f"lenient,lenience={lenience}").decide
    chances = emitted(rule, TABLES, drafts(TABLES, (1,), Kind.IID))
    first = [sum(chance for tokens, chance in chances.items() if tokens[0] == x) for x in range(3)]
    assert first == pytest.approx(distribution, abs=6e-5)


@pytest.mark.parametrize(
    ("distribution", "entropy", "bar"),
    [
        ([0.9, 0.06, 0.04], 0.392, 0.09),
        ([0.7, 0.2, 0.1], 0.802, 0.09),
        ([0.4, 0.3, 0.2, 0.1], 1.280, 0.0834),
        ([0.001] * 1000, 6.908, 0.0003),
    ],
)
def test_typical_page(distribution: list[float], entropy: float, bar: float) -> None:
    p = torch.tensor(distribution, dtype=torch.float64)
    assert float(torch.special.entr(p).sum()) == pytest.approx(entropy, abs=6e-4)
    assert TypicalVerifier().threshold(p) == pytest.approx(bar, abs=6e-5)
