"""The requests of an engine: those that wait, those that run, and what each of them holds until it leaves.

An error belongs to the request that caused it: whatever raises for a batch is tried again for each of its requests,
and those for which it raises alone end (:meth:`Requests.together`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

from foretoken.core import NonFiniteLogitsError
from foretoken.engine.admission import KvBudget
from foretoken.engine.errors import as_error, blamed, is_full_memory
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.engine.request import Emission, Running, Turn
from foretoken.engine.stopping import FinishReason
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.base import Drafter
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.checks.finite import why_not_finite

CHANGED = (
    "the model was changed (its weights, layers or hooks) while this request ran: ask again, and change it only "
    "between requests"
)
log = logging.getLogger("foretoken.engine")

Stage = Callable[[Sequence[Turn]], None]
"""A part of a round, for one request or several."""


class Requests:
    """Waiting and running requests of one engine.

    Attributes:
        taps: hidden states of the target that the drafter needs.
        waiting: by priority, then in order of arrival.
        budget: the memory that they may take.
        on_leave: told of every request that has left, waiting or running, however it ended; one that was cancelled
            has no finish reason.
    """

    on_leave: Callable[[Running], None] | None = None

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        controller: Controller | None,
        kv_memory: int | None,
        prefix_bytes: int,
    ) -> None:
        self.target, self.drafter, self.controller = target, drafter, controller
        self.taps: Sequence[str] = drafter.taps if drafter is not None else ()
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self._ended: list[tuple[Running, Emission]] = []
        self._weights_version = target.weights_version
        self.limit_memory(kv_memory, prefix_bytes)

    def limit_memory(self, kv_memory: int | None, prefix_bytes: int) -> None:
        """Begin with an empty prefix cache, and with another budget."""
        self.budget = KvBudget(self.target, kv_memory)
        self.prefix_cache = PrefixCache(self.target, self.taps, prefix_bytes)

    @property
    def busy(self) -> bool:
        """Whether any is there, or has ended and nobody was told."""
        return bool(self.waiting or self.running or self._ended)

    def holds(self, request_id: int) -> bool:
        """Whether a request is waiting or running."""
        runs = [*self.waiting, *self.running, *(run for run, _ in self._ended)]
        return any(run.id == request_id for run in runs)

    def queue(self, run: Running) -> None:
        """A request has come."""
        self.waiting.append(run)
        self.waiting.sort(key=lambda r: r.request.priority)  # stable: equals in order of arrival

    def started(self) -> list[Running]:
        """Those whose prompts are read: they take part in rounds."""
        return [run for run in self.running if run.started]

    def take_ended(self) -> list[tuple[Running, Emission]]:
        """Those that have ended before their time since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # -- leaving -----------------------------------------------------------------------------------------------------

    def cancel(self, request_id: int) -> None:
        """Drop a request, waiting or running."""
        for run in [r for r in self.waiting if r.id == request_id]:
            self._leave_queue(run)
        for run in [r for r in self.running if r.id == request_id]:
            self.drop(run)

    def close(self) -> None:
        """Drop everything (also what an interrupted round left behind)."""
        for run in self.waiting[:]:
            self.cancel(run.id)
        self._ended.clear()
        for run in list(self.running):
            self.drop(run)

    def end(self, run: Running, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request before its time; whoever takes the round's gains is told."""
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

    def let_go(self, turns: Sequence[Turn]) -> None:
        """Let requests leave that have all their tokens."""
        for turn in turns:
            if turn.emission.finish_reason is not None:
                self.target.follow()
                if turn.run.weights_version != self.target.weights_version:
                    raise ValueError(CHANGED)
                self._leave(turn.run)

    def drop(self, run: Running) -> None:
        """Let a request leave that nobody waits for."""
        try:
            self._leave(run)
        except Exception:
            log.exception("request %d was dropped, and freeing what it held failed", run.id)

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
        run.why = run.request.drafting_choice or controller.explain(run.context)

    # -- what an error or a change concerns --------------------------------------------------------------------------

    def drop_stale(self) -> None:
        """Forget what the target computed before it was changed, and end the requests that go on from that."""
        version = self.target.weights_version
        if version == self._weights_version:
            return
        self._weights_version = version
        self.prefix_cache.prefixes.clear()
        for run in [run for run in self.running if run.sequence is not None and run.weights_version != version]:
            self.end(run, "error", ValueError(CHANGED))

    def recover(self, before: Mapping[int, int]) -> None:
        """A step was broken off: bring every request back to the state between two rounds, or drop it.  ``before`` it
        they had so many tokens, by their ids."""
        for run in list(self.running):
            if run.sequence is None or not run.started:
                self.drop(run)
                continue
            try:
                if run.text.scratch_tokens:
                    self.target.commit(run.text, ())
            except CapabilityError:  # a cache that cannot be rolled back
                self.drop(run)
                continue
            have = len(run.context.tokens)
            if len(run.text.tokens) != have - 1 or before.get(run.id, have) != have:
                self.drop(run)

    def together(self, stage: Stage, turns: Sequence[Turn]) -> list[Turn]:
        """Run a stage for all, or, where that raises, for each; returns those for which it did not.

        The same coins are tossed again: with others, tokens after which nothing raises would be drawn too often.
        Where memory was full, kept texts make room before the stage is tried again.
        """
        marks = [turn.run.context.rng.mark() for turn in turns]
        try:
            if turns:
                stage(turns)
            return list(turns)
        except (Exception, SystemExit) as raised:  # it ends the requests that it concerns and nothing else
            error = as_error(raised)
            freed = is_full_memory(error) and self.prefix_cache.prefixes.nbytes > 0
            if freed:
                self.prefix_cache.prefixes.clear()
            elif len(turns) == 1:
                self.end(turns[0].run, "error", error)
                return []
        for turn, mark in zip(turns, marks, strict=True):
            turn.run.context.rng.back_to(mark)
        return [turn for each in turns for turn in self.together(stage, [each])]

    def each(self, stage: Stage, turns: Sequence[Turn]) -> list[Turn]:
        """A stage that is done request by request, and once only; returns those for which it did not raise."""
        successful = []
        for turn in turns:
            try:
                stage([turn])
                successful.append(turn)
            except (Exception, SystemExit) as raised:
                self.end(turn.run, "error", as_error(raised))
        return successful
