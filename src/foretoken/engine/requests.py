"""Waiting and running requests of an engine, and release of their resources.

An error belongs to the request that caused it: a stage that fails for a batch is retried for each of its requests, and
those that fail alone end (:meth:`Requests.together`).
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import chain
from typing import Any

from foretoken.core import Context, NonFiniteLogitsError
from foretoken.core.outside import OutsideError
from foretoken.engine.admission import KvBudget
from foretoken.engine.errors import as_error, blamed
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.engine.request import Emission, Running, Turn
from foretoken.engine.stopping import FinishReason
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.outside import explained, reported
from foretoken.methods.drafters.base import Drafter
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.checks.finite import why_not_finite
from foretoken.models.machine import is_full_memory

CHANGED = (
    "the model was changed (its weights, layers or hooks) while this request ran: submit it again, and change "
    "the model only between requests"
)
log = logging.getLogger("foretoken.engine")

Stage = Callable[[Sequence[Turn]], None]
"""Part of a round, for one request or several."""


class Requests:
    """Waiting and running requests of one engine.

    Attributes:
        taps: hidden states of the target that the drafter needs.
        waiting: by priority, then in order of arrival.
        has_owners: whether some of those in the queue may have owners; else they join in its order.
        budget: memory for requests.
        on_leave: called for every request that has left, waiting or running, for any reason; a cancelled one has no
            finish reason.
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
        self.has_owners = False
        self._with_deadline: dict[int, Running] = {}  # by id
        self._ended: list[tuple[Running, Emission]] = []
        self._logged_faults: set[str] = set()
        self._weights_version = target.weights_version
        self.limit_memory(kv_memory, prefix_bytes)

    def limit_memory(self, kv_memory: int | None, prefix_bytes: int) -> None:
        """Start with a new memory budget and an empty prefix cache."""
        self.budget = KvBudget(self.target, kv_memory)
        self.prefix_cache = PrefixCache(self.target, self.taps, prefix_bytes)

    @property
    def busy(self) -> bool:
        """Whether any request waits, runs, or has ended without being reported."""
        return bool(self.waiting or self.running or self._ended)

    @property
    def ids(self) -> set[int]:
        """Ids of the requests that wait, run, or have ended without being reported."""
        return {run.id for run in (*self.waiting, *self.running, *(run for run, _ in self._ended))}

    def holds(self, request_id: int) -> bool:
        """Whether a request waits, runs, or has ended without being reported."""
        ended = (run for run, _ in self._ended)
        return any(run.id == request_id for run in chain(self.running, ended, self.waiting))

    def queue(self, run: Running) -> None:
        """Queue a request."""
        request = run.request
        if request.deadline_s is not None:
            self._with_deadline[run.id] = run
        has_owner = bool(request.owner or request.owner_running)
        self.has_owners = has_owner or (self.has_owners and bool(self.waiting))
        insort(self.waiting, run, key=lambda r: r.request.priority)  # in order of arrival within a priority

    @property
    def late(self) -> list[Running]:
        """Requests that have passed their deadline."""
        return [run for run in self._with_deadline.values() if run.is_late]

    def started(self) -> list[Running]:
        """Requests with a complete prompt, which take part in rounds."""
        return [run for run in self.running if run.started]

    def take_ended(self) -> list[tuple[Running, Emission]]:
        """Requests that ended early since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # -- leaving -----------------------------------------------------------------------------------------------------

    def cancel(self, request_id: int) -> None:
        """Drop a waiting or running request."""
        run = next((run for run in chain(self.running, self.waiting) if run.id == request_id), None)
        if run in self.running:
            self.drop(run)
        elif run is not None:
            self._leave_queue(run)

    def close(self) -> None:
        """Drop all requests, and the remains of an interrupted round."""
        for run in self.waiting[:]:
            self.cancel(run.id)
        self._ended.clear()
        for run in list(self.running):
            self.drop(run)

    def end(self, run: Running, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request early; the next round's result reports it."""
        if type(error) is NonFiniteLogitsError:
            error = NonFiniteLogitsError(self._why_not_finite)
        run.finish_reason, run.error = reason, None if error is None else blamed(error)
        if run in self.running:
            try:
                self._leave(run)
            except Exception as later:  # it ends in any case, with the first error
                run.error = run.error or blamed(later)
                run.finish_reason = "error"
        if run in self.waiting:
            self._leave_queue(run)
        self._with_deadline.pop(run.id, None)  # also if an interrupt lost it between queue and batch
        self._ended.append((run, Emission(run.id, finish_reason=run.finish_reason, error=run.error)))

    @cached_property
    def _why_not_finite(self) -> str:
        """Cached, because reading all weights takes a while."""
        return why_not_finite(self.target)

    def let_go(self, turns: Sequence[Turn]) -> None:
        """Release requests that have all their tokens."""
        for turn in turns:
            if turn.emission.finish_reason is not None:
                self.target.follow()
                if turn.run.weights_version != self.target.weights_version:
                    raise ValueError(CHANGED)
                self._leave(turn.run)

    def drop(self, run: Running) -> None:
        """Release a request without reporting it."""
        try:
            self._leave(run)
        except Exception:
            log.exception("request %d was dropped, and freeing its memory failed", run.id)

    def _leave(self, run: Running) -> None:
        """Free all resources of a request, even if a part of that raises."""
        self.running.remove(run)
        run.note_unread()
        with ExitStack() as last_first:
            last_first.callback(run.drop_tensors)
            last_first.callback(self._tell_left, run)
            if self.controller is not None:
                last_first.callback(self._tell_end, "controller", self.controller.finish, run)
                last_first.callback(self._tell_end, "controller", partial(self._ask_why, run, self.controller), run)
            if self.drafter is not None and run.started:
                last_first.callback(self.finish_drafter, run)
            if run.sequence is not None:
                last_first.callback(self.target.release, run.sequence)
            if run.error is None and run.started:
                last_first.callback(self._keep, run)
            last_first.callback(self.budget.free, run)

    def finish_drafter(self, run: Running) -> None:
        """Tell the drafter that a request ended."""
        if self.drafter is not None:
            self._tell_end("drafter", self.drafter.finish, run)

    @staticmethod
    def _ask_why(run: Running, controller: Controller, context: Context) -> None:
        run.why = run.request.drafting_choice or explained(controller, context)

    def _tell_end(self, role: str, hook: Callable[[Context], None], run: Running) -> None:
        """Call a hook at the end of a request. What it raises is logged: the answer is complete, and nothing else needs
        the hook."""
        try:
            hook(run.context)
        except BaseException as raised:
            self._log_fault(raised, f"the {role} failed at the end of request {run.id}")

    def report_of(self, controller: Controller) -> dict[str, Any]:
        """The controller's report; an empty one, and a line in the log, if it fails: no request needs it."""
        try:
            return reported(controller)
        except BaseException as raised:
            self._log_fault(raised, "the controller cannot report")
            return {}

    def _log_fault(self, raised: BaseException, what: str) -> None:
        """Log an error once. Raises it again if it ends the process by right."""
        error = blamed(as_error(raised))
        if str(error) not in self._logged_faults:
            self._logged_faults.add(str(error))
            trace = None if isinstance(error, OutsideError) else error  # that of outside code names its line
            log.warning("%s: %s", what, error, exc_info=trace)

    def _leave_queue(self, run: Running) -> None:
        self.waiting.remove(run)
        run.note_unread()
        self._tell_left(run)

    def _tell_left(self, run: Running) -> None:
        self._with_deadline.pop(run.id, None)
        if self.on_leave is not None:
            self.on_leave(run)

    def _keep(self, run: Running) -> None:
        """Cache a sequence for later requests if possible; a failure does not affect the finished answer."""
        try:
            self.prefix_cache.keep(run)
        except Exception:
            log.warning("the tokens of request %d were not kept in the prefix cache", run.id, exc_info=True)

    # -- errors and model changes ------------------------------------------------------------------------------------

    def drop_stale(self) -> None:
        """Clear the prefix cache after a change of the target, and end the requests that started before it."""
        version = self.target.weights_version
        if version == self._weights_version:
            return
        self._weights_version = version
        self.prefix_cache.prefixes.clear()
        for run in [run for run in self.running if run.sequence is not None and run.weights_version != version]:
            self.end(run, "error", ValueError(CHANGED))

    def recover(self, before: Mapping[int, int]) -> None:
        """Restore every request to its state between two rounds after an interrupted step, or drop it. ``before`` holds
        the numbers of tokens before the step, by id, of those that were not admitted in it."""
        for run in list(self.running):
            if run.sequence is None or not run.started:
                self.drop(run)
                continue
            try:
                if run.open_sequence.scratch_tokens:
                    self.target.commit(run.open_sequence, ())
            except CapabilityError:  # a cache without rollback
                self.drop(run)
                continue
            have = len(run.context.tokens)
            if len(run.open_sequence.tokens) != have - 1 or before.get(run.id, run.context.prompt_length) != have:
                self.drop(run)

    def together(self, stage: Stage, turns: Sequence[Turn]) -> list[Turn]:
        """Run a stage for all requests together or, if that raises, for each; returns those for which it succeeded.

        A retry uses the same random numbers: new ones would favour tokens after which nothing raises. If memory ran
        out, the prefix cache is cleared before the retry.
        """
        marks = [turn.run.context.rng.mark() for turn in turns]
        try:
            if turns:
                stage(turns)
            return list(turns)
        except BaseException as raised:  # it ends only the requests that caused it
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
        """Run a stage once for each request separately; returns those for which it succeeded."""
        successful = []
        for turn in turns:
            try:
                stage([turn])
                successful.append(turn)
            except BaseException as raised:
                self.end(turn.run, "error", as_error(raised))
        return successful
