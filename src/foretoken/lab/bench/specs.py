"""Specs of benchmark arms, parsed without heavy imports."""

from __future__ import annotations

from foretoken.core.names import UnknownName
from foretoken.registry import find, parse_spec, rows

PLAIN = "plain"
"""The baseline arm; ``none`` is an alias."""
OTHER_ENGINES = "transformers:plain, transformers:assisted, transformers:prompt_lookup, llama.cpp"


def split_arm(spec: str) -> tuple[str, str | None]:
    """Drafter and controller of ``DRAFTER[@CONTROLLER]``; an ``@`` without a controller after it is part of the
    drafter."""
    head, at, tail = spec.rpartition("@")
    if at and head:
        try:
            find("controller", parse_spec(tail).name)
        except ValueError:
            return spec, None
        return head, tail
    return spec, None


def controller_of(spec: str, shared: str) -> str:
    """The controller of an arm, by its spec and the run's shared controller: arms draft at constant length unless one
    is set, and only the arm ``auto`` adapts."""
    drafter, controller = split_arm(spec)
    return controller or ("constant" if shared == "auto" and drafter != "auto" else shared)


def is_foreign(spec: str) -> bool:
    """Whether a spec names another engine."""
    # Any other arm is a drafter's spec
    return spec.partition(",")[0].partition(":")[0].strip() in ("transformers", "llama.cpp")


def check_arm(spec: str) -> None:
    """Raise ``ValueError``, with the choices, for an unknown arm."""
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
