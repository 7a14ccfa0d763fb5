"""A token tree as lines of text, for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.report.show.run import Round
from foretoken.lab.report.show.texts import visible
from foretoken.lab.report.show.why import Node


@dataclass(frozen=True)
class Line:
    """One node on a line of its own.

    Attributes:
        branch: the drawn branches before it.
        text: the token.
        kind: ``root``, ``accepted``, ``rejected``, ``untried``, ``probe``, or the origin of the target's own token.
        why: the reason, where one is worth reading.
    """

    branch: str
    text: str
    kind: str
    why: str


def lines_of(one: Round) -> list[Line]:
    """The tree of a round, the root first, every child below its parent; what was accepted comes first.

    Probes are left out, and so is what was never tried below a node that was not accepted.
    """
    last = max((n.index for n in one.nodes if n.status == "accepted"), default=0)
    children: dict[int, list[Node]] = {n.index: [] for n in one.nodes}
    for node in one.nodes[1:]:
        parent = one.nodes[node.parent]
        if node.status != "probe" and not (node.status == "untried" and parent.status in ("untried", "rejected")):
            children[node.parent].append(node)
    children[last].insert(0, one.next_token)
    for below in children.values():
        below.sort(key=lambda n: n.status != "accepted")
    root = one.nodes[0]
    return [Line("", visible(root.text), "root", ""), *_below(0, "", children)]


def _below(index: int, indent: str, children: dict[int, list[Node]]) -> Sequence[Line]:
    found: list[Line] = []
    below = children.get(index, [])
    for place, node in enumerate(below):
        is_last = place == len(below) - 1
        own = node.index < 0
        kind = node.why.split(":")[0] if own else node.status
        why = node.why if node.status == "rejected" else ""
        found.append(Line(indent + ("└─ " if is_last else "├─ "), visible(node.text), kind, why))
        if not own:
            found += _below(node.index, indent + ("   " if is_last else "│  "), children)
    return found
