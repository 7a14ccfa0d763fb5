"""Arms of a benchmark: their settings, their results, and the base class of other engines.

Every arm reports its prefill time separately.  The prefill of Transformers and llama.cpp makes the first token, so it
includes the first round; foretoken's does not.  The rate counts only tokens after the prefill, so that both are
decoding speeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.core.sampling import NO_FILTERS
from foretoken.lab.bench.results import Condition, UnitResult
from foretoken.lab.workload import Subject

MAX_BATCH = 64
"""Maximum batch size of an arm."""


@dataclass(frozen=True)
class ArmSetup(Subject):
    """Settings shared by all arms of a benchmark.

    Attributes:
        profile: a tuned profile for the arm ``auto``; other arms follow their specs.
        max_new_tokens: length of every output.
        ignore_eos: continue after an end-of-text token, so that every arm writes the same number of tokens.
        filters: active filters of :data:`foretoken.core.sampling.FILTERS`.
        inflate: size that the target was inflated to, if any.
        quantize, backend: load options of the target, for the record.
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
        prompts: their indices within the category.
        seeds: one per prompt, the same for every arm.
        num_fillers: the last prompts only fill the batch: their answers take time, but are not counted.
        turn: number of earlier runs of the same unit; -1 in a warm-up.
    """

    category: str
    number: int
    prompts: Sequence[int]
    ids: Sequence[Sequence[int]]
    seeds: Sequence[int]
    new_tokens: int
    num_fillers: int = 0
    turn: int = 0

    @property
    def num_counted(self) -> int:
        return len(self.prompts) - self.num_fillers

    @property
    def salts(self) -> list[str]:
        """One ``cache_salt`` per prompt: earlier turns and fillers answer the same prompts, which must be read and
        drafted anew."""
        own = f"turn {self.turn}" if self.turn else ""
        return [own] * self.num_counted + [f"fillers {own}"] * self.num_fillers

    @classmethod
    def of(cls, ids: Sequence[int], new_tokens: int, seed: int = 0) -> Unit:
        """A single prompt."""
        return cls("", 0, (0,), (ids,), (seed,), new_tokens)


class Arm(ABC):
    """One way to decode.

    Attributes:
        most_nodes: maximum number of nodes per request in a target forward; 0 if unknown.
        remembers: whether a run may profit from an earlier one of the same prompt, so that only the first counts: what
            ``online`` learns is used with any salt.
        ran: specs of the ``drafter``, ``controller`` and ``verifier`` that the arm's own spec may leave open; ``None``
            for another engine.
    """

    name: str
    most_nodes: int = 0
    remembers: bool = False
    ran: Mapping[str, str] | None = None

    def can(self, setting: Condition) -> bool:
        """Whether the arm can run at a temperature and batch size."""
        return True

    def enter(self, setting: Condition) -> None:  # noqa: B027
        """Prepare for a setting, without state from another one."""

    @abstractmethod
    def run(self, unit: Unit, setting: Condition, tracing: bool = False) -> UnitResult:
        """Decode a unit."""


@dataclass(frozen=True)
class Generation:
    """Output of another engine for one prompt.

    Attributes:
        seconds: decoding time without the prefill.
        num_decoded: number of tokens decoded in that time.
        prefill_s: seconds of prefill.
        mean_acceptance_length: tokens per target call while decoding; ``None`` if the engine does not report it.
    """

    token_ids: list[int]
    seconds: float
    num_decoded: int
    prefill_s: float
    mean_acceptance_length: float | None = None


class ForeignArm(Arm):
    """Another engine on the same weights, one request at a time.  Raises ``ValueError`` for filters, which are not
    compared, and for outputs of one token, which the prefill makes."""

    def __init__(self, name: str, shared: ArmSetup) -> None:
        if shared.max_new_tokens < 2:
            raise ValueError(f"{name} makes the first token in its prefill: give --max-new-tokens of at least 2")
        if any(shared.filters.get(key, neutral) != neutral for key, neutral in NO_FILTERS.items()):
            raise ValueError(f"{name} supports temperature only: leave out --top-k, --top-p and --min-p")
        self.name, self.shared = name, shared

    @abstractmethod
    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> Generation:
        """Decode one prompt; an end-of-text token ends it only if the benchmark allows it."""

    def can(self, setting: Condition) -> bool:
        return setting[1] == 1

    def run(self, unit: Unit, setting: Condition, tracing: bool = False) -> UnitResult:
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
