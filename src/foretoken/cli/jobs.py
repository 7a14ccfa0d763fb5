"""Batch jobs: a file of prompts in, a file of answers out, a line each; a job that was killed goes on where it was.

An answer is appended as one line when it is finished, and on the disk before the next is begun to be written.  Whoever
reads the file later skips the ids that are in it, so nothing is lost and nothing is done twice.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from foretoken.options import FIELDS as REQUEST_FIELDS

if TYPE_CHECKING:
    from foretoken.engine.request import Emission, Running
    from foretoken.llm import Llm

FIELDS = ("id", "prompt", "messages", "conversations")
OPTIONS = tuple(name for name, field in REQUEST_FIELDS.items() if field.in_lines)
"""Options of a generation that a line may have."""


@dataclass(frozen=True)
class Job:
    """One line of the input.

    Attributes:
        id: of the answer; the line's number if the line has none.
        prompt: text, token ids or messages.
        options: of the request.
    """

    id: str
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


def read_jobs(file: Path, options: Mapping[str, Any]) -> list[Job]:
    """All lines of the input, checked before any work.

    Args:
        file: JSON lines: ``prompt``, ``messages`` or ShareGPT's ``conversations`` (up to the last message that is to
            be answered), perhaps ``id``, perhaps options of its own.
        options: of lines that have none of their own.  A ``seed`` becomes seed + line number, from 0.

    Raises:
        ValueError: a line that is not such an object, or an id that comes twice; the message names the line.
        OSError: no such file.
    """
    jobs: list[Job] = []
    seen: set[str] = set()
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                job = _job(json.loads(line), number, options)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
            if job.id in seen:
                raise ValueError(f"{file}, line {number}: the id {job.id!r} comes twice")
            seen.add(job.id)
            jobs.append(job)
    return jobs


def _job(found: Any, number: int, options: Mapping[str, Any]) -> Job:
    if not isinstance(found, dict):
        raise ValueError('not an object such as {"id": "a", "prompt": "..."}')
    unknown = [name for name in found if name not in (*FIELDS, *OPTIONS)]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}: known are {', '.join((*FIELDS, *OPTIONS))}")
    prompt = _prompt(found)
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("seed") is not None:
        given["seed"] += number - 1
    own = {name: found[name] for name in OPTIONS if name in found}
    return Job(str(found.get("id", number)), prompt, {**given, **own})


def _prompt(found: Mapping[str, Any]) -> Any:
    """What a line asks."""
    from foretoken.core.conversation import checked, from_sharegpt, is_messages, to_answer

    asked = [name for name in ("prompt", "messages", "conversations") if name in found]
    if len(asked) != 1:
        raise ValueError("give prompt or messages (or conversations), one of them")
    value = found[asked[0]]
    if asked == ["messages"]:
        return checked(value)
    if asked == ["conversations"]:
        return to_answer(from_sharegpt(value))
    if isinstance(value, str) or _are_ids(value):
        return value
    if is_messages(value):
        return checked(value)
    raise ValueError("prompt is neither a text, nor a list of token ids, nor messages")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def finished_ids(file: Path) -> set[str]:
    """Ids of the answers in an output file.  A last line without its end, left by a kill, is cut off.

    Raises:
        ValueError: the file is something else.
    """
    if not file.exists():
        return set()
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    found = set()
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            found.add(str(json.loads(line)["id"]))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file}, line {number}: not an answer of this command; choose another file") from None
    if whole < len(data):
        with file.open("r+b") as cut:
            cut.truncate(whole)
    return found


@contextmanager
def output_file(file: Path) -> Iterator[IO[bytes]]:
    """The output, open for appending by this process alone.

    Raises:
        ValueError: another run writes to it.
        OSError: it cannot be written.
    """
    with file.open("ab") as out:
        _lock(out, file)
        yield out


def _lock(out: IO[bytes], file: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two runs on one file are the user's to avoid
        return
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"another run writes to {file}: wait for it, or choose another file") from None


def append(out: IO[bytes], answer: Mapping[str, Any]) -> None:
    """Write one line, and see to it that it is on the disk."""
    out.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    out.flush()
    os.fsync(out.fileno())


def run_jobs(llm: Llm, jobs: Sequence[Job], write: Callable[[Mapping[str, Any]], None], max_running: int = 16) -> None:
    """Answer all jobs, several at once.

    Args:
        llm: what answers.
        jobs: what is asked.
        write: told of every answer when it is finished; a job that fails has ``error`` in place of a text.
        max_running: most jobs that run together.
    """
    waiting, running = deque(jobs), dict[int, Job]()
    try:
        while waiting or running:
            while waiting and len(running) < max_running:
                job = waiting.popleft()
                try:
                    running[llm.engine.add(llm.request(job.prompt, **job.options))] = job
                except (ValueError, TypeError) as error:
                    write({"id": job.id, "error": " ".join(str(error).split())})
            if not running:
                continue
            for run, emission in llm.engine.step():
                if emission.finish_reason is not None and run.id in running:
                    write(_answer(llm, running.pop(run.id), run, emission))
    finally:
        for request_id in running:
            llm.engine.cancel(request_id)


def _answer(llm: Llm, job: Job, run: Running, emission: Emission) -> dict[str, Any]:
    from foretoken.engine.output import output_of

    if emission.error is not None:
        return {"id": job.id, "error": " ".join(str(emission.error).split())}
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
