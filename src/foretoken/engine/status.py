"""Status of an engine, for servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foretoken.core import RoundTimes
from foretoken.engine.loop import Engine


@dataclass(frozen=True)
class EngineStatus:
    """Status of an engine, for servers.

    Attributes:
        running: requests in rounds or in prefill.
        waiting: requests in the queue.
        kv_bytes: memory of running sequences' keys and values.
        kv_budget_bytes: its limit; ``None`` for none.
        heartbeat_age_s: seconds since the last heartbeat of the engine's thread.
        dead: why the engine has stopped; ``None`` while it lives.
        draining: whether new requests are refused.
        rounds: number of rounds so far.
        controller: the controller's report, as of the last rounds.
        times: seconds of all rounds so far, each counted once for the whole batch.
        prefix_bytes: memory of the prefix cache, ``prefix_limit_bytes`` its current limit.
        prefix_texts: number of cached sequences.
        graphs: whether the target's forwards run as CUDA graphs.
    """

    running: int
    waiting: int
    kv_bytes: int
    kv_budget_bytes: int | None
    heartbeat_age_s: float
    dead: str | None
    draining: bool
    rounds: int
    controller: dict[str, Any] = field(default_factory=dict)
    times: RoundTimes = RoundTimes(0.0, 0.0, 0.0, 0.0)  # noqa: RUF009 (a tuple)
    prefix_bytes: int = 0
    prefix_limit_bytes: int = 0
    prefix_texts: int = 0
    graphs: bool = False


def status_of(
    engine: Engine, num_open: int, heartbeat_age_s: float, dead: str | None, draining: bool, controller: dict[str, Any]
) -> EngineStatus:
    """Current status of an engine; ``num_open`` requests have not ended."""
    running, prefixes = len(engine.requests.running), engine.requests.prefix_cache.prefixes
    return EngineStatus(
        running,
        max(0, num_open - running),
        engine.target.kv_bytes,
        engine.requests.budget.limit,
        heartbeat_age_s,
        dead,
        draining,
        engine.rounds,
        controller,
        engine.times,
        prefixes.nbytes,
        prefixes.limit,
        len(prefixes),
        engine.target.uses_graphs,
    )
