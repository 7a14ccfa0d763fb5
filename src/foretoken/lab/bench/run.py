"""The benchmark: arms x categories x temperatures x batch sizes, interleaved, resumable, with equality checks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretoken.core.costs import TargetCost
from foretoken.core.noise import SEEDS, check_seed
from foretoken.core.outside import OutsideError
from foretoken.core.values import one_line
from foretoken.lab.bench.arms import MAX_BATCH, Arm, ArmSetup, Unit
from foretoken.lab.bench.partial import Partial
from foretoken.lab.bench.results import Condition, Key, UnitResult
from foretoken.lab.bench.serving import make_arm
from foretoken.lab.bench.specs import PLAIN, split_arm
from foretoken.lab.bench.summary import BenchResult, dtype_of, machine, runs_as, summarised
from foretoken.lab.prompts import BenchPrompt
from foretoken.lab.timing import interleave, median_run
from foretoken.models.call_costs import measure_target

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a benchmark.

    Attributes:
        arms: specs beside plain decoding, which is always an arm.
        temperatures, batches: every pair is a setting.
        repeat: runs per prompt; the one of median time counts.
        seed: of the first prompt, incremented for the others.
        chat: use the tokenizer's chat template, if any, for conversations.
    """

    arms: Sequence[str] = ("auto",)
    temperatures: Sequence[float] = (0.0,)
    batches: Sequence[int] = (1,)
    repeat: int = 1
    seed: int = 0
    chat: bool = True

    def __post_init__(self) -> None:
        if not self.temperatures or not self.batches:
            raise ValueError("a benchmark needs at least one temperature and one batch size")
        check_seed(self.seed)
        if self.repeat < 1:
            raise ValueError(f"repeat must be at least 1, not {self.repeat}")
        for batch in self.batches:
            if not 1 <= batch <= MAX_BATCH:
                raise ValueError(f"a batch size must be 1 to {MAX_BATCH}, not {batch}")
        for temperature in self.temperatures:
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"a temperature must be 0 or more, not {temperature}")

    @property
    def names(self) -> list[str]:
        """All arms, plain decoding first."""
        return list(dict.fromkeys([PLAIN, *(PLAIN if arm == "none" else arm for arm in self.arms)]))

    @property
    def settings(self) -> list[Condition]:
        """Distinct pairs of temperature and batch size, in order."""
        return list(dict.fromkeys((float(t), int(b)) for t in self.temperatures for b in self.batches))


