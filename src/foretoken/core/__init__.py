"""What the four axes exchange: trees, scores, verdicts, budgets, contexts, records.

Shapes: ``N`` nodes, ``V`` vocabulary, ``D`` hidden size, ``R`` stored distributions.  Topology and tokens are host
integers: trees are small, the walk over them is host code, and a drafter moves all its tokens to the host in one
transfer.  Distributions and logits stay tensors on the model's device.

Nothing heavy is imported until it is used: the command line reads names and spec strings here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.core.budget import Budget, Limits, PathStop
    from foretoken.core.context import Context, Rng
    from foretoken.core.records import RoundTimes, StepRecord, Verdict
    from foretoken.core.scores import (
        LARGE,
        NON_FINITE,
        NonFiniteLogitsError,
        NothingAllowedError,
        SamplingPipeline,
        Scores,
        argmaxes,
        is_large,
    )
    from foretoken.core.tree import Kind, TokenTree
    from foretoken.core.values import OptionError, with_article

_HOMES = {
    "Budget": "budget",
    "Context": "context",
    "Kind": "tree",
    "LARGE": "scores",
    "Limits": "budget",
    "NON_FINITE": "scores",
    "NonFiniteLogitsError": "scores",
    "NothingAllowedError": "scores",
    "OptionError": "values",
    "PathStop": "budget",
    "Rng": "context",
    "RoundTimes": "records",
    "SamplingPipeline": "scores",
    "Scores": "scores",
    "StepRecord": "records",
    "TokenTree": "tree",
    "Verdict": "records",
    "argmaxes": "scores",
    "is_large": "scores",
    "with_article": "values",
}

__all__ = [
    "LARGE",
    "NON_FINITE",
    "Budget",
    "Context",
    "Kind",
    "Limits",
    "NonFiniteLogitsError",
    "NothingAllowedError",
    "OptionError",
    "PathStop",
    "Rng",
    "RoundTimes",
    "SamplingPipeline",
    "Scores",
    "StepRecord",
    "TokenTree",
    "Verdict",
    "argmaxes",
    "is_large",
    "with_article",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foretoken.core' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"foretoken.core.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
