"""The ``foretoken`` command: one file per subcommand, heavy imports only inside the commands."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import typer

from foretoken import __version__
from foretoken.cli import (
    batch,
    bench,
    chat,
    datastore,
    demo,
    doctor,
    drafters,
    export,
    generate,
    methods,
    models,
    parity,
    plan,
    serve,
    show,
    train,
    tune,
    tune_all,
)
from foretoken.cli.ending import INTERRUPTED
from foretoken.cli.model_argument import WordsCommand
from foretoken.cli.variables import unknown_variables

app = typer.Typer(name="foretoken", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(f"foretoken {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
]


@app.callback()
def root_command(version: Version = False) -> None:
    """Speculative decoding for Hugging Face models: every method, exact and measured."""


app.command("demo")(demo.demo_command)
app.command("generate", cls=WordsCommand)(generate.generate_command)
app.command("batch", cls=WordsCommand)(batch.batch_command)
app.command("show", cls=WordsCommand)(show.show_command)
app.command("chat")(chat.chat_command)
app.command("models")(models.models_command)
app.command("methods")(methods.methods_command)
app.command("drafters", cls=WordsCommand)(drafters.drafters_command)
app.command("parity")(parity.parity_command)
app.add_typer(bench.app, name="bench")
app.command("plan")(plan.plan_command)
app.command("doctor")(doctor.doctor_command)
app.add_typer(train.app, name="train")
tune.app.callback(invoke_without_command=True)(tune_all.tune_command)
app.add_typer(tune.app, name="tune")
app.add_typer(datastore.app, name="datastore")
app.command("export", cls=WordsCommand)(export.export_command)
app.command("import", cls=WordsCommand)(export.import_command)
app.command("serve")(serve.serve_command)

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code.

    A user error is one line on stderr and exit code 2 (``FORETOKEN_DEBUG=1`` shows the traceback).  Ctrl-C is one line
    and exit code 130.
    """
    _keep_standard_streams()
    for line in unknown_variables(os.environ):
        print(f"warning: {line}", file=sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = _command()(args=None if argv is None else list(argv), prog_name="foretoken", standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        code = _report(error)
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _keep_standard_streams() -> None:
    """Open the null device for standard streams closed at start (``>&-``, some services), which Python sets to
    ``None``."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor > number:  # otherwise it already has the free number
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


@cache
def _command() -> Callable[..., Any]:
    """The Typer command, built once."""
    return typer.main.get_command(app)


def _warn(message: Warning | str, *location: object, **more: object) -> None:
    """Print a warning as one line on stderr."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _report(error: Exception) -> int:
    """Print a user error as one line and return its exit code; re-raise other errors."""
    kind = type(error).__name__
    if kind == "Abort":  # older versions of Click raise this for Ctrl-C
        return INTERRUPTED
    if kind == "NoArgsIsHelpError":
        print(str(error), end="", file=sys.stderr)
        return BAD_INPUT
    describe = getattr(error, "format_message", None)  # set on errors of Typer, such as bad options
    # Errors that a user can cause; others are bugs and keep their traceback
    by_user = isinstance(error, ValueError | OSError | ArithmeticError | MemoryError) or kind == "OutOfMemoryError"
    if describe is None and not by_user:
        raise error
    if os.environ.get("FORETOKEN_DEBUG", "") not in ("", "0"):
        raise error
    text = str(describe() if describe else getattr(error, "short", error))
    if isinstance(error, OSError) and error.strerror:  # drop the error number
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    message = " ".join(text.split()) or kind
    print(f"error: {message}", file=sys.stderr)
    return BAD_INPUT
