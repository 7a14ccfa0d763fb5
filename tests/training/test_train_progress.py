"""The lines of a training without a progress bar, and signals that end it between two steps."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from torch import nn

from foretoken.cli.ending import terminable
from foretoken.cli.main import main
from foretoken.cli.train_progress import ProgressLines, TrainingBar, duration, stop_on_signals
from foretoken.training.checkpoint import check_same, save_checkpoint
from foretoken.training.config import RunConfig
from foretoken.training.curves import ALIGNMENT, DRAFTER, LM, Curve
from foretoken.training.loop import Loop, Progress, Saving, Stopped


class Clock:
    """Seconds that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(text: io.StringIO) -> list[str]:
    return text.getvalue().splitlines()


def test_lines_come_at_once_then_now_and_then_and_at_the_end() -> None:
    text, clock = io.StringIO(), Clock()
    lines = ProgressLines(Console(file=text, width=200), clock)
    task = lines.add_task("steps", total=100, visible=False)
    for step in range(1, 101):
        lines.update(task, completed=step, total=100, description=f"loss {step}")
        clock.now += 2.0
    output = lines_of(text)
    assert output[0] == "1/100  loss 1"
    assert output[1] == "6/100  loss 6  3:08 min left"  # ten seconds later; 94 steps of two seconds
    assert output[-1].startswith("100/100  loss 100") and len(output) == 1 + 19 + 1


def test_what_has_no_known_end_is_said_without_one() -> None:
    text, clock = io.StringIO(), Clock()
    bar = TrainingBar(ProgressLines(Console(file=text), clock), 1, lambda measured: "")
    bar.on_read(64)
    bar.on_read(128)
    clock.now += 11
    bar.on_read(1200)
    assert lines_of(text) == ["64 documents read", "1,200 documents read"]


def test_every_line_of_progress_has_the_acceptance_that_was_measured_last() -> None:
    text = io.StringIO()
    lines = ProgressLines(Console(file=text, width=200), Clock())
    bar = TrainingBar(lines, 2, lambda m: f"length {m['length']}", lambda m: f"acceptance {m['rate']}")
    bar.on_step(Progress(0, 2, float("nan"), 0.0, {"length": 1.1, "rate": 0.1}))
    bar.on_step(Progress(1, 2, 3.5, 700.0))
    bar.on_step(Progress(2, 2, 3.25, 700.0, {"length": 2.2, "rate": 0.6}))
    assert lines_of(text) == [
        "step 0: length 1.1",
        "1/2  loss 3.500  acceptance 0.1  700 tokens/s",
        "2/2  loss 3.250  acceptance 0.6  700 tokens/s  0:00 min left",
        "step 2: loss 3.2500, length 2.2",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00 min"), (65, "1:05 min"), (3 * 3600 + 120, "3:02 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def loop(out: Path, steps: int = 6) -> tuple[Loop, Callable[[int], Any]]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    training = Loop(out, RunConfig(steps=steps, lr=0.1), net, [torch.optim.AdamW(net.parameters())], DRAFTER)
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["scale"] = 1.0
    return training, lambda step: net(torch.full((2, 3), float(step))).square().mean()


def saved(out: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in (out / "checkpoints").iterdir())


def test_a_run_that_is_asked_to_stop_leaves_its_last_step_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, loss = loop(tmp_path / "whole")
    whole.run(loss, save_every=100, eval_every=100)
    cut, loss = loop(tmp_path / "cut")
    steps: list[int] = []
    with pytest.raises(Stopped, match="stopped after step 3 of 6"):
        cut.run(
            loss, save_every=100, eval_every=100, on_step=lambda p: steps.append(p.step),
            saving=Saving(stop=lambda: len(steps) == 2),
        )  # fmt: skip
    assert steps == [1, 2, 3] and saved(tmp_path / "cut") == [3]
    rest, loss = loop(tmp_path / "cut")
    rest.run(loss, save_every=100, eval_every=100)
    assert rest.start == 3
    for expected, actual in zip(whole.trained.parameters(), rest.trained.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_fewer_steps_than_were_trained_are_refused(tmp_path: Path) -> None:
    whole, loss = loop(tmp_path)
    whole.run(loss, save_every=100, eval_every=100)
    written = (tmp_path / "losses.csv").read_text()
    with pytest.raises(
        ValueError, match=r"step-0000006 was trained for more than --steps 4: give at least 6, or anoth"
    ):
        loop(tmp_path, steps=4)
    assert (tmp_path / "losses.csv").read_text() == written
    assert loop(tmp_path)[0].start == 6


STORED = {
    "run": {"lr": 0.1},
    "net": {"layers": 2, "heads": 3},
    "target": {"layers": "1a", "width": 4},
    "text": {"x": 1},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"net": {"layers": 4, "heads": 3}}, "other settings (net.layers=2, now 4); give the same ones"),
        ({"net": {"layers": 2}}, "(net.heads=3, now nothing)"),
        ({"run": {"lr": 0.1, "mix": 1}}, "(run.mix=nothing, now 1)"),
        ({"target": {"layers": "2b", "width": 5}}, "other settings (another model); give"),
        ({"text": {"x": 2}}, "was trained on other text; give the same to resume, or another --out"),
        ({"text": {"x": 2}, "run": {"lr": 0.2}}, "other settings (run.lr=0.1, now 0.2; other text); give"),
        ({"run": {str(i): i for i in range(9)}}, " and 4 more); give"),
    ],
)
def test_what_is_not_the_same_is_named_with_both_values(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, 1, nn.Linear(1, 1), [], {"identity": STORED})
    check_same(checkpoint, STORED)
    with pytest.raises(ValueError, match=re.escape(words)):
        check_same(checkpoint, STORED | changes)


