"""Records a command in a terminal of its own and draws the recording as an animated SVG that loads nothing.

What is drawn is what the terminal received, when it received it, with two changes that the title bar names: silences
are cut short, and output that comes faster than an eye reads is slowed down.  Colours follow light and dark mode, and
where motion is unwanted (or not supported) the picture is the last frame.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from foretoken.lab.report.markup import Markup, tag

COLUMN, LINE, MARGIN, BAR = 8.0, 18.0, 16.0, 34.0
"""Pixels: width of a letter, height of a line, space around the text, height of the title bar."""
TYPED_S, PAUSE_S, WATCHED_S, HELD_S = 0.045, 1.2, 7.0, 7.0
"""Seconds: a typed letter, the longest silence, the least time that output takes, the last frame."""
LETTERS_AT_ONCE = 3
CODE = re.compile(r"\x1b\[([\d;]*)m")
OTHER = re.compile(r"\x1b\[[?\d;]*[A-Za-ln-z]|\r")
STYLES = {"1": "bold", "2": "dim", "31": "red", "32": "green", "33": "yellow", "34": "blue", "35": "pink", "36": "cyan"}
STYLE = """
:root { color-scheme: light dark; --back: #fbfcfd; --bar: #e8ebef; --ink: #1f2328; --dim: #57606a; --edge: #c8ced5;
  --red: #a8201a; --green: #0b6b3a; --yellow: #7a5200; --blue: #1559a6; --pink: #8a1f7a; --cyan: #0a6570; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15181d; --bar: #262b33; --ink: #e8ebef; --dim: #a0a9b4; --edge: #3a414b;
    --red: #ff8d85; --green: #62d394; --yellow: #e3b341; --blue: #7fb9ff; --pink: #f29be6; --cyan: #56d4dd; } }
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--ink);
  white-space: pre; }
.note { fill: var(--dim); font-size: 12px; } .bold { font-weight: 700; } .dim { fill: var(--dim); }
.red { fill: var(--red); } .green { fill: var(--green); } .yellow { fill: var(--yellow); } .blue { fill: var(--blue); }
.pink { fill: var(--pink); } .cyan { fill: var(--cyan); }
.back { fill: var(--back); stroke: var(--edge); } .bar { fill: var(--bar); }
@media (prefers-reduced-motion: reduce) { g { animation: none !important; } }
"""


@dataclass(frozen=True)
class Piece:
    """Letters of one style on one line that appeared together."""

    at: float
    line: int
    column: int
    text: str
    style: str


def record(
    command: Sequence[str], columns: int, env: Mapping[str, str], limit_s: float = 120.0
) -> list[tuple[float, str]]:
    """What a command writes to a terminal: seconds since its start, and text.

    Raises:
        RuntimeError: it failed, or took longer than ``limit_s``.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], list(command), {**env, "TERM": "xterm-256color", "COLUMNS": str(columns)})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    start, events, data = time.monotonic(), [], b""
    while time.monotonic() < start + limit_s:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            data += os.read(terminal, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        text = data.decode("utf-8", "ignore")
        if text.encode("utf-8") == data:  # a letter may come in two parts
            events.append((time.monotonic() - start, text))
            data = b""
    else:
        os.kill(child, 9)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: {''.join(text for _, text in events)[-500:]}")
    return events


def paced(events: Sequence[tuple[float, str]], begin: float) -> tuple[list[tuple[float, str]], int]:
    """The events as they are shown, from ``begin`` on, and how many times slower than they came."""
    first, last = events[0][0], events[-1][0]
    slower = max(1, round(WATCHED_S / max(last - first, 1e-3)))
    shown, now, before = [], begin, 0.0
    for at, text in events:
        now += min(PAUSE_S, (at - before) * (slower if before else 1))
        before = at
        shown.append((now, text))
    return shown, slower


def pieces(events: Sequence[tuple[float, str]], columns: int) -> Iterator[Piece]:
    """Where a terminal puts the text; a line that is too long goes on in the next one."""
    line = column = 0
    style = ""
    for at, text in events:
        for i, part in enumerate(CODE.split(OTHER.sub("", text))):
            if i % 2:
                style = " ".join(STYLES[code] for code in part.split(";") if code in STYLES)
                continue
            for j, words in enumerate(part.split("\n")):
                if j:
                    line, column = line + 1, 0
                while words:
                    if column == columns:
                        line, column = line + 1, 0
                    fits, words = words[: columns - column], words[columns - column :]
                    if fits.strip():
                        yield Piece(at, line, column, fits, style)
                    column += len(fits)


def typed(command: str) -> list[tuple[float, str]]:
    """A command as somebody types it."""
    letters = f"$ {command}"
    cut = [letters[i : i + LETTERS_AT_ONCE] for i in range(0, len(letters), LETTERS_AT_ONCE)]
    return [(TYPED_S * LETTERS_AT_ONCE * i, f"\x1b[1m{part}\x1b[0m") for i, part in enumerate(cut)]


def drawn(command: str, events: Sequence[tuple[float, str]], columns: int, title: str) -> str:
    """The recording as SVG."""
    keys = typed(command)
    shown, slower = paced(events, keys[-1][0] + 0.3)
    found = list(pieces([*keys, (shown[0][0], "\n"), *shown], columns))
    whole = shown[-1][0] + HELD_S
    wide, high = columns * COLUMN + 2 * MARGIN, BAR + 2 * MARGIN + (found[-1].line + 1) * LINE - 4
    frames, groups = [], []
    for i, (at, together) in enumerate(groupby(found, key=lambda piece: piece.at)):
        frames.append(f"@keyframes k{i}{{0%{{opacity:0}}{100 * at / whole:.2f}%{{opacity:1}}}}")
        groups.append(tag("g", *map(_text, together), style=f"animation:k{i} {whole:.1f}s step-end infinite"))
    note = "a real run" + (f", {slower} times slower than it came" if slower > 1 else "") + "; silences cut"
    head = (
        tag("rect", x=0.5, y=0.5, width=wide - 1, height=high - 1, rx=10, class_="back"),
        tag("path", d=f"M1,{BAR}V11a10,10 0 0,1 10,-10H{wide - 11:g}a10,10 0 0,1 10,10V{BAR}Z", class_="bar"),
        tag("text", title, x=MARGIN, y=22, class_="bold"),
        tag("text", note, x=wide - MARGIN, y=22, class_="note", text_anchor="end"),
    )
    return tag(
        "svg", tag("style", Markup(STYLE + "\n".join(frames) + "\n")), *head, *groups,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {wide:g} {high:g}", width=f"{wide:g}", height=f"{high:g}",
        role="img", aria_label=f"A recording of a terminal: {command}",
    ) + "\n"  # fmt: skip


def _text(piece: Piece) -> Markup:
    left = len(piece.text) - len(piece.text.lstrip(" "))
    text = piece.text.strip(" ")
    return tag(
        "text", text, x=f"{MARGIN + (piece.column + left) * COLUMN:g}",
        y=f"{BAR + MARGIN + piece.line * LINE + 9:g}", textLength=f"{len(text) * COLUMN:g}",
        lengthAdjust="spacingAndGlyphs", class_=piece.style or None,
    )  # fmt: skip


def recording(command: Sequence[str], words: str, file: Path, columns: int, title: str, env: Mapping[str, str]) -> None:
    """Run a command, and draw it as if ``words`` had been typed.

    Raises:
        RuntimeError: the command failed.
    """
    file.write_text(drawn(words, record(command, columns, env), columns, title), encoding="utf-8")
