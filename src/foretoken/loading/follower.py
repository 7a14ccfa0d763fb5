"""A process that holds a part of a split model: ``python -m foretoken.loading.follower '{"rank": 1, ...}'``.

:mod:`foretoken.loading.parallel` starts it.  The process reports on its standard output when it can join and when its
part is loaded.  Then it makes the calls that arrive on its standard input.  When that closes, the leader is gone and
the process exits at once.
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
    calls: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(calls,), daemon=True).start()
    stdout, sys.stdout = sys.stdout, sys.stderr  # the leader reads this stream: nothing else may write to it
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
        os._exit(1)  # at once, because the leader waits inside a reduction
