"""Fixed trees of equal size on the built-in draft model: chain, best k-ary tree, Sequoia's tree.

First one wide node per round measures how often the child tried k-th is the accepted one, on calibration prompts.
Every shape's tokens per round follow from that vector (predicted); then every shape decodes other prompts (measured).
"Best k-ary" is the k-ary tree that measured best, which favours it.  Greedy, and T=1 with siblings drawn without
replacement and recursive rejection, the rule that the vector belongs to.

    python benchmarks/trees.py [--nodes 8 16 32] [--prompts 20] [--new-tokens 64] [--temperature 0 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

from foretoken.lab.tune.positional import measured_acceptance
from foretoken.lab.workload import Subject, Workload
from foretoken.llm import assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.trees.expansion import expansion_choices
from foretoken.methods.trees.sequoia import solve
from foretoken.methods.trees.shapes import Choice, expected_length
from foretoken.models.base import LanguageModel

BRANCHING = (2, 3, 4)


@dataclass
class Row:
    """One shape at one size and temperature; the error is that of the mean over prompts."""

    temperature: float
    nodes: int
    shape: str
    depth: int
    predicted: float
    measured: float
    error: float


def k_ary(branching: int, nodes: int) -> list[Choice]:
    """The first ``nodes`` places of the complete tree, level by level."""
    levels = 1
    while len(expansion_choices([branching] * levels)) < nodes:
        levels += 1
    return expansion_choices([branching] * levels)[:nodes]


def shapes(acceptance: Sequence[float], nodes: int) -> dict[str, list[Choice]]:
    """Every rival with exactly this many nodes."""
    found = {"chain": [(0,) * depth for depth in range(1, nodes + 1)]}
    found |= {f"{k}-ary": k_ary(k, nodes) for k in BRANCHING}
    return found | {"sequoia": solve(acceptance, nodes, nodes).choices(nodes, nodes)}


def tokens_per_round(
    target: LanguageModel, drafter: ModelDrafter, prompts: Sequence[list[int]], new_tokens: int, temperature: float
) -> tuple[float, float]:
    """Tokens per round over all prompts, and the standard error from the spread between prompts."""
    llm = assemble(target, drafter, "without_replacement" if temperature else "auto", "constant", None)
    rounds, accepted = [], []
    for seed, prompt in enumerate(prompts):
        asked = {"max_new_tokens": new_tokens, "temperature": temperature, "seed": seed, "ignore_eos": True}
        stats = llm.generate(prompt, **asked).stats
        rounds.append(stats.num_drafts)
        accepted.append(stats.num_accepted_tokens)
    ratio = sum(accepted) / sum(rounds)
    spread = [a - ratio * r for a, r in zip(accepted, rounds, strict=True)]  # ratio estimator
    error = statistics.stdev(spread) * len(spread) ** 0.5 / sum(rounds) if len(spread) > 1 else float("nan")
    return 1 + ratio, error


def positional(acceptance: Sequence[float], choices: Sequence[Choice]) -> float:
    """What the vector promises of a shape; ranks beyond those that were measured count as never accepted."""
    width = 1 + max(choice[-1] for choice in choices)
    row = [*acceptance, *[0.0] * max(0, width - len(acceptance))]
    return expected_length(choices, [row] * max(map(len, choices)))


def compare(
    target: LanguageModel,
    drafter: ModelDrafter,
    prompts: list[list[int]],
    temperature: float,
    options: argparse.Namespace,
) -> list[Row]:
    """All shapes of all sizes at one temperature."""
    half = len(prompts) // 2
    work = Workload(Subject(target), prompts[:half], options.new_tokens, temperature)
    acceptance = measured_acceptance(work, drafter)
    print(f"\nT={temperature:g}: accepted k-th:", " ".join(f"{p:.3f}" for p in acceptance), flush=True)
    found = []
    for nodes in options.nodes:
        for name, choices in shapes(acceptance, nodes).items():
            print(f"T={temperature:g} {nodes} nodes: {name}", file=sys.stderr)
            measured, error = tokens_per_round(
                target, drafter.reshaped(choices), prompts[half:], options.new_tokens, temperature
            )
            depth = max(map(len, choices))
            found.append(Row(temperature, nodes, name, depth, positional(acceptance, choices), measured, error))
    return found


def table(rows: list[Row]) -> None:
    """Markdown, one line per size."""
    print("| nodes | chain | best k-ary | Sequoia | predicted: chain, k-ary, Sequoia | Sequoia's depth |")
    print("|---" * 6 + "|")
    for nodes in dict.fromkeys(row.nodes for row in rows):
        mine = {row.shape: row for row in rows if row.nodes == nodes}
        best = max((mine[f"{k}-ary"] for k in BRANCHING), key=lambda row: row.measured)
        three = (mine["chain"], best, mine["sequoia"])
        cells = [f"{row.measured:.3f} ± {row.error:.3f}" for row in three]
        cells[1] += f" ({best.shape})"
        predicted = ", ".join(f"{row.predicted:.2f}" for row in three)
        print(f"| {nodes} | {' | '.join(cells)} | {predicted} | {mine['sequoia'].depth} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--drafter", default="model")
    parser.add_argument("--nodes", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--prompts", type=int, default=20, help="how many of each kind; every second one calibrates")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--json", type=Path, dest="out", help="write the numbers here as well")
    options = parser.parse_args()
    print(environment(), f"{options.new_tokens} new tokens", sep=", ")
    target, tokenizer = load_model(options.target), load_tokenizer(options.target)
    drafter = build_drafter(options.drafter, target, target_source=options.target)
    if not isinstance(drafter, ModelDrafter):
        raise SystemExit(f"{options.drafter} is no draft model")
    texts = [*(*CODE, *MORE_CODE)[: options.prompts], *(*PROSE, *MORE_PROSE)[: options.prompts]]
    prompts = [tokenizer(text)["input_ids"] for text in (*texts[::2], *texts[1::2])]  # type: ignore[misc]
    rows = []
    for temperature in options.temperature:
        found = compare(target, drafter, prompts, temperature, options)
        table(found)
        rows += found
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
