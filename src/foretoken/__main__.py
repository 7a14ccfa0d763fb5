"""``python -m foretoken``: the same as the ``foretoken`` command."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


def main() -> int:
    """Run the command. Returns its exit code. Ctrl-C during the imports is reported as it is later.

    Only this file is loaded before: importing :mod:`foretoken.cli.main` takes half a second.
    """
    try:
        with _server_stoppable():
            from foretoken.cli.main import main as run_command

            return run_command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@contextmanager
def _server_stoppable() -> Iterator[None]:
    """Let SIGTERM end a server without handlers as it ends one that loads its model
    (:func:`foretoken.server.lifecycle.answer_signals`), because a supervisor would take the default, code 143, for a
    crash."""
    if sys.argv[1:2] != ["serve"]:
        yield
        return
    before = signal.signal(signal.SIGTERM, _stopped_early)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped_early(*_: object) -> NoReturn:
    with suppress(OSError):  # stderr may be closed
        os.write(2, b"stopped while the model was loading\n")
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
