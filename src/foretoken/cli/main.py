"""The ``foretoken`` command: one file per subcommand, heavy imports only inside the commands."""

from __future__ import annotations

import typer

from foretoken.cli import train

app = typer.Typer(
    name="foretoken",
    help="Speculative decoding for Hugging Face models: every method, exact and measured.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(train.app, name="train")


def main() -> None:
    """Entry point of the console script."""
    app()
