"""Checks of controllers and budgets; errors of outside controllers name the class, rule and line."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from foretoken.core import Budget, Context, TokenTree
from foretoken.core.outside import OutsideError, fault_message, fault_of, is_outside
from foretoken.methods.controllers.base import Controller


class ControllerError(OutsideError):
    """A controller from outside raised an error, or broke a rule of the protocol."""


def check_controller(controller: Any) -> None:
    """Raise ``ControllerError`` for an invalid controller.

    Raises:
        ControllerError: a class instead of an object, another type, or a controller without a name.
    """
    if fault := fault_of(controller, Controller, "controller"):
        raise ControllerError(fault)


def check_budgets(budgets: Any, count: int, controller: Controller) -> None:
    """Check a controller's budgets before the drafter is called.

    Raises:
        ControllerError: not one budget for each request, or a budget with invalid fields.
    """
    if not isinstance(budgets, Sequence) or len(budgets) != count:
        returned = f"{len(budgets)} budgets" if isinstance(budgets, Sequence) else type(budgets).__name__
        raise _broken(
            controller, f"returned {returned} for a round of {count}: it must be a list with one Budget for each"
        )
    for budget in budgets:
        _check_budget(budget, controller)


def check_kept(kept: Any, trees: Sequence[TokenTree], controller: Controller) -> None:
    """Check the nodes that a controller keeps before trees are cut.

    Raises:
        ControllerError: not one list of nodes for each tree, nodes that it does not have, no root, or a node without
            its parent.
    """
    if not isinstance(kept, Sequence) or len(kept) != len(trees):
        returned = f"{len(kept)} lists" if isinstance(kept, Sequence) else type(kept).__name__
        raise _broken_cut(controller, f"returned {returned} for {len(trees)} trees: it must be one list for each")
    for nodes, tree in zip(kept, trees, strict=True):
        if not isinstance(nodes, Sequence) or not all(type(node) is int for node in nodes):
            raise _broken_cut(controller, f"returned {nodes!r} for a tree: it must be a list of nodes")
        if list(nodes) != sorted(set(nodes)) or not nodes or nodes[0] != 0 or nodes[-1] >= len(tree):
            raise _broken_cut(
                controller, f"kept {list(nodes)} of {len(tree)} nodes: they must begin with the root and ascend"
            )
        chosen = set(nodes)
        for node in nodes[1:]:
            if tree.parents[node] not in chosen:
                raise _broken_cut(controller, f"kept node {node} without its parent {tree.parents[node]}")


def explained(controller: Controller, context: Context) -> str:
    """``explain()`` of a controller.

    Raises:
        ControllerError: an external one returned something else than a string.
    """
    return str(_checked(controller, "explain", controller.explain(context), str, "string"))


def reported(controller: Controller) -> dict[str, Any]:
    """``report()`` of a controller.

    Raises:
        ControllerError: an external one returned something else than a dictionary.
    """
    return dict(_checked(controller, "report", controller.report(), dict, "dictionary"))


def _checked(controller: Controller, method: str, value: Any, kind: type, word: str) -> Any:
    if is_outside(type(controller)) and not isinstance(value, kind):
        rule = f"returned {type(value).__name__}: it must be a {word}"
        raise ControllerError(fault_message(type(controller), method, rule))
    return value


def _broken_cut(controller: Controller, rule: str) -> ControllerError:
    return ControllerError(fault_message(type(controller), "kept", rule))


def _check_budget(budget: Any, controller: Controller) -> None:
    if not isinstance(budget, Budget):
        raise _broken(controller, f"returned {type(budget).__name__}, not a Budget")
    for name in ("max_depth", "max_nodes", "member"):
        value = getattr(budget, name)
        if not (isinstance(value, Integral) and not isinstance(value, bool)) and (
            name != "member" or value is not None
        ):
            raise _broken(controller, f"returned a Budget with {name} = {value!r}: it must be a whole number")
    if not isinstance(budget.min_confidence, Real):
        raise _broken(
            controller, f"returned a Budget with min_confidence = {budget.min_confidence!r}: it must be a number"
        )
    if budget.stop is not None and not callable(budget.stop):
        raise _broken(controller, f"returned a Budget with stop = {budget.stop!r}, which cannot be called")
    if budget.otherwise is not None:
        _check_budget(budget.otherwise, controller)


def _broken(controller: Controller, rule: str) -> ControllerError:
    cls = type(controller)
    method = "budget" if cls.budgets is Controller.budgets else "budgets"
    return ControllerError(fault_message(cls, method, rule))
