"""Sampled cells of a benchmark: the same text as plain decoding's with the same seeds, or no claim at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree
from foretoken.core.noise import Noise
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.lab.bench.arms import ArmSetup
from foretoken.lab.bench.results import UnitResult, cell
from foretoken.lab.bench.run import BenchSettings, run_bench
from foretoken.lab.bench.summary import BenchResult
from foretoken.lab.report.cards.written import markdown_card
from foretoken.lab.report.read import read_run
from foretoken.lab.report.verdict import verdict
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.other.table import TableModel
from toys import MarkovTable, llamas, tables

PROMPTS = {"a": [[1, 2, 3, 1, 2], [3, 1, 3, 1, 3]], "b": [[2, 2, 1]]}
ARM = "ngram,n=1"


@pytest.fixture(scope="module")
def table() -> MarkovTable:
    return tables(4, seed=3)[0]


def bench(target: Any, arms: Sequence[str] = (ARM,), prompts: Any = PROMPTS, **more: Any) -> BenchResult:
    settings = {name: more.pop(name) for name in ("temperatures", "batches", "seed") if name in more}
    shared = ArmSetup(target, "toy", None, **{"max_new_tokens": 12, **more})
    return run_bench(shared, prompts, BenchSettings(tuple(arms), **{"temperatures": (1.0,), **settings}))


def claims(result: BenchResult) -> dict[tuple[str, float], set[bool | None]]:
    """The values of ``identical`` by arm and temperature, in cells of one and of all categories."""
    claimed: dict[tuple[str, float], set[bool | None]] = {}
    for row in (*result.cells, *result.summary["overall"]):
        claimed.setdefault((row["arm"], row["temperature"]), set()).add(row["identical"])
    return claimed


# -- whose sampled outputs are compared ------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["auto", "coupled"])
def test_coupled_arms_say_what_plain_decoding_says(table: MarkovTable, verifier: str) -> None:
    filters = {"top_k": 3, "top_p": 0.9, "min_p": 0.05}
    result = bench(table, (ARM, "recycling@auto"), temperatures=(0.0, 0.6), verifier=verifier, filters=filters)
    assert set(map(frozenset, claims(result).values())) == {frozenset({True})}
    assert any(row["acceptance_rate"] > 0 for row in result.cells if row["temperature"] == 0.6)
    equality = result.summary["equality"]
    assert {(e["arm"], e["temperature"]) for e in equality} == set(claims(result))
    assert sum(e["identical"] for e in equality) == 3 * 2 * 3 and not any(
        e["ties"] or e["differences"] for e in equality
    )


@pytest.mark.parametrize(("verifier", "more"), [("point", {}), ("typical", {"allow_lossy": True})])
def test_a_rule_with_coins_of_its_own_makes_no_claim(table: MarkovTable, verifier: str, more: dict[str, Any]) -> None:
    result = bench(table, temperatures=(0.0, 1.0), verifier=verifier, **more)
    assert claims(result)[ARM, 1.0] == {None}
    assert claims(result)["plain", 1.0] == {True} and claims(result)[ARM, 0.0] <= {True, False}
    compared = {(e["arm"], e["temperature"]) for e in result.summary["equality"]}
    assert compared == {("plain", 0.0), ("plain", 1.0), (ARM, 0.0)}
    assert "| not compared |" in markdown_card(result.cells, result.summary)


def test_a_profile_may_name_such_a_rule(table: MarkovTable, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"drafter": ARM, "verifier": "point", "controller": "constant"}))
    claimed = claims(bench(table, ("auto", ARM), profile=profile))
    assert claimed == {("plain", 1.0): {True}, ("auto", 1.0): {None}, (ARM, 1.0): {True}}


def test_other_engines_make_no_claim() -> None:
    result = bench(llamas()[0], ("transformers:plain",), temperatures=(0.0, 1.0))
    assert claims(result)["transformers:plain", 0.0] == {True}
    assert claims(result)["transformers:plain", 1.0] == {None}


def test_all_arms_get_the_same_seeds(table: MarkovTable, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: dict[bool, list[tuple[tuple[int, ...], int | None]]] = {True: [], False: []}
    add = Engine.add

    def noted(self: Engine, request: Request) -> int:
        if list(request.prompt) in [ids for group in PROMPTS.values() for ids in group]:
            requests[self.drafter is None].append((tuple(request.prompt), request.seed))
        return add(self, request)

    monkeypatch.setattr(Engine, "add", noted)
    last = 2**64 - 1
    bench(table, seed=last)
    assert sorted(requests[True]) == sorted(requests[False])
    assert dict(requests[True]) == {(1, 2, 3, 1, 2): last, (3, 1, 3, 1, 3): 0, (2, 2, 1): last}
    with pytest.raises(ValueError, match="a seed must be"):
        BenchSettings(seed=last + 1)


def test_results_with_other_seeds_are_not_compared() -> None:
    """An older version left such results without seeds in a partial file."""

    def unit(arm: str, temperature: float, seeds: list[int] | None, token: int = 7) -> UnitResult:
        return UnitResult(arm, temperature, 1, "a", 0, [0], [[token] * 3], 1.0, 3, 0.0, seeds=seeds)

    def same(temperature: float, own: list[int] | None, plain: list[int] | None, token: int = 7) -> bool | None:
        row = cell([unit("x", temperature, own, token)], [unit("plain", temperature, plain)], "a", None)
        identical: bool | None = row["identical"]
        return identical

    assert same(1.0, [5], [5]) is True and same(1.0, [5], [5], token=8) is False
    assert same(1.0, [5], [6]) is same(1.0, [5], None) is same(1.0, None, [5]) is same(1.0, None, None) is None
    assert same(0.0, None, None) is True and same(0.0, None, None, token=8) is False


# -- differences are told, ties are told from them -------------------------------------------------------------------


def words_of(result: BenchResult, folder: Path) -> str:
    """What the report says about the run."""
    file = folder / "run.jsonl"
    file.write_text("\n".join(result.lines) + "\n")
    return " ".join(remark.text for remark in verdict(read_run(file)))


def test_an_error_that_changes_seeded_text_is_a_real_difference(
    table: MarkovTable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The drafter reverses the noise that the target is about to use."""
    propose = NgramDrafter.propose

    def wrong(self: NgramDrafter, context: Context, budget: Budget) -> TokenTree:
        if context.sampler.noise is not None:
            place = len(context.tokens) - context.prompt_length
            context.sampler.noise.gumbels(place, table.vocab_size, torch.device("cpu")).neg_()
        return propose(self, context, budget)

    assert "equals plain decoding's in all 4 compared cells (2 of them" in words_of(
        bench(table, temperatures=(0.0, 1.0)), tmp_path
    )
    monkeypatch.setattr(NgramDrafter, "propose", wrong)
    result = bench(table, temperatures=(0.0, 1.0))
    assert claims(result)[ARM, 0.0] == {True} and False in claims(result)[ARM, 1.0]
    wrongs = [e for e in result.summary["equality"] if e["differences"]]
    assert wrongs and {(e["arm"], e["temperature"]) for e in wrongs} == {(ARM, 1.0)}
    assert not any(e["ties"] for e in result.summary["equality"])
    assert (
        "differs from plain decoding's in 2 of 4 compared cells (2 of them sampled, with the same seeds)"
        in words_of(result, tmp_path)
    )
    card = markdown_card(result.cells, result.summary)
    assert f"`{ARM}`, a, temperature 1, batch 1" in card and "really" in card


