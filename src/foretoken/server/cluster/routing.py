"""Which replica serves a request: one session, one replica, so that its caches are found again.

A session is what a client says it is (``X-Session-Id``, or OpenAI's ``prompt_cache_key``), else the beginning of what
it sends: the messages up to the first of the user, or the first part of a prompt.  A conversation begins with the same
words at every turn, so that all its turns have one session.  Pure functions:
:mod:`foretoken.server.cluster.scale` asks them.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_ID = 256
"""Characters of a session that a client names."""
MORE = 1.5
"""A replica keeps its sessions until it has so many times its share of requests: moving one costs reading its text."""
TOKENS = 64
"""The same for a prompt of token ids."""


def asked_of(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a request; empty for what is none: a replica says what is wrong with it."""
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def choices_of(fields: Mapping[str, Any]) -> int:
    """How many texts a request asks for: as many as it has prompts, times ``n``; wrong numbers count as one."""
    prompt, count = fields.get("prompt"), fields.get("n")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return prompts * (count if type(count) is int and 0 < count < 2**31 else 1)


def session_of(headers: Mapping[str, str], fields: Mapping[str, Any], tenant: str = "") -> str:
    """The session of a request, a digest; empty where any replica will do.

    It depends on who asks (``tenant``): texts of one are never found again by another, so they need no replica in
    common.
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
    """What the turns of a conversation, or prompts with a common prefix, have in common."""
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
        # Of a prompt: texts with the same ones share a replica
        return prompt[:256]
    return json.dumps(prompt[:TOKENS]) if isinstance(prompt, list) else ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def ranked(session: str, replicas: Sequence[str]) -> list[str]:
    """Replicas by rendezvous hashing, the session's own first: when one leaves, only its sessions move."""
    return sorted(replicas, key=lambda name: hashlib.sha256(f"{session}\0{name}".encode()).digest(), reverse=True)


def order(session: str, loads: Mapping[str, int]) -> list[str]:
    """Replicas, the most wanted first: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016).

    A session's own replica comes first as long as it has less than its share of all requests, widened by ``MORE``;
    then the next ones in the session's order; at last the full ones, the least busy first.  A request without a session
    goes to the least busy replica.
    """
    if not session:
        names = list(loads)
        random.shuffle(names)  # among equals none is preferred
        return sorted(names, key=lambda name: loads[name])
    ranking = ranked(session, list(loads))
    most = math.ceil(MORE * (sum(loads.values()) + 1) / max(1, len(loads)))
    free = [name for name in ranking if loads[name] < most]
    return [*free, *sorted((name for name in ranking if loads[name] >= most), key=lambda name: loads[name])]
