"""``grafana/foretoken.json``: every metric and label that it asks for is exported, under both prefixes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import Running

FILE = Path(__file__).parents[2] / "grafana" / "foretoken.json"
METRIC = re.compile(r"\$\{prefix\}:([a-z0-9_]+)")


def queries() -> list[str]:
    """Everything that the dashboard asks Prometheus."""
    board = json.loads(FILE.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    return [*expressions, *variables]


def exported(page: str, prefix: str) -> dict[str, str]:
    """Names that a server exports for a prefix, and what kind each is; counters by the name of their samples."""
    kinds: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith(f"# TYPE {prefix}:"):
            name, kind = line.removeprefix(f"# TYPE {prefix}:").split()
            names = [f"{name}_{end}" for end in ("bucket", "sum", "count")] if kind == "histogram" else [name]
            kinds |= dict.fromkeys(names, kind)
    return kinds


def objections(expr: str, names: dict[str, str]) -> list[str]:
    """What is wrong with a query."""
    problems = [f"{name} is not exported" for name in METRIC.findall(expr) if name not in names]
    problems += [f"{m} has no prefix" for m in re.findall(r"(?<![:}\w])\w+(?=\{model_name)", expr)]
    for name in re.findall(r"rate\(\$\{prefix\}:([a-z0-9_]+)", expr):
        if names.get(name) == "gauge":
            problems.append(f"{name} is a gauge: it has no rate")
    return problems


@pytest.mark.parametrize("prefix", ["foretoken", "vllm"])
def test_the_server_exports_what_the_dashboard_asks(server: Running, prefix: str) -> None:
    names = exported(server.client.get("/metrics").text, prefix)
    assert len(names) > 20
    expressions = queries()
    assert len(expressions) > 25
    assert [objection for expr in expressions for objection in objections(expr, names)] == []


def test_labels_that_it_groups_by_are_there(server: Running) -> None:
    server.complete("one two three one two three", max_tokens=24)  # with drafts
    server.complete(max_tokens=4, speculative={"enabled": False})
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    grouped = 0
    for expr in queries():
        for by, name in re.findall(r"sum by \((\w+)\) \(rate\(\$\{prefix\}:([a-z0-9_]+)", expr):
            for prefix in ("foretoken", "vllm"):
                if f"{prefix}:{name}" in labels:  # a counter of errors has no samples before the first
                    assert by in labels[f"{prefix}:{name}"], (by, name)
                    grouped += 1
    assert grouped >= 20


def test_wrong_queries_are_seen(server: Running) -> None:
    names = exported(server.client.get("/metrics").text, "foretoken")
    for expr, words in (
        ("rate(${prefix}:no_such_total[1m])", "not exported"),
        ("rate(${prefix}:num_requests_running[1m])", "gauge"),
        ('sum(num_requests_running{model_name="x"})', "no prefix"),
        ("${prefix}:time_to_first_token_seconds", "not exported"),  # a histogram has buckets, sum and count
    ):
        assert any(words in objection for objection in objections(expr, names)), expr


def test_the_dashboard_can_be_imported() -> None:
    board: dict[str, Any] = json.loads(FILE.read_text())
    assert board["uid"] == "foretoken" and board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & places, panel["title"]
        places |= cells
