"""``foretoken batch``: answer a file of prompts; an interrupted run can be resumed."""

from __future__ import annotations

import io
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.generate import read_text
from foretoken.cli.model_argument import HELP, model_before
from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json, progress_bar
from foretoken.cli.turns import tell_defaults
from foretoken.core.conversation import checked, from_sharegpt, is_messages, to_answer
from foretoken.core.io.hub_ids import expanded
from foretoken.core.io.journal import append, open_locked, rows_of
from foretoken.core.values import check_text, one_line
from foretoken.options import FIELDS as REQUEST_FIELDS
from foretoken.options import OTHER_NAMES

if TYPE_CHECKING:
    from foretoken.engine.request import Emission, Running
    from foretoken.llm import Llm

OPTIONS = tuple(name for name, field in REQUEST_FIELDS.items() if field.in_lines)
"""Generation options that an input line may set."""


@with_common(model="own", own_sampling=True, max_new_tokens=256)
def batch_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] IN OUT",
            help='IN: JSON lines, {"id": "a", "prompt": "..."}, messages or conversations. OUT: an answer '
            f"each; ids in it are skipped. MODEL: {HELP}",
        ),
    ],
    max_running: Annotated[int, typer.Option(help="Requests that run together.", min=1)] = 16,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Answer every line of IN, several at once, and append each finished answer to OUT.

    Run it again after Ctrl-C, a kill or a power cut to answer the missing lines.  A line may set its own options
    (max_new_tokens, temperature, seed, stop, prediction, ...).  With --seed, line i (from 0) has the seed plus i.
    Exit code 1: some lines failed, now or in an earlier run; their answers give the reason.  Delete these to ask again.
    """
    model, files = model_before(words, "IN OUT")
    common, (source, out) = common.of(model), map(expanded, files)
    if source.is_dir():
        raise ValueError(f"IN {source} is a folder; with a model first, give three: MODEL IN OUT")
    if out.exists() and source.exists() and source.samefile(out):
        raise ValueError(f"IN and OUT are the same file, {out}: give another OUT")
    if out.exists() and not out.is_file():
        raise ValueError(f"OUT {out} is not a regular file: give the name of one")
    common.check()
    jobs = read_jobs(source, common.request_options)
    with open_locked(out) as file:
        failures = finished_ids(out)
        missing = [job for job in jobs if job.id not in failures]
        failed = sum(failures.get(job.id, False) for job in jobs)
        with json_only(as_json):
            counts = _run(common, missing, len(jobs), file, max_running) if missing else Counts()
    if as_json:
        skipped = {"skipped": len(jobs) - len(missing), "skipped_failed": failed}
        print_json({"jobs": len(jobs), **skipped, **counts.public()})
    else:
        there = f"{len(jobs) - len(missing)} were there{f' ({failed} failed: delete them to ask again)' * bool(failed)}"
        print(f"{there}, {counts} -> {out}", file=sys.stderr)
    if counts.failed or failed:
        raise typer.Exit(1)


class Counts:
    """Counts and speed of a run."""

    def __init__(self) -> None:
        self.answered = self.failed = self.tokens = 0
        self._began_s = time.monotonic()

    def take(self, answer: Mapping[str, Any]) -> None:
        self.failed += "error" in answer
        self.answered += "error" not in answer
        self.tokens += answer.get("num_new_tokens", 0)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of this run."""
        return self.tokens / max(time.monotonic() - self._began_s, 1e-9)

    def public(self) -> dict[str, Any]:
        """Fields of the JSON output."""
        return {
            "answered": self.answered,
            "failed": self.failed,
            "new_tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s, 2),
        }

    def __str__(self) -> str:
        return f"{self.answered} answered, {self.failed} failed, {self.tokens_per_s:.1f} tokens/s"


def _run(common: Common, jobs: Sequence[BatchLine], total: int, file: Any, max_running: int) -> Counts:
    llm: Llm = common.load(own_sampling=True)
    tell_defaults(llm)
    jobs = [replace(job, options={**llm.defaults.sampling, **job.options}) for job in jobs]
    counts = Counts()
    with progress_bar() as tell:

        def write(answer: Mapping[str, Any]) -> None:
            append(file, answer)
            counts.take(answer)
            tell(total - len(jobs) + counts.answered + counts.failed, total, f"{counts.tokens_per_s:.0f} tokens/s")

        tell(total - len(jobs), total, "")
        run_jobs(llm, jobs, write, max_running)
    return counts


@dataclass(frozen=True)
class BatchLine:
    """One input line.  ``id`` defaults to the line number; the prompt is text, token ids or messages."""

    id: str
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


