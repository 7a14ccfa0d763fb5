"""Spec strings -> drafters, lists of drafters and trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.drafters.base import Drafter
from foretoken.drafters.ensemble import EnsembleDrafter
from foretoken.drafters.inside import works_inside
from foretoken.loading.checkpoints import BUILTIN, ZOO, is_adapter, is_builtin, resolve
from foretoken.models.base import LanguageModel
from foretoken.registry import convert_options, find, make, parse_spec, rows, split_specs
from foretoken.trees.base import Shape

DEFAULT_GROUP = "router,drafters=(model,k=8|ngram,k=10)"


def build_drafter(
    spec: str | Drafter | Sequence[str | Drafter] | None,
    target: LanguageModel,
    *,
    target_source: Any = BUILTIN,
    tokenizer: Any | None = None,
    device: str | torch.device | None = None,
) -> Drafter | None:
    """A drafter from a spec string; the ensemble of a list of spec strings and drafters.

    Raises:
        ValueError: unknown name or option, an empty list, or a draft model that does not fit the target.
    """
    if spec is None or isinstance(spec, Drafter):
        return spec
    if not isinstance(spec, str):
        return EnsembleDrafter(
            build_members(spec, target, target_source=target_source, tokenizer=tokenizer, device=device)
        )
    if spec == "none":
        return None
    parsed = parse_spec(spec)
    row = find("drafter", parsed.name)
    cls = row.load()
    options = convert_options("drafter", parsed.name, cls, parsed.options)
    builder = getattr(cls, "build", None)
    if builder is None and parsed.path is not None:
        raise ValueError(f"drafter {parsed.name!r} takes no path; its options: {row.example}")
    parts = {"target": target, "target_source": target_source, "tokenizer": tokenizer, "device": device}
    built: Drafter = cls(**options) if builder is None else builder(parsed.path, **parts, **options)
    built.spec = spec
    return built


def build_members(
    specs: str | Sequence[str | Drafter],
    target: LanguageModel,
    *,
    target_source: Any = BUILTIN,
    tokenizer: Any | None = None,
    device: Any = None,
) -> list[Drafter]:
    """The drafters of a list, or of specs joined by ``|`` (``model:./a,k=4|ngram``).

    Raises:
        ValueError: as :func:`build_drafter`; an empty place in the list, or ``none`` in it.
    """
    members = []
    for spec in split_specs(specs) if isinstance(specs, str) else specs:
        built = build_drafter(spec, target, target_source=target_source, tokenizer=tokenizer, device=device)
        if built is None:
            raise ValueError("a list of drafters cannot hold 'none': leave it out")
        members.append(built)
    return members


def default_drafter(target: LanguageModel, target_source: Any) -> str | None:
    """What ``drafter="auto"`` means: for the built-in target its draft model and n-grams; for any other what is free
    (:meth:`~foretoken.drafters.base.Drafter.free_for`).  Of several the controller picks one, or none.

    Plain decoding (``None``) for a target whose state cannot be rolled back.
    """
    if not target.capabilities.rollback:
        return None
    if _has_draft(target_source):
        return DEFAULT_GROUP
    free = free_drafters(target, target_source)
    return f"router,drafters=({'|'.join(free)})" if len(free) > 1 else next(iter(free), None)


def free_drafters(target: LanguageModel, target_source: Any) -> list[str]:
    """Names of the drafters that a target has for nothing and that are expected to pay; those that run a network first,
    because what copies text has a guess only now and then."""
    free = [row for row in rows("drafter") if row.load().free_for(target, target_source)]
    return [row.name for row in sorted(free, key=lambda row: not row.needs)]


def default_members(target: LanguageModel, target_source: Any) -> list[str | Drafter]:
    """What a group of drafters is made of when no members are given: what ``auto`` chooses from, and what copies."""
    first = ["model"] if _has_draft(target_source) else free_drafters(target, target_source)
    return list(dict.fromkeys((*first, "ngram", "suffix,share=false")))


def _has_draft(target_source: Any) -> bool:
    """Whether the built-in draft model belongs to the target: the built-in one, or an update of it."""
    if not is_builtin(target_source) or not (ZOO / "draft" / "config.json").exists():
        return False
    return str(target_source) == BUILTIN or is_adapter(Path(resolve(target_source)))


def build_nested_drafter(outer: str, spec: str, target: LanguageModel, **parts: Any) -> Drafter:
    """A drafter that works inside the drafter ``outer``; ``parts`` as in :func:`build_drafter`.

    Raises:
        ValueError: an unknown name or option, no drafter at all, or one that cannot work inside another one; the
            message lists those that can.
    """
    name = parse_spec(spec).name
    able = [row.name for row in rows("drafter") if works_inside(row.load())]
    built = None if name == "none" or find("drafter", name).name not in able else build_drafter(spec, target, **parts)
    if built is None:
        raise ValueError(f"{outer} cannot use {name!r} inside: choose one of {', '.join(able)}")
    return built


def has_drafter(name: str, target_source: Any) -> bool:
    """Whether the library ships a trained drafter of this method for a target: it does for the built-in one."""
    return str(target_source) == BUILTIN and (ZOO / name).is_dir()


def drafter_folder(name: str, path: str | None, target_source: Any) -> Path:
    """Where a trained drafter of a ``NAME[:FOLDER]`` spec is: the folder, or the built-in target's own.

    Raises:
        ValueError: no such folder, or no folder given for a target that is not built in.
    """
    if path is None:
        if not has_drafter(name, target_source):
            raise ValueError(
                f"drafter {name!r} needs a folder for this target: {name}:FOLDER, made by `foretoken train {name}`"
            )
        return ZOO / name
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder with a trained drafter: make one with `foretoken train {name}`")
    return folder


def static_trees() -> list[str]:
    """Names of the trees of fixed shape."""
    return [row.name for row in rows("tree") if issubclass(row.load(), Shape)]


def build_tree(spec: str, sort: type[Any]) -> Any:
    """A tree from its spec, of the sort ``Shape`` (fixed) or ``Growth`` (by the draft's confidence).

    Raises:
        ValueError: an unknown name or option, or a tree of the other sort; the message lists the choices.
    """
    able = [row.name for row in rows("tree") if issubclass(row.load(), sort)]
    if parse_spec(spec).name not in able:
        raise ValueError(f"the tree cannot be {spec!r}: choose one of {', '.join(able)}")
    return make("tree", spec)
