"""The tuner: costs from rounds, the best configuration of a drafter, plans, interrupts, profiles.

Times are made up here: no test depends on a clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from foretoken import load
from foretoken.controllers.base import Controller
from foretoken.controllers.constant import ConstantController
from foretoken.core import StepRecord
from foretoken.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.drafters.base import Drafter
from foretoken.drafters.model import ModelDrafter
from foretoken.drafters.ngram import NgramDrafter
from foretoken.drafters.recycling import RecyclingDrafter
from foretoken.loading import read_profile
from foretoken.measure import profile as profiles
from foretoken.measure.profile import ProfileWarning, fingerprint_of, machine_of, misfits, refresh
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.tune import tuner
from foretoken.tune.choices import default_specs, generous, parse_names, router_spec, sizes, with_option
from foretoken.tune.probe import Measured, Run, Workload, best_candidate, measure_drafter
from foretoken.tune.reasons import why_not
from foretoken.tune.tuned import Job
from foretoken.tune.tuned_trees import can_fill, measured_shape, sequoia_spec
from foretoken.tune.tuner import partial_file, tune
from toys import fixed_tables, llama, llamas

V = TargetCost({1: 0.010, 2: 0.011, 256: 0.265})
"""10 ms for one node and 1 ms for every further one."""
REST = 0.002
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 6, 4, 5, 6, 4], [7, 8, 7, 8, 7, 8]]


def record(drafted: int, accepted: int, total_s: float, draft_s: float = 0.0) -> StepRecord:
    return StepRecord(1, drafted + 1, drafted, accepted, 1, draft_s, 0.0, 0.0, total_s)


def run_of(
    depth: int, survival: Sequence[float], drafting: float, nodes: float | None = None, asks: float = 1.0
) -> Run:
    """A run whose rounds cost ``drafting`` seconds beside the target call and the rest."""
    nodes = 1 + depth if nodes is None else nodes
    return Run(depth, 100, V.of(round(nodes)) + REST + drafting, drafting, nodes, asks, list(survival))


def chain(alpha: float, call_s: float, step_s: float, depth: int = 8, spec: str = "model,k=8") -> Measured:
    """A drafter whose every token is accepted with chance ``alpha``."""
    survival = [alpha**d for d in range(1, depth + 1)]
    short = depth // 4
    runs = (run_of(d, survival[:d], call_s + step_s * d) for d in (depth, short))
    return Measured(spec, 64, False, False, *runs)


# -- rounds ----------------------------------------------------------------------------------------------------------


def test_what_rounds_say() -> None:
    records = [record(4, 4, 0.3), record(4, 1, 0.3), record(0, 0, 0.1), record(2, 2, 0.2), record(4, 0, 0.3)]
    found = Run.of(records, 4)
    assert (found.rounds, found.nodes, found.proposes) == (5, 3.8, 0.8)
    assert found.survival == [0.6, 0.4, 0.2, 0.2]
    assert found.round_s == pytest.approx(0.24)
    pauses = [record(1, 0, 0.1)] * 38 + [record(1, 0, 50.0), record(1, 0, 0.0)]
    assert Run.of(pauses, 1).round_s == pytest.approx(0.1)
    with pytest.raises(ValueError, match="more new tokens"):
        Run.of([], 4)


def test_only_rounds_with_room_count() -> None:
    """A perfect draft of 4 is accepted whole in every round that is kept; of 24 tokens that is 4 rounds of 5."""
    target = HuggingFaceModel(llama())
    work = Workload(target, PROMPTS[:2], 24)
    rounds = work.rounds(ModelDrafter(target, k=4, target=target), 4, 64)
    assert [r.num_accepted_tokens for r in rounds] == [4] * 8
    assert Run.of(rounds, 4).survival == [1.0] * 4
    assert len(work.rounds(None, 0, 0)) == 48


def test_a_call_and_its_steps_are_told_apart() -> None:
    measured = chain(0.8, call_s=0.003, step_s=0.0015)
    cost = measured.cost(V, REST)
    assert (cost.call_s, cost.step_s, cost.nodes_per_depth) == pytest.approx((0.003, 0.0015, 1.0))
    costs = RoundCosts(V, {"model,k=8": cost}, REST)
    for run in (measured.long, measured.short):
        assert costs.round_s("model,k=8", run.depth) == pytest.approx(run.round_s)


def test_noise_gives_no_negative_costs() -> None:
    for long, short in ((0.0, 0.004), (0.001, 0.0), (-0.005, -0.001)):
        measured = Measured("x", 64, False, False, run_of(8, [0.5] * 8, long), run_of(2, [0.5] * 2, short))
        cost = measured.cost(V, REST)
        assert cost.call_s >= 0 and cost.step_s >= 0
        assert cost.seconds(8) == pytest.approx(max(long, 0.0))


def test_drafts_that_are_rare_cost_fewer_nodes() -> None:
    """A drafter that guesses 8 tokens in a quarter of the rounds: 3 nodes a round, and its costs say so again."""
    run = run_of(8, [0.2] * 8, 0.001, nodes=3.0, asks=0.25)
    cost = Measured("ngram", 64, False, True, run, replace(run, depth=2)).cost(V, REST)
    assert cost.nodes_per_depth == 1.0 and cost.proposes == 0.25
    assert RoundCosts(V, {"ngram": cost}, REST).round_s("ngram", 8) == pytest.approx(run.round_s)


@pytest.mark.parametrize(("alpha", "step_s"), [(0.9, 0.0002), (0.7, 0.002), (0.3, 0.004), (0.95, 0.00001)])
def test_the_best_depth_is_that_of_the_formula(alpha: float, step_s: float) -> None:
    """(1 - a^(k+1)) / (1 - a) tokens for v(k + 1) + c k + o (section 8 of the specification), by brute force."""
    best = best_candidate(chain(alpha, 0.0, step_s), V, REST)

    def speedup(k: int) -> float:
        tokens = (1 - alpha ** (k + 1)) / (1 - alpha)
        return tokens * (0.010 + REST) / (0.010 + 0.001 * k + step_s * k + REST)

    wanted = max(range(1, 9), key=speedup)
    assert (best.depth, best.predicted) == (wanted, pytest.approx(speedup(wanted)))
    assert best.controller == f"constant,k={wanted},nodes=64"


def test_of_a_tree_only_the_measured_depths_are_known() -> None:
    long, short = run_of(8, [0.8] * 8, 0.02, nodes=33), run_of(4, [0.9] * 4, 0.002, nodes=17)
    best = best_candidate(Measured("eagle", 32, True, False, long, short), V, REST)
    assert best.depth == 4 and best.predicted == pytest.approx(4.6 * 0.012 / (0.026 + REST + 0.002))
    costs = RoundCosts(V, {"eagle": best.cost}, REST)
    assert costs.round_s("eagle", 4) == pytest.approx(short.round_s)


def test_a_drafter_that_remembers_is_built_anew_for_every_pass() -> None:
    work = Workload(HuggingFaceModel(llama()), PROMPTS, 24)
    built: list[Drafter] = []

    def make(cls: type[Drafter]) -> Callable[[], Drafter]:
        def made() -> Drafter:
            built.append(cls())
            return built[-1]

        return made

    found = measure_drafter(work, "recycling", make(RecyclingDrafter), lambda d: False)
    assert RecyclingDrafter().traits.shares_state and len(built) == 3
    assert (found.trees, found.nodes, found.long.depth, found.short.depth) == (True, 80, 6, 3)
    built.clear()
    found = measure_drafter(work, "ngram", make(NgramDrafter), lambda d: True)
    assert len(built) == 1 and found.copies and (found.long.depth, found.short.depth) == (8, 2)
    assert Measured.from_dict(json.loads(json.dumps(found.as_dict()))) == found


# -- reasons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (chain(0.6, 0.02, 0.01), ("too expensive", "target calls")),
        (chain(0.05, 0.0, 0.0002), ("rarely accepted", "5%")),
        (Measured("t", 64, True, False, run_of(8, [0.7] * 4 + [0.0] * 4, 0.0005, 65), run_of(4, [0.7] * 4, 0.0005, 65)),
         ("grow", "65 nodes cost 7.40 times one")),
        (Measured("n", 64, False, True, run_of(8, [0.01] * 8, 0.0005, 2, 0.1), run_of(2, [0.01] * 2, 0.0005, 1.2, 0.1)),
         ("rarely guesses", "10%")),
    ],
)  # fmt: skip
def test_why_a_drafter_loses(measured: Measured, words: tuple[str, ...]) -> None:
    candidate = best_candidate(measured, V, REST)
    assert candidate.predicted < 1
    for word in words:
        assert word in why_not(candidate, V, REST)


# -- what is tried ---------------------------------------------------------------------------------------------------


def test_lists_of_drafters() -> None:
    assert parse_names("model,k=8,ngram") == ["model,k=8", "ngram"]
    assert parse_names("model:./a=b, k=3 ,ngram,ngram") == ["model:./a=b,k=3", "ngram"]
    nested = "router,drafters=(model,k=4|ngram)"
    assert parse_names(f"suffix,{nested}") == ["suffix", nested]
    for text, words in (
        ("nosuch", "choose one of"),
        ("ngram,", "empty"),
        ("ngram,z=1", "valid ones"),
        ("none", "plain"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_names(text)


def test_lengths_and_sizes() -> None:
    assert generous("model,k=4", False) == "model,k=8" and generous("model,k=4", True) == "model,k=4"
    assert generous("model:./d", True) == "model:./d,k=8"
    assert generous("ngram", True) == "ngram,k=16" and generous("bpd", False) == "bpd"
    assert generous("mtp", False) == "mtp,nodes=8,depth=8" or generous("mtp", False) == "mtp,depth=8,nodes=8"
    assert sizes("eagle,nodes=16", False) == ["eagle,nodes=8", "eagle,nodes=32", "eagle,nodes=64"]
    assert sizes("eagle,nodes=16", True) == [] and sizes("ngram", False) == []
    assert with_option("cascade,k=8,inner=(ngram,n=3)", "k", 4) == "cascade,k=4,inner=(ngram,n=3)"
    assert router_spec("model,k=4", "ngram", (0.25, 0.0)) == "router,drafters=(model,k=4|ngram),costs=0.25|0"
    builtin = default_specs("builtin")
    assert builtin[:2] == ["model,k=4", "ngram"] and builtin.index("eagle") < builtin.index("retokenize,k=4")
    elsewhere = default_specs("./target")
    assert "eagle" not in elsewhere and "ngram" in elsewhere and not any("scripted" in spec for spec in elsewhere)


def test_the_tree_for_what_is_accepted() -> None:
    """The draft model always ranks the target's token second: a tree that never branches would be worth nothing."""
    target, draft = fixed_tables([0.1, 0.2, 0.4, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03], [0.5, 0.1, 0.3] + [0.1 / 6] * 6)
    shape = measured_shape(Workload(target, [[1, 2]], 20), ModelDrafter(draft))
    assert (
        shape["acceptance"] == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0] and min(shape["level_s"], shape["node_s"]) >= 0
    )
    with pytest.raises(ValueError, match="no siblings"):
        measured_shape(Workload(target, [[1, 2]], 20), NgramDrafter())
    spec = sequoia_spec("model,k=8", {**shape, "level_s": 0.1, "node_s": 0.0}, TargetCost({1: 1.0, 2: 1.0}))
    assert spec is not None and "tree=(sequoia,nodes=16,depth=8,acceptance=0 1 0 0 0 0 0 0)" in spec


