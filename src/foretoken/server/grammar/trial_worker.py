"""Worker process that compiles grammars on trial and may die of them.

Run as a script by :mod:`foretoken.server.grammar.trial`; it imports only llguidance, so it starts in a tenth of a
second.  One JSON line in, one JSON line out.
"""

from __future__ import annotations

import json
import signal
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def limit_memory(most: int) -> None:
    """Make allocations beyond ``most`` bytes fail, which ends the process."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def limit_time(seconds: float) -> None:
    """End the process after ``seconds`` of processor time from now on; 0 for no limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main(memory: int, seconds: float) -> None:
    """Answer lines until the input ends."""
    limit_memory(memory)
    tokenizer = LLTokenizer("byte")
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        grammar, limits = json.loads(line)
        limit_time(seconds)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
        if not matcher.is_stopped():
            matcher.compute_bitmask()
        limit_time(0)
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
