"""Drafters from outside the package: a class in a file, ``file.py:Class``, or an entry point of another package."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.core.values import with_article


class OutsideError(ValueError):
    """Code that is none of ours has raised, or broken a rule of the protocol that it keeps."""


def is_code(name: str) -> bool:
    """Whether the name in a spec is a class in a file: ``file.py:Class``."""
    return name.partition(":")[0].endswith(".py")


def refuse_code(spec: Any, place: str) -> None:
    """Refuse a spec that came with data and names a file of code, by a ``ValueError``: data must not run code."""
    if isinstance(spec, str) and re.search(r"\.py\s*:", spec):
        raise ValueError(f"{place} names code ({spec}), which is only run when you name it: give --drafter {spec}")


def check_code(name: str) -> None:
    """Refuse what cannot be a ``file.py:Class``, by a ``ValueError``, before anything is imported."""
    file, _, cls = name.partition(":")
    if not Path(file).expanduser().is_file():
        raise ValueError(f"there is no file {file} with a drafter: a drafter from outside is file.py:Class")
    if not cls.isidentifier():
        raise ValueError(f"{name!r} names no class: a drafter from outside is file.py:Class")


@cache
def class_in_file(name: str) -> type[Any]:
    """The drafter ``file.py:Class``, which is run once.  Raises ``ValueError`` where it is none, or raises itself."""
    check_code(name)
    place, _, cls = name.partition(":")
    module = _run(Path(place).expanduser().resolve())
    drafter = vars(module).get(cls)
    if drafter is None:
        drafters = {key: value for key, value in vars(module).items() if _is_drafter(value)}
        names = [key for key, value in drafters.items() if value.__module__ == module.__name__]
        raise ValueError(f"{place} has no class {cls}: it has {', '.join(names) or 'no drafter'}")
    return checked(drafter, name)


@cache
def _run(file: Path) -> Any:
    """The module of a file."""
    name = f"drafters_of_{file.stem}_{abs(hash(file)):x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} cannot be read as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines.append(error.lineno)
        place = f"{file.name}, line {lines[-1]}" if lines else file.name
        message = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{place}: {type(error).__name__}: {message}") from error
    return module


@cache
def installed() -> dict[str, Any]:
    """The entry points of installed packages, ``name = "package.module:Class"``, by the name of the drafter."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group="foretoken.drafters")}


@cache
def installed_class(name: str) -> type[Any]:
    """The class behind an entry point.  Raises ``ValueError`` where it cannot be imported, or is no drafter."""
    point = installed()[name]
    try:
        drafter = point.load()
    except Exception as error:
        raise ValueError(
            f"drafter {name!r}, {point.value} of the package {point.dist.name}, cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    return checked(drafter, point.value)


def checked(thing: Any, name: str) -> type[Any]:
    """What was named, if it is a drafter that can be made.  Else it raises ``ValueError``, with the class, the rule and
    the line."""
    place = f"{name} ({line_of(thing)})" if inspect.isclass(thing) else name
    if not _is_drafter(thing):
        fault = "is a class, but no drafter" if inspect.isclass(thing) else f"is {type(thing).__name__}, no drafter"
        raise ValueError(f"{place} {fault}: derive a class from foretoken.Drafter")
    if missing := sorted(getattr(thing, "__abstractmethods__", ())):
        raise ValueError(f"{place} has no method {missing[0]}, which every drafter needs")
    if not isinstance(getattr(thing, "name", None), str):
        raise ValueError(f'{place} has no name: write name = "..." in the class')
    cls: type[Any] = thing
    return cls


def line_of(thing: Any) -> str:
    """``"period.py, line 12"`` of a class or a function."""
    try:
        file, (_, line) = inspect.getsourcefile(thing), inspect.getsourcelines(thing)
    except (OSError, TypeError):
        return "line not known"
    return f"{Path(file or '?').name}, line {line}"


def fault_of(thing: Any, protocol: type[Any], role: str) -> str:
    """What is wrong with an object that was given for a role, whatever it is; empty where nothing is."""
    if isinstance(thing, type):
        return f"{thing.__name__} ({line_of(thing)}) is a class: give an object, {thing.__name__}(...)"
    if not isinstance(thing, protocol):
        return f"{with_article(type(thing).__name__)} is no {role}: give a name, or an object of a {role}'s class"
    if not isinstance(getattr(thing, "name", None), str):
        return f'{type(thing).__name__} ({line_of(type(thing))}) has no name: write name = "..." in the class'
    return misfit_of(thing, protocol)


def misfit_of(thing: Any, protocol: type[Any]) -> str:
    """The method of a protocol that an object from outside has overridden with arguments with which nobody calls it;
    empty where there is none.  Said at load: the call itself would fail in our code, in which no line is theirs."""
    cls = type(thing)
    for name, method in vars(protocol).items():
        function = getattr(cls, name)
        if name.startswith("_") or not inspect.isfunction(method) or function is method or not is_outside(cls):
            continue
        called = list(inspect.signature(method).parameters)[1:]
        try:
            inspect.signature(getattr(thing, name)).bind(*called)
        except TypeError as error:
            return told_of(cls, name, f"is called with ({', '.join(called)}): {error}")
    return ""


def told_of(cls: type[Any], method: str, rule: str) -> str:
    """The rule that a method of a class broke, in one line with its place."""
    return f"{cls.__name__}.{method} ({line_of(getattr(cls, method))}) {rule}"


def is_outside(cls: type[Any]) -> bool:
    """Whether a class is none of ours."""
    return cls.__module__.partition(".")[0] != "foretoken"


def _is_drafter(thing: Any) -> bool:
    """By the names of its bases: to import the class that drafters derive from takes seconds."""
    base_class = ("foretoken.methods.drafters.base", "Drafter")
    return inspect.isclass(thing) and any((base.__module__, base.__name__) == base_class for base in thing.__mro__)
