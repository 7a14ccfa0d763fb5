"""Plain and speculative decoding of one prompt, interleaved in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """Repeated runs of one way to decode: the ``rates`` of all of them in tokens/s, and the ``output`` of the run with
    the median speed (of an even number of runs, the slower of the middle two)."""

    output: Output
    rates: list[float]

    @classmethod
    def of(cls, outputs: list[Output]) -> Runs:
        """All of them, warm-ups excluded."""
        median = median_run(outputs, lambda output: output.stats.tokens_per_s)
        return cls(median, [output.stats.tokens_per_s for output in outputs])

    @property
    def tokens_per_s(self) -> float:
        """Median speed of the rounds, prefill excluded."""
        return self.output.stats.tokens_per_s

    def public(self) -> dict[str, Any]:
        """As the CLI's JSON prints it."""
        return {"text": self.output.text, "token_ids": self.output.token_ids, "stats": self.output.stats.as_dict()}


@dataclass(frozen=True)
class Comparison:
    """Both arms, and whether they said the same; they are ``comparable`` where they were meant to: greedy outputs, and
    those that a seed fixes."""

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
        """As the CLI's JSON prints it."""
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

    The arms take turns at going first, so that a change in the machine's load hits both.  Sampled runs need
    ``options["seed"]``, or no two of them say the same; unless a verifier with draws of its own was asked for, both
    arms then say the same.  Raises ``ValueError`` for a ``repeat`` below 1.
    """
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1, not {repeat}")
    plain = llm.plain
    outputs: dict[bool, list[Output]] = {False: [], True: []}
    for turn, speculative in interleave((False, True), repeat + 1):
        outputs[speculative].append((llm if speculative else plain).generate(prompt, **options))
        if on_run is not None and len(outputs[not speculative]) > turn:
            on_run(turn)
    plain_runs, drafting_runs = Runs.of(outputs[False][1:]), Runs.of(outputs[True][1:])
    request = llm.request(prompt, **options)
    tokens = plain_runs.output.token_ids, drafting_runs.output.token_ids
    return Comparison(plain_runs, drafting_runs, *_difference(llm, request, *tokens))


def _difference(llm: Llm, request: Request, plain: list[int], drafting: list[int]) -> tuple[Difference | None, bool]:
    """Where the outputs of one request part, and whether they were meant to be the same."""
    greedy, verifier = request.params.temperature == 0, llm.engine.verifier
    coupled = not greedy and request.seed is not None and (verifier is None or verifier.races)
    noise = Noise(request.seed) if coupled and request.seed is not None else None
    comparable = greedy or coupled
    # Two draws of one distribution have no token that would be right: only where they part can be told.
    sampler = Sampler(request.params if comparable else SamplingParams(), len(request.prompt), noise)
    return first_difference(llm.target, request.prompt, plain, drafting, sampler), comparable
