"""``foretoken methods``: the catalogue."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from foretoken.cli.options import Json
from foretoken.cli.output import print_json

ROLES = ("drafter", "verifier", "tree", "controller")


def methods_command(
    role: Annotated[str | None, typer.Option(help=f"Only one role: {', '.join(ROLES)}.")] = None,
    as_json: Json = False,
) -> None:
    """List every drafter, verifier, tree and controller."""
    import foretoken

    if role is not None and role not in ROLES:
        raise ValueError(f"unknown role {role!r}: choose one of {', '.join(ROLES)}")
    found = [row for row in foretoken.methods() if role in (None, row["role"])]
    if as_json:
        print_json({"methods": found})
    else:
        _print_tables(found)


def _print_tables(found: list[dict[str, Any]]) -> None:
    """One table per role."""
    from rich.table import Table

    from foretoken.cli.output import screen

    console = screen()
    for role in ROLES:
        mine = [row for row in found if row["role"] == role]
        if not mine:
            continue
        table = Table(title=f"{role}s", title_justify="left", title_style="bold", expand=False)
        table.add_column("name", style="bold cyan", no_wrap=True)
        table.add_column("what it does", ratio=3)
        table.add_column("drafts" if role == "drafter" else "paper" if role == "controller" else "for drafts", ratio=1)
        table.add_column("lossless", no_wrap=True)
        for row in mine:
            lossless = "yes" if row["lossless"] else "no: --allow-lossy"
            # The example stands in the text: a column of its own would leave an 80 character terminal no room.
            example = f"\nexample: {row['example']}" if role in ("drafter", "tree") else ""
            third = row["paper"] if role == "controller" else row["kind"]
            table.add_row(row["name"], _summary(row) + example, third, lossless)
        console.print(table)


def _summary(row: dict[str, Any]) -> str:
    needs = "needs training" if row["needs_training"] else ""
    needs = ", ".join(part for part in (needs, row["needs"] and f"needs {row['needs']}") if part)
    text = row["summary"] + (f" ({needs})" if needs else "")
    return text if row["role"] == "controller" or not row["paper"] else f"{text} {row['paper']}"
