"""The benchmark: what is run in which order, what is kept of it, and what an interrupted run goes on from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student

import foretoken
from foretoken.core.costs import RoundCosts, TargetCost
from foretoken.engine.stats import SpecStats
from foretoken.lab.bench import run as bench_run
from foretoken.lab.bench.arms import ArmSetup, Unit
from foretoken.lab.bench.partial import Partial, partial_of
from foretoken.lab.bench.results import (
    UnitResult,
    acceptance_length,
    anchored,
    cell,
    dumps,
    interval,
    positions,
    speedup_ci95,
    t95,
)
from foretoken.lab.bench.run import Bench, BenchSettings, run_bench
from foretoken.lab.bench.serving import OwnArm
from foretoken.lab.bench.specs import check_arm, split_arm
from foretoken.lab.bench.summary import BenchResult
from foretoken.lab.report.cards.written import markdown_card
from foretoken.lab.report.read import read_run
from foretoken.llm import Llm
from foretoken.models.huggingface import HuggingFaceModel
from toys import MarkovTable, llama, llamas, tables

CELL = {
    "arm", "category", "temperature", "batch", "prompts", "new_tokens", "tokens_per_s", "speedup", "speedup_ci95",
    "mean_acceptance_length", "acceptance_rate", "identical", "draft_s", "target_s", "overhead_s", "predicted_speedup",
}  # fmt: skip
PROMPTS = {"a": [[1, 2, 3, 1, 2], [3, 1, 3, 1, 3]], "b": [[2, 2, 1]]}


@pytest.fixture(scope="module")
def table() -> MarkovTable:
    return tables(4, seed=3)[0]


def shared(table: MarkovTable, **more: Any) -> ArmSetup:
    return ArmSetup(table, "toy", None, max_new_tokens=more.pop("max_new_tokens", 12), **more)


# -- the whole of it -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(table: MarkovTable) -> BenchResult:
    settings = BenchSettings(("ngram,n=1", "recycling"), temperatures=(0, 1), batches=(1, 2))
    return run_bench(shared(table), PROMPTS, settings)


def test_there_is_a_cell_for_every_arm_category_and_setting(result: BenchResult) -> None:
    keys = [(c["arm"], c["category"], c["temperature"], c["batch"]) for c in result.cells]
    arms = ("plain", "ngram,n=1", "recycling")
    assert sorted(keys) == sorted((a, c, t, b) for a in arms for c in "ab" for t in (0.0, 1.0) for b in (1, 2))
    assert all(set(c) == CELL for c in result.cells)
    assert result.summary["cells"] == len(result.cells) == 24


def test_the_cells_add_up(result: BenchResult) -> None:
    for row in result.cells:
        prompts = 2 if row["category"] == "a" else 1
        served = prompts if row["batch"] == 1 else 2  # with a filler
        assert (row["prompts"], row["new_tokens"]) == (prompts, 12 * prompts)
        spent = row["draft_s"] + row["target_s"] + row["overhead_s"]
        assert 12 * served / spent == pytest.approx(row["tokens_per_s"])
        low, high = row["speedup_ci95"]
        assert low <= row["speedup"] + 1e-9 and row["speedup"] <= high + 1e-9
        assert row["predicted_speedup"] > 0
        assert row["identical"] is True  # sampled too: the seeds are those of plain decoding
        assert row["mean_acceptance_length"] >= 1.0
        if row["arm"] == "plain":
            assert (row["speedup"], row["predicted_speedup"], row["acceptance_rate"]) == (1.0, 1.0, 0.0)
    assert any(row["acceptance_rate"] > 0 for row in result.cells)


def test_the_summary_holds_what_a_report_needs(result: BenchResult) -> None:
    summary = json.loads(result.lines[-1])
    assert summary["summary"] is True and summary["target"] == "toy"
    assert summary["arms"] == ["plain", "ngram,n=1", "recycling"]
    assert {"versions", "hardware", "threads", "dtype"} == set(summary["machine"])
    costs = RoundCosts.from_dict(summary["costs"])
    assert set(costs.drafters) == {"ngram,n=1", "recycling"} and costs.rest_s > 0
    assert set(summary["positions"]) == {"ngram,n=1", "recycling"}
    for shares in summary["positions"].values():
        assert all(1 >= share >= other > 0 for share, other in zip(shares, [*shares[1:], 1e-9], strict=True))
    for split in summary["rounds"].values():
        assert set(split) == {"draft_s", "target_s", "verify_s", "overhead_s", "prefill_s", "total_s", "rounds"}
        parts = sum(split[name] for name in ("draft_s", "target_s", "verify_s", "overhead_s"))
        assert parts == pytest.approx(split["total_s"])
    assert all(row["identical"] and not row["differences"] for row in summary["equality"])
    assert len(summary["equality"]) == len(result.cells)
    assert {row["category"] for row in summary["overall"]} == {"overall"}
    assert len(summary["prefill"]) == 12


def test_acceptance_by_position_is_of_the_first_setting(table: MarkovTable) -> None:
    """Temperatures and batch sizes have different acceptance: a mean over them would describe none."""
    bench = Bench(shared(table), PROMPTS, BenchSettings(("ngram,n=1",), temperatures=(1, 0), batches=(2, 1)))
    summary = bench.run().summary
    assert summary["positions_at"] == {"temperature": 1.0, "batch": 1}
    own = [r for r in bench.results.values() if r.arm == "ngram,n=1" and r.setting == (1.0, 1)]
    assert summary["positions"] == {"ngram,n=1": positions(own)}
    assert positions(own) != positions([r for r in bench.results.values() if r.arm == "ngram,n=1"])


def test_traces_show_the_first_prompt_of_every_category_and_arm(result: BenchResult) -> None:
    traces = result.summary["traces"]
    keys = [(t["arm"], t["category"], t["temperature"]) for t in traces]
    assert sorted(keys) == sorted((a, c, t) for a in result.summary["arms"] for c in "ab" for t in (0.0, 1.0))
    for trace in traces:
        tokens = 0
        for round_ in trace["rounds"]:
            nodes = len(round_["tokens"])
            assert len(round_["texts"]) == len(round_["parents"]) == len(round_["status"]) == nodes
            assert round_["status"][0] == "root" and round_["parents"][0] == -1
            assert round_["next"]["origin"] == "plain" if nodes == 1 else round_["next"]["origin"] != "plain"
            accepted = [i for i, status in enumerate(round_["status"]) if status == "accepted"]
            assert all(round_["status"][round_["parents"][i]] in ("root", "accepted") for i in accepted)
            tokens += len(accepted) + 1
        assert tokens >= 12
    first = next(t for t in traces if t["arm"] == "plain")
    assert first["prompt"] == "1 2 3 1 2"


def test_a_long_trace_says_how_many_rounds_it_lacks() -> None:
    unit = Unit.of([1, 2, 3], 50)
    result = OwnArm("plain", ArmSetup(llamas()[0], "toy", None)).run(unit, (0.0, 1), tracing=True)
    assert result.trace is not None and result.drafts == 50
    assert [row.get("more_rounds") for row in result.trace] == [None] * 47 + [2]


def test_a_trace_follows_the_output() -> None:
    target, _ = llamas()
    arm = OwnArm("ngram,n=1,k=3", ArmSetup(target, "toy", None))
    arm.enter((0.0, 1))
    result = arm.run(Unit("a", 0, [0], [[5, 6, 5, 6, 5]], [0], 16), (0.0, 1), True)
    spelled = []
    for row in result.trace or []:
        spelled += [row["tokens"][i] for i, s in enumerate(row["status"]) if s == "accepted"] + [row["next"]["token"]]
    assert spelled[:16] == result.outputs[0]
    assert (
        result.outputs[0]
        == Llm(target, None, None, None, None).generate([5, 6, 5, 6, 5], max_new_tokens=16, ignore_eos=True).token_ids
    )
    assert result.drafts == len(result.rounds) == len(result.trace or [])
    assert sum(nodes - 1 for nodes, _, _ in result.rounds) == result.drafted


def test_a_request_that_fails_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = llamas()
    arm = OwnArm("ngram,n=1,k=3", ArmSetup(target, "toy", None))
    arm.enter((0.0, 1))

    def failing(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(arm.llm.engine.drafter, "propose", failing)
    with pytest.raises(ZeroDivisionError, match="planted"):
        arm.run(Unit("a", 0, [0], [[5, 6, 5, 6, 5]], [0], 16), (0.0, 1), False)
    assert not arm.llm.engine.busy


def test_an_observer_is_called_once_a_round_and_changes_nothing(table: MarkovTable) -> None:
    calls: list[tuple[int, int]] = []
    outputs = []
    for watched in (False, True):
        llm = Llm(table, None, None, None, None)
        if watched:
            llm.engine.on_round = lambda runs, trees, verdicts, times: calls.append((len(runs), len(trees)))
        outputs.append(
            [o.token_ids for o in llm.generate([[1, 2], [2, 1]], max_new_tokens=5, temperature=1, seed=[1, 2])]
        )
    assert outputs[0] == outputs[1]
    assert calls == [(2, 2)] * 5


# -- a difference is told --------------------------------------------------------------------------------------------


def test_a_rule_that_changes_the_output_is_seen(table: MarkovTable) -> None:
    lossy = shared(table, verifier="min_block,min_accepted=3", allow_lossy=True)
    outcome = run_bench(lossy, PROMPTS, BenchSettings(("ngram,n=1",)))
    wrong = [c for c in outcome.cells if c["arm"] == "ngram,n=1" and not c["identical"]]
    assert wrong and sum(e["differences"] for e in outcome.summary["equality"]) > 0
    assert "really" in markdown_card(outcome.cells, outcome.summary)


def test_lengths_are_equal_unless_texts_may_end(table: MarkovTable) -> None:
    ending = MarkovTable(table.distribution, 4, eos_token_ids={1})
    counts = {}
    for ignore_eos in (True, False):
        bench = run_bench(shared(ending, ignore_eos=ignore_eos), PROMPTS, BenchSettings(("ngram",), temperatures=(1,)))
        counts[ignore_eos] = {c["new_tokens"] for c in bench.cells}
    assert counts[True] == {12, 24}
    assert min(counts[False]) < 12


# -- arms ------------------------------------------------------------------------------------------------------------


def test_an_arm_may_name_its_controller() -> None:
    assert split_arm("model:./d,k=3@heuristic") == ("model:./d,k=3", "heuristic")
    assert split_arm("model,k=3@constant,k=2") == ("model,k=3", "constant,k=2")
    assert split_arm("model:./me@home,k=3") == ("model:./me@home,k=3", None)
    assert split_arm("ngram") == ("ngram", None)


@pytest.mark.parametrize("spec", ["none", "plain", "auto", "ngram@constant,k=3", "transformers:assisted", "llama.cpp"])
def test_known_arms(spec: str) -> None:
    check_arm(spec)


@pytest.mark.parametrize("spec", ["nothing", "ngrm@constant", "vllm:plain"])
def test_unknown_arms_list_the_choices(spec: str) -> None:
    with pytest.raises(ValueError, match=r"unknown drafter .*ngram.*transformers:plain"):
        check_arm(spec)


@pytest.mark.parametrize("spec", ["ngram@nosuch", "ngram@nosuch,k=3", "auto@nosuch"])
def test_an_unknown_controller_of_an_arm_is_called_one(spec: str) -> None:
    with pytest.raises(ValueError, match=r"unknown controller 'nosuch'.*constant"):
        check_arm(spec)


def test_controllers_differ_by_arm(table: MarkovTable) -> None:
    plain, three = OwnArm("none", shared(table)), OwnArm("ngram@constant,k=3", shared(table))
    assert plain.llm.engine.controller is None and plain.most_nodes == 1
    assert vars(three.llm.engine.controller)["k"] == 3


def test_what_remembers_outputs_starts_anew_at_every_setting(table: MarkovTable) -> None:
    forgetful, remembering = OwnArm("ngram", shared(table)), OwnArm("suffix,share=true", shared(table))
    assert (forgetful.remembers, remembering.remembers) == (False, True)
    before = forgetful.drafter, remembering.drafter
    for arm in (forgetful, remembering):
        arm.enter((0.0, 1))
    assert forgetful.drafter is before[0] and remembering.drafter is not before[1]


def test_bad_settings(table: MarkovTable) -> None:
    for bad, words in (
        ({"repeat": 0}, "repeat must be at least 1"),
        ({"batches": (0,)}, "a batch size must be 1 to 64, not 0"),
        ({"batches": (65,)}, "a batch size must be 1 to 64"),
        ({"temperatures": (-1.0,)}, "a temperature must be 0 or more"),
        ({"temperatures": (float("nan"),)}, "a temperature must be 0 or more"),
        ({"temperatures": ()}, "at least one temperature"),
    ):
        with pytest.raises(ValueError, match=words):
            BenchSettings(**bad)
    with pytest.raises(ValueError, match="no prompts"):
        Bench(shared(table), {"a": []}, BenchSettings())
    with pytest.raises(ValueError, match="max_new_tokens must be 1 to"):
        Bench(shared(table, max_new_tokens=10**6), PROMPTS, BenchSettings())


def test_prompts_that_are_too_long_lose_their_beginning(table: MarkovTable) -> None:
    short = MarkovTable(table.distribution, 4, context_length=20)
    bench = Bench(shared(short), {"a": [[1] * 3 + [2] * 8]}, BenchSettings(("ngram",)))
    assert bench.ids == {"a": [[2] * 8]} and bench.num_cut == 1


# -- order, repeats, resuming ----------------------------------------------------------------------------------------


class FakeArm:
    """Takes the seconds that a script says, and notes its calls."""

    most_nodes = 4
    ran = None

    def __init__(self, name: str, calls: list[tuple[Any, ...]], seconds: Callable[[], float], remembers: bool) -> None:
        self.name, self.calls, self.seconds, self.remembers = name, calls, seconds, remembers

    def can(self, setting: tuple[float, int]) -> bool:
        return True

    def enter(self, setting: tuple[float, int]) -> None:
        self.calls.append(("enter", self.name, setting))

    def run(self, unit: Unit, setting: tuple[float, int], tracing: bool) -> UnitResult:
        self.calls.append((self.name, unit.category, unit.number))
        return UnitResult(
            self.name, *setting, unit.category, unit.number, list(unit.prompts),
            [[1]] * len(unit.ids), self.seconds(), len(unit.ids), 0.0,
            trace=[{"at": len(self.calls)}] if tracing else None,
        )  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    noted: list[tuple[Any, ...]] = []
    clock = random.Random(1)
    monkeypatch.setattr(
        bench_run,
        "make_arm",
        lambda name, _: FakeArm(name, noted, lambda: clock.random() + 0.1, name == "keeps"),
    )
    return noted


def timed(calls: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [call for call in calls if call[0] != "enter" and call[1] != "warm-up"]


def test_arms_take_turns_at_going_first(table: MarkovTable, calls: list[tuple[Any, ...]]) -> None:
    run_bench(shared(table), {"a": [[1]] * 4}, BenchSettings(("x", "y")))
    order = [name for name, *_ in timed(calls)]
    assert order == ["plain", "x", "y", "x", "y", "plain", "y", "plain", "x", "plain", "x", "y"]
    assert [c for c in calls if c[0] == "enter"] == [("enter", name, (0.0, 1)) for name in ("plain", "x", "y")]
    assert calls.index(("x", "warm-up", 0)) < calls.index(("x", "a", 0))


def test_the_median_run_counts_but_the_first_of_what_remembers(
    table: MarkovTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {name: iter([9.0, 3.0, 1.0, 2.0]) for name in ("plain", "x", "keeps")}  # warm-up, then three runs
    monkeypatch.setattr(
        bench_run, "make_arm",
        lambda name, _: FakeArm(name, [], lambda: next(script[name]), name == "keeps"),
    )  # fmt: skip
    outcome = run_bench(shared(table), {"a": [[1]]}, BenchSettings(("x", "keeps"), repeat=3))
    assert [c["tokens_per_s"] for c in outcome.cells] == [0.5, 0.5, pytest.approx(1 / 3)]
    assert all(trace["rounds"] for trace in outcome.summary["traces"]) and len(outcome.summary["traces"]) == 3


def test_batches_are_filled_up_from_the_beginning(table: MarkovTable, calls: list[tuple[Any, ...]]) -> None:
    bench = Bench(shared(table), {"a": [[1], [2], [3]]}, BenchSettings(seed=10))
    units = list(bench.units(2))
    assert [(list(u.prompts), u.ids, u.seeds) for u in units] == [
        ([0, 1], [[1], [2]], [10, 11]),
        ([2, 0], [[3], [1]], [12, 13]),
    ]
    assert [list(u.prompts) for u in bench.units(4)] == [[0, 1, 2, 0]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int, int], list[SpecStats]]:
    """Statistics of every request, by arm, unit and turn."""
    noted: dict[tuple[str, int, int], list[SpecStats]] = {}
    serve = OwnArm._serve

    def noting(arm: OwnArm, unit: Unit, temperature: float) -> Any:
        done = serve(arm, unit, temperature)
        if unit.category != "warm-up":
            noted[arm.name, unit.number, unit.turn] = [run.stats for run in done[0]]
        return done

    monkeypatch.setattr(OwnArm, "_serve", noting)
    return noted


def test_fillers_and_repeated_runs_profit_from_no_earlier_answer(
    served: dict[tuple[str, int, int], list[SpecStats]],
) -> None:
    """A drafter with memory copied the answers, and the prompts' keys and values were copied."""
    target, arm = HuggingFaceModel(llama(context=256)), "suffix,k=8"
    prompts = {"a": [[(7 * place + number) % 31 for place in range(80)] for number in range(3)]}
    run_bench(ArmSetup(target, "toy", max_new_tokens=24), prompts, BenchSettings((arm,), batches=(2,), repeat=2))
    assert {stats.num_prompt_tokens_computed for batch in served.values() for stats in batch} == {80}
    accepted = {
        key[1:]: [stats.num_accepted_tokens for stats in batch] for key, batch in served.items() if key[0] == arm
    }
    assert accepted[0, 1] == accepted[0, 0] and accepted[1, 1] == accepted[1, 0]
    assert accepted[1, 0][1] == accepted[0, 0][0]  # the filler is the first prompt


