"""Trace files: JSON Lines for the rounds of any engine (``docs/howto/show.md`` lists the fields)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretoken.lab.report.show.read_round import Fault, number, read_round, text_of
from foretoken.lab.report.show.run import Round, Shown, Total, total_of
from foretoken.lab.report.show.texts import printable

MARK, VERSION = "foretoken_trace", 1
ONLY_REQUEST = "1"
"""Name of the request in a trace that names none."""


@dataclass(frozen=True)
class Trace:
    """Contents of a trace file.

    Attributes:
        facts: names and values about the run, the engine first.
        requests: the requests with rounds, by name.
        other_totals: totals reported without rounds.
    """

    facts: Sequence[tuple[str, str]]
    requests: Mapping[str, Shown]
    other_totals: Sequence[Total] = field(default_factory=list)

    @property
    def totals(self) -> list[Total]:
        """One total per request with rounds, then the reported totals."""
        return [*(total_of(name, run) for name, run in self.requests.items()), *self.other_totals]

    def choose(self, name: str | None) -> Shown:
        """The request with a name, or the first one; without any rounds, an empty request.  Raises ``ValueError`` for
        an unknown name."""
        if name is None:
            name = next(iter(self.requests), None)
        if name is None:
            return Shown("", self.facts, [])
        if name not in self.requests:
            names = ", ".join(list(self.requests)[:8]) or "none with rounds"
            raise ValueError(f"the trace has no request {name!r}; it has {names}")
        run = self.requests[name]
        count = len(self.requests)
        more = [("request", f"{name}, one of {count}")] if count > 1 else []
        return replace(run, facts=[*self.facts, *more])


def to_lines(run: Shown, engine: str) -> list[str]:
    """The lines of a trace with one request."""
    head = {MARK: VERSION, "engine": engine, "facts": dict(run.facts)}
    rows = [head, {"type": "request", "request": ONLY_REQUEST, "prompt": run.prompt}]
    rows += [{"type": "round", "request": ONLY_REQUEST, **_round_fields(round_)} for round_ in run.rounds]
    return [json.dumps(row) for row in rows]


def _round_fields(round_: Round) -> dict[str, Any]:
    root, *drafts = round_.nodes
    trace, next_token = round_.trace, round_.next_token
    return {
        "drafter": trace.drafter,
        "root": root.text,
        "draft": [node.text for node in drafts],
        "parents": [node.parent for node in drafts],
        "accepted": list(trace.accepted),
        "status": [node.status for node in drafts],
        "why": [node.why for node in drafts],
        "p": [_short(node.p) for node in drafts],
        "q": [_short(node.q) for node in drafts],
        "ids": [node.token for node in (*round_.nodes, next_token)],
        "next": next_token.text,
        "next_p": _short(next_token.p),
        "origin": round_.origin,
        "text": [word.text for word in round_.words],
        "draft_ms": _short(1000 * trace.draft_s),
        "target_ms": _short(1000 * trace.target_s),
        "total_ms": None if round_.total_s is None else _short(1000 * round_.total_s),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def read_trace(file: Path) -> Trace:
    """Read a trace.  Raises ``ValueError``, with file and line, for other files, other versions and malformed rows."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    reader = _Reader()
    for number_of_line, raw in enumerate(lines, 1):
        if raw.strip():
            try:
                reader.add(_row(raw))
            except Fault as fault:
                raise ValueError(f"{file}, line {number_of_line}: {fault}") from None
    if not reader.facts:
        raise ValueError(f"{file} is empty: a trace begins with {{{json.dumps(MARK)}: {VERSION}}}")
    if not reader.rounds and not reader.totals:
        raise ValueError(f"{file} holds no rounds and no totals")
    runs = {name: Shown(reader.prompts.get(name, ""), reader.facts, rounds) for name, rounds in reader.rounds.items()}
    return Trace(reader.facts, runs, reader.totals)


def _row(raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8, or not a JSON number"
        raise Fault(f"no JSON ({reason})") from None
    if not isinstance(row, dict):
        raise Fault("no JSON object")
    return row


def _no_constant(name: str) -> float:
    raise ValueError(name)


class _Reader:
    """Collects rows; ``facts`` is empty before the first row."""

    def __init__(self) -> None:
        self.facts: list[tuple[str, str]] = []
        self.prompts: dict[str, str] = {}
        self.rounds: dict[str, list[Round]] = {}
        self.totals: list[Total] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row.  Raises ``Fault`` for an invalid one."""
        if not self.facts:
            self._head(row)
            return
        kind = row.get("type")
        if kind == "request":
            self.prompts[_request(row)] = printable(text_of(row, "prompt", ""))
        elif kind == "round":
            rounds = self.rounds.setdefault(_request(row), [])
            rounds.append(read_round(row, len(rounds)))
        elif kind == "total":
            self.totals.append(_total(row))
        else:
            raise Fault(f"'type' must be request, round or total, not {kind!r}")

    def _head(self, row: Mapping[str, Any]) -> None:
        version = row.get(MARK)
        if MARK not in row:
            raise Fault(f"not a trace: the first line must be {{{json.dumps(MARK)}: {VERSION}, ...}}")
        if version != VERSION or isinstance(version, bool):
            raise Fault(f"a trace of version {version!r}, and this foretoken reads version {VERSION}")
        facts = row.get("facts", {})
        if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
            raise Fault("'facts' must be an object of strings")
        self.facts = [("engine", printable(text_of(row, "engine", "unknown")))]
        self.facts += [(printable(name), printable(value)) for name, value in facts.items()]


def _request(row: Mapping[str, Any]) -> str:
    name = row.get("request", ONLY_REQUEST)
    if not isinstance(name, str) or not name:
        raise Fault("'request' must be a string")
    return printable(name)


def _total(row: Mapping[str, Any]) -> Total:
    """A total from a row.  Raises ``Fault`` for no figures or invalid ones."""
    names = ("rounds", "drafted", "accepted", "tokens_per_round", "acceptance_rate", "tokens_per_s")
    values = {name: number(row, name) for name in names}
    by_position = row.get("per_position", [])
    if not isinstance(by_position, list) or not all(_is_share(value) for value in by_position):
        raise Fault("'per_position' must be a list of shares from 0 to 1")
    if all(value is None for value in values.values()) and not by_position:
        raise Fault(f"a total needs at least one of {', '.join(names)}, per_position")
    name = printable(text_of(row, "label", "")) or _request(row)
    return Total(name, per_position=tuple(by_position), **values)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value <= 1
