"""Meanings of options from docstrings: sections, inheritance, references to other classes, markup."""

from __future__ import annotations

from typing import Any

from foretoken.core.docstrings import meaning_of
from foretoken.core.specs import Option, described_options


class Base:
    """A base class.

    Args:
        n: length of the n-gram.
        k, width: maximum of *tokens*
            in a draft.
        text: words: and more of them.

    Raises:
        bias: not an argument.

    Options:
        shared: what subclasses take.
    """

    def __init__(self, n: int = 3, k: int = 8, width: int = 1, text: str = "", bias: float = 0.5) -> None: ...


class Limits:
    """Limits.

    Attributes:
        most: maximum draft tokens; see :class:`~foretoken.core.specs.Option`.
        window: positions that are read.
    """


class Derived(Base):
    """A method.

    Args:
        k: the ``"longest"`` draft, ``draw="iid"``.
        most: as in :class:`Limits`.
        window: as for :class:`~test_docstrings.Limits`, by default all.
        gone: as for :class:`Nothing`.
        away: as for :class:`~no.such.module.Nothing`.
    """

    def __init__(self, k: int = 4, most: int = 2, window: int | None = None, silent: bool = False) -> None: ...

    @classmethod
    def build(cls, path: str | None, context: Any, *, shared: str = "auto", k: int | None = None) -> Derived:
        """Build it.

        Args:
            k: draft length; measured by default.
        """
        raise NotImplementedError


def test_entries_of_all_sections() -> None:
    assert meaning_of(Base, "n") == "length of the n-gram"
    assert meaning_of(Base, "k") == meaning_of(Base, "width") == "maximum of *tokens* in a draft"
    assert meaning_of(Base, "text") == "words: and more of them"
    assert meaning_of(Base, "shared") == "what subclasses take"
    assert meaning_of(Base, "bias") == "", "only arguments, options and attributes are read"


def test_the_most_specific_docstring_counts() -> None:
    assert meaning_of(Derived, "k") == "draft length; measured by default"
    assert meaning_of(Derived, "n") == "length of the n-gram"


def test_references_are_followed() -> None:
    assert meaning_of(Derived, "most") == "maximum draft tokens; see `Option`"
    assert meaning_of(Derived, "window") == "positions that are read, by default all"
    assert meaning_of(Derived, "gone") == "as for `Nothing`"
    assert meaning_of(Derived, "away") == "as for `Nothing`"


def test_values_are_shown_as_in_a_spec() -> None:
    class Quoting:
        """It quotes.

        Args:
            draw: ``"iid"`` or ``draw="greedy"``, a "quoted" word.
        """

    assert meaning_of(Quoting, "draw") == '`iid` or `draw=greedy`, a "quoted" word'


def test_options_with_types_and_defaults() -> None:
    options = {option.name: option for option in described_options(Derived)}
    assert options["k"] == Option("k", "int", None, "draft length; measured by default")
    assert options["shared"] == Option("shared", "str", "auto", "what subclasses take")
    assert options["silent"] == Option("silent", "bool", False, "")
    assert [options[name].shown_default for name in ("k", "shared", "silent", "most")] == ["", "auto", "false", "2"]


def test_an_option_without_a_default() -> None:
    class Needing:
        def __init__(self, k: int) -> None: ...

    assert described_options(Needing) == [Option("k", "int", None, "")]
