"""Many replicas under Ray Serve, behind one gateway.

Each replica is a server with its own model, queue and caches, so limits and errors are the same as on one machine.  Ray
starts, watches and replaces replicas.  Clients never reach Ray's own HTTP proxy, whose errors are plain text: the
gateway (:mod:`foretoken.server.cluster.gateway`) calls the replicas through Ray's handles.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.types import Message

from foretoken.core.values import one_line
from foretoken.server import logs
from foretoken.server.cluster.gateway import Fleet, ReplicaLost, create_gateway
from foretoken.server.config import ServerSettings
from foretoken.server.keys import Caller
from foretoken.server.lifecycle import STOPPING, bound, run_app

REASON = re.compile(r"(?:ray::|\s*)(?:[\w.]*\.)?(?:\w*Error|\w*Exception): (.+)")


def serve_replicas(settings: ServerSettings, replicas: int, address: str, sock: socket.socket) -> int:
    """Serve with several replicas until a signal arrives; returns the exit code.  Host, port and keys of the settings
    are the gateway's; for ``address`` see :class:`RayReplicas`."""
    settings = bound(settings, sock)
    fleet = Fleet(settings, RayReplicas(settings, replicas, address))
    return run_app(create_gateway(fleet), fleet, sock)


def check_ray() -> None:
    """Raise ``ValueError`` if Ray is not installed, before anything else is done."""
    import importlib.util

    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise ValueError("--replicas needs Ray: pip install 'foretoken[ray]'")


class RayReplicas:
    """Replicas as a deployment of Ray Serve; see :class:`foretoken.server.cluster.gateway.Replicas`.

    ``address`` is the cluster's; ``local`` starts Ray here, and ``auto`` finds the cluster of this machine.
    """

    def __init__(self, settings: ServerSettings, count: int, address: str) -> None:
        self.settings, self.num_wanted, self._address = settings, count, address
        self.num_ready = 0
        self._name = f"foretoken-{settings.port}"
        self._handle: Any = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join the cluster and deploy; returns when all replicas can serve.  Raises ``ValueError`` if there is no such
        cluster or a replica cannot be started."""
        # Not in the main thread, where Ray would install a SIGTERM handler that raises at any point.
        await asyncio.to_thread(self.join)
        for number in STOPPING:  # Ray's C++ part has replaced each by one that writes a trace
            signal.signal(number, signal.getsignal(number))
        telling = asyncio.create_task(self._tell())
        try:
            self._handle = await asyncio.to_thread(self._deploy)
        finally:
            telling.cancel()
        self.num_ready = self.num_wanted
        self._watching = asyncio.create_task(self._watch())

    def join(self) -> None:
        """Join or start a cluster.  Raises ``ValueError`` if there is none at the address."""
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        local = self._address == "local"
        if not local:
            _reach(self._address)
        import ray

        try:
            ray.init(
                address=None if local else self._address,
                namespace="serve",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                num_cpus=max(self.num_wanted * self.settings.tensor_parallel, _cores()) if local else None,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            hint = "" if local else "; is RAY_AUTH_TOKEN that of the cluster?"
            raise ValueError(f"no Ray cluster at {self._address!r}: {reason}{hint}") from None

    def _deploy(self) -> Any:
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        quiet = {"log_level": "ERROR", "enable_access_log": False}
        try:
            serve.start(proxy_location="Disabled", logging_config=quiet)
            application = deployment(self.settings, self.num_wanted, self._threads())
            handle = serve.run(application, name=self._name, route_prefix=None, logging_config=quiet)
        except RuntimeError as error:
            raise ValueError(f"the replicas cannot be started: {_reason(self._name, error)}") from None
        return handle.options(method_name="answer", stream=True)

    def _threads(self) -> int:
        """Threads per replica that computes on the CPU, if the replicas share this machine; else 0."""
        return max(1, _cores() // self.num_wanted) if self._address == "local" else 0

    async def _tell(self) -> None:
        """Report what a long start waits for: most often the cluster has no room."""
        import ray

        while True:
            # Seconds between two reports
            await asyncio.sleep(60.0)
            free = await asyncio.to_thread(ray.available_resources)
            free_resources = {name: free.get(name, 0) for name in ("CPU", "GPU")}
            wants = _resources(self.settings)
            logs.say(f"waiting for {self.num_wanted} replicas of {wants}; free: {free_resources}")

    async def _watch(self) -> None:
        while True:
            # Seconds between two counts of the replicas
            await asyncio.sleep(0.5)
            try:
                self.num_ready = await asyncio.to_thread(_running, self._name)
            except Exception:  # Ray's controller is being replaced: the last count stays
                continue

    async def answer(
        self, scope: dict[str, Any], body: bytes, session: str, caller: Caller
    ) -> AsyncGenerator[list[Message], None]:
        """Messages of an answer.  Raises ``ReplicaLost`` if the replica died meanwhile."""
        from ray.exceptions import RayError, RayTaskError, TaskCancelledError

        response = self._handle.options(session_id=session).remote(scope, body, caller)
        is_over = False
        try:
            async for piece in response:
                yield piece
            is_over = True
        except RayTaskError:
            is_over = True
            raise
        except (RayError, TaskCancelledError) as error:
            is_over = True
            raise ReplicaLost(type(error).__name__) from error
        finally:
            if not is_over:
                response.cancel()

    async def metrics(self) -> Mapping[str, str]:
        """Counters of each replica, by name."""
        return dict(await self._ask_all("metrics"))

    async def is_chat(self) -> bool:
        """Whether the model comes with a chat template; false if no replica reports it in time."""
        return any(await self._ask_all("is_chat"))

    async def _ask_all(self, method: str) -> list[Any]:
        """Results of a method of every replica; empty if one does not answer in time."""
        from ray.exceptions import RayError

        try:
            return list(await self._handle.broadcast(method).results_async(timeout_s=5.0))
        except (RayError, TimeoutError):
            return []

    async def stop(self) -> None:
        """Remove the deployment, and end Ray if it was started here."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.to_thread(self._leave)

    def abandon(self) -> None:
        """End what is being started: Ray's processes if it was started here, else the deployment.

        Ray itself is not shut down: the deploying thread would start it again.
        """
        import psutil
        import ray
        from ray import serve

        if self._address == "local":
            children = psutil.Process().children(recursive=True)
            _kill(children)
            psutil.wait_procs(children, timeout=1.0)
        elif ray.is_initialized():
            serve.delete(self._name, _blocking=False)

    def _leave(self) -> None:
        import psutil
        import ray
        from ray import serve

        if not ray.is_initialized():
            return
        local = self._address == "local"
        children = psutil.Process().children(recursive=True) if local else []
        if self._handle is not None:
            self._handle.shutdown()
        serve.delete(self._name)
        ray.shutdown()
        # Ray's agents take up to a minute to notice that their node is gone, so they get a second to end.
        _kill(psutil.wait_procs(children, timeout=1.0)[1])


