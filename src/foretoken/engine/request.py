"""Requests and their state in the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from foretoken.core import Context, HiddenStates, HiddenText, Scores, TokenTree, Verdict
from foretoken.core.constraints import Constraint, FiniteLanguage
from foretoken.core.sampling import SamplingParams
from foretoken.core.values import python_number
from foretoken.engine.logprobs import TokenLogprobs
from foretoken.engine.stats import SpecStats
from foretoken.engine.stopping import FinishReason, Stopper
from foretoken.engine.trace import RoundTrace
from foretoken.methods.verifiers.base import Verifier
from foretoken.models.base import SequenceState

if TYPE_CHECKING:
    from foretoken.engine.conditional import LanguageRound

Origin = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        prompt: token ids, at least one.
        params: sampling parameters.
        max_new_tokens: most output tokens, at least 1.
        stop: stop strings.
        seed: fixes sampled output, whatever the drafts and the batch; ``None`` draws a random one. From 0 to 2**64 - 1.
        prediction: tokens that are expected in the output (for drafters that use them).
        ignore_eos: continue after an end-of-text id (benchmarks).
        stop_token_ids: tokens that end the output as an end-of-text id does, with finish reason ``stop``.
        min_tokens: fewest output tokens, unless nothing else may follow.
        allowed_token_ids: the only tokens allowed in the output, besides those that end it; ``None``: all.
        bad_words: forbidden sequences of tokens.
        include_stop: keep the stop string, or the text of the stop token, at the end of the text.
        shown_special: ids of special tokens whose text is part of the output's text.
        logprobs: report the log-probabilities of every output token and of this many most likely ones; ``None``: none.
        prompt_logprobs: the same for the prompt, which then uses no prefix cache.
        priority: requests with a smaller number are admitted first.
        owner: the request's owner; at most ``owner_running`` requests of one owner run together (0: any number).
        deadline_s: seconds from arrival after which the request ends with its present output.
        cache_salt: only requests with the same salt share cached sequences and learned drafts.
        max_draft_tokens: longest draft; 0 decodes plainly, ``None`` leaves it to the controller.
        drafter: name of the router member that drafts in every round; ``None`` leaves it to the controller.
        explain: keep a trace of every round.
        constraint: rule for the output, token by token.
        language: all allowed outputs, from which one is drawn as a whole.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 64
    stop: Sequence[str] = ()
    seed: int | None = None
    prediction: Sequence[int] | None = None
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    allowed_token_ids: frozenset[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    include_stop: bool = False
    shown_special: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    owner: str = ""
    owner_running: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    max_draft_tokens: int | None = None
    drafter: str | None = None
    explain: bool = False
    constraint: Constraint | None = None
    language: FiniteLanguage | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, python_number(value))

    @property
    def drafting_choice(self) -> str:
        """Reason for drafting that the request itself determines; empty if it does not."""
        if self.language is not None:
            return "conditional: all strings of its language are scored, and one is drawn"
        if self.max_draft_tokens == 0:
            return "plain: the request asked for it"
        return "" if self.drafter is None else f"drafts: the request named {self.drafter}"


@dataclass(eq=False)
class Running:
    """A request in the engine, waiting or admitted.

    Attributes:
        seed: given or random; ``None`` for a greedy request.
        sequence: its sequence in the target; ``None`` while it waits.
        arrived_s: arrival time by the monotonic clock.
        started: whether its prompt is complete and it takes part in rounds.
        reads_after: a request that is prefilling half of this prompt or more, and the number of shared tokens, which
            this request waits for and copies.
        states: hidden states of the sequence so far, if the prefix cache or the drafter needs them.
        prompt_logprobs: of the prompt's tokens, if requested; the first has none.
        rounds: traces, if requested.
        error: the error of finish reason ``error``.
        weights_version: the target's, when the sequence was opened.
        why: the controller's reason for its last draft decision.
        language_round: drafts and verifies a request with a language, in place of the engine's drafter and verifier.
        predicted: indices of prediction tokens that were drafted, and whether they were ever accepted.
    """

    request: Request
    context: Context
    stopper: Stopper
    stats: SpecStats = field(default_factory=SpecStats)
    origins: list[Origin] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seed: int | None = None
    sequence: SequenceState | None = None
    arrived_s: float = field(default_factory=monotonic)
    started: bool = False
    reads_after: tuple[Running, int] | None = field(default=None, repr=False, compare=False)
    states: HiddenText = field(default_factory=HiddenText)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    rounds: list[RoundTrace] = field(default_factory=list)
    error: Exception | None = None
    weights_version: int = 0
    why: str = ""
    language_round: LanguageRound | None = None
    predicted: dict[int, bool] = field(default_factory=dict)

    @property
    def id(self) -> int:
        return self.context.request_id

    @property
    def output(self) -> list[int]:
        """New tokens so far."""
        return self.context.tokens[self.context.prompt_length :]

    @property
    def open_sequence(self) -> SequenceState:
        """Its sequence in the target. Raises ``ValueError`` while it waits."""
        if self.sequence is None:
            raise ValueError(f"request {self.id} is waiting: it has no sequence in the target yet")
        return self.sequence

    @property
    def unread(self) -> int:
        """Prompt tokens not yet in the target's cache (the last one is the first root)."""
        return self.context.prompt_length - 1 - self.num_read

    @property
    def num_read(self) -> int:
        """Tokens in the target's cache."""
        return 0 if self.sequence is None else len(self.sequence.tokens)

    def note_unread(self) -> None:
        """Remove the unprocessed prompt tokens of a leaving request from its statistics."""
        if not self.started:
            # A prompt's last token is processed as the first root, so it is missing, too
            missing = self.unread + 1
            self.stats.num_prompt_tokens = max(0, self.stats.num_prompt_tokens - missing)
            self.stats.num_prompt_tokens_computed = max(0, self.stats.num_prompt_tokens_computed - missing)

    def note_prediction(self, positions: range, accepted: int) -> None:
        """Record drafted tokens of the prediction, by index, of which the first ``accepted`` were accepted."""
        stats = self.stats
        stats.num_prediction_tokens += len(positions)
        stats.num_accepted_prediction_tokens += accepted
        for number, position in enumerate(positions):
            self.predicted[position] = self.predicted.get(position, False) or number < accepted
        stats.num_prediction_places = len(self.predicted)
        stats.num_accepted_prediction_places = sum(self.predicted.values())

    def add_states(self, hidden: Mapping[str, Tensor]) -> None:
        """Append hidden states [n, D] by tap of the next n tokens."""
        if hidden:
            self.states.add(HiddenStates.of(hidden))

    def drop_tensors(self) -> None:
        """Drop hidden states and noise, which no output needs: a call keeps its ended requests until all have ended."""
        self.context.hidden, self.states = {}, HiddenText()
        if self.context.sampler.noise is not None:
            self.context.sampler.noise.forget()

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        limit = self.request.deadline_s
        return limit is not None and monotonic() - self.arrived_s > limit


