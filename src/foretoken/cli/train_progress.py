"""Progress of a training run, as bars on a terminal or occasional lines elsewhere, and its early end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from foretoken.cli.ending import TERMINATED
from foretoken.cli.output import json_only, screen
from foretoken.training.config import Intervals
from foretoken.training.run_folder import run_folder

if TYPE_CHECKING:
    from foretoken.training.answers import AnswerProgress
    from foretoken.training.loop import Progress


class ProgressLines:
    """Replaces rich's progress bars without a terminal: prints a line at once, then one every few seconds."""

    def __init__(self, console: Any, clock: Callable[[], float] = time.monotonic, interval_s: float = 10.0) -> None:
        self.console, self.clock, self.interval_s = console, clock, interval_s
        self._first: list[tuple[float, int]] = []  # per task: time and count of its first update
        self._last: list[float] = []

    def add_task(self, description: str, total: int | None = None, visible: bool = True) -> int:
        """Add a task and announce it if ``visible``."""
        self._first.append((self.clock(), 0))
        self._last.append(-self.interval_s)
        if visible:
            self.console.print(f"{description} ...", soft_wrap=True)
        return len(self._first) - 1

    def update(self, task: int, *, completed: int, total: int, description: str, visible: bool = True) -> None:
        """Print a task's progress if it is finished or its last line is old enough.

        A total of 0 means unknown.
        """
        now_s = self.clock()
        if self._last[task] < 0:
            self._first[task] = (now_s, completed)
        if now_s - self._last[task] < self.interval_s and completed != total:
            return
        self._last[task] = now_s
        if not total:
            self.console.print(description, soft_wrap=True)
            return
        start_s, before = self._first[task]
        left_s = (now_s - start_s) / (completed - before) * (total - completed) if completed > before else None
        ending = "" if left_s is None else f"  {duration(left_s)} left"
        self.console.print(f"{completed}/{total}  {description}{ending}", soft_wrap=True)


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 60}:{whole % 60:02d} min"


class TrainingBar:
    """Progress of one run: reading, the target's writing, steps.

    ``describe`` formats a measurement as one line; ``short`` formats it briefly for every step's line.
    """

    def __init__(
        self,
        bar: Any,
        steps: int,
        describe: Callable[[Mapping[str, Any]], str],
        short: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        self.bar, self.steps, self.describe, self.short = bar, steps, describe, short
        self._tasks: dict[str, Any] = {}
        self._measured = ""

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.bar.console.print(text, soft_wrap=True)

    def on_read(self, documents: int) -> None:
        """Show the number of encoded documents."""
        self._update("reading", f"{documents:,} documents read", documents, 0)

    def on_written(self, done: int, count: int) -> None:
        """Show the blocks of text that the target has written."""
        self._update("writing", "the target writes text", done, count)

    def on_answers(self, progress: AnswerProgress) -> None:
        """Show the conversations that the target has answered."""
        text = f"the target answers  {progress.tokens_per_s:,.0f} tokens/s"
        self._update("answers", text, progress.done, progress.count)

    def on_step(self, step: Progress, prefix: str = "") -> None:
        """Show an optimizer step, or the measurement before the first; ``prefix`` names one of several runs."""
        if step.measured and self.short is not None:
            self._measured = f"  {self.short(step.measured)}"
        if step.step:
            text = f"{prefix}loss {step.loss:.3f}{self._measured}  {step.tokens_per_s:,.0f} tokens/s"
            self._update(f"{prefix}steps", text, step.step, step.steps)
        if step.measured:
            loss = f"loss {step.loss:.4f}, " if step.step else ""
            self.say(f"{prefix}step {step.step}: {loss}{self.describe(step.measured)}")

    def _update(self, name: str, text: str, done: int, count: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self.bar.add_task(text, total=count, visible=False)
        self.bar.update(self._tasks[name], completed=done, total=count, description=text, visible=True)


@contextmanager
def training_bar(
    steps: int, describe: Callable[[Mapping[str, Any]], str], short: Callable[[Mapping[str, Any]], str] | None = None
) -> Iterator[TrainingBar]:
    """Progress of a :class:`foretoken.training.loop.Loop` on stderr."""
    console = screen(stderr=True, live=True)
    if not console.is_terminal:
        yield TrainingBar(ProgressLines(console), steps, describe, short)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        yield TrainingBar(bar, steps, describe, short)


class Stop:
    """Stop requests from SIGTERM and Ctrl-C.

    Inside :meth:`in_steps`, a loop calls :meth:`requested` between steps; after its first call signals wait for the
    next one.  Otherwise a signal ends the process at once, as a second signal always does.
    """

    def __init__(self) -> None:
        self.number = 0
        self._in_steps = self._waits = False
        self._say: Callable[[str], None] = lambda line: None

    def requested(self) -> bool:
        """Whether a signal has arrived."""
        self._waits = self._in_steps
        return self.number != 0

    def saving(self, intervals: Intervals) -> dict[str, Any]:
        """Keyword arguments of a loop: when to save, evaluate and stop."""
        from foretoken.training.loop import Saving

        saving = Saving(intervals.save_minutes, self.requested)
        return {"save_every": intervals.save_every, "eval_every": intervals.eval_every, "saving": saving}

    @property
    def exit_code(self) -> int:
        """Exit code that a shell reports for the signal."""
        return 128 + self.number

    @contextmanager
    def in_steps(self, say: Callable[[str], None], out: Path) -> Iterator[None]:
        """Make signals wait for the end of a step.  A run that they end prints its checkpoint's folder and exits."""
        from foretoken.training.loop import Stopped

        self._in_steps, self._say = True, say
        try:
            yield
        except Stopped as stopped:
            say(f"{stopped}; its checkpoint is in {out}: the same command continues from there")
            raise typer.Exit(self.exit_code) from None
        finally:
            self._in_steps = self._waits = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        waits, self.number = self._waits and not self.number, number
        if not waits:
            raise KeyboardInterrupt  # no Exception: imports and other code catch these and go on
        self._say("stopping when the current work is finished; a second signal stops at once")


@contextmanager
def training_run(
    out: Path, steps: int, describe: Callable[[Mapping[str, Any]], str], as_json: bool = False
) -> Iterator[tuple[TrainingBar, Stop]]:
    """Context of a training run in the folder ``out``: its progress bar and its stop requests."""
    with (
        json_only(as_json), stop_on_signals() as stop, run_folder(out),
        training_bar(steps, describe) as bar, stop.in_steps(bar.say, out),
    ):  # fmt: skip
        yield bar, stop


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Record SIGTERM and Ctrl-C in a :class:`Stop`; has no effect outside the main thread."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop._take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except KeyboardInterrupt:
        if stop.number != signal.SIGTERM:
            raise
        print("terminated", file=sys.stderr)
        raise typer.Exit(TERMINATED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
