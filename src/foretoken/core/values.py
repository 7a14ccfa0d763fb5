"""Validation of option values, with an error that names the option."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from numbers import Integral, Real
from typing import Any


class OptionError(ValueError):
    """An option has an invalid value."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def plain(value: Any) -> Any:
    """A tensor, array or NumPy value as Python numbers and lists; others unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_whole(value: Any) -> bool:
    """Whether a value is an integer; booleans are not."""
    # The plain type first: a prompt has 100,000 ids, and a check against an abstract class takes ten times as long
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def check_whole(option: str, value: Any) -> None:
    """Raise ``OptionError`` for a value that is not an integer; booleans are not."""
    if not is_whole(value):
        raise OptionError(option, f"{option} must be a whole number, not {_shown(value)}")


def check_counts(options: Mapping[str, Any], least: int) -> None:
    """Raise ``OptionError`` for options that are no integer or below ``least``."""
    for option, value in options.items():
        check_whole(option, value)
        if value < least:
            raise OptionError(option, f"{option} must be at least {least}, not {value}")


def check_least(method: str, least: float, **options: float | None) -> None:
    """Raise ``ValueError`` for options of a method below ``least``; ``None`` means unset."""
    for option, value in options.items():
        if value is not None and not value >= least:
            raise ValueError(f"{method} needs {option} >= {least}, not {value}")


def check_real(option: str, value: Any) -> None:
    """Raise ``OptionError`` for a value that is not a number; booleans are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(option, f"{option} must be a number, not {_shown(value)}")


def python_number(value: Any) -> Any:
    """A number of another type (NumPy's, ``Fraction``) as ``int`` or ``float``; any other value unchanged.

    Comparisons of NumPy's numbers give ``np.bool_``, which is neither ``True`` nor ``False``.
    """
    if type(value) in (int, float, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_flags(**options: Any) -> None:
    """Raise ``OptionError`` for options that are not booleans."""
    for option, value in options.items():
        if not isinstance(value, bool):
            raise OptionError(option, f"{option} must be True or False, not {_shown(value)}")


def check_text(option: str, value: Any) -> None:
    """Raise ``OptionError`` for a value that is not text, or not valid Unicode (half a surrogate pair)."""
    if not isinstance(value, str):
        raise OptionError(option, f"{option} must be text, not {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise OptionError(option, f"{option} contains half a surrogate pair, which is not a character") from None


def texts_of(option: str, value: Any, each: str) -> tuple[str, ...]:
    """One text or several. Raises ``OptionError`` for anything else, an empty text, or invalid Unicode."""
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else _members(option, value, "text, or a list of texts")
    for text in texts:
        check_text(option, text)
        if not text:
            raise OptionError(option, f"{option}: a {each} must not be empty")
    return texts


def ids_of(option: str, value: Any) -> tuple[int, ...]:
    """Token ids, inside the vocabulary or not. Raises ``OptionError`` for anything but integers."""
    ids = _members(option, value, "a list of token ids")
    for token in ids:
        if not is_whole(token):
            raise OptionError(option, f"{option} must hold token ids (whole numbers), not {_shown(token)}")
    return tuple(int(token) for token in ids)


@contextmanager
def numbered(index: int, count: int) -> Iterator[None]:
    """Add to an error the number of the prompt that caused it; ``index`` counts from 0.

    An error of an option that would be refused for any prompt is raised unchanged for the first one.
    """
    try:
        yield
    except ValueError as error:
        option = getattr(error, "option", "prompt")
        if count == 1 or (index == 0 and option not in ("prompt", "messages")):
            raise
        raise OptionError(option, f"prompt {index + 1} of {count}: {error}") from None


def check_ids(option: str, ids: Iterable[Any], vocab_size: int | None) -> None:
    """Raise ``OptionError`` for ids outside the vocabulary, or for negative ids if its size is unknown."""
    wide = inf if vocab_size is None else vocab_size
    for token in ids:
        if type(token) is int and 0 <= token < wide:
            continue
        if not is_whole(token):
            raise OptionError(option, f"{option} must hold token ids (whole numbers), not {_shown(token)}")
        if vocab_size is None and token < 0:
            raise OptionError(option, f"{option} token {token} is negative: ids count from 0")
        if vocab_size is not None and not 0 <= int(token) < vocab_size:
            raise OptionError(option, f"{option} token {token} is outside the vocabulary of {vocab_size}")


def _members(option: str, value: Any, rule: str) -> tuple[Any, ...]:
    if not isinstance(value, str | bytes | Mapping):
        with suppress(TypeError):  # a tensor without dimensions has __iter__, too
            return tuple(value)
    raise OptionError(option, f"{option} must be {rule}, not {_shown(value)}")


def _shown(value: Any) -> str:
    is_short = value is None or isinstance(value, str | int | float)
    return ascii(value)[:60] if is_short else with_article(type(value).__name__)


def one_line(error: BaseException | str, longest: int | None = None) -> str:
    """An error's message in one line of at most ``longest`` characters; the error's class if it has none."""
    return " ".join(str(error).split())[:longest] or type(error).__name__


def text_of(error: BaseException) -> str:
    """An error's message; empty if its class cannot give one, as code from outside may define any."""
    try:
        return str(error)
    except Exception:
        return ""


def named(error: BaseException) -> str:
    """``"KeyError: 'lost'"``: an error's class and message; the class alone if there is no message."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_article(name: str) -> str:
    """A type's name with its article: ``"a list"``, ``"an int"``."""
    return f"an {name}" if name[:1].lower() in ("a", "e", "i", "o") else f"a {name}"
