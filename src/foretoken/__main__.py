"""``python -m foretoken``: the same as the ``foretoken`` command."""

from foretoken.cli.main import main

if __name__ == "__main__":
    main()
