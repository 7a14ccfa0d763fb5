"""Values of options: of which kind they must be, and the error that names the option."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any


class OptionError(ValueError):
    """An option has a value that cannot be."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def plain(value: Any) -> Any:
    """A value of Python's own kinds: numbers and lists where it is a tensor's, an array's or NumPy's."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; a truth value is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(option: str, value: Any) -> None:
    """Refuse what is no whole number, by an ``OptionError``; a truth value is none."""
    if not is_whole(value):
        raise OptionError(option, f"{option} must be a whole number, not {_shown(value)}")


def check_counts(options: Mapping[str, Any], least: int) -> None:
    """Refuse options, by their names, that are no whole number or less than the least, by an ``OptionError``."""
    for option, value in options.items():
        check_whole(option, value)
        if value < least:
            raise OptionError(option, f"{option} must be at least {least}, not {value}")


def check_least(method: str, least: float, **options: float | None) -> None:
    """Refuse options of a method below the least, by a ``ValueError``; ``None`` was not given."""
    for option, value in options.items():
        if value is not None and not value >= least:
            raise ValueError(f"{method} needs {option} >= {least}, not {value}")


def check_real(option: str, value: Any) -> None:
    """Refuse what is no number, by an ``OptionError``; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(option, f"{option} must be a number, not {_shown(value)}")


def check_flags(**options: Any) -> None:
    """Refuse options, by their names, that are no truth values, by an ``OptionError``."""
    for option, value in options.items():
        if not isinstance(value, bool):
            raise OptionError(option, f"{option} must be True or False, not {_shown(value)}")


def check_text(option: str, value: Any) -> None:
    """Refuse what is no text, and text that is no Unicode (half a surrogate pair), by an ``OptionError``."""
    if not isinstance(value, str):
        raise OptionError(option, f"{option} must be text, not {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise OptionError(option, f"{option} holds half a surrogate pair, which is no character") from None


def texts_of(option: str, value: Any, each: str) -> tuple[str, ...]:
    """One text or several.  Raises ``OptionError`` for anything else, an empty text, or text that is no Unicode."""
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else _members(option, value, "text, or a list of texts")
    for text in texts:
        check_text(option, text)
        if not text:
            raise OptionError(option, f"{option}: a {each} must not be empty")
    return texts


def ids_of(option: str, value: Any) -> tuple[int, ...]:
    """Token ids, whether the vocabulary has them or not.  Raises ``OptionError`` for anything but whole numbers."""
    ids = _members(option, value, "a list of token ids")
    for token in ids:
        if not is_whole(token):
            raise OptionError(option, f"{option} must hold token ids (whole numbers), not {_shown(token)}")
    return tuple(int(token) for token in ids)


@contextmanager
def numbered(place: int, count: int) -> Iterator[None]:
    """Say of an error which of several prompts it is about, from 0.

    An option that would be refused for any prompt is refused with the first, which is not to blame.
    """
    try:
        yield
    except ValueError as error:
        option = getattr(error, "option", "prompt")
        if count == 1 or (place == 0 and option not in ("prompt", "messages")):
            raise
        raise OptionError(option, f"prompt {place + 1} of {count}: {error}") from None


def check_ids(option: str, ids: Iterable[Any], vocab_size: int | None) -> None:
    """Refuse ids that the vocabulary lacks, by an ``OptionError``; of one of unknown size, negative ids."""
    for token in ids:
        if not is_whole(token):
            raise OptionError(option, f"{option} must hold token ids (whole numbers), not {_shown(token)}")
        if vocab_size is None and token < 0:
            raise OptionError(option, f"{option} token {token} is negative: ids count from 0")
        if vocab_size is not None and not 0 <= int(token) < vocab_size:
            raise OptionError(option, f"{option} token {token} is outside the vocabulary of {vocab_size}")


def _members(option: str, value: Any, rule: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise OptionError(option, f"{option} must be {rule}, not {_shown(value)}")
    return tuple(value)


def _shown(value: Any) -> str:
    """A value in a message of one line."""
    is_short = value is None or isinstance(value, str | int | float)
    return ascii(value)[:60] if is_short else with_article(type(value).__name__)


def with_article(name: str) -> str:
    """The name of a type in a sentence: ``"a list"``, ``"an int"``."""
    return f"an {name}" if name[:1].lower() in ("a", "e", "i", "o") else f"a {name}"
