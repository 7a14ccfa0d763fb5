"""Coupled sampling against rejection in theory: exact acceptance over random pairs of distributions, as a picture.

The target's distribution p is a softmax of random logits; the draft's is the mixture (1 - m) p + m r with another such
distribution r, and m spreads over (0, 1].  No model runs, and nothing is simulated.

    python benchmarks/coupled_acceptance.py --out coupled.png [--pairs 400] [--vocabulary 32] [--sharpness 1.5]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from coupled_theory import (
    acceptance_probability,
    candidates_acceptance,
    coupled_acceptance,
    coupled_lower_bound,
    recursive_rejection_acceptance,
)
from numpy.typing import NDArray

Array = NDArray[np.float64]
BINS = np.linspace(0.0, 1.0, 11)
"""Edges of the total variations whose pairs are averaged."""
DARK, GREEN, HERE, OTHER = "#444444", "#4d8a57", "#b3442f", "#5b84b1"


def random_pairs(pairs: int, vocabulary: int, sharpness: float, seed: int = 0) -> tuple[Array, Array]:
    """Distributions p and q [pairs, V]: q leaves p by equal steps, up to unrelated ones."""
    rng = np.random.default_rng(seed)
    p, r = (_softmax(sharpness * rng.standard_normal((pairs, vocabulary))) for _ in range(2))
    mixed = np.linspace(0.0, 1.0, pairs + 1)[1:, None]
    return p, (1.0 - mixed) * p + mixed * r


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def acceptances(p: Array, q: Array) -> dict[str, Array]:
    """Chance per pair that the target's token is among the candidates, by rule and number of siblings."""
    return {
        "rejection, 1": acceptance_probability(p, q),
        "coupled, 1": coupled_acceptance(p, q),
        "recursive rejection, 2": recursive_rejection_acceptance(p, q, 2),
        "coupled, 2": candidates_acceptance(p, q, 2),
        "recursive rejection, 4": recursive_rejection_acceptance(p, q, 4),
        "coupled, 4": candidates_acceptance(p, q, 4),
    }


def means(distance: Array, values: Array) -> tuple[Array, Array]:
    """Mean distance and mean value of the pairs in each of the ``BINS`` that has any."""
    places = np.digitize(distance, BINS)
    groups = [places == place for place in np.unique(places)]
    return np.array([distance[g].mean() for g in groups]), np.array([values[g].mean() for g in groups])


def plot(distance: Array, found: dict[str, Array], file: Path) -> None:
    """Two panels: one candidate, and several.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'foretoken[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True, sharey=True)
    line = np.linspace(0.0, 1.0, 101)
    left.plot(line, 1.0 - line, color=DARK, linewidth=1.6, label="rejection: 1 - TV, the optimum for one candidate")
    left.plot(
        line,
        (1.0 - line) / (1.0 + line),
        color=DARK,
        linewidth=1.2,
        linestyle=":",
        label="(1 - TV) / (1 + TV), the lower bound for coupled",
    )
    _draw(left, distance, found["coupled, 1"], HERE, "-", "coupled (points: pairs, line: their mean)")
    left.set_title("One candidate", fontsize=10)
    for name, colour in (("4", GREEN), ("2", OTHER)):
        _draw(right, distance, found[f"coupled, {name}"], colour, "-", f"coupled, {name} siblings")
        _draw(right, distance, found[f"recursive rejection, {name}"], colour, "--", f"recursive rejection, {name}")
    _draw(right, distance, found["coupled, 1"], HERE, "-", "coupled, 1")
    right.plot(line, 1.0 - line, color=DARK, linewidth=1.2, linestyle="--", label="rejection, 1")
    right.set_title("Siblings (recursive rejection: drawn without replacement)", fontsize=10)
    left.set_ylabel("chance that the target's token is a candidate")
    for axes in (left, right):
        axes.set_xlabel("TV, total variation between draft and target")
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(0.0, 1.02)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, loc="lower left")
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def _draw(axes: Any, distance: Array, values: Array, colour: str, style: str, label: str) -> None:
    """The mean as a line; the pairs as pale points, for coupled sampling only."""
    axes.plot(*means(distance, values), color=colour, linestyle=style, linewidth=1.8, label=label, zorder=3)
    if style == "-":
        axes.plot(distance, values, ".", color=colour, markersize=3, alpha=0.35, zorder=2)


def main() -> None:
    """Compute, print the means, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="PNG file")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--vocabulary", type=int, default=32)
    parser.add_argument("--sharpness", type=float, default=1.5, help="standard deviation of the random logits")
    options = parser.parse_args()
    p, q = random_pairs(options.pairs, options.vocabulary, options.sharpness)
    distance, found = 1.0 - acceptance_probability(p, q), acceptances(p, q)
    print(f"{options.pairs} pairs, V={options.vocabulary}, sharpness {options.sharpness:g}; mean acceptance by TV")
    print("| TV | (1 - TV) / (1 + TV) | " + " | ".join(found) + " |\n" + "|---" * (2 + len(found)) + "|")
    columns = [coupled_lower_bound(p, q), *found.values()]
    rows = np.array([means(distance, column)[1] for column in columns]).T
    for middle, row in zip(means(distance, distance)[0], rows, strict=True):
        print(f"| {middle:.2f} | " + " | ".join(f"{value:.3f}" for value in row) + " |")
    if options.out:
        plot(distance, found, options.out)


if __name__ == "__main__":
    main()
