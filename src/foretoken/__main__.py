"""``python -m foretoken``: the same as the ``foretoken`` command."""

import sys


def main() -> int:
    """The command, and its exit code; Ctrl-C while Python still reads the code of the command line is told like later.

    Only this file is read before: half a second passes until :mod:`foretoken.cli.main` is there.
    """
    try:
        from foretoken.cli.main import main as run_command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
