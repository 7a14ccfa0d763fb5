"""What the commands below ``foretoken train`` share: options, the target with its tokenizer, the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.output import screen

if TYPE_CHECKING:
    from foretoken.models.base import LanguageModel
    from foretoken.training.loop import Progress

Data = Annotated[list[Path], typer.Option(help="Text folder or JSONL file; may be given several times.")]
Steps = Annotated[int, typer.Option(min=1)]
Every = Annotated[int, typer.Option(min=1)]
Blocks = Annotated[int, typer.Option(min=1, help="Blocks per step.")]
Context = Annotated[int, typer.Option(min=16, help="Tokens per block.")]
Corpus = Annotated[Path | None, typer.Option(help="Where the encoded text is kept; share it by runs.")]
Text = Annotated[str, typer.Option(help="fixed (the corpus) or target (what the target writes).")]
WrittenBlocks = Annotated[int, typer.Option(min=1, help="Blocks that the target writes.")]
WrittenTemperature = Annotated[float, typer.Option(min=0.0, help="Temperature at which it writes.")]
Optimizer = Annotated[str, typer.Option(help="muon (AdamW for what is no matrix) or adamw (faster on most CPUs).")]
Precision = Annotated[str, typer.Option(help="Of products: bfloat16, or float32 (faster on CPUs without bfloat16).")]
Report = Annotated[bool, typer.Option("--json", help="Print the report as the last line.")]


def key_values(items: list[str] | None) -> dict[str, str]:
    """What was given as ``--set key=value``.

    Raises:
        ValueError: something else.
    """
    found = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {item!r} is not key=value")
        found[key] = value
    return found


def load_target(target: str, device: str | None = None, dtype: str | None = None) -> tuple[LanguageModel, Any]:
    """The target and its tokenizer.

    Raises:
        ValueError: a bad checkpoint or device, or no tokenizer.
    """
    from foretoken.loading import load_model, load_tokenizer

    model, tokenizer = load_model(target, device=device, dtype=dtype, pack=False), load_tokenizer(target)
    if tokenizer is None:
        raise ValueError(f"{target} has no tokenizer beside it: training text must be encoded with the target's own")
    return model, tokenizer


@contextmanager
def progress_bars() -> Iterator[Any]:
    """The progress bars of a training on stderr: rich's object, without tasks."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=screen(stderr=True)) as bar:
        yield bar


@contextmanager
def training_bar(
    steps: int, describe: Callable[[Mapping[str, Any]], str]
) -> Iterator[tuple[Callable[[int, int], None], Callable[[Progress], None]]]:
    """A progress bar of a :class:`foretoken.training.loop.Loop`: what to call with written blocks and with steps.

    ``describe`` makes the line that is printed when something was just measured.
    """
    with progress_bars() as bar:
        task = bar.add_task("reading text", total=steps, visible=False)

        def on_written(done: int, count: int) -> None:
            bar.update(task, completed=done, total=count, description="the target writes text", visible=True)

        def on_step(step: Progress) -> None:
            text = f"loss {step.loss:.3f}  {step.tokens_per_s:,.0f} tokens/s"
            bar.update(task, completed=step.step, total=step.steps, description=text, visible=True)
            if step.measured is not None:
                said = f"step {step.step}: loss {step.loss:.4f}, {describe(step.measured)}"
                bar.console.print(said, soft_wrap=True)

        yield on_written, on_step
