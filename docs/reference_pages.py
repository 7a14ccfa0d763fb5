"""Pages made of the code: the Python API (``foretoken.__all__``), the command line (the Typer app) and options' tables.

``docs/hooks.py`` makes them while the site is built, so they are never out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import typer.main

import foretoken
from foretoken.cli.main import app
from foretoken.core.specs import Option
from foretoken.registry import rows
from foretoken.training.recipes import settings_of

ROLES = (
    ("Drafters", "drafter"),
    ("Verifiers", "verifier"),
    ("Trees", "tree"),
    ("Controllers", "controller"),
)

GROUPS = (
    (
        "Load and generate",
        ("load", "Llm", "Output", "Piece", "AsyncLlm", "SpecStats", "custom_generate", "CustomGenerate", "methods",
         "fetch"),
    ),
    ("Write a method", ("Drafter", "Verifier", "Controller", "TokenTree", "Kind", "Budget", "Context", "Scores",
                        "Verdict", "Rng", "LanguageModel", "TableModel", "CapabilityError")),
    ("Underneath", ("Engine", "Request", "SamplingParams")),
)  # fmt: skip
"""The public names by what they are for; names that are in none of them come last."""

OPTIONS = "foretoken.options.CommonOptions"


def methods_by_role() -> list[tuple[str, list[str]]]:
    """Title and method names of every role."""
    return [(title, [row.name for row in rows(role)]) for title, role in ROLES]  # type: ignore[arg-type]


def option_tables(name: str) -> str:
    """Sections with the options of a method and the settings of its training, as far as there are any."""
    options = [option for row in rows() if row.name == name for option in row.options()]
    return _options("Options", f"`{name},NAME=VALUE`", options) + _options(
        "Training settings", f"`foretoken train {name} --set NAME=VALUE`", settings_of(name)
    )


def _options(title: str, usage: str, options: list[Option]) -> str:
    if not options:
        return ""
    lines = ["| name | default | meaning |", "|---|---|---|"]
    for option in options:
        default = f"`{option.shown_default}`" if option.shown_default else ""
        lines.append(f"| `{option.name}` | {default} | {option.meaning} |")
    return "\n".join(["", f"## {title}", "", f"{usage}:", "", *lines, ""])


def api_page() -> str:
    """One mkdocstrings block per public name.

    Raises:
        ValueError: a group names what is not public.
    """
    public = [name for name in foretoken.__all__ if name != "__version__"]
    grouped = {name for _, names in GROUPS for name in names}
    if gone := grouped - set(public):
        raise ValueError(f"take these names out of docs/reference_pages.py: {sorted(gone)}")
    groups = [*GROUPS, ("More", tuple(name for name in public if name not in grouped))]
    parts = ["# Python", "Everything here is a name of `foretoken` itself: `import foretoken as ft`.\n"]
    for title, names in filter(lambda group: group[1], groups):
        parts.append(f"## {title}\n")
        for name in names:
            parts.append(f"::: {_home(name)}\n")
        if "load" in names:
            parts.append(f"::: {OPTIONS}\n    options:\n      heading_level: 3\n")
    return "\n".join(parts)


def _home(name: str) -> str:
    return f"{foretoken._HOMES.get(name, 'foretoken')}.{name}"


def cli_page() -> str:
    """Every command with its arguments and options."""
    command = typer.main.get_command(app)
    parts = [
        "# Command line",
        "Made from the commands themselves; `foretoken COMMAND --help` says the same. Errors are one line on stderr "
        "and exit code 2. With `--json` the last line of stdout is one JSON object.\n",
    ]
    parts += [_command(words, found) for words, found in _walk(("foretoken",), command)]
    return "\n".join(parts)


def _walk(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", {})
    if not children or getattr(command, "invoke_without_command", False):
        yield words, command
    for name, child in sorted(children.items()):
        if not child.hidden:
            yield from _walk((*words, name), child)


def _command(words: tuple[str, ...], command: Any) -> str:
    name = " ".join(words)
    text = " ".join((command.help or "").split())
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help" and not p.hidden]
    shown = " ".join(_metavar(p) for p in arguments)
    usage = " ".join(filter(None, (name, "[OPTIONS]" if options else "", shown)))
    lines = [f"## {name}", "", text, "", f"```text\n{usage}\n```", ""]
    if arguments or options:
        lines += ["| | meaning |", "|---|---|"]
        lines += [_row(f"`{_word(p)}`", p) for p in arguments]
        lines += [_row(", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts)), p) for p in options]
    return "\n".join([*lines, ""])


def _word(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _metavar(argument: Any) -> str:
    return _word(argument) if argument.required else f"[{_word(argument)}]"


def _row(name: str, parameter: Any) -> str:
    default = parameter.default
    nothing = default is None or default is False or default in ((), []) or callable(default)
    words = _cell(" ".join((getattr(parameter, "help", "") or "").split()))
    return f"| {name} | {words}{'' if nothing else f' Default: `{default}`.'} |"


def _cell(text: str) -> str:
    for sign, safe in (("|", "\\|"), ("<", "&lt;"), ("[", "\\["), ("*", "\\*"), ("_", "\\_")):
        text = text.replace(sign, safe)
    return text


PAGES: dict[str, Callable[[], str]] = {"reference/api.md": api_page, "reference/cli.md": cli_page}
