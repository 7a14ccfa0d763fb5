"""The fixed tree that a draft model should fill: from its acceptance by trial, and what nodes and levels cost here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.costs import TargetCost
from foretoken.lab.tune.choices import with_option
from foretoken.lab.tune.positional import draft_costs, measured_acceptance
from foretoken.lab.tune.tree import Workload as TreeWorkload
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.trees.sequoia import best_shape, solve
from foretoken.models.base import LanguageModel
from foretoken.registry import find, options_of, parse_spec

NODES, DEPTH = 64, 8
"""Largest tree that is considered."""


def can_fill(spec: str) -> bool:
    """Whether a drafter draws siblings from its own distributions, and was not given a tree."""
    parsed = parse_spec(spec)
    cls = find("drafter", parsed.name).load()
    return issubclass(cls, ModelDrafter) and "tree" in options_of(cls) and "tree" not in parsed.options


def measured_shape(
    target: LanguageModel, drafter: Drafter, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float = 0.0
) -> dict[str, Any]:
    """What the choice of a tree needs: ``acceptance`` by trial, ``level_s`` and ``node_s`` of drafting.

    Args:
        target: the model.
        drafter: a draft model.
        prompts: token ids of every prompt.
        new_tokens: written for each.
        temperature: of the text.

    Raises:
        ValueError: the drafter cannot draw siblings, or nothing was accepted.
    """
    if not isinstance(drafter, ModelDrafter):
        raise ValueError(f"{drafter.name} draws no siblings")
    found = TreeWorkload(target, drafter, prompts, new_tokens, temperature=temperature)
    acceptance = measured_acceptance(found)
    level_ms, node_ms = draft_costs(found, max(prompts, key=len))
    return {"acceptance": list(acceptance), "level_s": level_ms / 1e3, "node_s": node_ms / 1e3}


def sequoia_spec(spec: str, shape: Mapping[str, Any], target: TargetCost) -> str | None:
    """The drafter with the tree of most expected tokens per time; ``None`` where that is a chain or no draft at all.

    Args:
        spec: the drafter.
        shape: what :func:`measured_shape` found.
        target: measured v(n).
    """
    trees = solve(shape["acceptance"], NODES, DEPTH)
    nodes, depth, _ = best_shape(trees, lambda n: target.of(n) + shape["node_s"] * (n - 1), shape["level_s"])
    if nodes <= depth:
        return None
    vector = " ".join(f"{chance:.3g}" for chance in shape["acceptance"])
    return with_option(spec, "tree", f"sequoia,nodes={nodes},depth={depth},acceptance={vector}")
