"""What drafters that fit bring: each decodes a few prompts in turns with plain decoding."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from foretoken.bench.fitting import REFUSALS, Fit
from foretoken.bench.results import acceptance_length, rate
from foretoken.bench.run import Bench, BenchSettings, OnProgress
from foretoken.bench.serving import Shared
from foretoken.bench.specs import PLAIN
from foretoken.bench.summary import Tally
from foretoken.measure.prompts import BenchPrompt, select


@dataclass(frozen=True)
class Workload:
    """What every drafter decodes.

    Attributes:
        shared: the target, and how long the outputs are.
        prompts: by category.
        temperature: 0 is greedy.
        repeat: runs per prompt; the one of median time counts.
        seed: of the first prompt.
    """

    shared: Shared
    prompts: Mapping[str, Sequence[BenchPrompt]]
    temperature: float = 0.0
    repeat: int = 1
    seed: int = 0

    def bench(self, spec: str, on_progress: OnProgress) -> Bench:
        """A benchmark of one drafter and plain decoding: no more than one drafter's weights are held at a time."""
        settings = BenchSettings((spec,), (self.temperature,), repeat=self.repeat, seed=self.seed)
        return Bench(self.shared, self.prompts, settings, on_progress)

    def check(self) -> None:
        """Find what is wrong with prompts and lengths before anything is measured.

        Raises:
            ValueError: no room for the output, no tokenizer, or an option outside its range.
        """
        self.bench(PLAIN, lambda done, total, text: None)


def few(prompts: Sequence[BenchPrompt], most: int) -> dict[str, list[BenchPrompt]]:
    """At most so many prompts, spread over all of them, by category."""
    step = max(len(prompts) / most, 1.0)
    return select([prompts[int(number * step)] for number in range(min(most, len(prompts)))])


def gains(fitting: Sequence[Fit], work: Workload, on_progress: OnProgress) -> Iterator[tuple[int, Fit]]:
    """Measure what works for every request, one after the other; yields places in ``fitting`` and what stands there
    from now on.  What breaks while it runs does not work."""
    able = [number for number, fit in enumerate(fitting) if fit.works and not fit.only_for]
    for done, number in enumerate(able):
        fit = fitting[number]
        on_progress(done, len(able), fit.spec)
        gc.collect()  # the weights of the last one, see foretoken.bench.fitting
        yield number, _measured(fit, work, _under(on_progress, done, len(able), fit.spec))


def _under(on_progress: OnProgress, done: int, total: int, spec: str) -> Callable[[int, int, str], None]:
    """The steps of one drafter's benchmark, shown as parts of one step."""
    return lambda part, parts, text: on_progress(done, total, f"{spec} ({part}/{parts})" if parts else spec)


def _measured(fit: Fit, work: Workload, on_progress: OnProgress) -> Fit:
    try:
        bench = work.bench(fit.spec, on_progress)
        bench.run_units()
    except REFUSALS as error:
        return replace(fit, works=False, why=" ".join(str(error).split()) or type(error).__name__)
    own, plain = ([one for one in bench.results.values() if (one.arm == PLAIN) is other] for other in (False, True))
    same = _equality(bench, fit.spec)
    return replace(
        fit,
        gain=rate(own) / rate(plain),
        mean_acceptance_length=acceptance_length(own),
        identical=same.get("identical"),
        ties=same.get("ties"),
        differences=same.get("differences"),
    )


def _equality(bench: Bench, spec: str) -> dict[str, int]:
    """How many outputs are plain decoding's, and why others are not; nothing where they need not be."""
    tally, (setting,) = Tally(bench, {}), bench.settings.settings
    found = [tally.equality(spec, setting, category) for category in bench.ids]
    counts = [one for one in found if one is not None]
    return {name: sum(one[name] for one in counts) for name in ("identical", "ties", "differences") if counts}
