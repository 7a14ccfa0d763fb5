"""The traits that drafters declare agree with their behaviour: nobody looks at which methods a class has."""

from __future__ import annotations

import pytest
from cases import CASES

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.group import GroupDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.pard import PardDrafter
from foretoken.methods.drafters.sources import SourceDrafter
from foretoken.registry import rows
from toys import llamas

DRAWING = ("_expand", "_add_children", "_candidates")
"""The functions that make distributions and draw from them, request by request."""


def does_something(drafter: Drafter) -> bool:
    """Whether a round that it is shown is looked at."""
    if type(drafter).observe is SourceDrafter.observe:
        return drafter.traits.shares_state
    if isinstance(drafter, PardDrafter):
        return drafter.reader is not None
    return type(drafter).observe is not Drafter.observe


@pytest.mark.parametrize("name", CASES)
def test_who_learns_says_so(name: str) -> None:
    """A member of a group that says that it learns nothing is shown nothing."""
    target, draft = llamas()
    for case in CASES[name]:
        drafter = case.build(target, draft)
        if not isinstance(drafter, GroupDrafter):
            assert drafter.traits.learns == does_something(drafter), case.label


def test_who_draws_in_a_way_of_its_own_says_so() -> None:
    for cls in (row.load() for row in rows("drafter")):
        if issubclass(cls, ModelDrafter):
            usual = all(getattr(cls, part) is getattr(ModelDrafter, part) for part in DRAWING)
            assert cls.draws_together == usual, cls.name


def test_the_protocol_has_eight_hooks() -> None:
    """A ninth wants a reason: most of what a drafter is can be said as data."""
    hooks = {name for name, part in vars(Drafter).items() if callable(part) and not name.startswith("_")}
    assert hooks == {
        "start", "propose", "propose_batch", "observe", "rewind", "finish", "cost_beside", "describe"
    }  # fmt: skip
    for hook in hooks:
        users = {
            name for name in (row.load() for row in rows("drafter")) if getattr(name, hook) is not vars(Drafter)[hook]
        }
        assert len(users) > 2, hook