def test_fillers_count_for_the_speed_alone(served: dict[tuple[str, int, int], list[SpecStats]]) -> None:
    target, arm = HuggingFaceModel(llama()), "ngram,n=1,k=4"
    prompts = {"a": [[5, 6, 5, 6, 5], [7, 8, 9, 7, 8], [3, 1, 4, 3, 1]]}
    bench = Bench(ArmSetup(target, "toy", max_new_tokens=12), prompts, BenchSettings((arm,), batches=(2,)))
    outcome = bench.run()
    (last,) = [r for r in bench.results.values() if (r.arm, r.unit) == (arm, 1)]
    assert (last.prompts, len(last.outputs), last.decoded) == ([2], 1, 24)
    counted, filler = served[arm, 1, 0]
    assert (last.drafted, last.accepted) == (counted.num_draft_tokens, counted.num_accepted_tokens)
    assert filler.num_draft_tokens > 0
    assert all((row["prompts"], row["new_tokens"]) == (3, 36) for row in outcome.cells)
    assert [row["identical"] + row["ties"] + row["differences"] for row in outcome.summary["equality"]] == [3, 3]
    (prefill,) = [row["prefill_s"] for row in outcome.summary["prefill"] if row["arm"] == arm]
    assert prefill == pytest.approx(sum(r.prefill_s for r in bench.results.values() if r.arm == arm) / 4)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_an_interrupted_run_goes_on_where_it_was(
    table: MarkovTable, calls: list[tuple[Any, ...]], tmp_path: Path, after: int, stop: type[BaseException]
) -> None:
    settings = BenchSettings(("x",), temperatures=(0, 1))
    out = tmp_path / "run.jsonl"

    def broken(done: int, total: int, text: str) -> None:
        if done == after and "warming" not in text and total:
            raise stop

    with pytest.raises(stop):
        run_bench(shared(table), PROMPTS, settings, out, on_progress=broken)
    assert not out.exists()
    before = timed(calls)
    assert len(before) == after
    with partial_of(out).open("a") as file:
        file.write('{"result": {"arm": "x", "tempera')  # killed while it wrote
    calls.clear()
    totals = []
    outcome = run_bench(
        shared(table), PROMPTS, settings, out, True, lambda done, total, text: totals.append((done, total))
    )
    assert len(before) + len(timed(calls)) == 12  # nothing twice, nothing left out
    assert totals[-1] == (11, 12)
    assert not partial_of(out).exists() and sorted(p.name for p in tmp_path.iterdir()) == ["run.jsonl"]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[:-1] == json.loads(dumps(outcome.cells)) and lines[-1]["summary"] is True
    keys = {(c["arm"], c["category"], c["temperature"]) for c in lines[:-1]}
    assert len(keys) == 8 == len(lines) - 1


