"""Every worked number of ``docs/methods/coupled.md``, computed."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
import torch
from enumeration import FixedTables, drafts, mean_accepted

from foretoken import registry
from foretoken.core import Kind, Rng, Scores, TokenTree
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request, Running
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.verifiers.base import Coins
from foretoken.methods.verifiers.coupled import CoupledVerifier
from toys import engine, fixed_tables, serve

THEORY = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "coupled_theory.py"))
candidates_acceptance, coupled_acceptance = THEORY["candidates_acceptance"], THEORY["coupled_acceptance"]
coupled_lower_bound = THEORY["coupled_lower_bound"]
PAGE = (Path(__file__).parents[3] / "docs" / "methods" / "coupled.md").read_text(encoding="utf-8")
P, Q, SEED = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 11
PROMPT = [0]
TABLES = FixedTables(P, Q)


def test_the_page_is_about_these_numbers() -> None:
    assert "`p = (0.5, 0.3, 0.2)` and `q = (0.2, 0.3, 0.5)` after every prefix, seed 11." in PAGE


def test_the_table_of_races() -> None:
    rows = re.findall(r"^\| `E_(\d)( / [pq])?` \|(.*)\|$", PAGE, re.M)
    assert len(rows) == 6
    for position, divisor, cells in rows:
        divide = {"": [1.0] * 3, " / p": P, " / q": Q}[divisor]
        times = Noise(SEED).exponentials(int(position), 3) / torch.tensor(divide, dtype=torch.float64)
        *numbers, order = cells.split("|")
        assert [float(number) for number in numbers] == pytest.approx(times.tolist(), abs=5.1e-4)
        assert not divisor or [int(token) for token in order.split(",")] == times.argsort().tolist()


def run(seed: int = SEED, **draft: object) -> tuple[Running, list[tuple[int, ...]]]:
    """Two tokens of the page's models, and what each round added; no keywords: plain decoding."""
    target, model = fixed_tables(P, Q)
    drafter = ModelDrafter(model, **draft) if draft else None  # type: ignore[arg-type]
    rounds: list[tuple[int, ...]] = []
    serving = engine(target, drafter)
    serving.on_round = lambda runs, trees, verdicts, times: rounds.extend(
        (*(tree.tokens[node] for node in verdict.path), verdict.next_token)
        for tree, verdict in zip(trees, verdicts, strict=True)
    )
    # Three tokens, so that the second one can be drafted for, too.
    return serve(serving, [Request(PROMPT, SamplingParams(temperature=1.0), 3, seed=seed)])[0], rounds


def test_two_siblings() -> None:
    request, rounds = run(tree="2")
    assert rounds[0] == (1, 0)
    assert request.origins[:2] == ["accepted", "bonus"]


def test_a_chain_of_one() -> None:
    request, rounds = run(k=1)
    assert rounds[0] == (1,) and rounds[1][0] == 0
    assert request.origins == ["recovered", "accepted", "bonus"]


def test_no_draft() -> None:
    request, rounds = run()
    assert rounds[:2] == [(1,), (0,)]
    assert request.origins == ["plain"] * 3


def test_the_text_is_the_same() -> None:
    outputs = [run(**draft)[0].output for draft in ({"tree": "2"}, {"k": 1}, {})]  # type: ignore[arg-type]
    assert outputs[0][:2] == [1, 0] and outputs[1] == outputs[0] == outputs[2]


@pytest.mark.parametrize("way", ["decide", "decide_fast"])
@pytest.mark.parametrize(
    ("tokens", "parents", "path", "next_token", "is_bonus"),
    [((0, 2, 1), (-1, 0, 0), (2,), 0, True), ((0, 2), (-1, 0), (), 1, False), ((0,), (-1,), (), 1, True)],
)
def test_the_walk(
    way: str, tokens: tuple[int, ...], parents: tuple[int, ...], path: tuple[int, ...], next_token: int, is_bonus: bool
) -> None:
    tree = TokenTree(tokens, parents)
    sampler = Sampler(SamplingParams(temperature=1.0), len(PROMPT), Noise(SEED))
    logits = torch.tensor([P] * len(tree), dtype=torch.float64).log()
    verdict = getattr(CoupledVerifier(), way)(tree, Scores(logits, tree, PROMPT, sampler), Coins(Rng(0)))
    assert (tuple(verdict.path), verdict.next_token, verdict.next_is_bonus) == (path, next_token, is_bonus)


def accepted(verifier: str, shape: tuple[int, ...], kind: Kind) -> float:
    return mean_accepted(registry.make("verifier", verifier).decide, TABLES, drafts(TABLES, shape, kind))


def test_acceptance_over_all_seeds() -> None:
    acceptance = float(coupled_acceptance(P, Q))
    distinct = Kind.WITHOUT_REPLACEMENT
    for text, value in (
        ("`0.2 + 3/13 + 0.2 = 0.631`", acceptance),
        ("`rejection` has 0.7,", accepted("rejection", (1,), Kind.IID)),
        ("has 0.29,", accepted("match", (1,), Kind.IID)),
        ("`(1 - TV) / (1 + TV)` is 0.538.", float(coupled_lower_bound(P, Q))),
        ("accepted with 0.889,", float(candidates_acceptance(P, Q, 2))),
        ("`without_replacement` has 0.82.", accepted("without_replacement", (2,), distinct)),
        ("`0.631 + 0.631^2 = 1.029`", acceptance + acceptance**2),
        ("`rejection` 1.19,", accepted("rejection", (1, 1), Kind.IID)),
        ("`block` 1.25.", accepted("block", (1, 1), Kind.IID)),
    ):
        assert text in PAGE
        number = re.findall(r"\d+\.\d+", text)[-1]
        assert float(number) == pytest.approx(value, abs=0.51 * 10 ** -len(number.partition(".")[2]))
    assert acceptance == pytest.approx(0.2 + 3 / 13 + 0.2)


def test_the_engine_accepts_that_often() -> None:
    """One candidate and two, by the drafter itself, over many seeds."""
    for draft, expected in (({"k": 1}, coupled_acceptance(P, Q)), ({"tree": "2"}, candidates_acceptance(P, Q, 2))):
        target, model = fixed_tables(P, Q)
        requests = [Request(PROMPT, SamplingParams(temperature=1.0), 2, seed=seed) for seed in range(4000)]
        runs = serve(engine(target, ModelDrafter(model, **draft)), requests)  # type: ignore[arg-type]
        share = sum(request.origins[0] == "accepted" for request in runs) / len(runs)
        error = (float(expected * (1 - expected)) / len(runs)) ** 0.5
        assert share == pytest.approx(float(expected), abs=4.5 * error)


def test_the_code_prints_what_it_says() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    promised = [line.rpartition("  # ")[2] for line in block.splitlines() if line.startswith("print(")]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "coupled.md", "exec"), {})
    assert printed.getvalue().splitlines() == promised == ["True"]
