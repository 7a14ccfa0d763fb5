"""Types that the four axes exchange: trees, scores, verdicts, budgets, contexts and records.

Shapes: ``N`` nodes, ``V`` vocabulary, ``D`` hidden size, ``R`` stored distributions. Topology and tokens are host
integers: trees are small, the walk over them is host code, and a drafter copies all its tokens to the host in one
transfer. Distributions and logits stay on the model's device.

Heavy modules are imported on first use, because the command line reads names and spec strings here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.core.budget import Budget as Budget
    from foretoken.core.budget import Limits as Limits
    from foretoken.core.budget import PathStop as PathStop
    from foretoken.core.context import Context as Context
    from foretoken.core.context import Rng as Rng
    from foretoken.core.hidden import HiddenStates as HiddenStates
    from foretoken.core.hidden import HiddenText as HiddenText
    from foretoken.core.records import RoundTimes as RoundTimes
    from foretoken.core.records import StepRecord as StepRecord
    from foretoken.core.records import Verdict as Verdict
    from foretoken.core.scores import LARGE as LARGE
    from foretoken.core.scores import NON_FINITE as NON_FINITE
    from foretoken.core.scores import NonFiniteLogitsError as NonFiniteLogitsError
    from foretoken.core.scores import NothingAllowedError as NothingAllowedError
    from foretoken.core.scores import Scores as Scores
    from foretoken.core.scores import argmaxes as argmaxes
    from foretoken.core.scores import is_large as is_large
    from foretoken.core.tree import Kind as Kind
    from foretoken.core.tree import TokenTree as TokenTree
    from foretoken.core.values import OptionError as OptionError
    from foretoken.core.values import check_least as check_least
    from foretoken.core.values import with_article as with_article

_HOMES = {
    "budget": ("Budget", "Limits", "PathStop"),
    "context": ("Context", "Rng"),
    "hidden": ("HiddenStates", "HiddenText"),
    "records": ("RoundTimes", "StepRecord", "Verdict"),
    "scores": (
        *("LARGE", "NON_FINITE", "NonFiniteLogitsError", "NothingAllowedError"),
        *("Scores", "argmaxes", "is_large"),
    ),
    "tree": ("Kind", "TokenTree"),
    "values": ("OptionError", "check_least", "with_article"),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'foretoken.core' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"foretoken.core.{home}"), name)
    globals()[name] = value
    return value