def test_the_tree_for_what_nodes_cost() -> None:
    shape = {"acceptance": [0.5, 0.3, 0.1], "level_s": 0.1, "node_s": 0.0}
    assert sequoia_spec("model,k=8", shape, TargetCost({1: 1.0, 2: 3.0})) is None
    assert sequoia_spec("model,k=8", {**shape, "node_s": 2.0}, TargetCost({1: 1.0, 2: 1.0})) is None
    spec = sequoia_spec("model,k=8", shape, TargetCost({1: 1.0, 2: 1.0}))
    assert spec is not None and "tree=(sequoia,nodes=64," in spec and "acceptance=0.5 0.3 0.1)" in spec
    assert can_fill("model,k=8") and can_fill("early_exit")
    assert not any(map(can_fill, ("model,tree=2x2", "ngram", "medusa")))


# -- whole runs in a made-up world -----------------------------------------------------------------------------------


@dataclass
class World:
    """Planted costs, acceptances and speeds instead of measured ones; counts what was asked for."""

    alphas: dict[str, float]
    speeds: dict[str, float]
    asked: list[str]
    stop_at: str | None = None
    minutes: float = 0.0

    def measure(self, work: Workload, spec: str, make: Any, copies: Any) -> Measured:
        if spec == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(spec)
        self.minutes += 1.0
        name = spec.split(",")[0]
        if name not in self.alphas:
            raise ValueError(f"{name} does not fit this target")
        return replace(chain(self.alphas[name], 0.0, 0.0001, spec=spec), copies=name in ("ngram", "suffix"))

    def speed(self, drafter: Drafter | None, controller: Any, costs: RoundCosts | None = None) -> float:
        self.asked.append(f"run {drafter.spec if drafter else 'plain'} {controller}")
        if drafter is None:
            return 100.0
        assert costs is not None and drafter.spec in costs.drafters
        return 100.0 * self.speeds[drafter.name] * (0.98 if controller == "auto" else 1.0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """ngram is promised most, lookups of suffixes turn out to be fastest."""
    made = World({"ngram": 0.8, "suffix": 0.75, "jacobi": 0.1}, {"ngram": 1.5, "suffix": 1.8, "jacobi": 0.8}, [])
    monkeypatch.setattr(tuner, "measured_target", lambda *args, **more: V)
    monkeypatch.setattr(tuner, "measure_drafter", made.measure)
    monkeypatch.setattr(Workload, "rounds", lambda *args: [record(0, 0, 0.010 + REST)] * 10)
    monkeypatch.setattr(Workload, "speed", lambda self, *args: made.speed(*args))
    return made


def job(drafters: Sequence[str] = ("ngram", "suffix", "jacobi"), **more: Any) -> Job:
    return Job(Workload(HuggingFaceModel(llama()), PROMPTS, 24), "./x", None, None, drafters, **more)


def test_measurement_beats_prediction(world: World, tmp_path: Path) -> None:
    out = tmp_path / "new" / "profile.json"
    seen: list[tuple[str, int, int]] = []
    outcome = tune(job(), out, on_progress=lambda *args: seen.append(args))
    assert [one.drafter for one in outcome.candidates][:2] == ["ngram,k=16", "suffix"]
    assert outcome.chosen == ("suffix", outcome.candidates[1].controller) and outcome.speedup == pytest.approx(1.8)
    assert all(done <= total for _, done, total in seen) and [done for _, done, _ in seen] == sorted(
        d for _, d, _ in seen
    )
    stored = json.loads(out.read_text())
    assert set(stored) >= {
        "format",
        "target",
        "machine",
        "drafter",
        "verifier",
        "controller",
        "temperature",
        "costs",
        "table",
    }
    assert stored["drafter"] == "suffix" and stored["target"]["fingerprint"] == fingerprint_of(outcome.job.work.target)
    rows = {(row["drafter"], row["controller"]): row for row in stored["table"]}
    assert rows["suffix", stored["controller"]]["measured_speedup"] == pytest.approx(1.8)
    slow = next(row for row in stored["table"] if row["drafter"].startswith("jacobi"))
    assert slow["measured_speedup"] == pytest.approx(0.8) and "rarely accepted" in slow["why"]
    assert read_profile(out)["costs"] == outcome.costs
    assert not partial_file(out).exists() and not list(out.parent.glob(".*"))


def test_plain_decoding_is_chosen_where_nothing_pays(world: World, tmp_path: Path) -> None:
    world.speeds.update(ngram=0.9, suffix=1.01)
    outcome = tune(job(), tmp_path / "p.json")
    assert outcome.chosen is None and outcome.speedup == 1.0
    stored = json.loads((tmp_path / "p.json").read_text())
    assert stored["drafter"] is None and {row["drafter"] for row in stored["table"]} >= {"ngram,k=16", "suffix"}
    assert load(HuggingFaceModel(llama()), profile=tmp_path / "p.json").drafter is None


def test_auto_is_chosen_when_it_keeps_up() -> None:
    fixed, auto = ("ngram", "constant,k=3,nodes=64"), ("ngram", "auto")
    assert tuner._chosen({fixed: 1.5, auto: 1.47}) == auto
    assert tuner._chosen({fixed: 1.5, auto: 1.4}) == fixed
    assert tuner._chosen({fixed: 1.01, auto: 1.0}) is None


def test_a_network_and_a_copier_make_a_router(world: World, tmp_path: Path) -> None:
    world.alphas.update(router=0.9)
    world.speeds.update(router=2.5)
    world.alphas["jacobi"] = 0.6
    outcome = tune(job(), tmp_path / "p.json")
    assert outcome.chosen is not None and outcome.chosen[0].startswith("router,drafters=(jacobi|ngram,k=")
    members = [member.name for member in outcome.job.build(outcome.chosen[0]).limits.members]
    assert len(members) == 2 and set(members) <= set(outcome.costs.drafters)


def test_an_interrupted_run_goes_on(world: World, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    world.stop_at = "jacobi"
    with pytest.raises(KeyboardInterrupt):
        tune(job(), out)
    assert not out.exists() and partial_file(out).exists()
    assert world.asked == ["ngram,k=16", "suffix"]
    with pytest.raises(ValueError, match="--resume"):
        tune(job(), out)
    with pytest.raises(ValueError, match="another drafters"):
        tune(job(("ngram",)), out, resume=True)
    other = Job(Workload(HuggingFaceModel(llama()), PROMPTS[:1], 24), "./x", None, None, job().drafters)
    with pytest.raises(ValueError, match="another prompts"):
        tune(other, out, resume=True)
    world.stop_at = None
    tune(job(), out, resume=True)
    measured = [name for name in world.asked if not name.startswith("run")]
    assert measured == ["ngram,k=16", "suffix", "jacobi", *measured[3:]] and "ngram,k=16" not in measured[3:]
    assert not partial_file(out).exists()


def test_an_interrupted_comparison_goes_on(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, calls = tmp_path / "p.json", []

    def broken(self: Workload, *args: Any) -> float:
        calls.append(args)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return world.speed(*args)

    monkeypatch.setattr(Workload, "speed", broken)
    with pytest.raises(KeyboardInterrupt):
        tune(job(), out)
    turn = len({name for name in world.asked if name.startswith("run")})  # the first turn is whole
    assert turn < 7
    outcome = tune(job(), out, resume=True)
    assert len(calls) == 7 + 2 * turn and outcome.speedup == pytest.approx(1.8)


def test_damaged_states(world: World, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    for text in ("{", "[]", '{"settings": 1}', '{"settings": {}, "found": 3}'):
        partial_file(out).write_text(text)
        with pytest.raises(ValueError, match="delete it"):
            tune(job(), out, resume=True)


def test_no_time_left(world: World, tmp_path: Path) -> None:
    """Every drafter takes a made-up minute of two: the third is not begun."""
    outcome = tune(job(minutes=2.0, clock=lambda: 60 * world.minutes), tmp_path / "p.json")
    assert "out of time" in outcome.skipped["jacobi"] and len(outcome.candidates) == 2


def test_less_time_takes_fewer_prompts(world: World, tmp_path: Path) -> None:
    plans = []
    for minutes in (0.001, 0.2, 100.0):
        made = tuner._Tuning(job(minutes=minutes), tuner.State(tmp_path / "s", {}), lambda *args: None)
        plans.append(made._plan(3, 0.012))
    assert plans[0] == {"prompts": 1, "new_tokens": 24} and plans[2] == {"prompts": 3, "new_tokens": 24}
    assert 1 <= plans[1]["prompts"] <= 3


def test_drafters_that_do_not_fit(world: World, tmp_path: Path) -> None:
    """Named ones are errors before anything is measured; of the default ones they are listed as skipped."""
    with pytest.raises(ValueError, match="needs a path"):
        tune(job(("model",)), tmp_path / "p.json")
    assert not list(tmp_path.iterdir())
    outcome = tune(job(()), tmp_path / "p.json")
    assert "does not fit" in outcome.skipped["lookahead,w=7,n=5,g=7"]
    world.alphas.clear()
    with pytest.raises(ValueError, match="no drafter could be measured"):
        tune(job(()), tmp_path / "q.json")


def test_bad_jobs(tmp_path: Path) -> None:
    for minutes in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="minutes"):
            tune(job(minutes=minutes), tmp_path / "p.json")
    with pytest.raises(ValueError, match="is a folder"):
        tune(job(), tmp_path)


# -- profiles --------------------------------------------------------------------------------------------------------


class Noting(ConstantController):
    """Keeps the costs that it is given."""

    costs: RoundCosts | None = None

    def start_from(self, costs: RoundCosts) -> None:
        """Keep them."""
        self.costs = costs


COSTS = RoundCosts(V, {"ngram": DrafterCost(0.001, 0.002, [0.5, 0.25], 0.7, 1.0)}, REST)


def written(tmp_path: Path, **changes: Any) -> Path:
    """A profile of the toy target on this machine."""
    target = HuggingFaceModel(llama())
    content = {
        "format": 1,
        "target": {"source": "./x", "fingerprint": fingerprint_of(target)},
        "machine": machine_of(target),
        "drafter": "ngram",
        "costs": COSTS.as_dict(),
    }
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**content, **changes}))
    return file


