"""A token tree as SVG elements.  Colours come from ``lab/report/tree.css``, shared by all pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.report.markup import Markup, join, tag
from foretoken.lab.report.show.texts import quoted, visible, width
from foretoken.lab.report.show.why import TraceNode

LETTER = 7.9
"""Width of a character in the nodes' font, in pixels."""
HEIGHT = 38.0
GAP = 30.0


@dataclass(frozen=True)
class Box:
    """Position and width of a node, in pixels."""

    x: float
    y: float
    width: float


@dataclass(frozen=True)
class Drawn:
    """SVG elements and their size."""

    markup: Markup
    width: float
    height: float


def draw_tree(nodes: Sequence[TraceNode], next_token: TraceNode, origin: str) -> Drawn:
    """A round: its nodes, root first, with the target's own token after the last accepted one.

    The token's status is ignored; its ``origin`` gives the colour.
    """
    last = max((n.index for n in nodes if n.status == "accepted"), default=0)
    own = 1 << 20  # an index after those of all nodes
    next_node = TraceNode(own, last, next_token.token, next_token.text, "accepted", next_token.why, next_token.p, None)
    everyone = [*nodes, next_node]
    boxes = _boxes(everyone)
    edges = [_edge(boxes[n.parent], boxes[n.index], n.status == "accepted") for n in everyone[1:]]
    shapes = [_node(n, boxes[n.index], n.status) for n in nodes]
    shapes.append(_node(next_node, boxes[next_node.index], origin, round_corners=True))
    right = max(box.x + box.width for box in boxes.values())
    bottom = max(box.y for box in boxes.values()) + HEIGHT
    return Drawn(join(*edges, *shapes), right + 4, bottom + 4)


def _numbers(node: TraceNode) -> str:
    parts = [f"{name} {_share(value)}" for name, value in (("p", node.p), ("q", node.q)) if value is not None]
    return " ".join(parts)


def _share(value: float) -> str:
    """A short form of a probability."""
    if value >= 0.995 or value == 0.0:
        return f"{value:.0f}"
    return f"{value:.2f}"[1:] if value >= 0.01 else f"{value:.0e}".replace("e-0", "e-")


def _breadth(node: TraceNode) -> float:
    # Characters of the numbers are 6.2 pixels wide.
    return max(width(visible(node.text)) * LETTER, len(_numbers(node)) * 6.2) + 14


def _boxes(nodes: Sequence[TraceNode]) -> dict[int, Box]:
    """Boxes of nodes: depth gives the column, every leaf takes a row, and a parent is in the row of its first child."""
    children: dict[int, list[int]] = {n.index: [] for n in nodes}
    depth: dict[int, int] = {}
    for n in nodes:
        depth[n.index] = depth[n.parent] + 1 if n.parent >= 0 else 0
        if n.parent >= 0:
            children[n.parent].append(n.index)
    by_index = {n.index: n for n in nodes}
    for below in children.values():  # accepted nodes on top
        below.sort(key=lambda i: by_index[i].status != "accepted")
    columns: dict[int, float] = {}
    for n in nodes:
        columns[depth[n.index]] = max(columns.get(depth[n.index], 0.0), _breadth(n))
    left, x = {}, 4.0
    for level in sorted(columns):
        left[level] = x
        x += columns[level] + GAP
    rows: dict[int, int] = {}
    _fill_rows(0, children, rows)
    return {n.index: Box(left[depth[n.index]], 4.0 + 46.0 * rows[n.index], _breadth(n)) for n in nodes}


def _fill_rows(root: int, children: dict[int, list[int]], rows: dict[int, int]) -> None:
    row, waiting = 0, [(root, True)]
    while waiting:
        node, first = waiting.pop()
        row += not first
        rows[node] = row
        waiting += [(child, index == 0) for index, child in reversed(list(enumerate(children[node])))]


def _edge(above: Box, below: Box, is_accepted: bool) -> Markup:
    x1, y1, x2, y2 = above.x + above.width, above.y + HEIGHT / 2, below.x, below.y + HEIGHT / 2
    bend = x2 - GAP / 2
    path = f"M{x1:.1f},{y1:.1f}H{bend - 8:.1f}C{bend:.1f},{y1:.1f} {bend - 6:.1f},{y2:.1f} {x2:.1f},{y2:.1f}"
    return tag("path", d=path, class_="edge kept" if is_accepted else "edge")


def _node(node: TraceNode, box: Box, class_: str, round_corners: bool = False) -> Markup:
    numbers = _numbers(node)
    text_y = box.y + (16 if numbers else 24)
    parts = [
        tag("title", f"{quoted(node.text)}{f', token {node.token}' if node.token >= 0 else ''}: {node.why}"),
        tag(
            "rect", x=f"{box.x:.1f}", y=f"{box.y:.1f}", width=f"{box.width:.1f}", height=HEIGHT,
            rx=14 if round_corners else 4, class_=f"node {class_}",
        ),
        tag("text", visible(node.text), x=f"{box.x + 7:.1f}", y=f"{text_y:.1f}", class_="token"),
    ]  # fmt: skip
    if numbers:
        parts.append(tag("text", numbers, x=f"{box.x + 7:.1f}", y=f"{box.y + 31:.1f}", class_="numbers"))
    return tag("g", *parts)
