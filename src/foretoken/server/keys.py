"""API keys: identity and limits of callers."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

OPTIONS = ("name", "running", "queued", "tokens_per_minute", "priority")
"""Options that may follow a key in a file, as NAME=VALUE; ``priority`` also alone."""


@dataclass(frozen=True)
class Caller:
    """Identity and limits of a client; travels to replicas.

    Attributes:
        tenant: owner of the texts and drafts that may be reused for a request; empty for those of everybody.
        name: name of the key in logs and errors.
        running: choices of this key that run together, in each engine; 0 for no limit.
        queued: choices that may be open in addition to ``running``, over all replicas together; ``None`` for no limit.
        tokens_per_minute: tokens of prompts and answers; 0 for no limit.
        priority: whether a request may ask to precede those of others.
    """

    tenant: str = ""
    name: str = ""
    running: int = 0
    queued: int | None = None
    tokens_per_minute: int = 0
    priority: bool = False

    @property
    def most_open(self) -> int | None:
        """Limit of choices that run and wait together; ``None`` for no limit."""
        return None if self.queued is None else self.running + self.queued


class Keys:
    """All keys of a server.  An entry is a key, alone or followed by options (:func:`parsed`); ``standard`` has the
    limits that an entry does not set.  Raises ``ValueError`` as :func:`parsed` does, and for a repeated key or name."""

    def __init__(self, entries: Sequence[str], standard: Caller) -> None:
        self._callers: list[tuple[bytes, Caller]] = []
        for number, entry in enumerate(entries, 1):
            key, caller = parsed(entry, number, standard)
            digest = hashlib.sha256(key.encode()).digest()
            if any(digest == other for other, _ in self._callers):
                raise ValueError(f"API key {number} is given twice: give every key once")
            self._callers.append((digest, replace(caller, tenant=digest.hex()[:16] if len(entries) > 1 else "")))
        names = [caller.name for _, caller in self._callers]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two API keys have the name {twice!r}: give each a different name")

    def __len__(self) -> int:
        return len(self._callers)

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """Caller that sent these headers (lower-case names), compared with all keys in constant time; ``None`` for an
        unknown key."""
        if not self._callers:
            return Caller(priority=True)  # without keys all clients are one caller
        digest = hashlib.sha256(_key_of(headers).encode()).digest()
        same = [caller for other, caller in self._callers if hmac.compare_digest(digest, other)]
        return same[0] if same else None


def parsed(entry: str, number: int, standard: Caller) -> tuple[str, Caller]:
    """Key and limits of an entry: ``KEY name=team-a running=4 queued=16 tokens_per_minute=60000 priority``.  Missing
    options come from ``standard``.

    Errors and the default name identify the key by its ``number`` (from 1), never by its text.  Raises ``ValueError``
    for an unknown option, a value of the wrong type, and options without a key.
    """
    key, *options = entry.split()
    if key.partition("=")[0] in OPTIONS and "=" in key:
        raise ValueError(
            f"API key {number} is the option {key.partition('=')[0]!r}: write options after their key, in a line of "
            "--api-key-file"
        )
    values: dict[str, Any] = {"name": f"key-{number}"}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in OPTIONS or not (equals or name == "priority"):
            raise ValueError(f"API key {number} has an unknown option: use {', '.join(OPTIONS)}, as NAME=VALUE")
        values[name] = _value(number, name, value if equals else "true")
    caller = replace(standard, **values)
    if caller.queued is not None and not caller.running:
        raise ValueError(f"API key {number} limits queued but not running: give running too")
    return key, caller


def _value(number: int, name: str, text: str) -> Any:
    if name == "name":
        if not text or len(text) > 64 or not text.isprintable():
            raise ValueError(f"API key {number}: name must be 1 to 64 printable characters")
        return text
    if name == "priority":
        if text not in ("true", "false"):
            raise ValueError(f"API key {number}: priority must be true or false, not {text[:32]!r}")
        return text == "true"
    least = 0 if name == "queued" else 1
    if not (text.isascii() and text.isdigit() and least <= int(text[:18]) < 2**31):
        raise ValueError(f"API key {number}: {name} must be a whole number of at least {least}, not {text[:32]!r}")
    return int(text)


def _key_of(headers: Mapping[str, str]) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":  # from a browser: any user name, the key as the password
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return value.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "").strip()
