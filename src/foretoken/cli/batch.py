"""``foretoken batch``: answer a file of prompts; killed, it goes on where it was."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.jobs import Job, append, finished_ids, output_file, read_jobs
from foretoken.cli.model_argument import HELP, model_before
from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json, progress_bar
from foretoken.cli.turns import tell_defaults

if TYPE_CHECKING:
    from foretoken.llm import Llm

SOME_FAILED = 1


@with_common(model="own", own_sampling=True, max_new_tokens=256)
def batch_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] IN OUT",
            help='IN: JSON lines, {"id": "a", "prompt": "..."}, messages or conversations. OUT: an answer each; ids '
            f"in it are not asked again. MODEL: {HELP}",
        ),
    ],
    max_running: Annotated[int, typer.Option(help="Requests that run together.", min=1)] = 16,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Answer every line of IN, several at once, and append each finished answer to OUT.

    Run it again after Ctrl-C, a kill or a power cut: it goes on with what is missing.  A line may set its own options
    (max_new_tokens, temperature, seed, stop, prediction, ...).  With --seed, line i (from 0) has the seed plus i.
    Exit code 1: some lines failed; their answers say why.
    """
    model, files = model_before(words, "IN OUT")
    common, (source, out) = common.of(model), map(Path, files)
    if source.is_dir():
        raise ValueError(f"IN {source} is a folder; with a model first, give three: MODEL IN OUT")
    common.check()
    jobs = read_jobs(source, common.asked)
    with output_file(out) as file:
        done = finished_ids(out)
        left = [job for job in jobs if job.id not in done]
        with json_only(as_json):
            counts = _run(common, left, len(jobs), file, max_running) if left else Counts()
    if as_json:
        print_json({"jobs": len(jobs), "skipped": len(jobs) - len(left), **counts.public()})
    else:
        print(f"{len(jobs) - len(left)} were there, {counts} -> {out}", file=sys.stderr)
    if counts.failed:
        raise typer.Exit(SOME_FAILED)


class Counts:
    """What a run has done."""

    def __init__(self) -> None:
        self.answered = self.failed = self.tokens = 0
        self._began_s = time.monotonic()

    def take(self, answer: Mapping[str, Any]) -> None:
        """Count an answer."""
        self.failed += "error" in answer
        self.answered += "error" not in answer
        self.tokens += answer.get("num_new_tokens", 0)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of this run."""
        return self.tokens / max(time.monotonic() - self._began_s, 1e-9)

    def public(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "answered": self.answered,
            "failed": self.failed,
            "new_tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s, 2),
        }

    def __str__(self) -> str:
        return f"{self.answered} answered, {self.failed} failed, {self.tokens_per_s:.1f} tokens/s"


def _run(common: Common, left: Sequence[Job], total: int, file: Any, max_running: int) -> Counts:
    from foretoken.cli.jobs import run_jobs

    llm: Llm = common.load(own_sampling=True)
    tell_defaults(llm)
    left = [replace(job, options={**llm.defaults.sampling, **job.options}) for job in left]
    counts = Counts()
    with progress_bar() as tell:

        def write(answer: Mapping[str, Any]) -> None:
            append(file, answer)
            counts.take(answer)
            tell(total - len(left) + counts.answered + counts.failed, total, f"{counts.tokens_per_s:.0f} tokens/s")

        tell(total - len(left), total, "")
        run_jobs(llm, left, write, max_running)
    return counts
