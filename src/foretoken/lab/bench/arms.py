"""The arms of a benchmark: what they are given, what they give back, and what other engines' ones have in common.

Every arm tells the time of its prefill apart.  The prefill ends with the first round of an engine that makes its
first token in the prefill (Transformers, llama.cpp), and before the first round in foretoken, which does not; the
rate counts only the tokens that came after it, so that both are tokens per second of decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.core.sampling import NO_FILTERS
from foretoken.lab.bench.results import Setting, UnitResult
from foretoken.lab.workload import Subject

MAX_BATCH = 64
"""Requests that an engine runs together."""


@dataclass(frozen=True)
class ArmSetup(Subject):
    """What all arms of a benchmark have in common.

    Attributes:
        profile: a tuned profile, for the arm ``auto``; the others are what their specs say.
        max_new_tokens: length of every output.
        ignore_eos: go on behind an end-of-text token, so that every arm writes the same number of tokens.
        filters: those of :data:`foretoken.core.sampling.FILTERS` that are not off.
        inflate: the size that the target was inflated to, if it was.
        quantize, backend: how the target was loaded, for the record.
    """

    profile: Path | None = None
    max_new_tokens: int = 128
    ignore_eos: bool = True
    filters: dict[str, Any] = field(default_factory=dict)
    inflate: str | None = None
    quantize: str | None = None
    backend: str = "auto"


@dataclass(frozen=True)
class Unit:
    """A batch of prompts of one category.

    Attributes:
        prompts: their numbers within the category.
        seeds: one per prompt, the same for every arm.
    """

    category: str
    number: int
    prompts: Sequence[int]
    ids: Sequence[Sequence[int]]
    seeds: Sequence[int]
    new_tokens: int

    @classmethod
    def of(cls, ids: Sequence[int], new_tokens: int, seed: int = 0) -> Unit:
        """A prompt alone."""
        return cls("", 0, (0,), (ids,), (seed,), new_tokens)


class Arm(ABC):
    """One way to decode.

    Attributes:
        most_nodes: most nodes per request that it lets the target score; 0 where that is not known.
        remembers: whether a later run of the same prompt may profit from an earlier one: only the first then counts.
    """

    name: str
    most_nodes: int = 0
    remembers: bool = False

    def can(self, setting: Setting) -> bool:
        """Whether the arm can run at a temperature and batch size."""
        return True

    def enter(self, setting: Setting) -> None:  # noqa: B027
        """Get ready for a setting, with nothing learned at another one."""

    @abstractmethod
    def run(self, unit: Unit, setting: Setting, tracing: bool = False) -> UnitResult:
        """Decode a unit."""


@dataclass(frozen=True)
class Generation:
    """What another engine wrote for one prompt.

    Attributes:
        seconds: decoding, without the prefill.
        num_decoded: how many of the tokens were made in these seconds.
        prefill_s: seconds before them.
        mean_acceptance_length: tokens per target call while decoding; ``None`` where the engine does not tell.
    """

    token_ids: list[int]
    seconds: float
    num_decoded: int
    prefill_s: float
    mean_acceptance_length: float | None = None


class ForeignArm(Arm):
    """Another engine on the same weights; it serves one request at a time.  Filters are refused by a ``ValueError``:
    they are not compared."""

    def __init__(self, name: str, shared: ArmSetup) -> None:
        if any(shared.filters.get(key, neutral) != neutral for key, neutral in NO_FILTERS.items()):
            raise ValueError(f"{name} compares by temperature alone: leave out --top-k, --top-p and --min-p")
        self.name, self.shared = name, shared

    @abstractmethod
    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> Generation:
        """Decode one prompt; an end-of-text token does not end it unless the benchmark says so."""

    def can(self, setting: Setting) -> bool:
        return setting[1] == 1

    def run(self, unit: Unit, setting: Setting, tracing: bool = False) -> UnitResult:
        generated = self.generate(list(unit.ids[0]), unit.new_tokens, setting[0], unit.seeds[0])
        return UnitResult(
            arm=self.name,
            temperature=setting[0],
            batch=1,
            category=unit.category,
            unit=unit.number,
            prompts=list(unit.prompts),
            outputs=[list(generated.token_ids)],
            seconds=max(generated.seconds, 1e-9),
            decoded=generated.num_decoded,
            prefill_s=generated.prefill_s,
            mean_acceptance_length=generated.mean_acceptance_length,
        )
