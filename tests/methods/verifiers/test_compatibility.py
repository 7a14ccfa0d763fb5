"""Pairs that would not be lossless are refused, with the right choices in the message."""

from __future__ import annotations

import pytest

from foretoken import registry
from foretoken.core import Kind
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.compatibility import auto_verifier, check_proposals, verifiers_for


def rule(name: str) -> Verifier:
    return registry.make("verifier", name)  # type: ignore[no-any-return]


def check(name: str, kind: Kind, is_tree: bool = False, allow_lossy: bool = False, greedy: bool = False) -> None:
    check_proposals([(kind, is_tree)], rule(name), "some_drafter", allow_lossy, greedy)


@pytest.mark.parametrize(
    ("name", "kind", "is_tree", "reason"),
    [
        ("multi_round", Kind.WITHOUT_REPLACEMENT, True, "kind point or iid"),
        ("point", Kind.IID, True, "kind point"),
        ("point", Kind.IID, False, "kind point"),
        ("without_replacement", Kind.IID, True, "without_replacement"),
        ("kseq", Kind.POINT, True, "kind iid"),
        ("rejection", Kind.IID, True, "supports chains only"),
        ("block", Kind.POINT, True, "supports chains only"),
        ("greedy", Kind.POINT, False, "temperature 0 only"),
        ("typical", Kind.POINT, False, "allow_lossy=True"),
        ("lenient", Kind.IID, False, "allow_lossy=True"),
    ],
)
def test_wrong_pairs(name: str, kind: Kind, is_tree: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        check(name, kind, is_tree)
    listed = str(error.value).rpartition("Use ")[2].rstrip(".").split(", ")
    assert listed == verifiers_for([(kind, is_tree)], greedy=False)
    assert listed and name not in listed
    for other in listed:
        check(other, kind, is_tree)


def test_allow_lossy_allows_lossy_rules_but_not_wrong_ones() -> None:
    check("typical", Kind.POINT, allow_lossy=True)
    check("lenient", Kind.IID, allow_lossy=True)
    with pytest.raises(ValueError, match="supports chains only"):
        check("lenient", Kind.IID, is_tree=True, allow_lossy=True)
    with pytest.raises(ValueError, match="kind point or iid"):
        check("multi_round", Kind.WITHOUT_REPLACEMENT, is_tree=True, allow_lossy=True)


def test_at_temperature_0_all_lossless_rules_are_right() -> None:
    for row in registry.rows("verifier"):
        verifier = rule(row.name)
        for kind in Kind:
            if verifier.lossless:
                check(row.name, kind, greedy=True)
    with pytest.raises(ValueError, match="supports chains only"):
        check("block", Kind.POINT, is_tree=True, greedy=True)
    with pytest.raises(ValueError, match="lossy by design"):
        check("top_k", Kind.POINT, greedy=True)


def test_on_a_chain_one_draw_is_the_same_with_and_without_replacement() -> None:
    check("block", Kind.WITHOUT_REPLACEMENT)
    check("rejection", Kind.WITHOUT_REPLACEMENT)
    check("without_replacement", Kind.IID)


@pytest.mark.parametrize("kind", list(Kind))
def test_verifiers_for_trees_are_those_of_the_catalogue(kind: Kind) -> None:
    """A row says in words which kinds its class supports."""
    lossless = [row for row in registry.rows("verifier") if row.lossless and not row.load().chains_only]
    fitting = [row.name for row in lossless if row.kind == "any" or kind.value in row.kind.split(", ")]
    assert verifiers_for([(kind, True)], greedy=False) == [name for name in fitting if name != "greedy"]
    assert verifiers_for([(kind, True)], greedy=True) == [row.name for row in lossless]
    assert {"match", "coupled", "traversal"} < set(fitting) and len(fitting) < len(lossless)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(("greedy", "fixed"), [(True, True), (False, True), (False, False)])
def test_auto_is_always_right(kind: Kind, is_tree: bool, greedy: bool, fixed: bool) -> None:
    verifier = auto_verifier(kind, is_tree, greedy, fixed)
    check_proposals([(kind, is_tree)], verifier, "some_drafter", allow_lossy=False, greedy=greedy)
    if greedy:
        assert verifier.name == "greedy"
    elif fixed:
        assert verifier.name == "coupled"
    elif kind is Kind.POINT:
        assert verifier.name == "point"
    else:
        assert verifier.name == ("traversal" if is_tree else "block")


def test_classes_agree_with_the_registry() -> None:
    for row in registry.rows("verifier"):
        cls = row.load()
        assert (cls.name, cls.lossless) == (row.name, row.lossless)
        assert cls().name == row.name
        words = {kind.value for kind in cls.kinds}
        assert (row.kind == "any" and words == {kind.value for kind in Kind}) or set(row.kind.split(", ")) == words
        assert cls.__doc__
