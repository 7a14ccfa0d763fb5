"""``foretoken methods``: the catalogue, one sentence per method; ``foretoken methods NAME`` shows one in full."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Annotated, Any

import typer

from foretoken.cli.options import Json
from foretoken.cli.output import print_json, print_table, screen, table
from foretoken.core.names import did_you_mean, unknown
from foretoken.core.outside import is_code
from foretoken.core.specs import Option
from foretoken.registry import find

ROLES = ("drafter", "verifier", "tree", "controller")


def methods_command(
    name: Annotated[str | None, typer.Argument(help="Show one method in full.")] = None,
    role: Annotated[str | None, typer.Option(help=f"Only one role: {', '.join(ROLES)}.")] = None,
    as_json: Json = False,
) -> None:
    """List every drafter, verifier, tree and controller, or one with its options and what its training takes."""
    import foretoken

    if role is not None and role not in ROLES:
        raise unknown(f"unknown role {role!r}", role, ROLES)
    methods = [row for row in foretoken.methods() if role in (None, row["role"]) and name in (None, row["name"])]
    if name is not None and is_code(name) and role in (None, "drafter"):
        methods = [find("drafter", name).public()]
    if not methods:
        raise _not_found(str(name), foretoken.methods())
    if name is None:
        if as_json:
            print_json({"methods": methods})
        else:
            _print_lists(methods)
    elif as_json:
        print_json({"methods": [row | _as_json(_options(row)) for row in methods]})
    else:
        for row in methods:
            _print_details(row)
            _print_options(row, **_options(row))


def _options(row: dict[str, Any]) -> dict[str, list[Option]]:
    """Options and training settings of a method; imports its class."""
    from foretoken.training.recipes import settings_of

    return {"options": find(row["role"], row["name"]).options(), "settings": settings_of(row["name"])}


def _as_json(options: dict[str, list[Option]]) -> dict[str, Any]:
    return {key: [asdict(option) for option in listed] for key, listed in options.items()}


def _not_found(name: str, every: list[dict[str, Any]]) -> ValueError:
    """Error for an unknown method name, or for a name without that role."""
    if roles := [row["role"] for row in every if row["name"] == name]:
        return ValueError(f"{name} is a {' and a '.join(roles)}: leave out --role, or give --role {roles[0]}")
    near = did_you_mean(name, list(dict.fromkeys(row["name"] for row in every)))
    return ValueError(f"unknown method {name!r}: {near}`foretoken methods` lists all")


def _print_lists(methods: list[dict[str, Any]]) -> None:
    """Print one list per role: names, and summaries wrapped to the terminal's width."""
    console = screen()
    indent = max(len(row["name"]) for row in methods) + 4
    for role in ROLES:
        rows = [row for row in methods if row["role"] == role]
        if rows:
            console.print(f"{role}s", style="bold")
        for row in rows:
            mark = " (lossy)" if not row["lossless"] else " (trained)" if row["needs_training"] else ""
            width = max(console.width - indent, 20)
            first, *more = textwrap.wrap(row["summary"] + mark, width, break_on_hyphens=False)
            console.print(f"  {row['name']}".ljust(indent) + first)
            for line in more:
                console.print(" " * indent + line)
    console.print("\n`foretoken methods NAME` shows one in full; lossy verifiers need --allow-lossy", style="dim")


def _print_details(row: dict[str, Any]) -> None:
    console = screen()
    console.print(f"{row['name']} ({row['role']})", style="bold")
    console.print(row["summary"], soft_wrap=False)
    lines = {
        "paper": row["paper"],
        "needs": row["needs"],
        "training": "needs a trained network" if row["needs_training"] else "",
        "drafts" if row["role"] == "drafter" else "for drafts": row["kind"],
        "lossless": "yes" if row["lossless"] else "no: needs --allow-lossy",
        "example": f"--{row['role']} {row['example']}" if row["role"] != "tree" else f"tree={row['example']}",
    }
    for label, text in lines.items():
        if text:
            console.print(f"  {label + ':':<12}{text}")


def _print_options(row: dict[str, Any], options: list[Option], settings: list[Option]) -> None:
    """Print a table of the options and one of the training settings, as far as there are any."""
    console = screen()
    for key, title, listed in (
        ("option", f"options of {row['name']},NAME=VALUE", options),
        ("setting", f"settings of foretoken train {row['name']} --set NAME=VALUE", settings),
    ):
        if listed:
            grid = table(title, words=(key, "default", "meaning"))
            for option in listed:
                grid.add_row(option.name, option.shown_default, option.meaning)
            console.print()
            print_table(console, grid)