@dataclass(frozen=True)
class Emission:
    """New tokens of one request after one round.

    Attributes:
        origins: source of each token.
        finish_reason: finish reason of an ended request.
        logprobs: of the tokens, if requested.
        rounds: trace of the round, if requested.
        error: the error that ended the request.
    """

    request_id: int
    token_ids: Sequence[int] = ()
    origins: Sequence[Origin] = ()
    finish_reason: FinishReason | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    rounds: Sequence[RoundTrace] = ()
    error: Exception | None = None


@dataclass
class Turn:
    """One request's part in a round; each stage sets its result.

    Attributes:
        planned: whether the draft follows the controller's decision.
        allowed: most levels of a draft for the request's limit and remaining room.
        was_asked: whether the drafter was called.
        rule: the request's own acceptance rule, if any.
        verifier: the acceptance rule of the round.
    """

    run: Running
    planned: bool = True
    allowed: int = 0
    was_asked: bool = False
    rule: Verifier | None = None
    tree: TokenTree = field(init=False)
    scores: Scores = field(init=False)
    verifier: Verifier = field(init=False)
    verdict: Verdict = field(init=False)
    emission: Emission = field(init=False)

    @property
    def is_drafted(self) -> bool:
        """Whether the engine's drafter proposed anything."""
        return self.rule is None and self.tree.num_drafts > 0
