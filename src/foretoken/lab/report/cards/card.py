"""Fields of a card, and checked reading of its file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.io.stamped import Stamp

STAMP = Stamp("foretoken benchmark card", 1, "write one with foretoken bench --card FILE.json")
NUMBER, TEXT = (int, float), (str, type(None))
FIELDS: dict[str, dict[str, Any]] = {
    "model": {
        "name": str,
        "kind": str,
        "fingerprint": str,
        "weights": str,
        "forward": str,
        "exactness": str,
        "quantize": TEXT,
        "inflate": TEXT,
        "backend": TEXT,
    },
    "machine": {"cpu": str, "cores": int, "threads": int, "matrix": list, "gpus": list, "load": (*NUMBER, type(None))},
    "versions": {"foretoken": str, "torch": str, "transformers": str},
    "workload": {"prompts_sha256": str, "categories": dict, "max_new_tokens": int, "repeat": int, "seed": int},
}
"""Required fields of a card's parts, and their types."""
FIGURE: dict[str, Any] = {
    "method": str,
    "drafter": str,
    "controller": str,
    "verifier": str,
    "fingerprint": TEXT,
    "temperature": NUMBER,
    "batch": int,
    "plain_tokens_per_s": NUMBER,
    "tokens_per_s": NUMBER,
    "speedup": NUMBER,
    "speedup_ci95": list,
    "tokens_per_round": (*NUMBER, type(None)),
    "prefill_s": (*NUMBER, type(None)),
    "ttft_s": (*NUMBER, type(None)),
    "equality": (dict, type(None)),
}
COUNTS = ("identical", "ties", "differences")


@dataclass(frozen=True)
class Card:
    """One benchmark of one model on one machine.

    Attributes:
        written: date, UTC.
        model: ``name`` and ``kind`` (``gguf``, ``transformers`` or ``built-in``) of its files, and their
            ``fingerprint`` (SHA-256 over their checksums); load options: ``quantize`` (``null``: as stored),
            ``inflate`` (``null``: not inflated) and ``backend`` (of a GGUF file); and execution: ``weights``,
            ``forward`` and ``exactness``, as in ``llm.describe()``.
        machine: ``cpu``, ``cores``, ``threads``, ``matrix`` (its vector and matrix instructions), ``gpus``, ``kernels``
            and ``load`` over one minute before the run.
        versions: of foretoken, Python, PyTorch and Transformers.
        workload: ``prompts_sha256``, ``categories`` (prompts by category), ``max_new_tokens``, ``ignore_eos``,
            ``repeat``, ``seed`` and ``filters``.
        figures: one per method and setting, with the fields of :data:`FIGURE`; speeds exclude the prefill; ``ttft_s``
            is set for other engines, ``prefill_s`` for ours.  ``drafter``, ``controller`` and ``verifier`` are those
            that ran (controller ``none`` in other engines).  ``drafters``, if present, names those of ``auto`` that
            have files, with their fingerprints.  ``equality`` counts outputs that are ``identical`` to plain
            decoding's, differ by a numerical tie, or really differ; ``null`` if they need not be equal.
    """

    written: str
    model: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    workload: dict[str, Any]
    figures: list[dict[str, Any]]


def read_card(file: Path) -> Card:
    """Read a card.  Raises ``ValueError`` for other files, other versions, and edited or incomplete cards."""
    body = STAMP.read(file)
    if (fault := fault_of(body)) is not None:
        raise ValueError(f"{file} is incomplete: {fault}")
    return Card(**body)


def read_cards(folder: Path) -> tuple[list[tuple[str, Card]], list[str]]:
    """The cards of a folder by file stem, and one line for every invalid ``*.json``.  Raises ``ValueError`` if there is
    no such file."""
    if not folder.is_dir():
        raise ValueError(f"no such folder of cards: {folder}")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{folder} holds no cards (*.json): {STAMP.remedy}")
    cards, faults = [], []
    for file in files:
        try:
            cards.append((file.stem, read_card(file)))
        except ValueError as error:
            faults.append(str(error))
    return cards, faults


def fault_of(body: Mapping[str, Any]) -> str | None:
    """Description of the first fault in a card; ``None`` if it is valid."""
    names = set(Card.__dataclass_fields__)
    if names != set(body):
        return f"its parts must be {', '.join(sorted(names))}"
    for part, fields in FIELDS.items():
        if (fault := _fields(body[part], fields, part)) is not None:
            return fault
    if not isinstance(body["written"], str) or not isinstance(body["figures"], list) or not body["figures"]:
        return "it needs the date 'written' and a list of 'figures'"
    for i, figure in enumerate(body["figures"], 1):
        if (fault := _fields(figure, FIGURE, f"figure {i}")) is not None:
            return fault
        if figure["tokens_per_s"] <= 0 or figure["plain_tokens_per_s"] <= 0 or figure["speedup"] <= 0:
            return f"figure {i} has a speed that is not above 0"
        counts = figure["equality"]
        if counts is not None and not all(type(counts.get(name)) is int and counts[name] >= 0 for name in COUNTS):
            return f"figure {i}: 'equality' counts {', '.join(COUNTS)}"
        if not _interval(figure["speedup_ci95"]):
            return f"figure {i}: 'speedup_ci95' is two numbers"
    texts: Sequence[Any] = [*body["machine"]["matrix"], *body["machine"]["gpus"]]
    return None if all(isinstance(text, str) for text in texts) else "'matrix' and 'gpus' are lists of names"


def _fields(entry: Any, fields: Mapping[str, Any], label: str) -> str | None:
    if not isinstance(entry, dict):
        return f"{label} is not an object"
    for name, kind in fields.items():
        value = entry.get(name, ...)
        if value is ... or not isinstance(value, kind) or isinstance(value, bool):
            return f"{label} has no valid '{name}'"
        if isinstance(value, float) and not math.isfinite(value):
            return f"{label} has no finite '{name}'"
    return None


def _interval(ends: Sequence[Any]) -> bool:
    return len(ends) == 2 and all(isinstance(value, NUMBER) for value in ends)
