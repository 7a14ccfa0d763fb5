"""Options of a generation: one table of fields.

The sampling pipeline, requests, lines of batch jobs, command options, server bodies and model defaults are derived from
it. Imports nothing heavy, because the command line reads the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``; ``above`` excludes ``low``."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)


@dataclass(frozen=True)
class Field:
    """One option, and where it is accepted.

    Attributes:
        kind: type of a value that is used unchanged; ``None`` for one that :func:`foretoken.options.make_request`
            converts.
        default: default value.
        sampling: whether it belongs to :class:`~foretoken.core.sampling.SamplingParams`, else to the request.
        filters: whether it removes tokens, so that it matters only when sampling.
        neutral: the value without effect, if that is not the default.
        help: help of the option in all commands that generate; empty: no option.
        in_lines: whether lines of batch jobs accept it.
        served: range that the server accepts under the same name; ``None``: it does not, or converts another value.
        configured: range in a model's ``generation_config.json``; ``None``: it is not read from there.
    """

    kind: type | None = None
    default: Any = None
    sampling: bool = False
    filters: bool = False
    neutral: Any = None
    help: str = ""
    in_lines: bool = False
    served: Range | None = None
    configured: Range | None = None


def _drawn(kind: type, default: float, **more: Any) -> Field:
    """A number that controls sampling; lines of batch jobs accept all of these."""
    return Field(kind, default, sampling=True, in_lines=True, **more)


FIELDS: Mapping[str, Field] = {
    "max_new_tokens": Field(int, 64, help="Most tokens to generate.", in_lines=True, configured=Range(1)),
    "temperature": _drawn(float, 0.0, neutral=1.0, help="0 is greedy.", served=Range(0, 2), configured=Range(0)),
    "top_k": _drawn(
        int, 0, filters=True, help="Keep the k most likely tokens; 0 keeps all.", served=Range(-1), configured=Range(0)
    ),
    "top_p": _drawn(
        float, 1.0, filters=True, help="Nucleus mass in (0, 1].",
        served=Range(0, 1, above=True), configured=Range(0, 1, above=True),
    ),
    "min_p": _drawn(
        float, 0.0, filters=True, help="Drop tokens below this fraction of the most likely one.",
        served=Range(0, 1), configured=Range(0, 1),
    ),
    "repetition_penalty": _drawn(float, 1.0, served=Range(0, 10, above=True), configured=Range(0, above=True)),
    "presence_penalty": _drawn(float, 0.0, served=Range(-2, 2)),
    "frequency_penalty": _drawn(float, 0.0, served=Range(-2, 2)),
    "logit_bias": Field(),
    "logits_processor": Field(),
    "stop": Field(in_lines=True),
    "include_stop": Field(bool, False),
    "stop_token_ids": Field(),
    "ignore_eos": Field(bool, False, in_lines=True, served=Range()),
    "min_tokens": Field(int, 0, in_lines=True, served=Range(0), configured=Range(0)),
    "allowed_token_ids": Field(),
    "bad_words": Field(in_lines=True),
    "constraint": Field(),
    "logprobs": Field(int),
    "prompt_logprobs": Field(int),
    "max_draft_tokens": Field(int),
    "drafter": Field(str),
    "explain": Field(bool, False),
    "priority": Field(int, 0, in_lines=True, served=Range(-(2**31))),
    "deadline_s": Field(float),
    "cache_salt": Field(str, "", in_lines=True),
    "seed": Field(
        int, help="Fixes the output when sampling.", in_lines=True, served=Range(-(2**63), 2**63 - 1)
    ),
    "prediction": Field(in_lines=True),
}  # fmt: skip
"""All options, by name."""
FILTERS = tuple(name for name, field in FIELDS.items() if field.filters)
"""Parameters that remove tokens."""
NO_FILTERS = {name: FIELDS[name].default for name in FILTERS}
"""Values that remove none."""
PENALTIES = {
    name: field.default
    for name, field in FIELDS.items()
    if field.sampling and not field.filters and name != "temperature"
}
"""Parameters that change logits by the prefix, and their values without effect."""
