"""A request: what was asked, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from foretoken.core import Context, HiddenStates, HiddenText, Scores, TokenTree, Verdict
from foretoken.core.constraints import Constraint, FiniteLanguage
from foretoken.core.sampling import SamplingParams
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
        params: how tokens are drawn.
        max_new_tokens: most output tokens, at least 1.
        stop: stop strings.
        seed: fixes sampled output, whatever drafts and whatever else is in the batch; ``None`` draws one.  From 0 to
            2**64 - 1.
        prediction: tokens that are expected in the output (for drafters that use them).
        ignore_eos: go on after an end-of-text id (benchmarks).
        stop_token_ids: tokens that end the text as an end-of-text id does, with finish reason ``stop``.
        min_tokens: output tokens before which nothing ends the text, unless nothing else may follow.
        allowed_token_ids: the only tokens that may be in the output, besides those that end it; ``None``: all.
        bad_words: sequences of tokens that must not be in the output.
        include_stop: leave the stop string at the end of the text.
        logprobs: report the log-probability of every output token and of this many likeliest ones; ``None``: do not.
        prompt_logprobs: the same for the prompt, which is then read as a whole.
        priority: requests with a smaller number are admitted first.
        owner: whose it is, and ``owner_running`` how many requests of that owner may run together (0: any number).
        deadline_s: seconds from arrival after which the request is ended as it is.
        cache_salt: texts and drafts of earlier requests are reused among requests with the same salt only.
        max_draft_tokens: longest draft; 0 decodes plainly, ``None`` leaves it to the controller.
        drafter: name of the member of a router that drafts for it in every round; ``None``: the controller decides.
        explain: keep a trace of every round.
        constraint: what the output must look like, token by token.
        language: all that the output may be: a string of it is drawn as a whole.
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

    @property
    def drafting_choice(self) -> str:
        """What it says itself about how it is to be drafted for; empty where it leaves that to others."""
        if self.language is not None:
            return "conditional: all strings of its language are scored, and one is drawn"
        if self.max_draft_tokens == 0:
            return "plain: the request asked for it"
        return "" if self.drafter is None else f"drafts: the request named {self.drafter}"


@dataclass(eq=False)
class Running:
    """A request in the engine, waiting or admitted.

    Attributes:
        seed: of its randomness, given or drawn; ``None`` for a greedy request, which has none.
        sequence: its text in the target; ``None`` while it waits.
        arrived_s: when it arrived, by the monotonic clock.
        started: whether its prompt is read and it takes part in rounds.
        reads_after: a request that is reading half of this prompt or more, and how many tokens they share: this one
            waits and copies them.
        states: hidden states of the text so far, where the prefix cache or the drafter wants them.
        prompt_logprobs: of the prompt's tokens, if they were asked for; the first has none.
        rounds: traces, if they were asked for.
        error: what ended it with finish reason ``error``.
        weights_version: of the target, when its text was opened.
        why: why it drafted as it did in the end, as the controller says.
        language_round: of a request for a string of a language: what drafts and decides in place of the engine's
            drafter and verifier.
        predicted: places of the caller's prediction that were drafted, and whether they were ever accepted there.
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
    def text(self) -> SequenceState:
        """Its text in the target.  Raises ``ValueError`` where it still waits."""
        if self.sequence is None:
            raise ValueError(f"request {self.id} is waiting: it has no text in the target yet")
        return self.sequence

    @property
    def unread(self) -> int:
        """Tokens of the prompt that the target has still to read (the last one is the first root)."""
        return self.context.prompt_length - 1 - self.num_read

    @property
    def num_read(self) -> int:
        """Tokens that the target has read."""
        return 0 if self.sequence is None else len(self.sequence.tokens)

    def note_unread(self) -> None:
        """The request leaves: what of its prompt was not read is not counted."""
        if not self.started:
            missing = self.unread + 1
            self.stats.num_prompt_tokens = max(0, self.stats.num_prompt_tokens - missing)
            self.stats.num_prompt_tokens_computed = max(0, self.stats.num_prompt_tokens_computed - missing)

    def note_prediction(self, places: range, accepted: int) -> None:
        """Tokens at these places of the prediction were drafted, and so many of them accepted."""
        stats = self.stats
        stats.num_prediction_tokens += len(places)
        stats.num_accepted_prediction_tokens += accepted
        for number, place in enumerate(places):
            self.predicted[place] = self.predicted.get(place, False) or number < accepted
        stats.num_prediction_places = len(self.predicted)
        stats.num_accepted_prediction_places = sum(self.predicted.values())

    def add_states(self, hidden: Mapping[str, Tensor]) -> None:
        """Hidden states [n, D] by tap of the next n tokens of the text."""
        if hidden:
            self.states.add(HiddenStates.of(hidden))

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        limit = self.request.deadline_s
        return limit is not None and monotonic() - self.arrived_s > limit


@dataclass(frozen=True)
class Emission:
    """New tokens of one request after one round.

    Attributes:
        origins: where each came from.
        finish_reason: why the request ended with them, if it did.
        logprobs: of the tokens, if they were asked for.
        rounds: what happened, if that was asked for.
        error: what ended the request, if something went wrong.
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
    """One request's part in a round; each stage fills in what it decides.

    Attributes:
        planned: whether its draft is what the controller has decided.
        was_asked: whether the drafter was asked for one.
        rule: the acceptance rule that the request brings itself, if it does.
        verifier: the acceptance rule of the round.
    """

    run: Running
    planned: bool = True
    was_asked: bool = False
    rule: Verifier | None = None
    tree: TokenTree = field(init=False)
    scores: Scores = field(init=False)
    verifier: Verifier = field(init=False)
    verdict: Verdict = field(init=False)
    emission: Emission = field(init=False)

    @property
    def is_drafted(self) -> bool:
        """Whether the engine's drafter has guessed anything."""
        return self.rule is None and self.tree.num_drafts > 0
