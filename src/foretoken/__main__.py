"""``python -m foretoken``: the same as the ``foretoken`` command."""

import sys

from foretoken.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
