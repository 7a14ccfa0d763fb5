"""The loop: one round serves every running request, knows only protocols, and is the same for every method.

    budget = controller.budget(request)
    tree   = drafter.propose(context, budget)
    scores = target.forward(tree)
    verdict = verifier.verify(tree, scores, rng)
    target.commit(verdict.path); drafter.observe(...); controller.observe(...)
    emit

Plain decoding is the same loop with an empty draft. Between two rounds requests leave, join, and prefill a chunk of
their prompts. Each stage is an object, and :class:`Engine` runs them in this order:

    add       queue a checked request                        (:mod:`foretoken.engine.joining`)
    admit     what memory and owners allow                   (:mod:`foretoken.engine.admission`)
    read      prompts, all of them or a piece                (:mod:`foretoken.engine.reading`)
    draft     budgets, trees, and what is kept of them       (:mod:`foretoken.engine.drafting`)
    score     one forward of the target over all trees       (here)
    verify    the acceptance rule of each request            (:mod:`foretoken.engine.acceptance`)
    commit    the accepted path, and the tokens of the round (:mod:`foretoken.engine.delivery`)
    leave     who has all tokens frees what it held          (:mod:`foretoken.engine.requests`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import torch

from foretoken.core import NonFiniteLogitsError, RoundTimes, Scores, TokenTree, Verdict
from foretoken.engine.acceptance import AcceptanceRules
from foretoken.engine.admission import check, first_in_turn
from foretoken.engine.conditional import check_language
from foretoken.engine.delivery import Delivery
from foretoken.engine.drafting import Drafting, check_target, drop_scratch
from foretoken.engine.ends import ends_of
from foretoken.engine.errors import blaming
from foretoken.engine.joining import check_rules, join, stopper_of
from foretoken.engine.reading import ALL, Reader, ReadingTime
from foretoken.engine.request import Emission, Request, Running, Turn
from foretoken.engine.requests import Requests
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.verifiers.base import Verifier
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.clock import now
from foretoken.models.forward.attention import few_plans

OnRound = Callable[[Sequence[Running], Sequence[TokenTree], Sequence[Verdict], RoundTimes], None]
"""Called after every round with the requests, their trees and verdicts, and (draft_s, target_s, verify_s, total_s)."""


class Engine:
    """Serves requests over one target.

    Args:
        target: the model whose distribution is kept.
        drafter: proposes draft tokens; ``None`` for plain decoding.
        verifier: the acceptance rule; ``None`` chooses the best lossless one for every tree.
        controller: sets draft budgets; needed with a drafter.
        tokenizer: for stop strings.
        allow_lossy: accept a verifier that changes the target's distribution.
        max_batch: most requests in a batch; others wait.
        kv_memory: bytes of keys and values for running and cached sequences; ``None`` for no limit.
        prefill_chunk: prompt tokens that are processed before every round; ``None`` prefills whole prompts at once.
        prefix_bytes: size of the prefix cache in bytes.
        on_round: called after every round, for benchmarks and displays; its time is not part of any round.

    Attributes:
        requests: waiting and running requests, and their memory.
        taps: hidden states of the target that the drafter needs.
        rounds: number of rounds.
        times: total seconds of the rounds.
        kept_places: batch slots reserved for owners without a running request.

    Raises:
        ValueError: the drafter and the verifier are incompatible, or the verifier is lossy without ``allow_lossy``.
        CapabilityError: the target lacks a capability that the drafter needs.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        controller: Controller | None = None,
        *,
        tokenizer: Any | None = None,
        allow_lossy: bool = False,
        max_batch: int = 64,
        kv_memory: int | None = None,
        prefill_chunk: int | None = None,
        prefix_bytes: int = 0,
        on_round: OnRound | None = None,
    ) -> None:
        drafts = controller is None or controller.drafts  # else not even the drafter's prefill runs: plain decoding
        self.target, self.drafter = target, drafter if drafts else None
        self.verifier, self.controller, self.tokenizer = verifier, controller, tokenizer
        self.allow_lossy, self.max_batch, self.kept_places, self.on_round = allow_lossy, max_batch, 0, on_round
        self.rounds, self.times = 0, RoundTimes(0.0, 0.0, 0.0, 0.0)
        self._ids, self._bookkeeping_s = 0, 0.0
        self._device = target.device  # a round's times wait for this device
        self.requests = Requests(target, self.drafter, controller, kv_memory, prefix_bytes)
        self.taps = self.requests.taps
        members = [] if drafter is None else [member.name for member in drafter.limits.members]
        if drafter is not None:
            check_target(target, drafter)
            if controller is None:
                raise ValueError("a drafter needs a controller, for example ConstantController()")
            controller.attach(drafter.limits)
        self.reader = Reader(self.requests, prefill_chunk)
        self.drafting = Drafting(target, self.drafter, controller, members, self.reader.pace)
        self.acceptance = AcceptanceRules(verifier, self.drafter, allow_lossy)
        self.delivery = Delivery(self.requests, members)

    def serve(
        self,
        max_batch: int,
        kv_memory: int | None,
        prefill_chunk: int | None,
        prefix_bytes: int,
        prefill_s: float | None = None,
        kept_places: int = 0,
    ) -> None:
        """Change the limits of an idle engine; see :class:`AsyncLlm`.

        Raises:
            ValueError: requests are present, or a limit is invalid.
        """
        if self.busy:
            raise ValueError("requests are running: finish or close them first")
        self.max_batch, self.kept_places = max_batch, kept_places
        self.reader.chunk, self.reader.time = prefill_chunk, ReadingTime(prefill_s)
        self.requests.limit_memory(kv_memory, prefix_bytes)

    @property
    def limits(self) -> dict[str, Any]:
        """The present limits, as arguments of :meth:`serve`."""
        return {
            "max_batch": self.max_batch,
            "kv_memory": self.requests.budget.limit,
            "prefill_chunk": self.reader.chunk,
            "prefix_bytes": self.requests.prefix_cache.prefixes.capacity,
            "prefill_s": self.reader.time.limit_s,
            "kept_places": self.kept_places,
        }

    # -- requests ----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Validate a request; :meth:`add` calls this.

        Raises:
            ValueError: see :func:`foretoken.engine.admission.check`; also for too little memory, or sampling that the
                verifier does not support.
        """
        check(request, self.target)
        self.requests.budget.check(request)
        self.drafting.check_member(request.drafter)
        with blaming():
            self.acceptance.check(request)
        stopper_of(request, self.target, self.tokenizer)  # checks the stop strings
        check_rules(request, self.target, self.tokenizer)
        if request.language is not None:
            ends = ends_of(request, self.target, self.tokenizer).ids
            check_language(request, request.language, self.target, self.tokenizer, ends)

    def add(self, request: Request, arrived_s: float | None = None, checked: bool = False) -> int:
        """Queue a request, which joins before the next round. Returns its id.

        Args:
            arrived_s: arrival time by the monotonic clock; now by default.
            checked: whether :meth:`check` has accepted it already.

        Raises:
            ValueError: as for :meth:`check`.
        """
        if not checked:
            self.check(request)
        if self.target.answer_start:
            request = replace(request, prompt=[*request.prompt, *self.target.answer_start])
        with blaming():
            races = self.acceptance.races(request)
        run = join(self._ids + 1, request, self.target, self.tokenizer, races)
        self._ids += 1
        if arrived_s is not None:
            run.arrived_s = arrived_s
        self.requests.queue(run)
        return run.id

    def cancel(self, request_id: int) -> None:
        """Drop a waiting or running request."""
        self.requests.cancel(request_id)

    def close(self) -> None:
        """Drop all requests, and the remains of an interrupted round."""
        self.requests.close()

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self.requests.busy

    @property
    def read_s(self) -> float:
        """Seconds of prefill outside the rounds.

        Wall time: requests that share a prefill each count all of it as their own ``prefill_s``; here it counts once.
        """
        return self.reader.read_s + self.drafting.read_s

    # -- one step, stage by stage ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[tuple[Running, Emission]]:
        """Admit waiting requests, prefill prompts, and run one round. Returns each request's new output.

        A request whose processing raises ends with ``finish_reason`` "error". If an interrupt stops a round, its
        half-done requests are dropped and the others continue with the next one.
        """
        before = {run.id: len(run.context.tokens) for run in self.requests.running}
        try:
            with few_plans(self._device):
                self.requests.drop_stale()
                self._admit()
                self.reader.read()
                emissions = self._round(self.requests.started())
        except BaseException:
            self.requests.recover(before)
            raise
        return [*emissions, *self.requests.take_ended()]

    def _admit(self) -> None:
        """Admit requests with a free batch slot and enough memory; end those past their deadline."""
        waiting, running, budget = self.requests.waiting, self.requests.running, self.requests.budget
        for run in self.requests.late:
            self.requests.end(run, "deadline")
        while len(running) < self.max_batch:
            has_owners = self.requests.has_owners
            first = first_in_turn(waiting, running, self.max_batch, self.kept_places, has_owners)
            if first is None or not budget.admits(first):
                break
            waiting.remove(first)
            first.stats.queue_s = monotonic() - first.arrived_s
            running.append(first)
            self.requests.each(self.reader.open, [Turn(first)])
        if budget.remaining is not None:
            self.requests.prefix_cache.prefixes.shrink(budget.remaining)

    def _round(self, runs: Sequence[Running]) -> list[tuple[Running, Emission]]:
        """One round of requests that are all between two rounds."""
        if not runs:
            return []
        together, each, target = self.requests.together, self.requests.each, self.target
        device = self._device
        turns = [turn for run in runs for turn in together(self.drafting.begin, [Turn(run)])]
        started = now(device)
        self.drafting.allow_reading(runs, ALL if self.reader.chunk is None else self.reader.piece_size())
        turns = together(self.drafting.propose, turns)
        started += self.drafting.note_reading(turns)  # not part of the round, like the target's prefill
        turns = together(self.drafting.cut, turns)
        drafted = now(device)
        target_before, rows_before = target.run_s, target.run_rows
        turns = together(self._score, turns)
        target_s = target.run_s - target_before
        scored = now(device)
        turns = (each if self.acceptance.is_outside else together)(self._verify, turns)
        verified = now(device)
        turns = each(self.delivery.commit, turns)
        committed = now(device)
        turns = each(self.delivery.teach, turns)
        observed = now(device)
        # The previous round's bookkeeping is part of serving, and its time is only known now.
        draft_s = drafted - started + observed - committed
        times = RoundTimes(draft_s, target_s, verified - scored, observed - started + self._bookkeeping_s)
        self.rounds, self.times = self.rounds + 1, RoundTimes(*map(sum, zip(self.times, times, strict=True)))
        self.reader.time.note_round(times.total_s)
        counts = (len(turns), target.run_rows - rows_before or sum(len(turn.tree) for turn in turns))
        turns = each(lambda alone: self.delivery.account(alone[0], counts, times), turns)
        self._bookkeeping_s = now(device) - observed
        if self.on_round is not None:
            self.on_round([t.run for t in turns], [t.tree for t in turns], [t.verdict for t in turns], times)
        turns = each(self.requests.let_go, turns)
        return [(turn.run, turn.emission) for turn in turns]

    def _score(self, turns: Sequence[Turn]) -> None:
        """One forward of the target over all trees."""
        for turn in turns:
            drop_scratch(self.target, turn.run)
        rows = self.target.forward([self._feed(turn.run, turn.tree) for turn in turns], self.taps)
        for turn, row in zip(turns, rows, strict=True):
            context = turn.run.context
            turn.scores = Scores(row.logits, turn.tree, context.tokens, context.sampler, row.taps)

    def _verify(self, turns: Sequence[Turn]) -> None:
        """Verify the drafts. A draft may cause non-finite scores, because attention multiplies masked values by 0, and
        infinity remains. Plain decoding would not see this, so the root is scored again without drafts.

        Not where random draws led to such a node: new draws would favour other tokens.
        """
        try:
            self.acceptance.verify(turns)
        except NonFiniteLogitsError:
            turn = turns[0]
            if len(turns) > 1 or not turn.is_drafted:
                raise
            if not turn.scores.sampler.fixed and bool(turn.scores.logits[0].amax().isfinite()):
                raise
            self.target.forget(turn.run.open_sequence)
            turn.tree = TokenTree.root_only(turn.run.context.root)
            self._score(turns)
            self.acceptance.verify(turns)

    def _feed(self, run: Running, tree: TokenTree) -> Feed:
        return Feed(run.open_sequence, tree.tokens, tree.parents)
