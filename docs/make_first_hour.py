"""Walks ``docs/first_hour.md`` in an empty folder and writes what its commands printed and took into the page.

    python docs/make_first_hour.py [--repository URL] [--keep FOLDER] [--beside "nothing else ran"] [--most 1200]

Commands are the lines after ``$ `` in ``console`` blocks, run by one shell from the first to the last; a block with a
title is a file that is written first.  The walk begins before anything is installed, so only the standard library is
needed.  Home and cache are in the folder too: what an earlier walk has fetched or measured is not used.  The page is
written when every command went well; whatever a command left running is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("first_hour.md")
BLOCK = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```\n', re.M | re.S)
TIMES = re.compile(r"(<!-- begin: times -->\n).*?(<!-- end: times -->)", re.S)
CLONE = "<this repository>"
MOST, FIRST, LAST, WIDEST = 12, 3, 9, 120
"""Lines of an output that are kept whole; else the first and the last ones; letters of a line."""
NOISE = re.compile(
    r"^(WARNING: Location |Cloning into |done\.$|Updating files|\[notice\]|\[\d+\]|bash: (cannot|no) )|^\s*$"
    r"|^(python3 -m venv|\.venv/bin/pip install) "
)
"""What pip, git, make and the shell say about themselves."""


class Failed(RuntimeError):
    """A command of the page failed."""


@dataclass
class Shell:
    """One bash in a folder; commands see what earlier ones exported, where they went, and their background jobs."""

    folder: Path
    places: Sequence[tuple[str, str]]
    most_s: float = 1200.0
    bash: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        env |= {"COLUMNS": "120", "HF_HUB_OFFLINE": "1", "MAKEFLAGS": "--no-print-directory"}
        env |= {"XDG_CACHE_HOME": str(self.folder / ".cache")}
        self.bash = subprocess.Popen(
            ["bash", "-m"], cwd=self.folder, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, errors="replace", start_new_session=True,
        )  # fmt: skip

    def run(self, command: str) -> tuple[list[str], float]:
        """What a command printed, and its seconds.

        Raises:
            Failed: it did, or it took longer than a command may.
        """
        assert self.bash.stdin is not None and self.bash.stdout is not None
        start, lines, end = time.monotonic(), [], "--- end of the command:"
        # The group keeps what the command changes in the shell, and keeps it from reading the shell's own input.
        self.bash.stdin.write(f"{{ {command}\n}} </dev/null\ncode=$?; echo; echo '{end}' $code\n")
        self.bash.stdin.flush()
        timer, line = threading.Timer(self.most_s, self.close), ""
        timer.start()
        for line in self.bash.stdout:
            if line.startswith(end):
                break
            lines.append(line.rstrip())
        timer.cancel()
        code = line.removeprefix(end).strip() if line.startswith(end) else f"no end within {self.most_s:.0f} s"
        if code != "0":
            raise Failed(f"$ {command}\n" + "\n".join(lines[-20:]) + f"\nended with {code or 'the shell'}")
        return [self.plain(line) for line in lines if not NOISE.match(line)], time.monotonic() - start

    def close(self) -> None:
        """End the shell and all that it has started: background jobs have process groups of their own."""
        found = subprocess.run(["ps", "-o", "pid=", "-s", str(self.bash.pid)], capture_output=True, text=True)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def plain(self, line: str) -> str:
        """A line without this machine's folders."""
        for place, name in self.places:
            line = line.replace(place, name)
        return line if len(line) <= WIDEST else line[: WIDEST - 1] + "…"


def cut(lines: Sequence[str]) -> list[str]:
    """An output that is not too long."""
    if len(lines) <= MOST:
        return list(lines)
    return [*lines[:FIRST], f"[{len(lines) - FIRST - LAST} lines]", *lines[-LAST:]]


def walked(page: str, folder: Path, repository: str, most_s: float = 1200.0) -> str:
    """The page with outputs and times.

    Raises:
        Failed: a command did; the message has its last lines.
    """
    shell = Shell(folder, [(repository, CLONE), (str(folder), "~")], most_s)
    parts, rows, done = [], [], 0
    heading = ""
    try:
        for block in BLOCK.finditer(page):
            parts.append(page[done : block.end()])
            done = block.end()
            headings = re.findall(r"^## (.+)$", parts[-1], re.M)
            heading = headings[-1] if headings else heading
            if block["title"]:
                (folder / "work" / block["title"]).write_text(block["body"], encoding="utf-8")
            if block["language"] != "console":
                continue
            body, took = _run(shell, block["body"], repository)
            parts[-1] = parts[-1][: block.start() - block.end()] + f"```console\n{body}```\n"
            rows.append((heading, took))
    finally:
        shell.close()
    return TIMES.sub(lambda found: f"{found[1]}{_times(rows)}{found[2]}", "".join([*parts, page[done:]]))


def _run(shell: Shell, block: str, repository: str) -> tuple[str, float]:
    text, whole = "", 0.0
    for command in re.findall(r"^\$ (.*?)(?:  # [\d.]+ s)?$", block, re.M):
        print(f"$ {command}", file=sys.stderr, flush=True)
        lines, took = shell.run(command.replace(CLONE, repository))
        whole += took
        text += f"$ {command}  # {took:.1f} s\n" + "".join(f"{line}\n" for line in cut(lines))
    return text, whole


def _times(rows: Sequence[tuple[str, float]]) -> str:
    table = "| path | seconds |\n|---|---|\n"
    for heading in dict.fromkeys(name for name, _ in rows):
        table += f"| {heading} | {sum(took for name, took in rows if name == heading):.0f} |\n"
    return table


def machine(beside: str) -> str:
    """The processor, its matrix instructions, and what else was going on."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.M)
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "avx2") if re.search(rf"\b{flag}\b", text)]
    has = f"{flags[0]}{'' if 'amx_bf16' in flags else ', no AMX'}" if flags else "no matrix instructions known"
    return f"{name[1] if name else 'an unknown processor'}, {os.cpu_count()} cores, {has}; {beside}"


def main() -> int:
    """Walk and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default=str(ROOT), help="what is cloned (its last commit)")
    parser.add_argument("--keep", type=Path, help="walk in this folder and leave it there")
    parser.add_argument("--beside", default="nothing else ran", help="what ran on the machine at the same time")
    parser.add_argument("--most", type=float, default=1200.0, help="seconds that one command may take")
    arguments = parser.parse_args()
    if arguments.keep:
        arguments.keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.keep or Path(made)
        try:
            page = walked(PAGE.read_text(encoding="utf-8"), folder.resolve(), arguments.repository, arguments.most)
        except Failed as failure:
            print(failure, file=sys.stderr)
            return 1
    on = f"Walked on {machine(arguments.beside)}.\n"
    page = TIMES.sub(lambda found: f"{found[1]}{found[0][len(found[1]) : -len(found[2])]}\n{on}{found[2]}", page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
