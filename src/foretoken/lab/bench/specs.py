"""The specs of a benchmark's arms, read without loading anything heavy."""

from __future__ import annotations

from foretoken.core.names import UnknownName
from foretoken.registry import find, parse_spec, rows

PLAIN = "plain"
"""The arm that all others are compared with; ``none`` names it too."""
OTHER_ENGINES = "transformers:plain, transformers:assisted, transformers:prompt_lookup, llama.cpp"


def split_arm(spec: str) -> tuple[str, str | None]:
    """Drafter and controller of ``DRAFTER[@CONTROLLER]``; an ``@`` that no controller follows is part of the
    drafter."""
    head, at, tail = spec.rpartition("@")
    if at and head:
        try:
            find("controller", parse_spec(tail).name)
        except ValueError:
            return spec, None
        return head, tail
    return spec, None


def is_foreign(spec: str) -> bool:
    """Whether a spec names another engine."""
    # Engines that are not ours; every other arm is a drafter's spec
    return spec.partition(",")[0].partition(":")[0].strip() in ("transformers", "llama.cpp")


def check_arm(spec: str) -> None:
    """Refuse a name that stands for nothing, by a ``ValueError`` that lists what there is."""
    name = parse_spec(split_arm(spec)[0]).name
    if is_foreign(spec) or name in ("auto", "none", PLAIN):
        return
    try:
        find("drafter", name)
    except UnknownName as error:
        head, at, controller = name.partition("@")
        if at and (head in ("auto", "none", PLAIN) or any(row.name == head for row in rows("drafter"))):
            find("controller", controller)
        others = f", or another engine: {OTHER_ENGINES}"
        raise UnknownName(f"{error}{others}", f"{error.short}{others}") from None
