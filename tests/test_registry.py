"""The catalogue: every row is what it says, and spec strings fail with the choices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken import registry
from foretoken.core import Kind
from foretoken.loading import build_controller, build_drafter
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.verifiers.base import Verifier
from foretoken.registry import Row, convert_options, find, options_of, parse_spec, split_specs
from foretoken.training.recipes import RECIPES, STOP_HEAD, settings_of
from toys import tables

DOCS = Path(__file__).parents[1] / "docs" / "methods"
BASES: dict[str, type[Any]] = {"drafter": Drafter, "verifier": Verifier, "controller": Controller}

each_row = pytest.mark.parametrize("row", registry.ROWS, ids=lambda row: f"{row.role}-{row.name}")


# -- rows ------------------------------------------------------------------------------------------------------------


@each_row
def test_the_class_is_the_row(row: Row) -> None:
    """File name = method name = registry key; one method, one class, in the package of its role."""
    cls = row.load()
    assert row.target.startswith(f"methods.{row.role}s.{row.name}:")
    assert cls.__module__ == f"foretoken.methods.{row.role}s.{row.name}"
    assert cls.name == row.name
    assert cls.__doc__
    if row.role in BASES:
        assert issubclass(cls, BASES[row.role])
    if row.role == "verifier":
        assert cls.lossless is row.lossless


@each_row
def test_every_method_has_its_page(row: Row) -> None:
    assert (DOCS / f"{row.name}.md").is_file(), f"write docs/methods/{row.name}.md"


@each_row
def test_the_texts_are_complete(row: Row) -> None:
    assert row.summary.endswith(".") and "\n" not in row.summary
    assert set(row.public()) == {
        "name", "role", "paper", "lossless", "needs_training", "needs", "kind", "example", "summary",
    }  # fmt: skip
    if row.role in ("drafter", "verifier"):
        kinds = {kind.value for kind in Kind} | {"any"}
        assert set(row.kind.replace(" or ", ", ").split(", ")) <= kinds, row.kind


@each_row
def test_the_example_is_a_spec_of_the_method(row: Row) -> None:
    spec = parse_spec(row.example)
    assert spec.name == row.name
    convert_options(row.role, row.name, row.load(), spec.options)


@each_row
def test_every_option_has_a_meaning(row: Row) -> None:
    options = row.options()
    assert [option.name for option in options] == list(options_of(row.load()))
    assert not [option.name for option in options if not is_explained(option.meaning)]


@pytest.mark.parametrize("method", [*RECIPES, *STOP_HEAD])
def test_every_setting_of_training_has_a_meaning(method: str) -> None:
    settings = settings_of(method)
    assert settings
    assert not [setting.name for setting in settings if not is_explained(setting.meaning)]


def is_explained(meaning: str) -> bool:
    """Whether a meaning says more than a name, and in words of its own rather than by reference to a docstring."""
    return len(meaning.split()) >= 3 and not re.match(r"(as (for|in)|see) ", meaning) and ":`" not in meaning


@pytest.mark.parametrize("meaning", ["", "draft nodes", "as for the drafter `model`", "see :class:`Model` for it"])
def test_a_name_or_a_reference_is_no_meaning(meaning: str) -> None:
    assert not is_explained(meaning)


def test_a_default_that_is_measured_is_not_a_number() -> None:
    """The constructor's default is not what a spec without the option gets."""
    sizes = {row.name: option for row in registry.rows("drafter") for option in row.options() if option.name == "nodes"}
    measured = {name for name, nodes in sizes.items() if nodes.default is None}
    assert measured == {name for name, nodes in sizes.items() if "as many as pay off" in nodes.meaning}
    assert measured >= {"eagle", "eagle3", "peagle", "dflash", "dflash2", "dspark", "pard", "uno", "medusa", "hydra"}


@pytest.mark.parametrize("row", registry.rows("verifier"), ids=lambda row: row.name)
def test_the_kinds_of_a_verifier_are_those_of_its_class(row: Row) -> None:
    stated = set(Kind) if row.kind == "any" else {Kind(kind) for kind in row.kind.split(", ")}
    assert set(row.load().kinds) == stated


def test_names_are_unique_within_a_role() -> None:
    names = [(row.role, row.name) for row in registry.ROWS]
    assert len(names) == len(set(names))


def test_every_method_file_has_a_row() -> None:
    """A class with a registry name that is in no row is forgotten, or dead."""
    known = {row.target.partition(":")[0] for row in registry.ROWS}
    package = Path(foretoken.__file__).parent
    for role, base in BASES.items():
        for file in (package / "methods" / f"{role}s").glob("*.py"):
            module = f"methods.{role}s.{file.stem}"
            text = file.read_text()
            if "\n    name = " in text and f"({base.__name__})" in text:
                assert module in known, f"add a registry row for {module}"


def test_methods_is_the_catalogue() -> None:
    assert foretoken.methods() == [row.public() for row in registry.ROWS]
    assert {row["role"] for row in foretoken.methods()} == {"drafter", "verifier", "controller", "tree"}