def test_a_controller_starts_from_the_profile(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "measured_target", lambda *args, **more: pytest.fail("nothing is to be measured"))
    noting = Noting()
    llm = load(llama(), controller=noting, profile=written(tmp_path))
    assert noting.costs == COSTS and llm.drafter is not None and llm.drafter.spec == "ngram"
    assert not [w for w in recwarn if w.category is ProfileWarning]
    load(llama(), drafter=None, profile=written(tmp_path))


def test_a_profile_of_another_target_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = TargetCost({1: 0.001, 64: 0.002})
    monkeypatch.setattr(profiles, "measured_target", lambda *args, **more: fast)
    noting = Noting()
    with pytest.warns(ProfileWarning, match="another target.*measured again"):
        load(llama(seed=5), controller=noting, profile=written(tmp_path))
    assert noting.costs is not None and noting.costs.target == fast
    cost = noting.costs.drafters["ngram"]
    assert (cost.call_s, cost.step_s, noting.costs.rest_s) == pytest.approx((1e-4, 2e-4, 2e-4))  # ten times faster
    assert cost.survival == [0.5, 0.25]
    monkeypatch.setattr(profiles, "measured_target", lambda *args, **more: pytest.fail("nobody wants the costs"))
    with pytest.warns(ProfileWarning, match="foretoken tune"):
        load(llama(seed=5), controller=ConstantController(), profile=written(tmp_path))


