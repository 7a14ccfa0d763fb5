"""What is measured: a target (inflated or not) with what belongs to it, and the prompts that every arm decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from foretoken.core.noise import unseeded_from
from foretoken.engine.stats import SpecStats
from foretoken.lab.prompts import BenchPrompt, spread
from foretoken.lab.timing import median_run, runs_of
from foretoken.llm import assemble
from foretoken.loading import build_drafter
from foretoken.models.base import LanguageModel
from foretoken.models.variants.inflated import InflatedModel
from foretoken.options import Options

if TYPE_CHECKING:
    from foretoken.llm import Llm
    from foretoken.methods.drafters.base import Drafter

FINAL_RUNS = 5
"""Interleaved runs of each arm of a tuner's last comparison."""
REFUSALS = (ValueError, OSError, ArithmeticError, MemoryError)
"""What says that a drafter does not fit; anything else is a bug of ours."""


def reason_of(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class Subject:
    """A target, and what drafters for it are made with.

    Attributes:
        source: what it was loaded from (``builtin``, a path, a hub id, a model): decides which drafters it has.
        verifier, controller: specs, for arms that name none of their own.
        device: where draft models run.
        allow_lossy: permit verifiers that change the target's distribution.
    """

    target: LanguageModel
    source: Any = "builtin"
    tokenizer: Any | None = None
    verifier: str = "auto"
    controller: str = "auto"
    device: Any = None
    allow_lossy: bool = False

    def drafter(self, spec: str | None) -> Drafter | None:
        """The drafter of a spec, which must fit the target; ``None`` for plain decoding."""
        return build_drafter(spec, self.target, target_source=self.source, tokenizer=self.tokenizer, device=self.device)

    def llm(self, drafter: Drafter | None) -> Llm:
        """The target with a drafter.  Raises ``ValueError`` for parts that do not fit each other."""
        return assemble(
            self.target, drafter, self.verifier, self.controller, self.tokenizer, allow_lossy=self.allow_lossy
        )


@dataclass(frozen=True)
class Speed:
    """What one way to decode did: medians over prompts (and over runs, where there are several)."""

    tokens_per_s: float
    acceptance_rate: float = 0.0
    mean_acceptance_length: float = 1.0

    @classmethod
    def over(cls, stats: Sequence[SpecStats]) -> Speed:
        """Of one run per prompt: the median speed, the acceptance of all prompts together."""
        total = SpecStats.summed(stats)
        return cls(median(answer.tokens_per_s for answer in stats), total.acceptance_rate, total.mean_acceptance_length)


def compared_speeds(arms: Mapping[str, Callable[[], Speed]]) -> dict[str, Speed]:
    """The median speed of every arm, over runs in which they take turns at going first."""
    runs = runs_of(arms, FINAL_RUNS)
    return {name: median_run(speeds, lambda speed: speed.tokens_per_s) for name, speeds in runs.items()}


@dataclass(frozen=True)
class Workload:
    """Prompts that every arm decodes, each answered with at most ``new_tokens`` tokens."""

    subject: Subject
    prompts: Sequence[Sequence[int]]
    new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    @property
    def target(self) -> LanguageModel:
        return self.subject.target

    def speed(self, drafter: Drafter | None) -> Speed:
        """Decode all prompts once, one after the other, ends of text ignored, with whole drafts in every round."""
        llm = assemble(self.target, drafter, "auto", "constant", None)
        options = Options(max_new_tokens=self.new_tokens, temperature=self.temperature, ignore_eos=True)
        with unseeded_from(self.seed):
            return Speed.over([llm.generate(list(prompt), **options).stats for prompt in self.prompts])


def fitting_prompts(subject: Subject, prompts: Sequence[BenchPrompt], new_tokens: int, most: int) -> list[list[int]]:
    """Token ids of at most ``most`` prompts, spread over the list, that leave room for ``new_tokens``.  Raises
    ``ValueError`` without a tokenizer, and where no prompt fits."""
    if subject.tokenizer is None:
        raise ValueError("the target has no tokenizer beside it: tuning needs one to read the prompts")
    context = subject.target.context_length
    encoded = [prompt.encode(subject.tokenizer) for prompt in prompts]
    fitting = [ids for ids in encoded if 0 < len(ids) <= context - new_tokens]
    if not fitting:
        raise ValueError(f"no prompt leaves room for {new_tokens} new tokens in a context of {context}")
    return spread(fitting, most)


def target_name(target: LanguageModel, source: Any) -> str:
    """How tables and JSON call a target: the source, and what it was inflated to."""
    model_name = getattr(getattr(source, "config", None), "_name_or_path", "") or "target"
    name = str(source) if isinstance(source, str | Path) else model_name
    return f"{name}, {target.note}" if isinstance(target, InflatedModel) else name


def inflation(target: LanguageModel) -> dict[str, Any] | None:
    """For JSON: what an inflated target grew to; ``None`` for another one."""
    if not isinstance(target, InflatedModel):
        return None
    shape = target.shape
    return {
        "parameters": target.num_parameters,
        "layers": shape.layers,
        "hidden_size": shape.width,
        "small_layers": target.num_layers,
        "small_hidden_size": shape.small,
    }