@dataclass
class Bench:
    """A benchmark of one target.

    ``on_progress`` is called with (finished, total, next run), never during a timed run.  Raises ``ValueError`` without
    prompts, without room for the output, and for an arm that does not fit.

    Attributes:
        failed: error messages of arms whose code from outside failed, which were left out from then on.
    """

    shared: ArmSetup
    prompts: Mapping[str, Sequence[BenchPrompt | Sequence[int]]]
    settings: BenchSettings
    on_progress: OnProgress = lambda done, total, text: None
    results: dict[Key, UnitResult] = field(default_factory=dict)
    targets: dict[int, TargetCost] = field(default_factory=dict)
    num_cut: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not any(self.prompts.values()):
            raise ValueError("there are no prompts to run")
        self.ids = {name: [self._encode(p) for p in group] for name, group in self.prompts.items() if group}
        self.arms = self._build()
        self._total = sum(a.can(s) for s in self.settings.settings for _ in self.units(s[1]) for a in self.arms)

    def _encode(self, prompt: BenchPrompt | Sequence[int]) -> list[int]:
        """Token ids, truncated on the left to fit the context."""
        shared = self.shared
        room = shared.target.context_length - shared.max_new_tokens
        if shared.max_new_tokens < 1 or room < 1:
            most = shared.target.context_length - 1
            raise ValueError(f"max_new_tokens must be 1 to {most} for this target, not {shared.max_new_tokens}")
        if isinstance(prompt, BenchPrompt):
            if shared.tokenizer is None:
                raise ValueError("text prompts need a tokenizer: this target has none beside it")
            ids = prompt.encode(shared.tokenizer, self.settings.chat)
        else:
            ids = list(prompt)
        if not ids:
            raise ValueError("a prompt has no tokens")
        self.num_cut += len(ids) > room
        return ids[-room:]

    def _build(self) -> list[Arm]:
        arms = []
        for name in self.settings.names:
            self.on_progress(0, 0, f"loading {name}")
            arms.append(make_arm(name, self.shared))
        return arms

    def units(self, batch: int) -> Iterator[Unit]:
        """Batches of prompts; a partial last batch is filled from the category's beginning."""
        for category, group in self.ids.items():
            for number, start in enumerate(range(0, len(group), batch)):
                prompts = [(start + i) % len(group) for i in range(batch)]
                seeds = [(self.settings.seed + start + i) % SEEDS for i in range(batch)]
                ids = [group[i] for i in prompts]
                num_fillers = max(0, start + batch - len(group))
                yield Unit(category, number, prompts, ids, seeds, self.shared.max_new_tokens, num_fillers)

    @property
    def config(self) -> dict[str, Any]:
        """Everything that determines the results, which a resumed run must share."""
        shared, settings = self.shared, self.settings
        digest = hashlib.sha256(repr(list(self.ids.items())).encode()).hexdigest()[:16]
        return {
            "target": str(shared.source),
            "dtype": dtype_of(shared),
            "weights": runs_as(shared)["weights"],
            "device": str(shared.target.device or "cpu"),
            "quantize": shared.quantize,
            "backend": shared.backend,
            "inflate": shared.inflate,
            "arms": settings.names,
            "temperatures": list(settings.temperatures),
            "batches": list(settings.batches),
            "prompts": {"sha256": digest, "categories": {name: len(group) for name, group in self.ids.items()}},
            "max_new_tokens": shared.max_new_tokens,
            "repeat": settings.repeat,
            "seed": settings.seed,
            "verifier": shared.verifier,
            "controller": shared.controller,
            "profile": None if shared.profile is None else str(shared.profile),
            "allow_lossy": shared.allow_lossy,
            "ignore_eos": shared.ignore_eos,
            "filters": shared.filters,
            "chat": settings.chat,
        }

    @property
    def circumstances(self) -> dict[str, Any]:
        """What else must be equal for the parts of a resumed run to be comparable."""
        where = machine(self.shared)
        ran = {arm.name: arm.ran for arm in self.arms if split_arm(arm.name)[0] == "auto"}
        processor = {name: where["hardware"][name] for name in ("cpu", "kernels", "gpus")}
        return {"threads": where["threads"]["torch_threads"], "versions": where["versions"], **processor, "ran": ran}

    def run(self, partial: Partial | None = None) -> BenchResult:
        """Run all missing units, then compute cells and summary."""
        where = machine(self.shared)
        if partial is not None:
            self.results |= partial.results
        self._measure_targets(partial)
        for setting in self.settings.settings:
            self._run_setting(setting, partial)
        return summarised(self, where)

    def _measure_targets(self, partial: Partial | None) -> None:
        most = max(arm.most_nodes for arm in self.arms)
        prompts = sorted((ids for group in self.ids.values() for ids in group), key=len)
        middle = prompts[len(prompts) // 2]
        for batch in sorted(set(self.settings.batches)):
            name = f"target_s:{batch}"
            seconds_by_count = partial.notes.get(name) if partial is not None else None
            if seconds_by_count is None:
                self.on_progress(len(self.results), self._total, f"measuring v(n), batch {batch}")
                last = min(256, most * batch)
                counts = [batch * 2**i for i in range(10) if batch * 2**i < 2 * last]
                cost = measure_target(self.shared.target, middle, counts, 7, batch)
                seconds_by_count = {str(n): seconds for n, seconds in cost.seconds.items()}
                if partial is not None:
                    partial.note(name, seconds_by_count)
            self.targets[batch] = TargetCost({int(n): seconds for n, seconds in seconds_by_count.items()})

    def _run_setting(self, setting: Condition, partial: Partial | None) -> None:
        able = [arm for arm in self.arms if arm.can(setting)]
        entered: set[str] = set()
        self._forget_partial(able, setting)
        traced = setting[1] == self.settings.settings[0][1]
        for turn, unit in enumerate(self.units(setting[1])):
            key = (*setting, unit.category, unit.number)
            missing = [arm for arm in able if arm in self.arms and (arm.name, *key) not in self.results]
            for arm in missing:
                if arm.name not in entered:
                    entered.add(arm.name)
                    with self._leaving_out(arm):
                        self._warm_up(arm, setting)
            missing = [arm for arm in missing if arm in self.arms]
            for result in self._run_unit(missing, unit, setting, turn, traced and unit.number == 0):
                self.results[result.key] = result
                if partial is not None:
                    partial.add(result)

    def _forget_partial(self, arms: Sequence[Arm], setting: Condition) -> None:
        """Drop an interrupted run's results of arms whose memory of them is lost: these run again from the start."""
        keys = [(*setting, unit.category, unit.number) for unit in self.units(setting[1])]
        for arm in arms:
            if arm.remembers and not all((arm.name, *key) in self.results for key in keys):
                for key in keys:
                    self.results.pop((arm.name, *key), None)

    def _warm_up(self, arm: Arm, setting: Condition) -> None:
        self._tell(setting, f"warming up {arm.name}")
        arm.enter(setting)
        shared = self.shared
        # Not a benchmark prompt, and a turn of its own, so that drafters learn nothing from it
        text = "The quick brown fox jumps over the lazy dog while the small grey cat looks on and says nothing."
        ids = shared.tokenizer(text)["input_ids"] if shared.tokenizer is not None else range(1, 25)
        room = shared.target.context_length - shared.max_new_tokens
        prompt = [i % shared.target.vocab_size for i in ids][:room]
        each = range(setting[1])
        unit = Unit("warm-up", 0, each, [prompt for _ in each], each, min(32, shared.max_new_tokens), turn=-1)
        arm.run(unit, setting, False)

    def _run_unit(
        self, arms: Sequence[Arm], unit: Unit, setting: Condition, turn: int, traced: bool
    ) -> Iterator[UnitResult]:
        """Run the arms in rotating order, so that a change in the machine's load affects all of them."""
        runs: dict[str, list[UnitResult]] = {arm.name: [] for arm in arms}
        for again, arm in interleave(arms, self.settings.repeat, turn):
            self._tell(setting, f"{arm.name}, {unit.category}")
            results = runs[arm.name]
            if arm in self.arms:
                with self._leaving_out(arm):
                    results.append(arm.run(replace(unit, turn=again), setting, traced and again == 0))
            if len(results) == self.settings.repeat:
                yield _counted(results, arm.remembers)

    @contextmanager
    def _leaving_out(self, arm: Arm) -> Iterator[None]:
        """Leave an arm out, with all its results, if its code from outside fails."""
        try:
            yield
        except OutsideError as error:
            self.failed[arm.name] = one_line(error)
            self.arms.remove(arm)
            self.results = {key: result for key, result in self.results.items() if result.arm != arm.name}

    def _tell(self, setting: Condition, text: str) -> None:
        self.on_progress(len(self.results), self._total, f"T={setting[0]:g} batch {setting[1]}: {text}")


def _counted(runs: Sequence[UnitResult], remembers: bool) -> UnitResult:
    """The run of median time, or the first run of an arm with memory."""
    chosen = runs[0] if remembers else median_run(runs, lambda run: run.seconds)
    chosen.trace = runs[0].trace
    return chosen


def run_bench(
    shared: ArmSetup,
    prompts: Mapping[str, Sequence[BenchPrompt | Sequence[int]]],
    settings: BenchSettings,
    out: Path | None = None,
    resume: bool = False,
    on_progress: OnProgress = lambda done, total, text: None,
) -> BenchResult:
    """Run a benchmark; with ``out``, finished results are kept in ``OUT.partial`` until the run is complete.

    Raises ``ValueError`` for an arm, setting or prompt that does not fit, and for an unfinished run that is not to be
    resumed or has another configuration.
    """
    bench = Bench(shared, prompts, settings, on_progress)
    if out is None:
        return bench.run()
    partial = Partial(out, {**bench.config, **bench.circumstances}, resume)
    try:
        result = bench.run(partial)
        partial.finish(result.lines)
    finally:
        partial.close()
    return result
