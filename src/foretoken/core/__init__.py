"""What the four axes exchange: trees, scores, verdicts, budgets, contexts, records.

Shapes: ``N`` nodes, ``V`` vocabulary, ``D`` hidden size, ``R`` stored distributions.  Topology and tokens are host
integers: trees are small, the walk over them is host code, and a drafter moves all its tokens to the host in one
transfer.  Distributions and logits stay tensors on the model's device.
"""

from __future__ import annotations

from foretoken.core.budget import Budget, Limits, PathStop
from foretoken.core.context import Context, Rng
from foretoken.core.records import RoundTimes, StepRecord
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
from foretoken.core.verdict import Verdict

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