class Rounds(TableModel):
    """Logits of several rows differ in their last places from those of one row."""

    def forward(self, feeds: Any, taps: Sequence[str] = ()) -> Any:
        rows = super().forward(feeds, taps)
        change = torch.tensor([0.0, 0.0, 4e-12], dtype=torch.float64)
        return [replace(row, logits=row.logits + change * (len(row.logits) > 1)) for row in rows]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_numerical_tie_is_told_from_a_difference(temperature: float, tmp_path: Path) -> None:
    prompt, seed, place = [0, 1, 2, 0, 1, 2], 9, 3
    noise = Noise(seed).gumbels(place, 3, torch.device("cpu"))

    def distribution(prefix: tuple[int, ...]) -> Tensor:
        """Tokens 1 and 2 tie at one position of this seed's text."""
        if len(prefix) != len(prompt) + place:
            return torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        return torch.softmax(torch.tensor([-9.0, 0.0, -2e-12], dtype=torch.float64) - temperature * noise, -1)

    arm = f"{ARM}@constant,k=2"
    result = bench(Rounds(distribution, 3), (arm,), {"a": [prompt]}, temperatures=(temperature,), seed=seed)
    (row,) = [e for e in result.summary["equality"] if e["arm"] == arm]
    assert (row["identical"], row["ties"], row["differences"]) == (0, 1, 0)
    assert claims(result)[arm, temperature] == {False}
    assert "but for numerical ties in 1 of 1 compared cells (all sampled" in words_of(result, tmp_path)
