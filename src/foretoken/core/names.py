"""Unknown names: what was probably meant, and what there is."""

from __future__ import annotations

from collections.abc import Sequence

FEW = 100
"""Characters of a list that one line of a terminal has room for."""


class UnknownName(ValueError):
    """A name that is none of the valid ones, all of which the message lists.

    Attributes:
        short: the message for a terminal: of a long list, the nearest names and where all of them are.
    """

    def __init__(self, message: str, short: str = "") -> None:
        super().__init__(message)
        self.short = short or message


def did_you_mean(name: str, choices: Sequence[str]) -> str:
    """``"did you mean a, b or c? "`` with the nearest choices, at most three; nothing where none is near.

    Near are names of which at least a share of 0.65 are the same letters in the same order.
    """
    from difflib import get_close_matches

    lowered = {choice.lower(): choice for choice in choices}
    near = [lowered[match] for match in get_close_matches(name.lower(), list(lowered), 3, 0.65)]
    if not near:
        return ""
    return f"did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}? "


def unknown(
    subject: str,
    name: str,
    choices: Sequence[str],
    *,
    lead: str = "choose one of",
    catalogue: str = "",
    examples: Sequence[str] = (),
) -> UnknownName:
    """The error for a name that is none of the choices.

    Args:
        subject: the beginning of the message, which names it: ``"unknown drafter 'ngrm'"``.
        lead: words in front of the choices.
        catalogue: where all choices are shown, for the short message; without one it is the long message.
        examples: choices for the short message where none is near.
    """
    near, listed = did_you_mean(name, choices), f"{lead} {', '.join(choices)}"
    message = f"{subject}: {near}{listed}"
    if not catalogue or len(listed) <= FEW:
        return UnknownName(message)
    some = f"{lead} {', '.join(examples)}, ...; "
    return UnknownName(message, f"{subject}: {near or some}{catalogue}")
