"""Plain and speculative decoding of one prompt, interleaved in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.lab.parity.difference import Difference, first_difference
from foretoken.lab.timing import interleave, median_run

if TYPE_CHECKING:
    from foretoken.engine.request import Request
    from foretoken.llm import Llm, Output
from foretoken.options import Prompt


@dataclass(frozen=True)
class Runs:
    """Repeated runs of one arm.

    ``rates`` are tokens/s of all runs.  ``output`` is from the run of median speed (the slower of the middle two for an
    even number of runs).
    """

    output: Output
    rates: list[float]

    @classmethod
    def of(cls, outputs: list[Output]) -> Runs:
        """Summary of timed runs, without warm-ups."""
        median = median_run(outputs, lambda output: output.stats.tokens_per_s)
        return cls(median, [output.stats.tokens_per_s for output in outputs])

    @property
    def tokens_per_s(self) -> float:
        """Median decoding speed, without prefill."""
        return self.output.stats.tokens_per_s

    def public(self) -> dict[str, Any]:
        """Fields of the CLI's JSON."""
        return {"text": self.output.text, "token_ids": self.output.token_ids, "stats": self.output.stats.as_dict()}


@dataclass(frozen=True)
class Comparison:
    """Runs of both arms and their first difference.

    ``comparable``: outputs are expected to be equal, as for greedy decoding and coupled seeds.
    """

    plain: Runs
    speculative: Runs
    difference: Difference | None
    comparable: bool = True

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens/s (medians)."""
        plain = self.plain.tokens_per_s
        return self.speculative.tokens_per_s / plain if plain else 0.0

    @property
    def identical(self) -> bool:
        return self.difference is None

    def public(self) -> dict[str, Any]:
        """Fields of the CLI's JSON."""
        difference = self.difference
        return {
            "plain": self.plain.public(),
            "speculative": self.speculative.public(),
            "speedup": self.speedup,
            "identical": self.identical,
            "first_difference": difference
            and {"position": difference.position, "logit_gap": difference.logit_gap if self.comparable else None},
        }


def compare(
    llm: Llm, prompt: Prompt, options: Mapping[str, Any], repeat: int = 3, on_run: Callable[[int], None] | None = None
) -> Comparison:
    """Decode ``prompt`` both ways, ``repeat`` times each after one warm-up.

    The arms take turns at going first, so that a change in the machine's load affects both.  Every run has a
    ``cache_salt`` of its own, so that both arms read the whole prompt and no drafter knows the answer of an earlier
    run.  Sampled runs need ``options["seed"]`` to be reproducible; with it, both arms give the same output unless the
    verifier draws its own random numbers.  Raises ``ValueError`` for a ``repeat`` below 1.
    """
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1, not {repeat}")
    plain = llm.plain
    outputs: dict[bool, list[Output]] = {False: [], True: []}
    for turn, speculative in interleave((False, True), repeat + 1):
        salted: dict[str, Any] = {**options, "cache_salt": uuid4().hex}
        outputs[speculative].append((llm if speculative else plain).generate(prompt, **salted))
        if on_run is not None and len(outputs[not speculative]) > turn:
            on_run(turn)
    plain_runs, drafting_runs = Runs.of(outputs[False][1:]), Runs.of(outputs[True][1:])
    request = llm.request(prompt, **options)
    tokens = plain_runs.output.token_ids, drafting_runs.output.token_ids
    return Comparison(plain_runs, drafting_runs, *_difference(llm, request, *tokens))


def _difference(llm: Llm, request: Request, plain: list[int], drafting: list[int]) -> tuple[Difference | None, bool]:
    """The first difference of two outputs, and whether they were expected to be equal."""
    greedy, verifier = request.params.temperature == 0, llm.engine.verifier
    coupled = not greedy and request.seed is not None and (verifier is None or verifier.races)
    noise = Noise(request.seed) if coupled and request.seed is not None else None
    comparable = greedy or coupled
    # For independent draws no token is the expected one; only the position of the difference is meaningful.
    sampler = Sampler(request.params if comparable else SamplingParams(), len(request.prompt), noise)
    return first_difference(llm.target, request.prompt, plain, drafting, sampler), comparable
