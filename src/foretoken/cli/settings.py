"""Command options made from dataclass fields, so that each is declared once."""

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
    """Marks an ``Annotated`` parameter whose dataclass is filled from options.

    Attributes:
        prefix: prefix of the option names.
        omit: fields without an option.
        fixed: values of fields without an option that differ from the class's defaults.
    """

    prefix: str = ""
    omit: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def fields(self, config: type) -> dict[str, tuple[dataclasses.Field[Any], About]]:
        """The fields that have an option, by parameter name."""
        left_out = {*self.omit, *self.fixed}
        return {
            self.prefix + entry.name: (entry, about)
            for entry, about in settings_of(config).items()
            if entry.name not in left_out
        }


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per field of its dataclass parameters.

    A parameter ``Annotated[Config, FromOptions(...)]`` stands for the fields of ``Config`` made by
    :func:`foretoken.core.settings.setting`; the command receives the object.
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
    """The function with a signature that Typer turns into options."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option_of(kind: Any, about: About, names: Iterable[str] = (), **more: Any) -> Any:
    """The annotation of an option of this kind."""
    text = about.help.replace("[", "\\[") or None  # Rich takes "[auto]" for a style and drops it
    return Annotated[kind, typer.Option(*names, help=text, min=about.low, max=about.high, **more)]


def _filled(annotation: Any) -> tuple[Any, FromOptions | None]:
    """The dataclass of a parameter and its source; ``None`` for a plain option."""
    marks = [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, FromOptions)]
    return (annotation.__origin__, marks[0]) if marks else (None, None)


def parameters_of(config: type, source: FromOptions) -> list[inspect.Parameter]:
    """One parameter per field that has an option."""
    kinds, parameters = typing.get_type_hints(config), []
    for option, (entry, about) in source.fields(config).items():
        names = [f"--{option.replace('_', '-')}"] if about.is_flag else []
        parameters.append(parameter(option, option_of(kinds[entry.name], about, names), entry.default))
    return parameters
