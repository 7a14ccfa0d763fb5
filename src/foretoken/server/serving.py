"""State shared by all routes of a server: engine, settings and counters."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foretoken.core.conversation import has_template
from foretoken.core.io.hub_ids import expanded
from foretoken.core.values import one_line
from foretoken.engine.admission import kept_back
from foretoken.engine.background import AsyncLlm, EngineStatus
from foretoken.engine.errors import Draining, EngineDead, QueueFull
from foretoken.engine.request import Request
from foretoken.engine.stats import SpecStats
from foretoken.engine.stopping import FinishReason
from foretoken.llm import Llm, load
from foretoken.loading.measured.busy import settle_threads
from foretoken.loading.tokenizers import load_tokenizer
from foretoken.methods.drafters.texts import BESIDE
from foretoken.models.words import how_it_runs, refused_lines
from foretoken.server.config import ServerSettings
from foretoken.server.errors import ApiError, api_error, still_loading
from foretoken.server.keys import Caller
from foretoken.server.lengths import Lengths
from foretoken.server.memory import LONG_PROMPT, LONG_PROMPTS
from foretoken.server.metrics import Metrics
from foretoken.server.slots import AdmissionSlots
from foretoken.server.workers import GRAMMARS, in_thread

log = logging.getLogger("foretoken.server")


def load_llm(settings: ServerSettings) -> Llm:
    """The served model with drafter, verifier and controller.  Raises ``ValueError`` if it cannot be loaded."""
    drafter = None if settings.drafter == "none" else settings.drafter
    if settings.online:
        drafter = settings.online_drafter
    return load(
        settings.model,
        drafter,
        settings.verifier,
        settings.controller,
        tokenizer=read_tokenizer(settings) if settings.chat_template else None,
        dtype=None if settings.dtype == "auto" else settings.dtype,
        device=settings.device,
        profile=settings.profile or None,
        quantize=settings.quantize or None,
        backend=settings.backend,
        exact=settings.exact,
        known=True,
        tensor_parallel=settings.tensor_parallel,
    )


def read_tokenizer(settings: ServerSettings) -> Any:
    """The model's tokenizer with the chat template of ``--chat-template``, before the weights are read: loading adds
    the template's end of a turn to the tokens that end an answer.  Raises ``ValueError`` for a file that cannot be
    read, and for a model without a tokenizer."""
    try:
        template = expanded(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ValueError(f"cannot read --chat-template {settings.chat_template}: {reason}") from None
    tokenizer = load_tokenizer(settings.model, settings.backend)
    if tokenizer is None:
        raise ValueError(f"--chat-template needs a model with a tokenizer, and {settings.name} has none")
    tokenizer.chat_template = template
    return tokenizer


def keep_promise(settings: ServerSettings, llm: Llm) -> None:
    """Raise ``ValueError`` for ``exact="bitwise"`` with a model that is exact up to rounding only."""
    if settings.exact == "bitwise" and llm.exactness != "bitwise":
        raise ValueError(
            f"{settings.name} cannot be served with --exact bitwise: {llm.target.exactness_why}; leave --exact out to "
            "serve it exact up to rounding"
        )


def tell(settings: ServerSettings, llm: Llm) -> None:
    """Log how the model runs, how exact it is, and every faster path that it could not take."""
    description = llm.describe()
    drafter = "none" if llm.drafter is None else llm.drafter.spec or llm.drafter.name
    summary = f"{how_it_runs(description)}, drafter {drafter}"
    log.info("loaded %s: %s", settings.name, summary, extra={"fields": {**description, "drafter": drafter}})
    for line in refused_lines(description):
        log.warning(line, extra={"plain": True})


def check_memory(settings: ServerSettings, llm: Llm) -> None:
    """Raise ``ValueError`` if ``--kv-memory`` is too small for any request."""
    budget = llm.engine.requests.budget
    room = budget.room(1)
    if room is not None and room < 1:
        least = budget.need(Request((0,), max_new_tokens=1))
        raise ValueError(
            f"--kv-memory {settings.kv_memory} is too small for any request: one token and its answer need {least} "
            "bytes, so give more"
        )


def tell_memory(settings: ServerSettings, llm: Llm) -> None:
    """Warn if requests without a token limit wait for memory because each reserves so much."""
    caps = [llm.target.context_length, settings.default_max_tokens, llm.defaults.sampling.get("max_new_tokens")]
    each = min(cap for cap in (*caps, llm.engine.requests.budget.room(0)) if cap)
    count = max(1, llm.engine.requests.budget.at_once(0, each, settings.max_running))
    if count < settings.max_running:
        log.warning(
            "--kv-memory %s: only %d of --max-running %d requests without max_tokens run at once, as each reserves up "
            "to %d tokens; give more memory or a smaller --default-max-tokens",
            settings.kv_memory,
            count,
            settings.max_running,
            each,
            extra={"plain": True},
        )


def warm_up(llm: Llm) -> None:
    """Compile a grammar, so that the first request does not spend its two seconds on the tokenizer's view and the trial
    process."""
    try:
        from foretoken.server.grammar import compile_constraint

        compile_constraint("regex", "a", llm.tokenizer, llm.target.vocab_size, ends=llm.target.eos_token_ids)
    except ModuleNotFoundError:
        log.info("no structured output: pip install 'foretoken[grammar]' brings it")
    except (ValueError, RuntimeError) as error:
        log.info("no structured output: %s", one_line(error))


def capture(llm: Llm, max_running: int) -> None:
    """Capture the CUDA graphs for rounds of up to ``max_running`` sequences, so that no request waits for one."""
    graphs = llm.target.graphs
    if graphs is None:
        return
    start_s, drafter = time.perf_counter(), llm.drafter
    nodes = 1
    if drafter is not None:
        nodes += drafter.max_nodes if drafter.traits.draws_trees else drafter.max_depth
    max_running = llm.engine.requests.budget.most_sequences(max_running)
    count = graphs.capture_ladder(max_running, nodes, max(nodes, 1 + BESIDE), llm.engine.taps)
    if not graphs.stopped:
        log.info("captured %d CUDA graphs in %.1f s", count, time.perf_counter() - start_s)


@dataclass
class Serving:
    """State of a server.

    Attributes:
        slots: slots of admitted choices, held until their last byte was read.
        kept_places: places of the batch for keys without a running request.
        lengths: lower bounds on the number of tokens of a text.
        started_s: time at which the model was ready, in seconds since 1970.
        failed: error that prevented loading.
        end_s: seconds within which it must have ended after a stop signal.
    """

    settings: ServerSettings
    make: Callable[[ServerSettings], Llm] = load_llm
    metrics: Metrics = field(init=False)
    slots: AdmissionSlots = field(init=False)
    kept_places: int = field(init=False)
    started_s: int = 0
    failed: Exception | None = None
    draining: bool = False
    end_s: float = 5.0
    unknown: set[str] = field(default_factory=set)
    lengths: Lengths = field(default_factory=lambda: Lengths(None))
    _engine: AsyncLlm | None = None

    def __post_init__(self) -> None:
        most = self.settings.max_running + self.settings.max_queued
        self.slots = AdmissionSlots(most)
        self.metrics = Metrics(self.settings.name, self._status, lambda: self.slots.open, self.settings.metrics_compat)
        self.reserve(len(self.settings.keys) > 1)

    def reserve(self, several_keys: bool) -> None:
        """Reserve the last eighth of the slots and of the batch for keys that have none, if there are several keys.

        A replica's settings have no keys: it calls this before the start.
        """
        self.kept_places = kept_back(self.settings.max_running) if several_keys else 0
        self.slots.reserved = kept_back(self.settings.max_running + self.settings.max_queued) if several_keys else 0

    def _status(self) -> EngineStatus | None:
        return None if self._engine is None else self._engine.status

    async def start(self) -> None:
        """Load the model in a thread and start the engine."""
        try:
            llm = await asyncio.to_thread(self.make, self.settings)
            keep_promise(self.settings, llm)
            if (message := await asyncio.to_thread(settle_threads, llm.target)) is not None:
                log.warning(message, extra={"plain": True})
            tell(self.settings, llm)
            settings, self.metrics.has_drafter = self.settings, llm.drafter is not None
            engine = AsyncLlm(
                llm,
                max_running=settings.max_running,
                max_queued=settings.max_queued,
                kv_memory=settings.kv_bytes,
                prefill_chunk=settings.prefill_chunk,
                prefill_s=settings.prefill_time or None,
                kept_places=self.kept_places,
                prefix_cache=settings.prefix_cache,
                prefix_bytes=settings.prefix_bytes,
                on_end=partial(self._ended, llm.target.kv_bytes_per_token),
            )
            check_memory(settings, llm)
            tell_memory(settings, llm)
            await asyncio.to_thread(capture, llm, settings.max_running)
            await engine.start()
            self.lengths = await asyncio.to_thread(Lengths, llm.tokenizer)
            await in_thread(GRAMMARS, lambda: warm_up(llm))
            self._engine, self.started_s = engine, int(time.time())
        except Exception as error:  # reported by the loop that watches the server
            self.failed = error

    def _ended(
        self, bytes_per_token: int, request: Request, arrived_s: float, stats: SpecStats, reason: FinishReason | None
    ) -> None:
        """Count a choice that has left the engine, and return the memory of a long one to the system."""
        self.metrics.ended(request, arrived_s, stats, reason)
        if len(request.prompt) * bytes_per_token >= LONG_PROMPT:
            LONG_PROMPTS.large_one_ended()

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, finish running ones and end the engine."""
        self.drain()
        if self._engine is not None:
            await self._engine.close(drain_s)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        if self._engine is not None:
            self._engine.drain()

    def abandon(self) -> None:
        """Do nothing: threads that load the model end with the process."""

    @property
    def num_open(self) -> int:
        """Number of unfinished requests."""
        return 0 if self._engine is None else self._engine.num_open

    @property
    def is_loaded(self) -> bool:
        return self._engine is not None

    @property
    def trouble(self) -> str | None:
        """Failure of the engine, if any."""
        if self.failed is not None:
            return f"the model could not be loaded: {self.failed}"
        if self._engine is None:
            return None
        status = self._engine.status
        if status.dead is not None:
            return status.dead
        if status.heartbeat_age_s > self.settings.watchdog:
            return f"the engine has not responded for {status.heartbeat_age_s:.0f} s"
        return None

    @property
    def engine(self) -> AsyncLlm:
        """The engine.  Raises :class:`ApiError` 503 while the model is being loaded, and :class:`EngineDead` if loading
        failed."""
        if self.failed is not None:
            raise EngineDead(str(self.failed))
        if self._engine is None:
            raise still_loading()
        return self._engine

    def admit(self, caller: Caller) -> None:
        """Raise ``ApiError`` 503 while this caller has no room for any request.  Without an engine the route reports
        the reason."""
        try:
            if self._engine is not None:
                self._engine.check_room()
                self.slots.check_room(caller)
        except (QueueFull, Draining, EngineDead) as error:
            raise self.rejected(error) from error

    def rejected(self, error: Exception) -> ApiError:
        """Count a refused request; returns the error for its client."""
        failure = api_error(error)
        self.metrics.rejected(failure.reason)
        failure.counted = True
        return failure

    @property
    def llm(self) -> Llm:
        """The served model."""
        return self.engine.llm

    @property
    def is_chat(self) -> bool:
        """Whether the model comes with a chat template."""
        return has_template(self.llm.tokenizer)

    def check_model(self, name: str | None) -> None:
        """Raise ``ApiError`` 404 for the name of another model."""
        if name is not None and name not in (self.settings.name, self.settings.model):
            raise ApiError(
                404,
                f"the model does not exist: this server has {self.settings.name}",
                param="model",
                code="model_not_found",
            )

    def note_ignored(self, names: list[str]) -> dict[str, str]:
        """Header that lists ignored fields; each field is logged once."""
        safe = [name for name in names[:1000] if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)][:20]
        new = set(safe) - self.unknown
        if new and len(self.unknown) < 1000:
            self.unknown |= new
            log.warning("ignored unknown fields: %s", ", ".join(sorted(new)))
        return {"X-Ignored-Fields": ", ".join(safe) or str(len(names))} if names else {}