def test_another_machine(tmp_path: Path) -> None:
    target = HuggingFaceModel(llama())
    machine = machine_of(target)
    for key, other in (("cpu", "abacus"), ("torch_threads", 999), ("dtype", "float8"), ("gpus", ["one"])):
        found = read_profile(written(tmp_path, machine={**machine, key: other}))
        (reason,) = misfits(found, target)
        assert key in reason and (str(other) if key != "gpus" else "one") in reason
    load_only = {**machine, "load": 17.0, "versions": {}}
    assert misfits(read_profile(written(tmp_path, machine=load_only)), target) == []
    assert misfits({"drafter": "ngram"}, target) == []  # written by hand


def test_refreshing_measures_the_target() -> None:
    """Really measured, on a tiny target: one call per node count that fits, all positive."""
    target, _ = llamas()
    found = refresh(COSTS, target)
    assert sorted(found.target.seconds) == [1, 2, 4, 8, 16, 32, 64] and min(found.target.seconds.values()) > 0
    factor = found.target.of(1) / V.of(1)
    assert found.drafters["ngram"].step_s == pytest.approx(0.002 * factor)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"target": "x"},
        {"target": {}},
        {"machine": 3},
        {"costs": []},
        {"costs": {"target_s": {}}},
        {"costs": {**COSTS.as_dict(), "drafters": {"ngram": {"call_s": "a", "step_s": 1}}}},
        {"costs": {**COSTS.as_dict(), "drafters": {"ngram": {"call_s": 1.0}}}},
        {"costs": {**COSTS.as_dict(), "drafters": {"ngram": {"call_s": 1, "step_s": 1, "survival": ["x"]}}}},
        {"controller": 5},
    ],
)
def test_profiles_of_the_wrong_shape(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = written(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"profile\.json"):
        read_profile(file)


def test_a_target_without_a_network_has_a_fingerprint() -> None:
    one, _ = fixed_tables([0.5, 0.5], [0.5, 0.5])
    other, _ = fixed_tables([0.2, 0.3, 0.5], [0.5, 0.3, 0.2])
    assert fingerprint_of(one) != fingerprint_of(other)


def test_start_from_is_nothing_to_a_plain_controller() -> None:
    assert ConstantController.start_from is Controller.start_from
    ConstantController().start_from(COSTS)


def test_a_profile_that_says_nothing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"profile\.json has no drafter, verifier, controller or costs"):
        read_profile(file)
