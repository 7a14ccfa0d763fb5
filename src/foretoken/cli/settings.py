"""Options of a command that are the fields of the dataclasses that it takes: each is written down once."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any

import typer

from foretoken.core.settings import About, settings_of


@dataclass(frozen=True)
class FromOptions:
    """How a dataclass comes from the command line, in the ``Annotated`` of a parameter.

    Attributes:
        prefix: of the options' names.
        omit: fields without an option.
        fixed: values of fields without an option that are not the class's defaults.
    """

    prefix: str = ""
    omit: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def fields(self, config: type) -> dict[str, tuple[dataclasses.Field[Any], About]]:
        """The fields that have an option, by the parameter's name."""
        left_out = {*self.omit, *self.fixed}
        return {
            self.prefix + entry.name: (entry, about)
            for entry, about in settings_of(config).items()
            if entry.name not in left_out
        }


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of the dataclasses that it takes.

    A parameter of the kind ``Annotated[Config, FromOptions(...)]`` stands for the fields of ``Config`` that
    :func:`foretoken.core.settings.setting` has made; the command is given the object.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, FromOptions]] = {}
    for name, declared in inspect.signature(command).parameters.items():
        config, source = _filled(hints[name])
        if source is None:
            parameters.append(parameter(name, hints[name], declared.default))
        else:
            groups[name] = config, source
            parameters += parameters_of(config, source)

    @wraps(command)
    def run(**values: Any) -> None:
        for name, (config, source) in groups.items():
            settings = {entry.name: values.pop(option) for option, (entry, _) in source.fields(config).items()}
            values[name] = config(**source.fixed, **settings)
        command(**values)

    return signed(run, parameters)


def signed(run: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """The function with the parameters that Typer makes options of."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option_of(kind: Any, about: About, names: Iterable[str] = (), **more: Any) -> Any:
    """The annotation of a parameter that is an option of this kind."""
    return Annotated[kind, typer.Option(*names, help=about.help or None, min=about.low, max=about.high, **more)]


def _filled(annotation: Any) -> tuple[Any, FromOptions | None]:
    """The dataclass that a parameter is filled with, and how; ``None`` for one that is an option itself."""
    marks = [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, FromOptions)]
    return (annotation.__origin__, marks[0]) if marks else (None, None)


def parameters_of(config: type, source: FromOptions) -> list[inspect.Parameter]:
    """A parameter for each field that has an option."""
    kinds, parameters = typing.get_type_hints(config), []
    for option, (entry, about) in source.fields(config).items():
        names = [f"--{option.replace('_', '-')}"] if about.is_flag else []
        parameters.append(parameter(option, option_of(kinds[entry.name], about, names), entry.default))
    return parameters
