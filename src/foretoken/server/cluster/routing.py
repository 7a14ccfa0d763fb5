"""Choice of a replica: the requests of a session go to one replica, so that its caches are reused.

A session is what a client names (``X-Session-Id``, or OpenAI's ``prompt_cache_key``), else the beginning of its
request: the messages up to the first of the user, or the first part of a prompt.  All turns of a conversation begin
with the same words, so they share a session.  All functions but the shuffling :func:`order` are pure.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_ID = 256
"""Maximum characters of a session that a client names."""


def asked_of(body: bytes) -> Mapping[str, Any]:
    """JSON object of a request; empty if it is invalid, which the replica reports."""
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def choices_of(path: str, fields: Mapping[str, Any]) -> int:
    """Number of choices of a request: ``n``, for each prompt of a completion; invalid numbers count as one. Messages
    and responses have a single answer, and a replica ignores both fields there."""
    if not path.endswith("/completions"):
        return 1
    prompt = None if path.endswith("/chat/completions") else fields.get("prompt")
    count = fields.get("n")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return prompts * (count if type(count) is int and 0 < count < 2**31 else 1)


def session_of(headers: Mapping[str, str], fields: Mapping[str, Any], tenant: str = "") -> str:
    """Digest of a request's session; empty if any replica will do.

    It depends on the ``tenant``: tenants do not reuse each other's prefixes, so they need no common replica.
    """
    session_id = headers.get("x-session-id", "")[:LONGEST_ID]
    if session_id:
        return _digest("named", tenant, session_id)
    key = fields.get("prompt_cache_key")
    if isinstance(key, str) and key:
        return _digest("named", tenant, key[:LONGEST_ID])
    beginning = _beginning(fields)
    return _digest("text", tenant, str(fields.get("cache_salt") or ""), beginning) if beginning else ""


def _beginning(fields: Mapping[str, Any]) -> str:
    """Common beginning of a conversation's turns, or of prompts with a common prefix."""
    messages = fields.get("messages") or fields.get("input")
    if isinstance(messages, list):
        first: list[Any] = []
        for message in messages:
            first.append(message)
            if isinstance(message, dict) and message.get("role") == "user":
                break
        return json.dumps(first, sort_keys=True) if first else ""
    prompt = fields.get("prompt") or fields.get("input")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        # Prompts with the same first characters share a replica
        return prompt[:256]
    return json.dumps(prompt[:64]) if isinstance(prompt, list) else ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def ranked(session: str, replicas: Sequence[str]) -> list[str]:
    """Replicas by rendezvous hashing, the session's own first: when one leaves, only its sessions move."""
    return sorted(replicas, key=lambda name: hashlib.sha256(f"{session}\0{name}".encode()).digest(), reverse=True)


def order(session: str, loads: Mapping[str, int], factor: float = 1.5) -> list[str]:
    """Replicas in order of preference: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016).

    A session's own replica comes first while it has less than ``factor`` times its share of all requests: moving a
    session costs a prefill.  The next ones in the session's order follow, and then the full ones, the least busy first.
    A request without a session goes to the least busy replica.
    """
    if not session:
        names = list(loads)
        random.shuffle(names)  # ties are broken at random
        return sorted(names, key=lambda name: loads[name])
    ranking = ranked(session, list(loads))
    most = math.ceil(factor * (sum(loads.values()) + 1) / max(1, len(loads)))
    free = [name for name in ranking if loads[name] < most]
    return [*free, *sorted((name for name in ranking if loads[name] >= most), key=lambda name: loads[name])]