def test_a_checkpoint_of_an_earlier_version_says_what_was_not_compared(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, 1, nn.Linear(1, 1), [], {"identity": {"run": {"lr": 0.1}}})
    with pytest.warns(
        UserWarning, match="step-0000001 is of an earlier version, without these to compare: text, teacher"
    ):
        check_same(checkpoint, {"run": {"lr": 0.1}, "text": {"x": 1}, "teacher": None})
    with pytest.raises(ValueError, match=r"run.lr=0.1, now 0.2"):
        check_same(checkpoint, {"run": {"lr": 0.2}, "text": {"x": 1}})


def test_checkpoints_come_by_time_too(tmp_path: Path) -> None:
    often, loss = loop(tmp_path / "often")
    often.run(loss, save_every=100, eval_every=100, saving=Saving(minutes=0.0))
    seldom, loss = loop(tmp_path / "seldom")
    seldom.run(loss, save_every=100, eval_every=100, saving=Saving(minutes=60.0))
    assert saved(tmp_path / "often") == [5, 6] and saved(tmp_path / "seldom") == [6]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_waits_for_the_end_of_a_step_and_a_second_one_does_not(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    messages: list[str] = []
    with stop_on_signals() as stop:
        with stop.in_steps(messages.append, tmp_path):
            assert not stop.requested() and not messages
            os.kill(os.getpid(), number)
            assert stop.requested() and stop.exit_code == code
            assert messages == ["stopping when the current work is finished; a second signal stops at once"]
            with pytest.raises((KeyboardInterrupt, typer.Exit)):
                os.kill(os.getpid(), number)
        with pytest.raises((KeyboardInterrupt, typer.Exit)):  # nothing is done in steps here
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, typer.Exit), (signal.SIGINT, KeyboardInterrupt)])
def test_code_that_goes_on_after_an_error_does_not_swallow_a_signal(
    number: signal.Signals, ending: type[BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As imports do that try a package: SIGTERM was lost there, and the training ran to its end."""
    with pytest.raises(ending) as caught, stop_on_signals():
        with contextlib.suppress(Exception):
            os.kill(os.getpid(), number)
        pytest.fail("the signal is lost")
    if isinstance(caught.value, typer.Exit):
        assert caught.value.exit_code == 143 and capsys.readouterr().err == "terminated\n"
    with stop_on_signals() as stop, stop.in_steps(print, tmp_path):
        with contextlib.suppress(BaseException):  # as a callback of C code does
            os.kill(os.getpid(), number)
        assert stop.requested()


@pytest.mark.parametrize("block", [stop_on_signals, terminable])
def test_handlers_that_are_not_pythons_are_no_error(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has ``None`` for those of a program in C that embeds it: the command ended in a traceback."""
    honest, handlers = signal.signal, []

    def in_c(number: int, handler: Any) -> None:
        honest(number, handler)
        handlers.append(handler)

    monkeypatch.setattr(signal, "signal", in_c)
    with block():
        pass
    assert handlers[-1] == signal.SIG_DFL
    honest(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("columns", [DRAFTER, LM, ALIGNMENT])
def test_a_picture_leaves_the_backend_and_the_figures_of_a_program(columns: tuple[str, ...], tmp_path: Path) -> None:
    """In a notebook no further figure was shown."""
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    before = matplotlib.get_backend()
    pyplot.switch_backend("svg")
    try:
        curve = Curve(tmp_path / "curve.csv", 0, columns)
        curve.add(1, 2.0, None)
        curve.add(2, 1.0, dict.fromkeys(columns[1:], 1.0))
        assert curve.plot(tmp_path / "curve.png") and (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG"
        assert matplotlib.get_backend() == "svg" and not pyplot.get_fignums()
    finally:
        pyplot.switch_backend(before)


@pytest.mark.parametrize("command", ["medusa", "lm"])
def test_a_terminated_training_says_where_it_goes_on(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM during the second step: its checkpoint is there, and the same command goes on behind it."""
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 400)
    step = Loop._step

    def terminated(self: Loop, number: int, loss_of: Any) -> float:
        if number == 1 and self.start == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number, loss_of)

    monkeypatch.setattr(Loop, "_step", terminated)
    shape = ["--hidden", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--ffn", "16", "--vocab", "300"]
    more = shape if command == "lm" else ["--target", "builtin"]
    out = tmp_path / "out"
    arguments = ["train", command, "--data", str(tmp_path / "text.txt"), "--out", str(out), "--steps", "3"]
    arguments += ["--context", "32", "--batch-size", "2", *more]
    assert main(arguments) == 143
    assert f"stopped after step 2 of 3; its checkpoint is in {out}: the same command" in capsys.readouterr().err
    assert saved(out) == [2] and not (out / "model.safetensors").exists()
    assert main(arguments) == 0 and (out / "model.safetensors").exists()
