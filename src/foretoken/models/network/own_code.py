"""What a module computes with besides its weights: the code of its forward, its numbers, and buffers that no checkpoint
has (rotary frequencies).

Any of them can be changed on a network that is in use: a ``forward`` is replaced on a module or on its class, as
packages of faster kernels and ablations do, or ``scaling``, an epsilon or ``inv_freq`` are written.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from foretoken.models.network.rotary import follows_length

FAMILIAR = ("torch", "transformers")
"""Packages whose decorators may lie around the forward of a class."""


def numbers_by_module(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, list[str]]]:
    """The modules that keep plain numbers (``scaling``, ``variance_epsilon``, ``top_k``), and the names of those.

    Numbers that a class writes in its own methods are left out: a counter says nothing about what is computed.
    """
    plain = ((m, [name for name, value in vars(m).items() if type(value) in (int, float)]) for m in modules)
    return _without_written(plain)


def constants_by_module(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, list[str]]]:
    """The modules with buffers that are not saved with a model, and the names of those that nothing in their class
    seems to write: many forwards keep tables and masks in such buffers."""
    return _without_written((m, list(m._non_persistent_buffers_set)) for m in modules)


def _without_written(listed: Iterable[tuple[nn.Module, list[str]]]) -> list[tuple[nn.Module, list[str]]]:
    unwritten = []
    for module, names in listed:
        if names and not follows_length(module):  # else its forward writes what it turns by
            kind: Any = type(module)  # (mypy takes a class of modules for no hashable thing)
            written = _written_names(kind, kind.forward, frozenset(names))
            unwritten.append((module, [name for name in names if name not in written]))
    return unwritten


@lru_cache(maxsize=256)
def _written_names(kind: type, forward: Any, names: frozenset[str]) -> set[str]:
    """Which of the names methods of a class may write, but for those that make it.  Kept: it takes milliseconds."""
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
    """A method with its decorators, outermost first; nothing for what is no function."""
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    while isinstance(member, FunctionType):
        yield member
        member = getattr(member, "__wrapped__", None)


# -- the code of a class -----------------------------------------------------------------------------------------------


def mark_of(kind: type[nn.Module]) -> str | None:
    """What tells the forward of a class from others that it may be given, also in another process.

    ``None`` where nothing does: a function from elsewhere (another package's kernel) or no function at all took its
    place.  Decorators of PyTorch and Transformers, and a forward that is inherited, are no such thing.
    """
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    functions = list(_layers(vars(owner)["forward"]))
    if not functions or hasattr(functions[-1], "__wrapped__"):
        return None
    *around, inner = functions
    package = owner.__module__.partition(".")[0]
    if inner.__module__ != owner.__module__ or inner.__globals__.get("__name__") != owner.__module__:
        return None
    if set(inner.__code__.co_freevars) - {"__class__"}:  # what it closes over is not in its code
        return None
    # functools.wraps copies the name of the module: where a decorator comes from, its globals tell.
    homes = (str(function.__globals__.get("__name__", "")) for function in around)
    if any(home.partition(".")[0] not in (package, *FAMILIAR) for home in homes):
        return None
    return "\n".join(_text(function) for function in functions)


def _text(function: FunctionType) -> str:
    codes = [
        f"{code.co_code.hex()} {code.co_names} {[_constant(constant) for constant in code.co_consts]}"
        for code in _nested(function.__code__)
    ]
    return f"{function.__module__} {function.__qualname__} {codes}"


def _constant(value: Any) -> str:
    """A constant in words that are the same in every process."""
    if isinstance(value, CodeType):
        return value.co_name
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def forwards_of(modules: Iterable[nn.Module]) -> list[Any]:
    """What calls of modules run: their classes, forwards of their own (``None`` where there are none), and the forwards
    of those classes."""
    modules = list(modules)
    kinds = [type(module) for module in modules]
    replaced = [vars(module).get("forward") for module in modules]
    return [*kinds, *replaced, *(kind.forward for kind in dict.fromkeys(kinds))]
