"""Ends of a request's output: the model's end-of-text ids, requested ids and strings, and the end of a constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.core.constraints import CannotGoOn
from foretoken.engine.request import Request, Running
from foretoken.engine.stopping import FinishReason
from foretoken.models.base import LanguageModel


@dataclass(frozen=True)
class Ends:
    """Token ids that end the output.

    Attributes:
        eos: ids that end it as end of text.
        stops: ids that end it as a stop string does.
        special_stops: stop strings that are the text of a special token, by its id. Text is decoded without special
            tokens, so such a string never occurs in it.
        special: ids of all special tokens, by their text, if there are stop strings.
    """

    eos: frozenset[int]
    stops: frozenset[int]
    special_stops: Mapping[int, str]
    special: Mapping[str, int]

    @property
    def ids(self) -> frozenset[int]:
        """Ids of all three groups."""
        return self.eos | self.stops | frozenset(self.special_stops)


def ends_of(request: Request, target: LanguageModel, tokenizer: Any | None) -> Ends:
    """Token ids that end a request's output.

    A constraint ends it where nothing may follow, even with ``ignore_eos``; a string of a language ends where it is
    complete.
    """
    eos = frozenset() if request.ignore_eos else target.eos_token_ids
    for rule in (request.constraint, request.language):
        if rule is not None:
            eos = target.eos_token_ids | rule.ends
    special = special_tokens(tokenizer) if request.stop else {}
    special_stops = {special[stop]: stop for stop in request.stop if stop in special}
    return Ends(eos, request.stop_token_ids, special_stops, special)


def special_tokens(tokenizer: Any | None) -> dict[str, int]:
    """Ids of a tokenizer's special tokens, by their text; empty without a tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {str(token.content): int(number) for number, token in added.items() if token.special}
    for text in getattr(tokenizer, "all_special_tokens", ()):
        if text not in ids and tokenizer is not None:
            ids[str(text)] = int(tokenizer.convert_tokens_to_ids(text))
    return {text: number for text, number in ids.items() if text}


def dropped_ids(request: Request, tokenizer: Any | None) -> frozenset[int] | None:
    """Ids of the special tokens that have no text in a request's output, if it shows others; else ``None``."""
    if not request.shown_special:
        return None
    return frozenset(special_tokens(tokenizer).values()) - request.shown_special


def end_where_nothing_follows(run: Running, tokens: Sequence[int]) -> FinishReason:
    """Finish reason where the request's rules allow no token after ``tokens`` of the last round. A complete constraint
    ends with ``stop``; anything else raises ``CannotGoOn``."""
    request, output = run.request, [*run.output, *tokens]
    if request.constraint is not None and request.constraint.may_end(output):
        return "stop"
    raise CannotGoOn(
        f"{rules_of(request)} allow no token after {len(output)} generated tokens, and the output may not end there"
    )


def rules_of(request: Request) -> str:
    """The options of a request that rule out tokens, in words."""
    rules = {
        "the constraint": request.constraint is not None,
        "allowed_token_ids": request.allowed_token_ids is not None,
        "bad_words": bool(request.bad_words),
        "logits_processor": bool(request.params.processors),
    }
    return " and ".join(name for name, is_given in rules.items() if is_given)
