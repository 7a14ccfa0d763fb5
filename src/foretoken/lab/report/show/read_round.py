"""One round from a line of a trace: its tree, accepted nodes and labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.engine.trace import RoundTrace
from foretoken.lab.report.show.run import Round, Word, own_meaning
from foretoken.lab.report.show.texts import printable
from foretoken.lab.report.show.why import Status, TraceNode

UNKNOWN = "?"
"""Text of a token that an engine does not report."""
ORIGINS = ("recovered", "bonus", "plain")
REASONS = {
    "root": "the last token of the text: the target reads it now",
    "accepted": "accepted",
    "rejected": "rejected: the target took another token",
    "untried": "not reached: the token before it was not accepted",
    "probe": "probe: scored for the drafter, never a candidate",
}


class Fault(ValueError):
    """A fault of a line; the reader adds the file and the line number."""


def text_of(row: Mapping[str, Any], name: str, default: str) -> str:
    """A string field.  Raises ``Fault`` for another type."""
    value = row.get(name, default)
    if not isinstance(value, str):
        raise Fault(f"'{name}' must be a string")
    return value


def number(row: Mapping[str, Any], name: str) -> float | None:
    """An optional number >= 0.  Raises ``Fault`` for anything else."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise Fault(f"'{name}' must be a number >= 0")
    return float(value)


def read_round(row: Mapping[str, Any], index: int, most_nodes: int = 4096) -> Round:
    """A round from a row.  Raises ``Fault`` for an invalid or inconsistent field."""
    draft = _list(row, "draft", None, (str, type(None)))
    count = len(draft)
    if count > most_nodes:
        raise Fault(f"'draft' has {count} tokens, and at most {most_nodes} can be shown")
    parents = _list(row, "parents", count, int) if "parents" in row else list(range(count))
    for before, parent in enumerate(parents):
        if not 0 <= parent <= before:
            raise Fault(f"'parents': node {before + 1} has parent {parent}; the root is 0, and parents come first")
    accepted = _path(row, parents)
    status = _status(row, parents, accepted)
    texts = [UNKNOWN if text is None else text for text in draft]
    whys = _optional(row, "why", count, str)
    ps, qs = (_optional(row, name, count, (int, float)) for name in ("p", "q"))
    ids = _list(row, "ids", count + 2, int) if "ids" in row else [-1] * (count + 2)
    root = TraceNode(0, -1, ids[0], text_of(row, "root", UNKNOWN), "root", REASONS["root"], None, None)
    nodes = [root] + [
        TraceNode(i + 1, parents[i], ids[i + 1], texts[i], status[i], whys[i] or REASONS[status[i]], ps[i], qs[i])
        for i in range(count)
    ]
    origin = _origin(row, nodes, accepted)
    next_text = text_of(row, "next", UNKNOWN)
    next_p = number(row, "next_p")
    next_node = TraceNode(-1, -1, ids[-1], next_text, "accepted", own_meaning(origin, next_text, next_p), next_p, None)
    probes = [node.index for node in nodes if node.status == "probe"]
    trace = RoundTrace(
        index, ids[:-1], [-1, *parents], [None, *ps], [None, *qs], accepted, ids[-1], origin == "bonus",
        printable(text_of(row, "drafter", "drafter")) if count else "none",
        draft_s=(number(row, "draft_ms") or 0.0) / 1000, target_s=(number(row, "target_ms") or 0.0) / 1000,
        probes=probes,
    )  # fmt: skip
    total_ms = number(row, "total_ms")
    total_s = None if total_ms is None else total_ms / 1000
    return Round(trace, nodes, next_node, origin, _words(row, nodes, accepted, next_text, origin), total_s)


def _list(row: Mapping[str, Any], name: str, count: int | None, kind: Any) -> list[Any]:
    values = row.get(name)
    right = isinstance(values, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
    if not right or not isinstance(values, list):
        raise Fault(f"'{name}' must be a list of {'whole numbers' if kind is int else 'strings or null'}")
    if count is not None and len(values) != count:
        raise Fault(f"'{name}' has {len(values)} entries instead of {count}")
    return values


def _optional(row: Mapping[str, Any], name: str, count: int, kind: Any) -> list[Any]:
    """A list with an entry or ``null`` per draft token; all ``None`` if missing."""
    values = row.get(name)
    if values is None:
        return [None] * count
    if not isinstance(values, list) or len(values) != count:
        raise Fault(f"'{name}' must have an entry for each of the {count} draft tokens")
    if not all(v is None or (isinstance(v, kind) and not isinstance(v, bool)) for v in values):
        raise Fault(f"'{name}' has an entry of the wrong type")
    return values


def _path(row: Mapping[str, Any], parents: Sequence[int]) -> list[int]:
    accepted = _list(row, "accepted", None, int)
    above = 0
    for node in accepted:
        if not 1 <= node <= len(parents) or parents[node - 1] != above:
            raise Fault(f"'accepted' is not a path from the root: {accepted}")
        above = node
    return accepted


def _status(row: Mapping[str, Any], parents: Sequence[int], accepted: Sequence[int]) -> list[Status]:
    path = {0, *accepted}
    stored = _optional(row, "status", len(parents), str)
    statuses: list[Status] = []
    for i, parent in enumerate(parents):
        derived: Status = "accepted" if i + 1 in path else "rejected" if parent in path else "untried"
        status = stored[i] or derived
        if status not in ("accepted", "rejected", "untried", "probe") or (status == "accepted") != (
            derived == "accepted"
        ):
            raise Fault(f"'status' of node {i + 1} is {status!r}, which contradicts 'accepted'")
        statuses.append(status)
    return statuses


def _origin(row: Mapping[str, Any], nodes: Sequence[TraceNode], accepted: Sequence[int]) -> str:
    last = accepted[-1] if accepted else 0
    if "origin" in row:
        origin = text_of(row, "origin", "")
        if origin not in ORIGINS:
            raise Fault(f"'origin' must be {', '.join(ORIGINS)}, not {origin!r}")
        return origin
    if len(nodes) == 1:
        return "plain"
    return "recovered" if any(n.parent == last and n.status != "probe" for n in nodes[1:]) else "bonus"


def _words(
    row: Mapping[str, Any], nodes: Sequence[TraceNode], accepted: Sequence[int], next_text: str, origin: str
) -> list[Word]:
    """The tokens of the round; the last round may be truncated."""
    pieces = [nodes[node].text for node in accepted] + [next_text]
    if "text" in row:
        pieces = _list(row, "text", None, str)
        if len(pieces) > len(accepted) + 1:
            raise Fault(f"'text' has {len(pieces)} pieces, and the round wrote at most {len(accepted) + 1}")
    origins = ["accepted"] * len(accepted) + [origin]
    return [Word(printable(text), origins[i]) for i, text in enumerate(pieces)]
