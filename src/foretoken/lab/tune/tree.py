"""Which tree should heads fill?  Accuracies by head and rank on the target's own text, and what nodes cost here.

Medusa, Cai et al. 2024 (arXiv 2401.10774), section 2.3.3, with the size chosen by measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from foretoken.core.io.files import write_json
from foretoken.core.noise import unseeded_from
from foretoken.lab.tune.layer_skip import FINAL_RUNS, Speed
from foretoken.llm import assemble
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.trees.shapes import Choice, choice_parents, expected_length, medusa_choices
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.options import Options
from foretoken.training.recipes import find_recipe
from foretoken.training.recipes.base import Batch

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Node counts that are tried."""
REPEATS = 15
"""Timed calls per size, interleaved."""


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
        target: the model.
        drafter: heads that fill a tree, or a draft model (:mod:`foretoken.lab.tune.positional`).
        prompts: token ids of every prompt.
        new_tokens: generated per prompt, ends of text ignored.
        sizes: node counts to choose from.
        shape: ``"medusa"`` or, for a draft model, ``"sequoia"``.
        temperature: of the text that a draft model is measured on; heads are measured greedily.
        depth: most levels of a draft model's tree.
    """

    target: LanguageModel
    drafter: HeadsDrafter | ModelDrafter
    prompts: Sequence[Sequence[int]]
    new_tokens: int = 64
    sizes: Sequence[int] = SIZES
    shape: str = "medusa"
    temperature: float = 0.0
    depth: int = 8


class SizeCost(NamedTuple):
    """What a round with a tree takes, and the tokens that it promises."""

    round_ms: float
    expected_length: float

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.expected_length / self.round_ms


class DraftCost(NamedTuple):
    """Milliseconds of drafting."""

    level: float
    node: float


@dataclass(frozen=True)
class Outcome:
    """What was found.

    Attributes:
        method: registry name of the drafter.
        choices: the tree.
        accuracies: [K][R] chance per level and rank (for a draft model the same row for every level: how often the
            child tried first, second, ... is the accepted one).
        sizes: per node count.
        speeds: measured, by arm: ``"plain"``, ``"default"`` and ``"tuned"``.
        shape: how the tree was built.
        temperature: of the text that was measured on.
        draft_ms: of a draft model.
    """

    method: str
    choices: list[Choice]
    accuracies: list[list[float]]
    sizes: dict[int, SizeCost]
    speeds: dict[str, Speed]
    shape: str = "medusa"
    temperature: float = 0.0
    draft_ms: DraftCost | None = None

    def public(self) -> dict[str, Any]:
        """As it is stored, and printed by ``--json``."""
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
        }

    def save(self, file: Path) -> None:
        """Write the file that ``tree=FILE`` reads, whole or not at all."""
        write_json(file, self.public())


def tune(work: Workload, on_progress: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measure accuracies on text that the target writes, time every size, take the best tree, and compare it."""
    on_progress("writing text to measure on")
    texts = _written(work)
    on_progress("measuring the heads")
    accuracies = measured_accuracies(work, texts)
    on_progress("timing trees")
    trees = {size: medusa_choices(accuracies, size) for size in work.sizes}
    costs = target_costs(work, trees, max(texts, key=len))
    sizes = {size: SizeCost(costs[size], expected_length(trees[size], accuracies)) for size in trees}
    best = max(trees, key=lambda size: sizes[size].rate)
    on_progress("comparing")
    speeds = compared(work, trees[best])
    return Outcome(work.drafter.name, trees[best], accuracies, sizes, speeds)


def _written(work: Workload) -> list[list[int]]:
    """The prompts and what the target says to them: what a head must guess is known there."""
    llm = assemble(work.target, None, "auto", "constant", None)
    outs = llm.generate([list(p) for p in work.prompts], max_new_tokens=work.new_tokens, ignore_eos=True)
    return [[*prompt, *out.token_ids] for prompt, out in zip(work.prompts, outs, strict=True)]


def measured_accuracies(work: Workload, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """[K][R] how often the head's candidate of each rank is what the target says, over whole texts.

    Raises:
        ValueError: every text is shorter than the heads look ahead, or no heads.
    """
    if not isinstance(work.drafter, HeadsDrafter):
        raise ValueError(f"{work.drafter.name} has no heads: measure it as a draft model")
    parts = TargetParts(work.target)
    recipe: Any = find_recipe(work.drafter.name)
    settings = {key: str(value) for key, value in asdict(work.drafter.heads.config).items() if key not in recipe.fixed}
    made = recipe(work.target, parts, settings)
    made.net = work.drafter.heads
    batches = []
    for text in texts:
        tokens = torch.tensor([list(text)], device=parts.device)
        batches.append(Batch(tokens, parts.features(tokens[:, :-1], made.taps), parts))
    found: list[list[float]] = made.measure(batches)["accuracies"]
    if not any(map(any, found)):
        raise ValueError("the heads were right nowhere: give longer prompts, or train them longer")
    return found


@torch.inference_mode()
def target_costs(work: Workload, trees: dict[int, list[Choice]], text: Sequence[int]) -> dict[int, float]:
    """Milliseconds of scoring every tree behind ``text``: medians of interleaved calls, never falling with the size."""
    sequence = work.target.open()
    try:
        work.target.prefill(sequence, list(text[:-1]))
        times: dict[int, list[float]] = {size: [] for size in trees}
        for _ in range(REPEATS):
            for size, choices in trees.items():
                feed = Feed(sequence, [text[-1]] * (len(choices) + 1), [-1, *choice_parents(choices)])
                began = perf_counter()
                work.target.forward([feed])
                times[size].append(perf_counter() - began)
                work.target.commit(sequence, ())
    finally:
        work.target.release(sequence)
    costs: dict[int, float] = {}
    for size in sorted(times):
        costs[size] = max([1e3 * median(times[size]), *costs.values()])
    return costs


def compared(work: Workload, tuned: list[Choice]) -> dict[str, Speed]:
    """Plain decoding, the drafter as it was and with the new tree, interleaved."""
    arms = {"plain": None, "default": work.drafter, "tuned": work.drafter.reshaped(tuned)}
    runs: dict[str, list[Speed]] = {name: [] for name in arms}
    for _ in range(FINAL_RUNS):
        for name, drafter in arms.items():
            llm = assemble(work.target, drafter, "auto", "constant", None)
            asked = Options(max_new_tokens=work.new_tokens, temperature=work.temperature, ignore_eos=True)
            with unseeded_from(0):
                outs = [llm.generate(list(p), **asked) for p in work.prompts]
            runs[name].append(Speed.over([out.stats for out in outs]))
    return {name: sorted(found, key=lambda s: s.tokens_per_s)[len(found) // 2] for name, found in runs.items()}
