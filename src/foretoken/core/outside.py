"""Drafters from outside the package: a class in a file, ``file.py:Class``, or another package's entry point."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.core.io.hub_ids import expanded
from foretoken.core.values import named, with_article

_FASTER = {"propose": "propose_batch", "decide": "decide_fast", "budget": "budgets"}
"""What the engine calls in place of a protocol's plain method, which many of our classes write out."""


class OutsideError(ValueError):
    """Code from outside raised an error, or broke a rule of its protocol."""


def is_code(name: str) -> bool:
    """Whether a spec names a class in a file: ``file.py:Class``."""
    return name.partition(":")[0].endswith(".py")


def names_code(spec: Any) -> bool:
    """Whether a spec, or one inside it, names a class in a file."""
    return isinstance(spec, str) and re.search(r"\.py\s*:", spec) is not None


def refuse_code(spec: Any, source: str) -> None:
    """Raise ``ValueError`` for a spec from data that names a file of code: data must not run code."""
    if names_code(spec):
        raise ValueError(f"{source} names code ({spec}), which is only run when you name it: give --drafter {spec}")


def check_code(name: str) -> None:
    """Raise ``ValueError`` for an invalid ``file.py:Class``, before anything is imported."""
    file, _, cls = name.partition(":")
    if not expanded(file).is_file():
        raise ValueError(f"there is no file {file}: give a drafter from outside as file.py:Class")
    if not cls.isidentifier():
        raise ValueError(f"{name!r} has no class name: give a drafter from outside as file.py:Class")


def class_in_file(name: str) -> type[Any]:
    """The drafter ``file.py:Class``; its file is run once, and a relative one is that of the present folder. Raises
    ``ValueError`` if it is no drafter, or if the file raises."""
    check_code(name)
    path, _, cls = name.partition(":")
    module = _run(expanded(path).resolve())
    drafter = vars(module).get(cls)
    if drafter is None:
        drafters = {key: value for key, value in vars(module).items() if _is_drafter(value)}
        names = [key for key, value in drafters.items() if value.__module__ == module.__name__]
        raise ValueError(f"{path} has no class {cls}: it has {', '.join(names) or 'no drafter'}")
    return checked(drafter, name)


@cache
def _run(file: Path) -> Any:
    name = f"drafters_of_{file.stem}_{abs(hash(file)):x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} cannot be read as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look up their module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        del sys.modules[name]
        raise
    except BaseException as error:  # an exit, too: the file is read where its error is one line
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines.append(error.lineno)
        location = f"{file.name}, line {lines[-1]}" if lines else file.name
        message = f"{type(error).__name__}: {error.msg}" if isinstance(error, SyntaxError) else named(error)
        raise ValueError(f"{location}: {message}") from error
    return module


@cache
def installed() -> dict[str, Any]:
    """Entry points of installed packages, ``name = "package.module:Class"``, by drafter name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group="foretoken.drafters")}


@cache
def installed_class(name: str) -> type[Any]:
    """The class of an entry point. Raises ``ValueError`` if it cannot be imported, or is no drafter."""
    point = installed()[name]
    try:
        drafter = point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(
            f"drafter {name!r}, {point.value} of the package {point.dist.name}, cannot be imported: {named(error)}"
        ) from error
    return checked(drafter, point.value)


def checked(thing: Any, name: str) -> type[Any]:
    """The argument, if it is a concrete drafter class. Else raises ``ValueError`` with the class, the rule and the
    line."""
    label = f"{name} ({line_of(thing)})" if inspect.isclass(thing) else name
    if not _is_drafter(thing):
        fault = (
            "is a class, but not a drafter" if inspect.isclass(thing) else f"is {type(thing).__name__}, not a drafter"
        )
        raise ValueError(f"{label} {fault}: derive a class from foretoken.Drafter")
    if missing := sorted(getattr(thing, "__abstractmethods__", ())):
        raise ValueError(f"{label} has no method {missing[0]}, which every drafter needs")
    if not isinstance(getattr(thing, "name", None), str):
        raise ValueError(f'{label} has no name: write name = "..." in the class')
    cls: type[Any] = thing
    return cls


def line_of(thing: Any) -> str:
    """``"period.py, line 12"`` of a class or function."""
    try:
        file, (_, line) = inspect.getsourcefile(thing), inspect.getsourcelines(thing)
    except (OSError, TypeError):
        return "line not known"
    return f"{Path(file or '?').name}, line {line}"


def fault_of(thing: Any, protocol: type[Any], role: str) -> str:
    """Why an object cannot fill a role; empty if it can."""
    kind = type(thing)  # not isinstance, which asks the object for its class
    if issubclass(kind, type):
        return f"{thing.__name__} ({line_of(thing)}) is a class: give an object, {thing.__name__}(...)"
    if not issubclass(kind, protocol):
        return f"{with_article(kind.__name__)} is not a {role}: give a name, or an object of a {role} class"
    if not isinstance(getattr(thing, "name", None), str):
        return f'{kind.__name__} ({line_of(kind)}) has no name: write name = "..." in the class'
    return misfit_of(thing, protocol)


def misfit_of(thing: Any, protocol: type[Any]) -> str:
    """The first method of a protocol that an outside object overrides in vain or with an incompatible signature; empty
    if there is none. Checked at load: one would never run, and the other fail in our code, with no line of theirs."""
    cls = type(thing)
    if not is_outside(cls):
        return ""
    for name, method in vars(protocol).items():
        function = getattr(cls, name)
        if name.startswith("_") or not inspect.isfunction(method) or function is method:
            continue
        if fast := _runs_instead(cls, name, protocol):
            return fault_message(cls, name, f"is bypassed by {fast}: override {fast.partition('.')[2]}, too")
        called = list(inspect.signature(method).parameters)[1:]
        try:
            inspect.signature(getattr(thing, name)).bind(*called)
        except TypeError as error:
            return fault_message(cls, name, f"is called with ({', '.join(called)}): {error}")
    return ""


def _runs_instead(cls: type[Any], name: str, protocol: type[Any]) -> str:
    """The faster method that a class inherits from one of ours, above the plain one that it overrides; empty if there
    is none."""
    fast = _FASTER.get(name, name)
    owner = next(base for base in cls.__mro__ if name in vars(base) or fast in vars(base))
    ours = next(base for base in cls.__mro__ if fast in vars(base))
    return "" if fast in vars(owner) or is_outside(ours) or ours is protocol else f"{ours.__name__}.{fast}"


def fault_message(cls: type[Any], method: str, rule: str) -> str:
    """The rule that a class's method broke, in one line with its location."""
    return f"{cls.__name__}.{method} ({line_of(getattr(cls, method))}) {rule}"


def is_outside(cls: type[Any]) -> bool:
    """Whether a class is defined outside foretoken."""
    return cls.__module__.partition(".")[0] != "foretoken"


def _is_drafter(thing: Any) -> bool:
    """Checked by the names of the bases, because importing the base class takes seconds."""
    base_class = ("foretoken.methods.drafters.base", "Drafter")
    return inspect.isclass(thing) and any((base.__module__, base.__name__) == base_class for base in thing.__mro__)
