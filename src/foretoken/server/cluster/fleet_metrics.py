"""Counters of many replicas as one text, in which every sample names its replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from foretoken.server.metrics import under_names


class FleetMetrics:
    """Counters of a gateway, and the exposition of its replicas' counters.

    Attributes:
        retried: requests that were passed to another replica.
        broken: streams that ended with an error because their replica was lost.
        failures: the gateway's own error answers, by reason.
        rejections: requests that the gateway itself refused at admission, by reason.
    """

    def __init__(self, model: str, compat: str) -> None:
        self._model, self._compat = model, compat
        self.retried = self.broken = 0
        self.failures: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()

    def failed(self, reason: str) -> None:
        self.failures[reason] += 1

    def rejected(self, reason: str) -> None:
        self.rejections[reason] += 1

    def text(self, replicas: Mapping[str, str], ready: int, open_: int) -> str:
        """Exposition for Prometheus, from the replicas' expositions by name; ``ready`` replicas can serve."""
        families = (
            ("replicas_ready", "gauge", "Replicas that can serve.", ready),
            ("gateway_requests_open", "gauge", "Requests that have not ended.", open_),
            ("replica_retries_total", "counter", "Requests that another replica served.", self.retried),
            ("broken_streams_total", "counter", "Streams whose replica was lost.", self.broken),
        )
        lines: list[str] = []
        for name, kind, help_text, value in families:
            full = f"foretoken:{name}"
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"]
            lines.append(f'{full}{{model_name="{_escaped(self._model)}"}} {value}')
        text = "\n".join([*lines, *labelled({"gateway": self._errors(), **replicas})]) + "\n"
        return under_names(text, self._compat)

    def _errors(self) -> str:
        """The gateway's error answers in the format of replicas."""
        lines: list[str] = []
        for full, help_text, counts in (
            ("foretoken:request_failure_total", "Requests that were answered with an error.", self.failures),
            ("foretoken:admission_rejections_total", "Requests refused at admission.", self.rejections),
        ):
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} counter"]
            for reason, count in counts.items():
                lines.append(f'{full}{{model_name="{_escaped(self._model)}",reason="{_escaped(reason)}"}} {count}')
        return "\n".join(lines)


def labelled(texts: Mapping[str, str]) -> list[str]:
    """Lines of several expositions as one: each family once, each sample with the label ``replica``."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head_lines = heads.setdefault(family, [])
                if line not in head_lines:
                    head_lines.append(line)
            elif line:
                samples.setdefault(family, []).append(_with_label(line, name))
    return [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]


def _with_label(line: str, replica: str) -> str:
    label = f'replica="{_escaped(replica)}"'
    name, brace, tail = line.partition("{")
    if brace:
        return f"{name}{{{label},{tail}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
