"""Ray Serve's router, told which replica a session belongs to (:mod:`foretoken.server.cluster.routing`)."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from foretoken.server.cluster.routing import order


class SessionRouter(RequestRouter):
    """A session's own replica as long as it is not busier than the others."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ranks of one replica each, the most wanted first."""
        session = "" if pending_request is None else pending_request.metadata.session_id or ""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        return [[by_name[name]] for name in order(session, loads)]
