"""Many replicas: the same application as a deployment of Ray Serve.

Every replica is a server of its own with its own model, queue and caches, so limits and errors are the same as on one
machine.  Requests of one session go to one replica, where its prefix and its drafts are: whoever sends the header
``X-Session-Id`` (or none, and gets the replica with the fewest requests) decides what a session is.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from foretoken.server.config import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

MANY = 100_000
"""Requests that Ray may hand to a replica, which refuses by its own limits, in OpenAI's words."""


def serve_replicas(settings: Settings, replicas: int, address: str, forever: bool = True) -> int:
    """Serve with several replicas until a signal comes; returns the exit code.

    Args:
        settings: of every replica; host and port are those of Ray's proxy.
        replicas: how many.
        address: ``local`` starts Ray here, ``auto`` finds a cluster that this machine is part of, or its address.
        forever: wait for a signal; else return as soon as all replicas are ready.

    Raises:
        ValueError: Ray is not installed, there is no cluster at the address, or replicas do not get ready.
    """
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError:
        raise ValueError("--replicas needs Ray: pip install 'foretoken[ray]'") from None
    try:
        ray.init(
            address=None if address == "local" else address,
            ignore_reinit_error=True,
            include_dashboard=False,
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None
    serve.start(
        http_options={"host": settings.host, "port": settings.port, "request_timeout_s": settings.request_timeout}
    )
    serve.run(deployment(settings, replicas), name="foretoken", route_prefix=settings.root_path or "/")
    print(
        f"serving {settings.name} with {replicas} replicas at http://{settings.host}:{settings.port}", file=sys.stderr
    )
    if forever:
        _wait()
        serve.shutdown()
        ray.shutdown()
    return 0


def deployment(settings: Settings, replicas: int) -> Any:
    """The application as a deployment."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    @serve.deployment(
        name="foretoken",
        num_replicas=replicas,
        max_ongoing_requests=MANY,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        health_check_period_s=2,
        health_check_timeout_s=max(10.0, settings.watchdog),
        request_router_config=RequestRouterConfig(request_router_class="foretoken.server.routing:SessionRouter"),
        ray_actor_options=_resources(settings),
    )
    @serve.ingress(functools.partial(_application, settings))
    class Replica:
        """One model, one engine."""

        def check_health(self) -> None:
            """Ray starts another replica when this raises."""
            trouble = _state.trouble if _state is not None else None
            if trouble is not None:
                raise RuntimeError(trouble)

    return Replica.bind()  # type: ignore[attr-defined]


_state: Any = None


def _application(settings: Settings) -> FastAPI:
    """The application of a replica, whose model is loaded before it gets requests."""
    global _state
    from foretoken.server.app import create_app
    from foretoken.server.serving import Serving

    _state = Serving(settings)
    return create_app(settings, _state)


def _resources(settings: Settings) -> dict[str, Any]:
    """A GPU for each replica where the model runs on one."""
    import torch

    wants = settings.device.startswith("cuda") or (settings.device == "auto" and torch.cuda.is_available())
    return {"num_gpus": 1} if wants else {"num_cpus": 1}


def _wait() -> None:
    """Until a signal comes."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    while not asked.is_set():
        time.sleep(0.2)
