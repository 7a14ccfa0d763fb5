"""Counts and times of a generation, in vLLM's terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.models.words import refused_lines

if TYPE_CHECKING:
    from foretoken.core import RoundTimes


@dataclass
class SpecStats:
    """Counts and times of a request or a whole run.

    Attributes:
        num_drafts: rounds (target calls that verified a tree, empty drafts included), ``num_drafted_rounds`` rounds
            with a draft, ``num_asked_rounds`` rounds that called the drafter.
        num_draft_tokens: proposed draft tokens.
        num_accepted_tokens: accepted draft tokens that were emitted, without those behind the end of the text.
        num_accepted_tokens_per_pos: accepted tokens at each draft position (depth 1 first).
        num_new_tokens: emitted tokens.
        num_prediction_tokens: proposed tokens of the caller's prediction, ``num_accepted_prediction_tokens`` the
            accepted ones.
        num_prediction_places: the same with each token of the prediction counted once;
            ``num_accepted_prediction_places`` those ever accepted.
        draft_s, target_s, verify_s, overhead_s: seconds in the drafter, in the target network, in the acceptance
            rule, and in the rest of the rounds. In a batch every request counts the whole round.
        prefill_s: seconds before the first round. Prompts that share a prefill each count all of it; an engine's
            ``read_s`` counts it once.
        total_s: total seconds.
        num_prompt_tokens: tokens of the prompt, ``num_prompt_tokens_computed`` those that the target computed; the
            others came from the prefix cache.
        num_draft_prompt_tokens_computed: tokens that the draft models prefilled in total: the prompt and tokens
            generated without drafts, without those from the prefix cache. 0 without drafts or draft models.
        drafters: rounds with drafts, by drafter.
        queue_s: seconds from arrival to admission.
        first_token_s: seconds from arrival to the first token.
        forward: the target's forward, as :meth:`~foretoken.models.base.LanguageModel.describe` names it.
        exactness: ``"bitwise"`` or ``"rounding"``: possible difference between this output and plain decoding.
        refused: faster paths that the target was refused at load, a line each.
    """

    num_drafts: int = 0
    num_drafted_rounds: int = 0
    num_asked_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_new_tokens: int = 0
    num_prediction_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    num_prediction_places: int = 0
    num_accepted_prediction_places: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    prefill_s: float = 0.0
    total_s: float = 0.0
    num_prompt_tokens: int = 0
    num_prompt_tokens_computed: int = 0
    num_draft_prompt_tokens_computed: int = 0
    drafters: dict[str, int] = field(default_factory=dict)
    queue_s: float = 0.0
    first_token_s: float = 0.0
    forward: str = ""
    exactness: str = ""
    refused: tuple[str, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens (0 without drafts)."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted draft tokens per round, plus one: the bonus or recovered token, which the last round may lack."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of the rounds, without prefill."""
        busy = self.total_s - self.prefill_s
        return self.num_new_tokens / busy if busy > 0 else 0.0

    def note_target(self, description: Mapping[str, Any]) -> None:
        """Record the target's :meth:`~foretoken.models.base.LanguageModel.describe`."""
        self.forward, self.exactness = description["forward"], description["exactness"]
        self.refused = tuple(refused_lines(description))

    def add_round(self, drafted: int, accepted: int, emitted: int, was_asked: bool = False) -> None:
        """Count one round of one request; ``was_asked`` is whether the drafter was called."""
        self.num_drafts += 1
        self.num_asked_rounds += was_asked
        self.num_drafted_rounds += drafted > 0
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_new_tokens += emitted
        positions = self.num_accepted_tokens_per_pos
        positions.extend([0] * (accepted - len(positions)))
        for i in range(accepted):
            positions[i] += 1

    def cut_round(self, origins: Sequence[str], kept: int) -> None:
        """Count only the first ``kept`` tokens of the last round, whose tokens have these origins."""
        accepted, remaining = origins.count("accepted"), origins[:kept].count("accepted")
        self.num_new_tokens -= len(origins) - kept
        self.num_accepted_tokens -= accepted - remaining
        positions = self.num_accepted_tokens_per_pos
        for i in range(remaining, accepted):
            positions[i] -= 1
        while positions and not positions[-1]:
            positions.pop()

    def add_times(self, times: RoundTimes) -> None:
        """Add the times of one round."""
        self.draft_s += times.draft_s
        self.target_s += times.target_s
        self.verify_s += times.verify_s
        self.overhead_s += times.overhead_s
        self.total_s += times.total_s

    @classmethod
    def summed(cls, stats: Iterable[SpecStats]) -> SpecStats:
        """Counts and times of several requests together."""
        total = cls()
        for part in stats:
            total.merge(part)
        return total

    def merge(self, other: SpecStats) -> None:
        """Add another request's counts and times; both use the same target.

        Times of concurrent requests add up to more than the elapsed time, because each counts all of its rounds.
        """
        for name, value in vars(other).items():
            if isinstance(value, int | float):
                setattr(self, name, getattr(self, name) + value)
        self.forward, self.exactness = other.forward or self.forward, other.exactness or self.exactness
        self.refused = other.refused or self.refused
        for name, count in other.drafters.items():
            self.drafters[name] = self.drafters.get(name, 0) + count
        counts, added = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        counts.extend([0] * (len(added) - len(counts)))
        for i, count in enumerate(added):
            counts[i] += count

    def as_dict(self) -> dict[str, Any]:
        """All fields and ratios, as in the CLI's JSON."""
        ratios = ("acceptance_rate", "mean_acceptance_length", "tokens_per_s")
        return {**vars(self), "refused": list(self.refused), **{name: getattr(self, name) for name in ratios}}