# -- spec strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "path", "options"),
    [
        ("ngram", "ngram", None, {}),
        ("ngram,n=3,k=8", "ngram", None, {"n": "3", "k": "8"}),
        ("model:./draft,k=5", "model", "./draft", {"k": "5"}),
        ("model:./draft,tree=3x2x1", "model", "./draft", {"tree": "3x2x1"}),
        (" model : ./a b , k = 5 ", "model", "./a b", {"k": "5"}),
        ("scripted,tokens=1 2 3", "scripted", None, {"tokens": "1 2 3"}),
        ("model:org/name=x", "model", "org/name=x", {}),
        ("cascade:./d,k=8,inner=(ngram,n=3,k=6)", "cascade", "./d", {"k": "8", "inner": "ngram,n=3,k=6"}),
        (
            "ensemble,drafters=(model:./a,k=4|model:./b,k=4|ngram)",
            "ensemble",
            None,
            {"drafters": "model:./a,k=4|model:./b,k=4|ngram"},
        ),
        ("a,inner=( b,inner=(c,k=1) ),k=2", "a", None, {"inner": "b,inner=(c,k=1)", "k": "2"}),
        ("a,list=(b,k=1)|(c,k=2)", "a", None, {"list": "(b,k=1)|(c,k=2)"}),
        ("model:./a (copy),k=3", "model", "./a (copy)", {"k": "3"}),
    ],
)
def test_specs(text: str, name: str, path: str | None, options: dict[str, str]) -> None:
    spec = parse_spec(text)
    assert (spec.name, spec.path, spec.options) == (name, path, options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no method name"),
        (",k=5", "has no method name"),
        (":path", "has no method name"),
        ("ngram,k", "'k' in 'ngram,k'"),
        ("ngram,=5", "is not key=value"),
        ("ngram,", "is not key=value"),
        ("ngram,k=4,n=2,k =7", "gives k twice"),
        ("a,inner=(b,k=1", "unbalanced parentheses"),
        ("a,inner=b,k=1)", "unbalanced parentheses"),
        ("a,inner=)b(", "unbalanced parentheses"),
    ],
)
def test_broken_specs(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        parse_spec(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("ngram", ["ngram"]),
        ("model:./a,k=4|ngram", ["model:./a,k=4", "ngram"]),
        ("(model,k=4) | (ngram)", ["model,k=4", "ngram"]),
        ("router,drafters=(a|b)|c", ["router,drafters=(a|b)", "c"]),
        ("0.1|0", ["0.1", "0"]),
    ],
)
def test_lists_of_specs(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


@pytest.mark.parametrize("text", ["", "a|", "|a", "a||b", "a|()", "(a|b"])
def test_broken_lists_of_specs(text: str) -> None:
    with pytest.raises(ValueError, match=r"empty item|unbalanced") as error:
        split_specs(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("role", ["drafter", "verifier", "controller", "tree"])
def test_an_unknown_name_lists_the_choices(role: Any) -> None:
    with pytest.raises(ValueError, match=f"unknown {role} 'nonsense': choose one of") as error:
        find(role, "nonsense")
    assert all(row.name in str(error.value) for row in registry.rows(role))


@pytest.mark.parametrize("row", registry.rows("drafter"), ids=lambda row: row.name)
def test_an_unknown_key_lists_the_valid_ones(row: Row) -> None:
    with pytest.raises(ValueError, match=f"unknown option 'nonsense' of drafter '{row.name}': valid ones: ") as error:
        convert_options("drafter", row.name, row.load(), {"nonsense": "1"})
    assert all(key in str(error.value) for key in options_of(row.load()))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("constant,k=five", "option k='five' of controller 'constant' must be of type int"),
        ("confidence,threshold=high", "must be of type float"),
        ("constant,size=3", "unknown option 'size' of controller 'constant': valid ones: k, nodes"),
        ("constant,k=-1", "constant needs k >= 0"),
    ],
)
def test_wrong_values(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_controller(spec)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("No", False), ("1", True), ("0", False)])
def test_truth_values(text: str, value: bool) -> None:
    class Switched:
        def __init__(self, flag: bool = False, size: int | None = None) -> None: ...

    assert convert_options("drafter", "switched", Switched, {"flag": text}) == {"flag": value}
    assert convert_options("drafter", "switched", Switched, {"size": "3"}) == {"size": 3}
    with pytest.raises(ValueError, match="must be of type bool"):
        convert_options("drafter", "switched", Switched, {"flag": "maybe"})


def test_options_reach_the_drafter() -> None:
    target, _ = tables()
    drafter: Any = build_drafter("ngram,n=2,k=6,match=first", target, target_source=target)
    assert (drafter.n, drafter.max_depth, drafter.match) == (2, 6, "first")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nonsense", "unknown drafter 'nonsense': choose one of model"),
        ("ngram,x=1", "unknown option 'x' of drafter 'ngram': valid ones: n, k"),
        ("ngram:./here", "drafter 'ngram' takes no path"),
        ("ngram,n=0", "1 <= min_n <= n"),
        ("model", "needs a path for this target"),
    ],
)
def test_drafter_specs_fail_with_what_to_do(spec: str, words: str) -> None:
    target, _ = tables()
    with pytest.raises(ValueError, match=words) as error:
        build_drafter(spec, target, target_source=target)
    assert "\n" not in str(error.value)


def test_no_drafter() -> None:
    target, _ = tables()
    assert build_drafter(None, target) is None
    assert build_drafter("none", target) is None
