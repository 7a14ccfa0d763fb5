"""A process that holds a part of a split model: ``python -m foretoken.loading.follower '{"rank": 1, ...}'``.

It is started by :mod:`foretoken.loading.parallel`, says on its standard output when it can join and when it has loaded
its part, and then makes the calls that come in on its standard input.  When that closes the leader is gone, and it ends
at once, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback


def _listen(calls: queue.Queue[str]) -> None:
    for line in sys.stdin:
        calls.put(line)
    os._exit(0)


def main() -> None:
    """Follow the leader."""
    calls: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(calls,), daemon=True).start()
    stdout, sys.stdout = sys.stdout, sys.stderr  # nobody else may write where the leader reads
    settings = json.loads(sys.argv[1])

    def say(**fields: object) -> None:
        stdout.write(json.dumps(fields) + "\n")
        stdout.flush()

    from foretoken.loading.networks import load_network, parse_dtype
    from foretoken.loading.parallel import join
    from foretoken.models.huggingface import HuggingFaceModel
    from foretoken.models.other.parallel import follow

    say(ready="to join")
    join(settings["rank"], settings)
    try:
        network = load_network(settings["path"], parse_dtype(settings["dtype"]), settings["world"])
        inner = HuggingFaceModel(network, exact=settings["exact"], lean=False)
    except Exception as error:
        say(error=str(error))
        raise
    say(ready="to follow")
    follow(inner, iter(calls.get, None))


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the leader waits in the middle of a sum
