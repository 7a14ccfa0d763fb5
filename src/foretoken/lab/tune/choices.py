"""Drafters and sizes that a tuner tries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.specs import Spec, split_outside
from foretoken.lab.workload import Subject
from foretoken.loading import BUILTIN
from foretoken.loading.drafters import brought_drafters
from foretoken.methods.drafters.group import GroupDrafter
from foretoken.methods.drafters.sources import SourceDrafter
from foretoken.registry import Row, convert_options, find, installed_rows, options_of, parse_spec, rows

LIKELY = ("ngram", "suffix,share=false", "quantized,bits=4")
"""Drafters that most often pay without training or downloads."""


def parse_names(text: str) -> list[str]:
    """The specs in a list ``model,k=8,ngram``; an item ``key=value`` belongs to the spec before it.  Raises
    ``ValueError`` for an empty item, an option before any drafter, and unknown names or options."""
    specs: list[str] = []
    for item in split_outside(text, ","):
        if re.match(r"\s*\w+\s*=", item) and specs:
            specs[-1] += f",{item.strip()}"
        else:
            specs.append(item.strip())
    if not all(specs):
        raise ValueError(
            f"--drafters {text!r} has an empty item: write names joined by commas, for example model,ngram"
        )
    for spec in specs:
        if spec == "none":
            raise ValueError("--drafters cannot hold 'none': plain decoding is always measured")
        parsed = parse_spec(spec)
        convert_options("drafter", parsed.name, find("drafter", parsed.name).load(), parsed.options)
    return list(dict.fromkeys(specs))


def default_specs(target_source: Any) -> list[str]:
    """All candidates of a target: its trained drafters if it is built in, all drafters without training, and those of
    installed packages."""
    builtin = str(target_source) == BUILTIN
    # Excluded are drafters that depend on scripted tokens, a caller's prediction or online training
    able = [
        row
        for row in rows("drafter")
        if row.name not in ("scripted", "prediction", "online") and (builtin or not row.needs_training)
    ]
    alone = [row for row in able if not issubclass(row.load(), GroupDrafter)]
    # Best candidates first: time may run out.
    first = ("model", "ngram", "suffix", "recycling")
    alone.sort(key=lambda row: (row.name not in first, not row.needs_training))
    return [row.example for row in (*alone, *installed_rows())]


def likely(subject: Subject, offers: Sequence[str] = ()) -> list[str]:
    """First candidates: drafters that often pay, the target's own, and ``offers``."""
    brought = brought_drafters(subject.target, subject.source, [parse_spec(spec).name for spec in LIKELY])
    return list(dict.fromkeys((*LIKELY, *brought, *offers)))


def further(target_source: Any, tried: Sequence[str]) -> list[str]:
    """All other candidates of a target."""
    names = {parse_spec(spec).name for spec in tried}
    return [spec for spec in default_specs(target_source) if parse_spec(spec).name not in names]


def generous(spec: str, is_chosen: bool) -> str:
    """The spec with a draft length worth measuring; a user's choice (``is_chosen``) is kept."""
    parsed = parse_spec(spec)
    row = find("drafter", parsed.name)
    cls, key = row.load(), length_key(row)
    if key is None or (is_chosen and key in parsed.options):
        return spec
    # Steps of a drafter that copies text are free.
    length = 16 if issubclass(cls, SourceDrafter) else 8
    options = options_of(cls)
    for option in (key, "nodes") if key == "depth" else (key,):  # a chain of 8 needs 8 nodes
        value = parsed.options.get(option, options[option].default)
        if isinstance(value, int | str) and 0 < int(value) < length:  # 0: all that a network predicts at once
            spec = with_option(spec, option, length)
    return spec


def length_key(row: Row) -> str | None:
    """The option for the draft length, if the drafter supports any length."""
    options = options_of(row.load())
    if "k" in options:  # without trees, a trained network has a fixed draft length
        return "k" if "tree" in options or not row.needs_training else None
    return "depth" if "depth" in options and "width" in options else None


def sizes(spec: str, is_chosen: bool) -> list[str]:
    """Specs of a tree drafter with other node counts; empty if the user chose a size or tree."""
    parsed = parse_spec(spec)
    options = options_of(find("drafter", parsed.name).load())
    if "nodes" not in options or (is_chosen and {"nodes", "tree"} & set(parsed.options)):
        return []
    nodes = parsed.options.get("nodes", options["nodes"].default)
    return [with_option(spec, "nodes", n) for n in (8, 16, 32, 64) if str(n) != str(nodes)]


def with_option(spec: str, key: str, value: object) -> str:
    parsed = parse_spec(spec)
    return _text(parsed, {**parsed.options, key: str(value)})


def with_tree(spec: str, tree: object) -> str:
    """The spec with a tuned tree in place of the options that shape another one.

    ``draw=iid`` is left out, too: siblings of tuned trees are drawn without replacement.
    """
    parsed = parse_spec(spec)
    shaped = {"k", "nodes", "width", "tree"}
    kept = {
        key: value for key, value in parsed.options.items() if key not in shaped and (key, value) != ("draw", "iid")
    }
    return _text(parsed, {**kept, "tree": str(tree)})


def _text(parsed: Spec, options: Mapping[str, str]) -> str:
    head = parsed.name if parsed.path is None else f"{parsed.name}:{parsed.path}"
    return ",".join([head, *(f"{name}={_wrapped(text)}" for name, text in options.items())])


def _wrapped(text: str) -> str:
    return f"({text})" if "," in text or "|" in text else text


def router_spec(network: str, copier: str, costs: Sequence[float]) -> str:
    """Spec of a router over two drafters, with their costs per draft token in target steps."""
    return f"router,drafters=({network}|{copier}),costs={'|'.join(f'{cost:.3g}' for cost in costs)}"
