"""The life of requests: they wait, are admitted, have their prompts read, take part in rounds, and leave.

An error belongs to the request that caused it: whatever raises for a batch is tried again for each of its requests,
and those for which it raises alone end.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import monotonic
from typing import Any

import torch

from foretoken.core import NonFiniteLogitsError, Scores, TokenTree, Verdict
from foretoken.engine.admission import KvBudget, check
from foretoken.engine.conditional import check_language
from foretoken.engine.ends import ends_of
from foretoken.engine.errors import blamed, is_full_memory
from foretoken.engine.joining import check_rules, join, stopper_of
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.engine.reading import ALL, ReadingTime, open_text, read, shares
from foretoken.engine.request import Emission, Request, Running
from foretoken.engine.stopping import FinishReason
from foretoken.engine.turns import first_in_turn
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.texts import DraftText, DraftTexts, Pace
from foretoken.methods.verifiers.base import Verifier
from foretoken.models.base import CapabilityError, LanguageModel, Snapshot
from foretoken.models.checks.finite import why_not_finite
from foretoken.models.clock import now

CHANGED = (
    "the model was changed (its weights, layers or hooks) while this request ran: ask again, and change it only "
    "between requests"
)
log = logging.getLogger("foretoken.engine")


@dataclass
class Turn:
    """One request's part in a round.

    Attributes:
        planned: whether its draft is what the controller has decided.
        rule: the acceptance rule that the request brings itself, if it does.
    """

    run: Running
    planned: bool = True
    rule: Verifier | None = None
    tree: TokenTree = field(init=False)
    scores: Scores = field(init=False)
    verdict: Verdict = field(init=False)
    emission: Emission = field(init=False)


class Requests(ABC):
    """Waiting and running requests of one engine.

    Args:
        target: the model.
        drafter: what guesses, if anything does.
        verifier: the acceptance rule that was asked for, if one was.
        controller: how much to guess.
        tokenizer: for stop strings.
        max_batch: most requests that run together.
        kv_memory: bytes of keys and values that running and kept texts may take; ``None`` for no limit.
        prefill_chunk: tokens of prompts that are read before every round; ``None`` reads whole prompts at once.
        prefix_bytes: bytes of finished texts that are kept, so that others need not read the same beginning again.

    Attributes:
        on_leave: told of every request that has left, waiting or running, however it ended; one that was cancelled
            has no finish reason.
    """

    on_leave: Callable[[Running], None] | None = None

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        verifier: Verifier | None,
        controller: Controller | None,
        tokenizer: Any | None,
        max_batch: int,
        kv_memory: int | None,
        prefill_chunk: int | None,
        prefix_bytes: int,
    ) -> None:
        self.target, self.drafter, self.verifier, self.controller = target, drafter, verifier, controller
        self.tokenizer, self.max_batch, self.prefill_chunk = tokenizer, max_batch, prefill_chunk
        if controller is not None and not controller.drafts:
            self.drafter = None  # plain decoding: not even the drafter's prefill runs
        self.taps: Sequence[str] = self.drafter.taps if self.drafter is not None else ()
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.budget = KvBudget(target, kv_memory)
        self.prefix_cache = PrefixCache(target, self.taps, prefix_bytes)
        self.pace = Pace()
        self.reading, self.kept_places = ReadingTime(), 0
        self._ended: list[tuple[Running, Emission]] = []
        self._ids = 0
        self._weights_version = target.weights_version
        self._device = getattr(target, "device", None)  # whose work the times of a round wait for

    @abstractmethod
    def _check_verifier(self, verifier: Verifier, greedy: bool) -> None:
        """Refuse sampling that the verifier is not right for."""

    @abstractmethod
    def _check_drafter(self, name: str | None) -> None:
        """Refuse the name of a member that there is not."""

    def serve(
        self,
        max_batch: int,
        kv_memory: int | None,
        prefill_chunk: int | None,
        prefix_bytes: int,
        prefill_s: float | None = None,
        kept_places: int = 0,
    ) -> None:
        """Change how many requests run together, and what they may take, see :class:`AsyncLlm`; nothing may be running.

        Raises:
            ValueError: requests are there already, or a limit that makes no sense.
        """
        if self.busy:
            raise ValueError("requests are running: finish or close them first")
        self.max_batch, self.prefill_chunk, self.kept_places = max_batch, prefill_chunk, kept_places
        self.reading = ReadingTime(prefill_s)
        self.budget = KvBudget(self.target, kv_memory)
        self.prefix_cache = PrefixCache(self.target, self.taps, prefix_bytes)

    def check(self, request: Request) -> None:
        """Refuse what cannot be served; :meth:`add` does it, too.

        Raises:
            ValueError: what :func:`foretoken.engine.admission.check` refuses, more memory than there is, or sampling
                that the verifier is not right for.
        """
        check(request, self.target)
        self.budget.check(request)
        self._check_drafter(request.drafter)
        if self.verifier is not None:
            self._check_verifier(self.verifier, greedy=request.params.temperature == 0)
        stopper_of(request, self.target, self.tokenizer)  # checks the stop strings
        check_rules(request, self.target, self.tokenizer)
        if request.language is not None:
            ends = ends_of(request, self.target, self.tokenizer).ids
            check_language(request, request.language, self.target, self.tokenizer, ends)

    def add(self, request: Request, arrived_s: float | None = None) -> int:
        """Queue a request; it joins before the next round.  Returns its id.

        Args:
            request: what is asked.
            arrived_s: when it arrived, by the monotonic clock; now by default.

        Raises:
            ValueError: what :meth:`check` refuses.
        """
        self.check(request)
        if self.target.answer_start:
            request = replace(request, prompt=[*request.prompt, *self.target.answer_start])
        run = join(self._ids + 1, request, self.target, self.tokenizer, self._races(request))
        self._ids += 1
        if arrived_s is not None:
            run.arrived_s = arrived_s
        self.waiting.append(run)
        self.waiting.sort(key=lambda one: one.request.priority)  # stable: equals in order of arrival
        return run.id

    def _races(self, request: Request) -> bool:
        """Whether draft and target share noise: then the seed fixes the text.  By default where a seed was given, or
        where it is accepted most; a verifier with draws of its own that was asked for has no use for it."""
        if self.verifier is not None:
            return self.verifier.races
        return request.seed is not None or (self.drafter is not None and self.drafter.traits.prefers_noise)

    def cancel(self, request_id: int) -> None:
        """Drop a request, waiting or running."""
        for run in [r for r in self.waiting if r.id == request_id]:
            self._leave_queue(run)
        for run in [r for r in self.running if r.id == request_id]:
            self._drop(run)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running or self._ended)

    def holds(self, request_id: int) -> bool:
        """Whether a request is waiting or running."""
        held = [*self.waiting, *self.running, *(run for run, _ in self._ended)]
        return any(run.id == request_id for run in held)

    def close(self) -> None:
        """Drop everything (also what an interrupted round left behind)."""
        for run in self.waiting[:]:
            self.cancel(run.id)
        self._ended.clear()
        for run in list(self.running):
            self._drop(run)

    def _end(self, run: Running, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request before its time; the caller of :meth:`step` is told."""
        if type(error) is NonFiniteLogitsError:
            error = NonFiniteLogitsError(self._why_not_finite)
        run.finish_reason, run.error = reason, None if error is None else blamed(error)
        if run in self.running:
            try:
                self._leave(run)
            except Exception as later:  # it ends in any case: with what came first
                run.error = run.error or blamed(later)
                run.finish_reason = "error"
        if run in self.waiting:
            self._leave_queue(run)
        self._ended.append((run, Emission(run.id, finish_reason=run.finish_reason, error=run.error)))

    @cached_property
    def _why_not_finite(self) -> str:
        """Looked for once: reading all weights takes a while."""
        return why_not_finite(self.target)

    def _leave(self, run: Running) -> None:
        """Free all that a request holds, also where a part of that raises."""
        self.running.remove(run)
        run.note_unread()
        with ExitStack() as last_first:
            last_first.callback(self._tell_left, run)
            if self.controller is not None:
                last_first.callback(self.controller.finish, run.context)
                last_first.callback(self._ask_why, run, self.controller)
            if self.drafter is not None and run.started:
                last_first.callback(self.drafter.finish, run.context)
            if run.sequence is not None:
                last_first.callback(self.target.release, run.sequence)
            if run.error is None and run.started:
                last_first.callback(self._keep, run)
            last_first.callback(self.budget.free, run)

    def _leave_queue(self, run: Running) -> None:
        self.waiting.remove(run)
        run.note_unread()
        self._tell_left(run)

    def _tell_left(self, run: Running) -> None:
        if self.on_leave is not None:
            self.on_leave(run)

    def _keep(self, run: Running) -> None:
        """Keep a text for later requests, if that can be: it has its answer in any case."""
        try:
            self.prefix_cache.keep(run)
        except Exception:
            log.warning("the text of request %d was not kept", run.id, exc_info=True)

    @staticmethod
    def _ask_why(run: Running, controller: Controller) -> None:
        run.why = run.request.asked or controller.explain(run.context)

    def _drop(self, run: Running) -> None:
        """Let a request leave that nobody waits for."""
        try:
            self._leave(run)
        except Exception:
            log.exception("request %d was dropped, and freeing what it held failed", run.id)

    # -- between two rounds ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for run in [run for run in (*self.waiting, *self.running) if run.is_late]:
            self._end(run, "deadline")
        while len(self.running) < self.max_batch:
            first = first_in_turn(self.waiting, self.running, self.max_batch, self.kept_places)
            if first is None or not self.budget.admits(first):
                break
            self.waiting.remove(first)
            first.stats.queue_s = monotonic() - first.arrived_s
            self.running.append(first)
            self._each(self._open, [Turn(first)])
        if self.budget.left is not None:
            self.prefix_cache.prefixes.shrink(self.budget.left)

    def _open(self, turns: Sequence[Turn]) -> None:
        """Give requests their texts, and those what an earlier text has of the same beginning."""
        for run in (turn.run for turn in turns):
            open_text(self.target, run)
            run.weights_version = self.target.weights_version
            self._drop_stale()
            self.prefix_cache.take_over(run, self.running)
            find = partial(self._find_draft, run) if self.prefix_cache.keeps else None
            run.context.texts = DraftTexts(self.pace, find)

    def _find_draft(
        self, run: Running, key: Hashable, own: DraftText, tokens: Sequence[int]
    ) -> tuple[Snapshot, int] | None:
        return self.prefix_cache.find_draft(run, self.running, key, own, tokens)

    def _drop_stale(self) -> None:
        """Forget what the target computed before it was changed, and end the requests that go on from that."""
        version = self.target.weights_version
        if version == self._weights_version:
            return
        self._weights_version = version
        self.prefix_cache.prefixes.clear()
        for run in [run for run in self.running if run.sequence is not None and run.weights_version != version]:
            self._end(run, "error", ValueError(CHANGED))

    def _read(self) -> None:
        """Let the target read prompts, all of them or a piece."""
        while unread := [run for run in self.running if not run.started]:
            began = now(self._device)
            chosen = shares(unread, self._most_to_read())
            sizes = {run.id: size for run, size in chosen}
            turns = [Turn(run) for run, _ in chosen]

            def read_some(turns: Sequence[Turn], sizes: Mapping[int, int] = sizes) -> None:
                read(self.target, [(turn.run, sizes[turn.run.id]) for turn in turns], self.taps)

            done = [turn for turn in self._guard(read_some, turns) if turn.run.unread == 0]
            for turn in done:
                self._guard(self._start, [turn])
            spent = now(self._device) - began
            self.reading.note(sum(sizes.values()), spent)
            for turn in turns:
                turn.run.stats.prefill_s += spent
                turn.run.stats.total_s += spent
            if self.prefill_chunk is not None:
                return

    def _most_to_read(self) -> int:
        return self.reading.most(self.prefill_chunk or ALL, len(self.running) + len(self.waiting))

    def _start(self, turns: Sequence[Turn]) -> None:
        """The last prompt token is the first root: there is no special first step, and reading needed no logits."""
        for run in (turn.run for turn in turns):
            run.context.hidden = {name: torch.cat(rows) for name, rows in run.states.items()}
            run.states = {name: [rows] for name, rows in run.context.hidden.items()} if self.prefix_cache.keeps else {}
            if self.drafter is not None:
                try:
                    self.drafter.start(run.context)
                except BaseException:
                    self.drafter.finish(run.context)
                    raise
            run.started = True

    def _recover(self, before: Mapping[int, int]) -> None:
        """Bring every request back to the state between two rounds, or drop it."""
        for run in list(self.running):
            if run.sequence is None or not run.started:
                self._drop(run)
                continue
            try:
                if run.text.scratch_tokens:
                    self.target.commit(run.text, ())
            except CapabilityError:  # a cache that cannot be rolled back
                self._drop(run)
                continue
            have = len(run.context.tokens)
            if len(run.text.tokens) != have - 1 or before.get(run.id, have) != have:
                self._drop(run)

    def _guard(self, stage: Callable[[Sequence[Turn]], None], turns: Sequence[Turn]) -> list[Turn]:
        """Run a stage for all, or, where that raises, for each; returns those for which it did not.

        Where memory was full, kept texts make room before the stage is tried again.
        """
        try:
            if turns:
                stage(turns)
            return list(turns)
        except Exception as error:  # whatever it is, it ends the requests that it concerns and nothing else
            freed = is_full_memory(error) and self.prefix_cache.prefixes.nbytes > 0
            if freed:
                self.prefix_cache.prefixes.clear()
            elif len(turns) == 1:
                self._end(turns[0].run, "error", error)
                return []
        return [turn for each in turns for turn in self._guard(stage, [each])]

    def _each(self, stage: Callable[[Sequence[Turn]], None], turns: Sequence[Turn]) -> list[Turn]:
        """A stage that is done request by request, and once only."""
        done = []
        for turn in turns:
            try:
                stage([turn])
                done.append(turn)
            except Exception as error:
                self._end(turn.run, "error", error)
        return done
