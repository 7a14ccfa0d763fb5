"""Messages for unknown names: similar and valid ones."""

from __future__ import annotations

from collections.abc import Sequence


class UnknownName(ValueError):
    """A name that is none of the valid ones, all of which the message lists.

    Attributes:
        short: message for a terminal: instead of a long list, the nearest names and a reference to the full list.
    """

    def __init__(self, message: str, short: str = "") -> None:
        super().__init__(message)
        self.short = short or message


def did_you_mean(name: str, choices: Sequence[str]) -> str:
    """``"did you mean a, b or c? "`` with at most three similar choices; empty if none is similar.

    Names are similar if at least a share of 0.65 of their letters match in order.
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
    more: str = "",
    catalogue: str = "",
    examples: Sequence[str] = (),
) -> UnknownName:
    """The error for a name that is none of the choices.

    Args:
        subject: start of the message, including the name: ``"unknown drafter 'ngrm'"``.
        lead: words before the choices.
        more: words after the choices.
        catalogue: a reference to the full list, for the short message; without it the long message is used.
        examples: choices for the short message if none is similar.
    """
    near, listed = did_you_mean(name, choices), f"{lead} {', '.join(choices)}{more}"
    message = f"{subject}: {near}{listed}"
    if not catalogue or len(listed) <= 100:  # about a terminal line
        return UnknownName(message)
    some = f"{lead} {', '.join(examples)}, ...; "
    return UnknownName(message, f"{subject}: {near or some}{catalogue}")
