"""Workload of measurements: a target (inflated or not) with its tokenizer and settings, and the prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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

REFUSALS = (ValueError, OSError, ArithmeticError, MemoryError)
"""Errors of a drafter that does not fit; others are bugs."""


@dataclass(frozen=True)
class Subject:
    """A target, with the settings for building its drafters.

    Attributes:
        source: origin of the target (``builtin``, a path, a hub id, a model); decides which drafters it has.
        verifier, controller: default specs of arms.
        device: device of draft models.
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
        """The drafter of a spec; ``None`` for plain decoding.  Raises ``ValueError`` if it does not fit the target."""
        return build_drafter(spec, self.target, target_source=self.source, tokenizer=self.tokenizer, device=self.device)

    def llm(self, drafter: Drafter | None) -> Llm:
        """The target with a drafter.  Raises ``ValueError`` for incompatible parts."""
        return assemble(
            self.target, drafter, self.verifier, self.controller, self.tokenizer, allow_lossy=self.allow_lossy
        )


@dataclass(frozen=True)
class Speed:
    """Speed of one arm over all prompts; that of the median run, if there are several."""

    tokens_per_s: float
    acceptance_rate: float = 0.0
    mean_acceptance_length: float = 1.0

    @classmethod
    def over(cls, stats: Sequence[SpecStats]) -> Speed:
        """Rate and acceptance of all prompts together.  Ratios of two arms' medians over prompts would not compare the
        same prompts."""
        total = SpecStats.summed(stats)
        return cls(total.tokens_per_s, total.acceptance_rate, total.mean_acceptance_length)


def compared_speeds(arms: Mapping[str, Callable[[], Speed]], turns: int = 5) -> dict[str, Speed]:
    """Median speed of every arm, over ``turns`` interleaved runs."""
    runs = runs_of(arms, turns)
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
        """Decode all prompts once, one by one, ignoring ends of text, with full drafts in every round."""
        llm = assemble(self.target, drafter, "auto", "constant", None)
        options = Options(max_new_tokens=self.new_tokens, temperature=self.temperature, ignore_eos=True)
        with unseeded_from(self.seed):
            return Speed.over([llm.generate(list(prompt), **options).stats for prompt in self.prompts])


def fitting_prompts(subject: Subject, prompts: Sequence[BenchPrompt], new_tokens: int, most: int) -> list[list[int]]:
    """Token ids of at most ``most`` prompts, evenly spread, that leave room for ``new_tokens``.  Raises ``ValueError``
    without a tokenizer, and if no prompt fits."""
    if subject.tokenizer is None:
        raise ValueError("the target has no tokenizer beside it: tuning needs one to read the prompts")
    context = subject.target.context_length
    encoded = [prompt.encode(subject.tokenizer) for prompt in prompts]
    fitting = [ids for ids in encoded if 0 < len(ids) <= context - new_tokens]
    if not fitting:
        raise ValueError(f"no prompt fits with {new_tokens} new tokens into a context of {context}")
    return spread(fitting, most)


def target_name(target: LanguageModel, source: Any) -> str:
    """Name of a target in tables and JSON: its source and inflated size."""
    model_name = getattr(getattr(source, "config", None), "_name_or_path", "") or "target"
    name = str(source) if isinstance(source, str | Path) else model_name
    return f"{name}, {target.note}" if isinstance(target, InflatedModel) else name


def inflation(target: LanguageModel) -> dict[str, Any] | None:
    """JSON fields about an inflated target; ``None`` for others."""
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
