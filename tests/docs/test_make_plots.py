"""The plots of the pages on theory are those that the script draws, and say what they show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import make_plots
import pytest
from pages import DOCS

from foretoken.lab.plan.speedup import expected_tokens
from foretoken.methods.trees.shapes import expected_length

each_plot = pytest.mark.parametrize("name", list(make_plots.PLOTS))


@each_plot
def test_a_plot_is_current_and_small(name: str) -> None:
    make, words = make_plots.PLOTS[name]
    kept = (make_plots.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    pytest.importorskip("matplotlib")
    root, drawn = ElementTree.fromstring(kept), ElementTree.fromstring(make_plots.picture(make(), words))
    assert said(root) == said(drawn), "make plots draws it anew"  # places may differ between versions of matplotlib
    assert root.attrib["aria-label"] == words and len(kept) < 60_000
    assert "url(" not in kept and "prefers-color-scheme: dark" in kept
    assert len(list(root.iter("{http://www.w3.org/2000/svg}text"))) > 8


def said(root: ElementTree.Element) -> list[tuple[object, ...]]:
    """Texts, tooltips, and numbers and colours of marks, in order."""
    parts = [(part.text, part.get("data-x"), part.get("data-y"), part.get("style", "")) for part in root.iter()]
    return [(text, x, y, re.findall(r"var.*?\)", style)) for text, x, y, style in parts if text or x]


@each_plot
def test_a_plot_is_on_a_page(name: str) -> None:
    pages = [page for page in DOCS.rglob("*.md") if f"figures/theory/{name}.svg" in page.read_text(encoding="utf-8")]
    assert pages


def test_the_best_tree_is_the_best() -> None:
    first, second, _ = make_plots.POSITIONS
    assert make_plots.best_tree(1) == pytest.approx(1 + first)
    assert make_plots.best_tree(3) == pytest.approx(
        expected_tokens(first, 3)
    )  # 0.216 is more than a second child's 0.15
    five = expected_length([(0,), (0, 0), (0, 0, 0), (1,), (0, 0, 0, 0)], [[first, second]] * 4)
    assert make_plots.best_tree(5) == pytest.approx(five)
    assert make_plots.best_tree(32) > expected_tokens(first, 32)
