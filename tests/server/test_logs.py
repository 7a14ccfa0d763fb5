"""The log of a server: no request waits for the log's reader."""

from __future__ import annotations

import json
import logging
import os
import threading
import warnings

import pytest

from foretoken.server import logs
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
    num_written, lost = 0, 0
    with os.fdopen(read_end) as lines:
        for line in lines:
            message = json.loads(line)["message"]
            if "were dropped" in message:
                lost += int(message.split()[0])
            else:
                num_written += 1
            if num_written + lost == 2000:
                break
        assert lost > 1000 and num_written >= 50
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


def test_a_line_with_half_a_character_is_written_and_so_are_later_ones() -> None:
    """A plain line is not escaped as JSON; a file name may hold half a surrogate pair."""
    read_end, write_end = os.pipe()
    handler = LineWriter(write_end)
    for text in ("caf\udce9.json", "and on"):
        handler.handle(logging.makeLogRecord({"msg": text, "plain": True}))
    handler.flush()
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        assert lines.read() == "caf\\udce9.json\nand on\n"
    handler.close()


def test_a_program_that_has_served_has_its_logs_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Its own uvicorn and asyncio wrote JSON for ever, and its handlers were gone."""
    names = ("foretoken", "asyncio", "uvicorn")
    own = logging.NullHandler()
    logging.getLogger("uvicorn").addHandler(own)
    before = {name: (logging.getLogger(name).handlers[:], logging.getLogger(name).propagate) for name in names}
    show, threads = warnings.showwarning, set(threading.enumerate())
    try:
        with pytest.raises(KeyError), logs.installed():
            logs.say("inside")
            (writer,) = set(threading.enumerate()) - threads
            raise KeyError
        assert capfd.readouterr().err == "inside\n"
        assert before == {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in names}
        assert warnings.showwarning is show
        writer.join(10)
        assert not writer.is_alive()
    finally:
        logging.getLogger("uvicorn").removeHandler(own)


def test_a_log_that_was_installed_for_good_stays() -> None:
    names = ("foretoken", "asyncio", "uvicorn")
    before = {name: (logging.getLogger(name).handlers[:], logging.getLogger(name).level) for name in names}
    show = warnings.showwarning
    try:
        logs.install()
        (handler,) = logging.getLogger("foretoken").handlers
        with logs.installed():
            pass
        assert logging.getLogger("foretoken").handlers == [handler] and warnings.showwarning is not show
    finally:
        for name, (handlers, level) in before.items():
            log = logging.getLogger(name)
            log.handlers[:], log.propagate = handlers, True
            log.setLevel(level)
        warnings.showwarning = show
