"""The log of a server: nobody waits for who reads it."""

from __future__ import annotations

import json
import logging
import os
import threading

from foretoken.server.logs import LineWriter


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("foretoken.requests", logging.INFO, "", 0, text, None, None)


def test_lines_that_nobody_reads_stop_nobody_and_are_counted() -> None:
    """A pipe holds 64 KiB; 2,000 lines of 200 bytes are six times as much."""
    read_end, write_end = os.pipe()
    handler = LineWriter(write_end, most=50)

    def tell() -> None:
        for number in range(2000):
            handler.handle(record(f"{number} " + "x" * 200))

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    teller.join(60)
    assert not teller.is_alive()
    found, lost = 0, 0
    with os.fdopen(read_end) as lines:
        for line in lines:
            message = json.loads(line)["message"]
            if "were lost" in message:
                lost += int(message.split()[0])
            else:
                found += 1
            if found + lost == 2000:
                break
        assert lost > 1000 and found >= 50
        handler.handle(record("and on"))
        handler.flush()
        assert json.loads(lines.readline())["message"] == "and on"
    os.close(write_end)


def test_who_reads_may_be_gone() -> None:
    read_end, write_end = os.pipe()
    handler = LineWriter(write_end)
    os.close(read_end)
    for _ in range(3):
        handler.handle(record("x"))
    handler.flush()
    assert handler._lines.unfinished_tasks == 0
    os.close(write_end)
