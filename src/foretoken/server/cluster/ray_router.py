"""Ray Serve's request router with session affinity (:mod:`foretoken.server.cluster.routing`)."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from foretoken.server.cluster.routing import order


class SessionRouter(RequestRouter):
    """Routes a session to its own replica while that is not busier than the others."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ranks of one replica each, in order of preference."""
        session = "" if pending_request is None else pending_request.metadata.session_id or ""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        return [[by_name[name]] for name in order(session, loads)]
