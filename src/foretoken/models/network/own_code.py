"""Inputs of a module's computation besides its weights: the code of its forward, its numbers, and buffers that are in
no checkpoint (rotary frequencies).

All of them can change while a network is in use: packages of faster kernels and ablations replace a ``forward`` on a
module or its class; others write ``scaling``, an epsilon or ``inv_freq``.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from foretoken.models.network.rotary import follows_length

KNOWN_PACKAGES = ("torch", "transformers", "foretoken")
"""Packages whose classes have the code that their names say."""


def numbers_by_module(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, list[str]]]:
    """Modules with plain numbers (``scaling``, ``variance_epsilon``, ``top_k``), and the names of these.

    Numbers written by methods of their class are left out: a counter does not affect the result.
    """
    plain = ((m, [name for name, value in vars(m).items() if type(value) in (int, float)]) for m in modules)
    return _without_written(plain)


def constants_by_module(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, list[str]]]:
    """Modules with non-persistent buffers, and the names of those that no method of their class seems to write: many
    forwards keep tables and masks in such buffers."""
    return _without_written((m, list(m._non_persistent_buffers_set)) for m in modules)


def _without_written(listed: Iterable[tuple[nn.Module, list[str]]]) -> list[tuple[nn.Module, list[str]]]:
    unwritten = []
    for module, names in listed:
        if names and not follows_length(module):  # otherwise its forward writes the frequencies
            kind: Any = type(module)  # (mypy does not consider a module class hashable)
            written = _written_names(kind, kind.forward, frozenset(names))
            unwritten.append((module, [name for name in names if name not in written]))
    return unwritten


@lru_cache(maxsize=256)
def _written_names(kind: type, forward: Any, names: frozenset[str]) -> set[str]:
    """The names that methods of a class, except its constructor, may write.  Cached, as it takes milliseconds."""
    classes = [base for base in kind.__mro__ if base is not object and not base.__module__.startswith("torch.nn.")]
    members = (member for base in classes for name, member in vars(base).items() if name != "__init__")
    codes = (code for member in members for function in _layers(member) for code in _nested(function.__code__))
    return {name for code in codes for name in _written_in(code, names)}


def _written_in(code: CodeType, names: frozenset[str]) -> set[str]:
    read, stored = set(names.intersection(code.co_names)), set[str]()
    if {"register_buffer", "setattr"}.intersection(code.co_names):
        stored.update(names.intersection(constant for constant in code.co_consts if isinstance(constant, str)))
    if not read:
        return stored
    steps = list(dis.get_instructions(code))
    in_place = any(name.endswith("_") and not name.startswith("__") for name in code.co_names)
    if in_place or any(step.opname in ("STORE_SUBSCR", "STORE_SLICE") for step in steps):  # x.copy_(...), x[i] = ...
        return stored | read
    return stored | {step.argval for step in steps if step.opname == "STORE_ATTR" and step.argval in read}


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _layers(member: Any) -> Iterator[FunctionType]:
    """A method and its decorators, outermost first; empty if it is not a function."""
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    while isinstance(member, FunctionType):
        yield member
        member = getattr(member, "__wrapped__", None)


# -- the code of a class -----------------------------------------------------------------------------------------------


def mark_of(kind: type[nn.Module]) -> str | None:
    """Text that identifies the forward of a class across processes.

    ``None`` if a function from elsewhere (another package's kernel) or something else replaced it.  Decorators of
    PyTorch and Transformers, and an inherited forward, are fine.
    """
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    functions = list(_layers(vars(owner)["forward"]))
    if not functions or hasattr(functions[-1], "__wrapped__"):
        return None
    *around, inner = functions
    package = owner.__module__.partition(".")[0]
    if inner.__module__ != owner.__module__ or inner.__globals__.get("__name__") != owner.__module__:
        return None
    if set(inner.__code__.co_freevars) - {"__class__"}:  # its code does not contain what it closes over
        return None
    # functools.wraps copies the module name; a decorator's globals show its origin.
    homes = (str(function.__globals__.get("__name__", "")) for function in around)
    if any(home.partition(".")[0] not in (package, "torch", "transformers") for home in homes):
        return None
    return "\n".join(_text(function) for function in functions)


def is_changed(module: nn.Module) -> bool:
    """Whether a module runs other code than that of a class of PyTorch, Transformers or this package: its own
    ``forward``, a class from elsewhere that overrides more than the constructor (a subclass, another package's kernel),
    or a forward put on its class."""
    kind = type(module)
    own = vars(module).get("forward")
    own = getattr(own, "runs", own)  # in this thread
    own = getattr(own, "_torchdynamo_orig_callable", own)  # the result of compiled code is the same
    if own is not None and getattr(own, "__func__", None) is not kind.forward:
        return True
    return _overrides(kind) or mark_of(kind) is None


def _overrides(kind: type[nn.Module]) -> bool:
    """Whether classes from elsewhere override something of those that they derive from."""
    known = next(base for base in kind.__mro__ if base.__module__.partition(".")[0] in KNOWN_PACKAGES)
    others = kind.__mro__[: kind.__mro__.index(known)]
    free = {"__init__", "__module__", "__doc__", "__annotations__"}
    added = [(name, value) for base in others for name, value in vars(base).items() if name not in free]
    return any(getattr(known, name, value) is not value for name, value in added)


def _text(function: FunctionType) -> str:
    codes = [
        f"{code.co_code.hex()} {code.co_names} {[_constant(constant) for constant in code.co_consts]}"
        for code in _nested(function.__code__)
    ]
    return f"{function.__module__} {function.__qualname__} {codes}"


def _constant(value: Any) -> str:
    """A constant as text that is equal in every process."""
    if isinstance(value, CodeType):
        return value.co_name
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def forwards_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Everything that calls of modules run: their classes, their instances' forwards (or ``None``), and the classes'
    forwards."""
    modules = list(modules)
    kinds = [type(module) for module in modules]
    replaced = [vars(module).get("forward") for module in modules]
    return [*kinds, *replaced, *(kind.forward for kind in dict.fromkeys(kinds))]