def _kill(processes: list[Any]) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def deployment(settings: ServerSettings, replicas: int, threads: int) -> Any:
    """The application as a deployment, with ``threads`` per replica on the CPU; 0 leaves the number to Ray, which gives
    as many as it reserves."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from foretoken.server.cluster.replica import Replica

    @serve.deployment(
        name="foretoken",
        num_replicas=replicas,
        max_ongoing_requests=100_000,  # a replica refuses by its own limits, with OpenAI's errors
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        health_check_period_s=2,
        health_check_timeout_s=max(10.0, settings.watchdog),
        max_constructor_retry_count=1,
        request_router_config=RequestRouterConfig(
            request_router_class="foretoken.server.cluster.ray_router:SessionRouter"
        ),
        ray_actor_options={
            **_resources(settings),
            **({"runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}}} if threads else {}),
        },
    )
    class Foretoken:
        async def __init__(self, settings: ServerSettings) -> None:  # type: ignore[misc]
            self.replica = Replica(settings, serve.get_replica_context().replica_id.unique_id)
            await self.replica.start()

        async def answer(
            self, scope: dict[str, Any], body: bytes, caller: Caller
        ) -> AsyncGenerator[list[Message], None]:
            async for piece in self.replica.answer(scope, body, caller):
                yield piece

        async def metrics(self) -> tuple[str, str]:
            return self.replica.name, self.replica.metrics()

        async def is_chat(self) -> bool:
            return self.replica.is_chat

        def check_health(self) -> None:
            """Raise if the engine is dead or hangs, upon which Ray starts another replica."""
            self.replica.check()

        async def __del__(self) -> None:
            await self.replica.stop()

    return Foretoken.bind(settings)  # type: ignore[attr-defined]


def _noted() -> str:
    """Address of the cluster that this machine belongs to, as written by ``ray start``."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    return file.read_text().strip() if file.exists() else ""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _reach(address: str) -> None:
    """Raise ``ValueError`` quickly if nothing listens at an address: Ray itself tries for minutes."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _noted()
        if not address:
            raise ValueError("no Ray cluster at 'auto': start one with ray start --head, or give its address")
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ValueError(f"--ray-address must be local, auto or HOST:PORT, not {address!r}")
    try:
        socket.create_connection((host, int(port)), 5.0).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster at {address!r}: {error.strerror or error}") from None


def _resources(settings: ServerSettings) -> dict[str, float]:
    """Ray resources of a replica: a GPU per process if the model runs on one, else a CPU."""
    import torch

    wants = settings.device.startswith("cuda") or (settings.device == "auto" and torch.cuda.is_available())
    return {"num_gpus" if wants else "num_cpus": settings.tensor_parallel}


def _running(name: str) -> int:
    """Number of an application's replicas that can serve."""
    from ray import serve
    from ray.serve.schema import ReplicaState

    status = serve.status().applications.get(name)
    if status is None:
        return 0
    return sum(deployment.replica_states.get(ReplicaState.RUNNING, 0) for deployment in status.deployments.values())


def _reason(name: str, error: Exception) -> str:
    """Last error of a replica's constructor, or of Ray itself, in one line."""
    from ray import serve

    status = serve.status().applications.get(name)
    texts = (
        [] if status is None else [status.message, *(deployment.message for deployment in status.deployments.values())]
    )
    for text in [*reversed(texts), str(error)]:
        matches = REASON.findall(text)
        if matches:
            return str(matches[-1]).strip()
    return one_line(error)
