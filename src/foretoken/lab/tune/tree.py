"""The best tree for heads, from their accuracies on the target's own text and the measured cost of nodes.

Medusa, Cai et al. 2024 (arXiv 2401.10774), section 2.3.3, with the size chosen by measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foretoken.core.io.files import write_json
from foretoken.lab.workload import Speed, Workload, compared_speeds, target_name
from foretoken.loading.measured.profile import fingerprint_of
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.methods.trees.shapes import Choice, choice_parents, expected_length, medusa_choices
from foretoken.models.call_costs import measure_target
from foretoken.models.forward.parts import TargetParts
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Candidate node counts."""
REPEATS = 15
"""Timed calls per size, interleaved."""


class SizeCost(NamedTuple):
    """Time of a round with a tree, and its expected tokens."""

    round_ms: float
    expected_length: float

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.expected_length / self.round_ms


class DraftCost(NamedTuple):
    """Milliseconds of drafting, per level and per node."""

    level: float
    node: float


@dataclass(frozen=True)
class TunedTree:
    """Result of a tree search.

    Attributes:
        accuracies: [K][R] probability per level and rank (for a draft model the same row for every level: the
            probability that the child tried first, second, ... is accepted).
        speeds: measured, by arm: ``"plain"``, ``"default"`` and ``"tuned"``.
        shape: method that built the tree.
        temperature: of the measured text.
        target: ``source`` and ``fingerprint`` of the measured target.
    """

    method: str
    choices: list[Choice]
    accuracies: list[list[float]]
    sizes: dict[int, SizeCost]
    speeds: dict[str, Speed]
    shape: str = "medusa"
    temperature: float = 0.0
    draft_ms: DraftCost | None = None
    target: Mapping[str, str] | None = None

    def public(self) -> dict[str, Any]:
        """Fields of the stored file and of ``--json``."""
        return {
            "format": 1,
            "method": self.method,
            "shape": self.shape,
            "temperature": self.temperature,
            "choices": [list(choice) for choice in self.choices],
            "nodes": len(self.choices),
            "accuracies": self.accuracies,
            "expected_length": expected_length(self.choices, self.accuracies),
            "sizes": {str(nodes): cost._asdict() for nodes, cost in self.sizes.items()},
            "speeds": {name: asdict(speed) for name, speed in self.speeds.items()},
            **({} if self.draft_ms is None else {"draft_ms": self.draft_ms._asdict()}),
            **({} if self.target is None else {"target": dict(self.target)}),
        }

    def save(self, file: Path) -> None:
        """Write the file for ``tree=FILE``, atomically."""
        write_json(file, self.public())


def tune(
    work: Workload, drafter: HeadsDrafter, sizes: Sequence[int] = SIZES, tell: Callable[[str], None] = lambda _: None
) -> TunedTree:
    """Measure accuracies on text that the target writes, time every size, choose the best tree, and compare it."""
    tell("writing text to measure on")
    sequences = _answered(work)
    tell("measuring the heads")
    accuracies = measured_accuracies(work, drafter, sequences)
    tell("timing trees")
    trees = {size: medusa_choices(accuracies, size) for size in sizes}
    costs = target_costs(work, trees, max(sequences, key=len))
    size_costs = {size: SizeCost(costs[size], expected_length(trees[size], accuracies)) for size in trees}
    best = max(trees, key=lambda size: size_costs[size].rate)
    tell("comparing")
    speeds = compared(work, drafter, drafter.reshaped(trees[best]))
    return TunedTree(drafter.name, trees[best], accuracies, size_costs, speeds, target=target_of(work))


def target_of(work: Workload) -> dict[str, str]:
    """The target's name and fingerprint, as a file keeps them."""
    name = target_name(work.target, work.subject.source)
    return {"source": name, "fingerprint": fingerprint_of(work.target)}


def _answered(work: Workload) -> list[list[int]]:
    """The prompts with the target's answers, which are the heads' correct predictions."""
    outs = work.subject.llm(None).generate(
        [list(p) for p in work.prompts], max_new_tokens=work.new_tokens, ignore_eos=True
    )
    return [[*prompt, *out.token_ids] for prompt, out in zip(work.prompts, outs, strict=True)]


def measured_accuracies(work: Workload, drafter: HeadsDrafter, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Share [K][R] of positions at which the head's candidate of each rank is the next token."""
    parts = TargetParts(work.target)
    kind: Any = find_recipe(drafter.name)
    settings = {key: str(value) for key, value in asdict(drafter.heads.config).items() if key not in kind.fixed}
    recipe = kind(work.target, parts, settings)
    recipe.net, recipe.frequent = drafter.heads, getattr(drafter.heads, "vocabulary", None)
    batches = []
    for sequence in sequences:
        tokens = torch.tensor([list(sequence)], device=parts.device)
        batches.append(Batch(tokens, parts.features(tokens[:, :-1], recipe.taps), parts))
    accuracies: list[list[float]] = recipe.measure(batches)["accuracies"]
    if not any(map(any, accuracies)):
        raise ValueError("no token of the heads was accepted: give longer prompts, or train them longer")
    return accuracies


def target_costs(work: Workload, trees: Mapping[int, Sequence[Choice]], tokens: Sequence[int]) -> dict[int, float]:
    """Milliseconds of scoring every tree after ``tokens``: medians of interleaved calls, non-decreasing with size."""
    shapes = [[-1, *choice_parents(choices)] for choices in trees.values()]
    cost = measure_target(work.target, tokens[:-1], [len(shape) for shape in shapes], REPEATS, shapes=shapes)
    sizes = sorted(trees)
    measured = (1e3 * cost.of(len(trees[size]) + 1) for size in sizes)
    return dict(zip(sizes, accumulate(measured, max), strict=True))


def compared(work: Workload, drafter: Drafter | None, tuned: Drafter | None) -> dict[str, Speed]:
    """Speeds of plain decoding, the drafter as it is by default and as it was tuned, interleaved."""
    arms = {"plain": None, "default": drafter, "tuned": tuned}
    return compared_speeds({name: partial(work.speed, arm) for name, arm in arms.items()})