def test_finished_results_are_used_as_they_were(
    table: MarkovTable, calls: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    settings, out = BenchSettings(("x",)), tmp_path / "run.jsonl"

    def stop(done: int, total: int, text: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(shared(table), PROMPTS, settings, out, on_progress=stop)
    rows = [json.loads(line) for line in partial_of(out).read_text().splitlines()]
    kept = {
        (r["result"]["arm"], r["result"]["category"], r["result"]["unit"]): r["result"] for r in rows if "result" in r
    }
    bench = Bench(shared(table), PROMPTS, settings)
    outcome = bench.run(Partial(out, {**bench.config, **bench.circumstances}, True))
    for result in bench.results.values():
        was = kept.get((result.arm, result.category, result.unit))
        assert was is None or was["seconds"] == result.seconds
    assert len(kept) == 3 and any("note" in row for row in rows)
    unfinished = read_run(out)  # the file beside it, which now has every result
    summary = json.loads(dumps(outcome.summary))
    assert unfinished.unfinished and unfinished.part("costs") and [c["predicted_speedup"] for c in unfinished.cells]
    for name in ("arms", "costs", "positions", "rounds", "overall", "drafted", "prefill"):
        assert json.loads(dumps(unfinished.summary[name])) == summary[name], name


def test_another_run_is_not_mixed_in(
    table: MarkovTable, calls: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.jsonl"

    def stop(done: int, total: int, text: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(shared(table), PROMPTS, BenchSettings(("x",)), out, on_progress=stop)
    kept = partial_of(out).read_bytes()
    circumstances = Bench(shared(table), PROMPTS, BenchSettings(("x",))).circumstances
    for settings, prompts, more, words in (
        (BenchSettings(("y",)), PROMPTS, {}, r"other settings \(arms\)"),
        (BenchSettings(("x",), seed=1), PROMPTS, {}, r"other settings \(seed\)"),
        (BenchSettings(("x",)), {"a": [[1]]}, {}, r"other settings \(prompts\)"),
        (BenchSettings(("x",)), PROMPTS, {"max_new_tokens": 7}, r"other settings \(max_new_tokens\)"),
        (BenchSettings(("x",)), PROMPTS, {"quantize": "int4"}, r"other settings \(quantize\)"),
        (BenchSettings(("x",)), PROMPTS, {"backend": "llama.cpp"}, r"other settings \(backend\)"),
        (BenchSettings(("x",), chat=False), PROMPTS, {}, r"other settings \(chat\)"),
    ):
        with pytest.raises(ValueError, match=words):
            run_bench(shared(table, **more), prompts, settings, out, True)
    with pytest.raises(ValueError, match="add --resume"):
        run_bench(shared(table), PROMPTS, BenchSettings(("x",)), out)
    for name, now in (("threads", 99), ("versions", {}), ("cpu", "another"), ("kernels", "none"), ("ran", {"auto": 1})):
        monkeypatch.setattr(Bench, "circumstances", {**circumstances, name: now})
        with pytest.raises(ValueError, match=rf"other settings \({name}\)"):
            run_bench(shared(table), PROMPTS, BenchSettings(("x",)), out, True)
    assert partial_of(out).read_bytes() == kept


def test_other_threads_are_not_mixed_in(table: MarkovTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(shared(table), PROMPTS, BenchSettings(("auto", "recycling")))
    before = bench.circumstances
    assert before["ran"] == {"auto": bench.arms[1].ran} and before["versions"]["foretoken"] == foretoken.__version__
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert bench.circumstances == {**before, "threads": 99}


def test_what_remembers_runs_again_from_the_start(
    table: MarkovTable, calls: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    """Its memory of the finished prompts is lost, which a whole run has."""
    settings, out = BenchSettings(("x", "keeps"), temperatures=(0, 1)), tmp_path / "run.jsonl"
    prompts = {"a": [[1], [2], [3]]}

    def stop(done: int, total: int, text: str) -> None:
        if done == 9 + 4:  # in the second unit of the second temperature
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(shared(table), prompts, settings, out, on_progress=stop)
    done = timed(calls)[9:]
    calls.clear()
    run_bench(shared(table), prompts, settings, out, True)
    again = timed(calls)
    assert [unit for name, _, unit in again if name == "keeps"] == [0, 1, 2]
    others = [call for call in (*done, *again) if call[0] != "keeps"]
    assert sorted(others) == sorted((name, "a", unit) for name in ("plain", "x") for unit in range(3))


def test_a_damaged_partial_file_is_told(table: MarkovTable, calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    for content in ("nonsense\n", '{"other": 1}\n', '{"config": {}}\n{"result": {"a": 1}}\n'):
        partial_of(out).write_text(content)
        with pytest.raises(ValueError, match="is damaged"):
            run_bench(shared(table), PROMPTS, BenchSettings(("x",)), out, True)


def test_a_header_without_its_newline_is_written_again(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    Partial(out, {"arms": ["plain"]}, resume=False).close()
    whole = partial_of(out).read_text()
    partial_of(out).write_text(whole.rstrip())
    Partial(out, {"arms": ["plain"]}, resume=True).close()
    assert partial_of(out).read_text() == whole


def test_where_a_run_cannot_be_written(table: MarkovTable, calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        run_bench(shared(table), PROMPTS, BenchSettings(), tmp_path)
    with pytest.raises(ValueError, match=r"the folder .*missing does not exist"):
        run_bench(shared(table), PROMPTS, BenchSettings(), tmp_path / "missing" / "run.jsonl")
    (tmp_path / "done.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="nothing to resume"):
        run_bench(shared(table), PROMPTS, BenchSettings(), tmp_path / "done.jsonl", True)


# -- numbers ---------------------------------------------------------------------------------------------------------


def unit(arm: str = "x", number: int = 0, seconds: float = 1.0, decoded: int = 10, **more: Any) -> UnitResult:
    return UnitResult(arm, 0.0, 1, "a", number, [number], [[7] * decoded], seconds, decoded, 0.5, **more)


def test_a_cell_by_hand() -> None:
    plain = [unit("plain", i, 2.0, drafts=10, draft_s=0.0, target_s=1.5) for i in range(2)]
    arm = [
        unit(number=0, seconds=0.5, drafts=4, drafted=12, accepted=6, draft_s=0.1, target_s=0.3),
        unit(number=1, seconds=1.5, drafts=6, drafted=18, accepted=4, draft_s=0.3, target_s=0.9),
    ]
    row = cell(arm, plain, "a", 2.5)
    low, high = row.pop("speedup_ci95")
    assert row == {
        "arm": "x", "category": "a", "temperature": 0.0, "batch": 1, "prompts": 2, "new_tokens": 20,
        "tokens_per_s": 10.0, "speedup": 2.0, "mean_acceptance_length": 2.0, "acceptance_rate": pytest.approx(1 / 3),
        "identical": True, "draft_s": pytest.approx(0.4), "target_s": pytest.approx(1.2),
        "overhead_s": pytest.approx(0.4), "predicted_speedup": 2.5,
    }  # fmt: skip
    # Shares of the arm's seconds are 1/4 and 3/4, so the relative error is 1/2; two units have one degree of freedom
    assert (low, high) == (0.0, pytest.approx(2 * (1 + 12.7062 / 2), rel=1e-5))


def test_another_engine_tells_less() -> None:
    arm = [
        unit(seconds=0.5, decoded=9, mean_acceptance_length=3.0),
        unit(number=1, decoded=1, mean_acceptance_length=1.0),
    ]
    row = cell(arm, [unit("plain"), unit("plain", 1)], "a", None)
    assert row["mean_acceptance_length"] == pytest.approx(10 / 4)
    assert all(row[name] is None for name in ("acceptance_rate", "draft_s", "target_s", "overhead_s"))
    assert row["identical"] is False
    assert acceptance_length([unit()]) is None


def test_one_unit_has_no_spread() -> None:
    assert speedup_ci95([unit(seconds=0.5)], [unit("plain", seconds=2.0)]) == [4.0, 4.0]
    assert interval({"speedup_ci95": [4.0, 4.0]}) == "-"
    assert interval({"speedup_ci95": [1.0, 1.25]}) == "1.00-1.25"


def test_the_interval_covers_the_true_ratio() -> None:
    draws, covered = np.random.default_rng(5), 0
    for _ in range(100):
        seconds = draws.lognormal(0.0, 0.3, (2, 24))
        arm = [unit(number=i, seconds=float(s) / 2) for i, s in enumerate(seconds[0])]
        plain = [unit("plain", i, float(s)) for i, s in enumerate(seconds[1])]
        low, high = speedup_ci95(arm, plain)
        covered += low <= 2.0 <= high
    assert 84 <= covered <= 100


@pytest.mark.parametrize("units", [2, 3, 4, 6, 12])
def test_the_interval_of_few_prompts_covers_the_true_ratio(units: int) -> None:
    """Both arms have the same prompt lengths; the gain from drafting varies."""
    draws, covered = np.random.default_rng(units), 0
    for _ in range(1000):
        base = draws.lognormal(0.0, 0.1, units)
        seconds = base * draws.lognormal(-(0.15**2) / 2, 0.15, units)
        arm = [unit(number=i, seconds=float(s)) for i, s in enumerate(seconds)]
        low, high = speedup_ci95(arm, [unit("plain", i, float(s)) for i, s in enumerate(base)])
        covered += low <= 1.0 <= high
    assert covered >= 920


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 12, 101])
def test_students_t(freedom: int) -> None:
    assert t95(freedom) == pytest.approx(student.ppf(0.975, freedom))


def test_positions_are_shares_of_rounds() -> None:
    assert positions([unit(drafts=4, per_pos=[3, 1]), unit(drafts=6, per_pos=[2])]) == [0.5, 0.1]


def test_the_curve_is_moved_to_where_the_run_was() -> None:
    plain = [unit("plain", target_s=0.4, rounds=[[1, 0, 0.0]] * 10)]
    moved = anchored(TargetCost({1: 0.02, 4: 0.03}), plain)
    assert moved.seconds == pytest.approx({1: 0.04, 4: 0.06})
    assert anchored(moved, []) is moved


def test_lines_are_ascii_and_hold_no_nan() -> None:
    assert dumps({"a": float("nan"), "b": ["\u2028"]}) == '{"a": null, "b": ["\\u2028"]}'


def test_one_run_at_a_time_writes_a_partial_file(tmp_path: Path) -> None:
    """Lines of two runs would mix, and each would miss the other's results."""
    out = tmp_path / "run.jsonl"
    first = Partial(out, {"arms": ["plain"]}, resume=False)
    with pytest.raises(ValueError, match=r"another run writes to .*run\.jsonl\.partial"):
        Partial(out, {"arms": ["plain"]}, resume=True)
    first.close()
    Partial(out, {"arms": ["plain"]}, resume=True).close()
    assert partial_of(out).read_text().count("config") == 1
