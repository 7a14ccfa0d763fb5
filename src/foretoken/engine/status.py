"""What a server shows of its engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foretoken.core import RoundTimes
from foretoken.engine.loop import Engine


@dataclass(frozen=True)
class EngineStatus:
    """What a server shows of its engine.

    Attributes:
        running: requests that take part in rounds or have their prompts read.
        waiting: requests in the queue.
        kv_bytes: memory of running texts' keys and values.
        kv_budget_bytes: the most that they may take; ``None`` for no limit.
        heartbeat_age_s: seconds since the engine's thread last showed that it lives.
        dead: why it does not live any more.
        draining: whether new requests are refused.
        rounds: rounds so far.
        controller: what the controller says of itself; as of the last rounds.
        times: seconds of all rounds so far, each counted once however many requests took part.
        prefix_bytes: memory of kept texts, ``prefix_limit_bytes`` the most that they may take just now.
        prefix_texts: how many are kept.
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
    """What an engine does just now; ``num_open`` requests have not ended."""
    running, prefixes = len(engine.running), engine.prefix_cache.prefixes
    return EngineStatus(
        running,
        max(0, num_open - running),
        engine.target.kv_bytes,
        engine.budget.limit,
        heartbeat_age_s,
        dead,
        draining,
        engine.rounds,
        controller,
        engine.times,
        prefixes.nbytes,
        prefixes.limit,
        len(prefixes),
        getattr(engine.target, "graphs_off", "none") == "",
    )
