"""Which replica serves a request, for Ray Serve: one session, one replica, so that its caches are found again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import RequestRouter


def ranked(session: str, replicas: Sequence[str]) -> list[str]:
    """Replicas by rendezvous hashing, the session's own first: when one leaves, only its sessions move."""
    return sorted(replicas, key=lambda name: hashlib.sha256(f"{session}\0{name}".encode()).digest(), reverse=True)


class SessionRouter(RequestRouter):
    """A session's replica; without a session the less busy one of two."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ranks of replicas, the most wanted first."""
        session = "" if pending_request is None else pending_request.metadata.session_id or ""
        if not session:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        return [[by_name[name]] for name in ranked(session, list(by_name))]
