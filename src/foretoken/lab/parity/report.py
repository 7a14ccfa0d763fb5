"""What a parity run is asked to do, and what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.core.noise import check_seed
from foretoken.core.sampling import SamplingParams
from foretoken.methods.verifiers.base import Verifier

MODES = ("greedy", "transformers", "batch", "stop", "sampled", "seed")
"""The checks in the order in which they run."""
PLAIN = "none"
"""How plain decoding is named among the drafters."""
FALSE_ALARM = 1e-3
"""Chance that a whole report fails although every distribution is right (shared by its sampled checks)."""


@dataclass(frozen=True)
class Settings:
    """What a parity run does.

    Attributes:
        target_source: what the target was loaded from (decides what a drafter without a path means).
        verifier, controller, profile, device, allow_lossy: as in :func:`foretoken.llm.load`.
        max_new_tokens: length of greedy outputs.
        sampling: temperature, top_k, top_p, min_p of sampled outputs; a repetition_penalty holds for greedy ones too.
        samples: outputs per drafter for the test of the distribution; 0 leaves it out.
        false_alarm: chance that the report fails although every distribution is right.
        seed: of the first seeded output, the others count up; it fixes what is drawn without a seed too.
        modes: which of :data:`MODES` are checked.

    Raises:
        ValueError: a value outside its range, or an unknown mode.
    """

    target_source: Any = "builtin"
    verifier: str | Verifier = "auto"
    controller: str = "auto"
    profile: Path | None = None
    device: str | None = None
    allow_lossy: bool = False
    max_new_tokens: int = 64
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    samples: int = 256
    false_alarm: float = FALSE_ALARM
    seed: int = 0
    modes: Sequence[str] = MODES

    def __post_init__(self) -> None:
        SamplingParams(**self.sampling)
        check_seed(self.seed)
        if self.samples < 0:
            raise ValueError(f"--samples must be at least 0, not {self.samples}")
        if not 0 < self.false_alarm < 1:
            raise ValueError(f"--false-alarm must be between 0 and 1, not {self.false_alarm}")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise ValueError(f"unknown mode {unknown[0]!r}: choose from {', '.join(MODES)}")

    @property
    def greedy(self) -> dict[str, Any]:
        """Sampling options of the greedy checks: the penalties alone."""
        return {name: value for name, value in self.sampling.items() if name.endswith("_penalty")}


@dataclass
class Check:
    """One drafter in one mode.

    Attributes:
        drafter: its spec.
        verifier: the rule's name.
        mode: one of :data:`MODES`.
        prompts: outputs compared; prompts of the test of the distribution.
        identical: of them, how many are the same token by token.
        ties: first differences that rounding explains.
        differences: first differences that it does not, a failed test of the distribution, or a check that broke off.
        p_value: of the test of the distribution.
        sees: the smallest total variation that this test finds with a probability of 0.9 at least.
        drafted: draft tokens that the target checked.
        notes: what differs, in words.
        gaps: logit gaps of the numerical ties.
        broken: of the differences, how many are ties that the target promises not to have.
    """

    drafter: str
    verifier: str
    mode: str
    prompts: int
    identical: int = 0
    ties: int = 0
    differences: int = 0
    p_value: float | None = None
    sees: float | None = None
    drafted: int = 0
    notes: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    broken: int = 0

    @property
    def compares_texts(self) -> bool:
        """Whether it compares outputs token by token."""
        return self.mode != "sampled"

    @property
    def tried(self) -> bool:
        """Whether anything was drafted; plain decoding itself is tried against what is outside."""
        return self.drafted > 0 or self.drafter == PLAIN

    def public(self) -> dict[str, Any]:
        """As the CLI's JSON prints it."""
        keys = ("drafter", "verifier", "mode", "prompts", "identical", "ties", "differences", "p_value")
        return {key: getattr(self, key) for key in keys}


@dataclass
class Report:
    """All checks so far, and how far the run came.

    Attributes:
        checks: in the order in which they ran.
        skipped: the drafters that could not be checked, and why.
        complete: whether the run came to its end.
        exactness, exactness_why: what the target promises, as ``llm.describe()`` says it.
        done, planned: checks that were run or left out as not fitting, and how many there are in all.
        prompts: token ids of the prompts.
        plain: greedy outputs of plain decoding.
        seeded: sampled outputs of plain decoding, of every prompt twice.
    """

    checks: list[Check] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    complete: bool = False
    exactness: str = "rounding"
    exactness_why: str = ""
    done: int = 0
    planned: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    plain: list[list[int]] = field(default_factory=list)
    seeded: list[list[int]] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether anything differs but ties that the target does not exclude."""
        return any(check.differences for check in self.checks)

    @property
    def passed(self) -> bool:
        """Whether the run is complete, something was compared, and nothing differs but ties."""
        return self.complete and bool(self.checks) and not self.differs

    def public(self) -> dict[str, Any]:
        """As the CLI's JSON prints it; ``prompts`` counts the texts that were compared, over all checks."""
        texts = [check for check in self.checks if check.compares_texts]
        totals = {key: sum(getattr(check, key) for check in texts) for key in ("prompts", "identical", "ties")}
        return {
            "passed": self.passed,
            "exactness": self.exactness,
            **totals,
            "checks": [check.public() for check in self.checks],
        }