def read_jobs(file: Path, options: Mapping[str, Any]) -> list[BatchLine]:
    """Read and check all input lines.  Raises ``ValueError``, with the line number, for a malformed line or a repeated
    id.

    Args:
        file: JSON lines with ``prompt``, ``messages`` or ShareGPT's ``conversations`` (up to the last message to
            answer), and optionally ``id`` and generation options.
        options: defaults for lines that do not set them.  A ``seed`` becomes seed + line number, from 0.
    """
    jobs: list[BatchLine] = []
    ids: set[str] = set()
    for number, line in enumerate(io.StringIO(read_text(file)), 1):
        if not line.strip():
            continue
        try:
            job = _job(json.loads(line), number, options)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        if job.id in ids:
            raise ValueError(f"{file}, line {number}: the id {job.id!r} comes twice")
        ids.add(job.id)
        jobs.append(job)
    return jobs


def _job(row: Any, number: int, options: Mapping[str, Any]) -> BatchLine:
    if not isinstance(row, dict):
        raise ValueError('not an object such as {"id": "a", "prompt": "..."}')
    known = ("id", "prompt", "messages", "conversations", *OPTIONS)
    unknown = [name for name in row if name not in known]
    if unknown:
        hint = OTHER_NAMES.get(unknown[0], "")
        raise ValueError(f"unknown field {unknown[0]!r}: {hint}use one of {', '.join(known)}")
    prompt = _prompt_of(row)
    shared = {name: value for name, value in options.items() if value is not None}
    if shared.get("seed") is not None:
        from foretoken.core.noise import SEEDS

        shared["seed"] = (shared["seed"] + number - 1) % SEEDS
    own_options = {name: row[name] for name in OPTIONS if name in row}
    _check_sampling(own_options)
    job_id = str(row.get("id", number))
    check_text("id", job_id)  # it would be written as another one
    return BatchLine(job_id, prompt, {**shared, **own_options})


def _check_sampling(options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for invalid sampling options."""
    sampling = {name: value for name, value in options.items() if REQUEST_FIELDS[name].sampling}
    if sampling:
        from foretoken.core.sampling import SamplingParams

        SamplingParams(**sampling)


def _prompt_of(row: Mapping[str, Any]) -> Any:
    """The prompt of an input line."""
    kinds = [name for name in ("prompt", "messages", "conversations") if name in row]
    if len(kinds) != 1:
        raise ValueError("give either prompt or messages (or conversations)")
    value = row[kinds[0]]
    if kinds == ["messages"]:
        return checked(value)
    if kinds == ["conversations"]:
        return to_answer(from_sharegpt(value))
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        return value
    if is_messages(value):
        return checked(value)
    raise ValueError("prompt must be text, a list of token ids, or messages")


def finished_ids(file: Path) -> dict[str, bool]:
    """Ids of the answers in an output file, and whether each is a failure; an unfinished last line is cut off.  Raises
    ``ValueError`` for a file that holds anything else, and leaves that file unchanged."""
    return dict(rows_of(file, _answered, "not an answer of this command; choose another file"))


def _answered(answer: Mapping[str, Any]) -> tuple[str, bool]:
    """The id of an answer, and whether it is a failure.  Raises ``ValueError`` for another object."""
    if not ({"id", "text", "finish_reason"} <= set(answer) or {"id", "error"} <= set(answer)):
        raise ValueError
    return str(answer["id"]), "error" in answer


def run_jobs(
    llm: Llm, jobs: Sequence[BatchLine], write: Callable[[Mapping[str, Any]], None], max_running: int = 16
) -> None:
    """Answer all jobs, ``max_running`` at once, and pass each finished answer to ``write``.  The answer of a failed job
    has ``error`` instead of ``text``."""
    waiting, running = deque(jobs), dict[int, BatchLine]()
    try:
        while waiting or running:
            while waiting and len(running) < max_running:
                job = waiting.popleft()
                try:
                    running[llm.engine.add(llm.request(job.prompt, **job.options))] = job
                except (ValueError, TypeError) as error:
                    write({"id": job.id, "error": one_line(error)})
            if not running:
                continue
            for run, emission in llm.engine.step():
                if emission.finish_reason is not None and run.id in running:
                    write(_answer(llm, running.pop(run.id), run, emission))
    finally:
        for request_id in running:
            llm.engine.cancel(request_id)


def _answer(llm: Llm, job: BatchLine, run: Running, emission: Emission) -> dict[str, Any]:
    from foretoken.engine.output import output_of

    if emission.error is not None:
        return {"id": job.id, "error": one_line(emission.error)}
    out = output_of(run, llm.tokenizer)
    return {
        "id": job.id,
        "text": out.text,
        "finish_reason": out.finish_reason,
        **({} if out.seed is None else {"seed": out.seed}),
        "num_prompt_tokens": out.stats.num_prompt_tokens,
        "num_new_tokens": out.stats.num_new_tokens,
        "mean_acceptance_length": round(out.stats.mean_acceptance_length, 3),
        **({"token_ids": out.token_ids} if llm.tokenizer is None else {}),
        **({"note": out.note} if out.note else {}),
    }
