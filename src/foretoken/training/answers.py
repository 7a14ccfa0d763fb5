"""Conversations whose answers the target writes itself, kept in a file: what a drafter learns best from.

A drafter must guess what its target says, so EAGLE-3 (arXiv 2503.01840, section 4) and Medusa's self-distillation
(arXiv 2401.10774, section 2.3.2) let the target answer the questions of a data set again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.conversation import has_template, render
from foretoken.core.io.documents import CONVERSATIONS, ROWS, asked_of, files_below, iter_rows, kind_of
from foretoken.core.io.files import checksum, replacing, write_json
from foretoken.training.chat import check_calls, messages_of
from foretoken.training.config import AnswerConfig

if TYPE_CHECKING:
    from foretoken.llm import Llm

log = logging.getLogger("foretoken.training")


@dataclass(frozen=True)
class AnswerProgress:
    """What a caller is told now and then: how many of how many are done, and tokens that were written per second of
    this run."""

    done: int
    count: int
    tokens_per_s: float


@dataclass
class Dialogue:
    """A conversation on its way.

    Attributes:
        number: its place in the data.
        script: its messages; an answer to be written is ``None``.
        unfinished: places of answers that were cut at the length limit.
        tokens: of the answer that is being written.
    """

    number: int
    script: list[dict[str, Any] | None]
    tools: Any = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def advance(self) -> bool:
        """Go on to the next answer that is to be written; whether there is one."""
        while len(self.messages) < len(self.script):
            message = self.script[len(self.messages)]
            if message is None:
                return True
            self.messages.append(message)
        return False

    def row(self) -> dict[str, Any]:
        """As it is kept."""
        more = {"tools": self.tools} if self.tools else {}
        more |= {"unfinished": self.unfinished} if self.unfinished else {}
        return {"id": self.number, "messages": self.messages, **more}


def read_questions(paths: Sequence[str | Path]) -> list[Dialogue]:
    """The conversations of JSONL files, without the answers that the target is to write.

    Rows carry ``messages`` or ``conversations``, ``turns`` (a list of the user's texts), or one question: that of
    :func:`foretoken.core.io.documents.asked_of`, or a ``text``.  An assistant's message that calls a tool stays as it
    is.  Raises ``ValueError``, with file and line, for rows of another shape.
    """
    dialogues: list[Dialogue] = []
    for root in map(Path, paths):
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        below = files_below(root) if root.is_dir() else []
        files = [file for file in below if kind_of(file) == ROWS] if root.is_dir() else [root]
        others = [file for file in below if kind_of(file) != ROWS]
        if others:
            log.warning(
                "files that are not JSONL ask no questions and are passed over: %d, the first one %s",
                len(others),
                others[0],
            )
        for file in files:
            for place, _, row in iter_rows(file):
                try:
                    dialogues.append(_dialogue(len(dialogues), row))
                except ValueError as error:
                    raise ValueError(f"{place}: {error}") from None
    if not dialogues:
        raise ValueError(f"no questions found below {', '.join(map(str, paths))}: give JSONL rows with messages")
    return dialogues


def _dialogue(number: int, row: Any) -> Dialogue:
    if not isinstance(row, dict):
        raise ValueError(
            "a row is an object with messages, conversations, turns, prompt, instruction, question or text"
        )
    messages = _messages(row)
    script: list[dict[str, Any] | None] = []
    for place, message in enumerate(messages):
        answered = message["role"] == "assistant" and not message.get("tool_calls")
        script.append(None if answered and place else message)
        following = messages[place + 1]["role"] if place + 1 < len(messages) else ""
        if message["role"] in ("user", "tool") and following not in ("assistant", message["role"]):
            script.append(None)
    if None not in script:
        raise ValueError("no message of the user to answer")
    return Dialogue(number, script, row.get("tools"))


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    if any(key in row for key in CONVERSATIONS):
        return messages_of(row)
    answer = {"role": "assistant", "content": ""}
    question = [] if row.get("turns") else asked_of(row)
    if question:
        return messages_of({"messages": [*question, answer]})
    turns = row.get("turns") or [row.get("text")]
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        forms = "'messages', 'conversations', 'turns', 'prompt', 'instruction', 'question' or 'text'"
        raise ValueError(f"a row without a question: give {forms}")
    return [message for turn in turns for message in ({"role": "user", "content": turn}, answer)]


class AnswerFile:
    """Conversations with the target's answers: ``answers.jsonl``, and until all are there ``answers.part.jsonl``.

    ``target`` is what tells the target from others, as JSON can hold it.  Raises ``ValueError`` where the folder, which
    is made when it is missing, holds answers of another target or to other questions, or otherwise written ones.
    """

    def __init__(
        self, folder: Path, target: Mapping[str, Any], config: AnswerConfig, dialogues: Sequence[Dialogue]
    ) -> None:
        self.file, self.part = folder / "answers.jsonl", folder / "answers.part.jsonl"
        self.dialogues = dialogues
        scripts = json.dumps([[dialogue.script, dialogue.tools] for dialogue in dialogues], sort_keys=True)
        settings = {key: value for key, value in asdict(config).items() if key != "batch"}
        identity = {"target": dict(target), **settings, "questions": checksum(scripts)}
        card = folder / "answers.json"
        if card.exists():
            stored = json.loads(card.read_text(encoding="utf-8"))
            others = [key for key in identity if stored.get(key) != json.loads(json.dumps(identity[key]))]
            if others:
                raise ValueError(
                    f"{folder} holds answers of another run ({' and '.join(others)}): give the same to go on with "
                    "them, or another --out"
                )
        write_json(card, identity)

    def rows(self) -> dict[int, dict[str, Any]]:
        """The rows that are there, by number; a last line without its end, left by a kill, is cut off.  Raises
        ``ValueError`` for a damaged file."""
        file = self.file if self.file.exists() else self.part
        if not file.exists():
            return {}
        data = file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(file, whole)
        try:
            rows = [json.loads(line) for line in data[:whole].splitlines()]
            return {int(row["id"]): row for row in rows}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file} is damaged: delete it, and the answers are written again") from None

    def write(
        self,
        llm: Llm,
        config: AnswerConfig,
        on_progress: Callable[[AnswerProgress], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Path | None:
        """Answer what is not answered yet; the file, or ``None`` when ``stop`` was true before all were there.  Raises
        ``ValueError`` without a chat template, and for a conversation that the target's context does not hold."""
        rows = self.rows()
        open_dialogues = [dialogue for dialogue in self.dialogues if dialogue.number not in rows]
        if open_dialogues:
            with self.part.open("a", encoding="utf-8") as out:
                for row, rate in answered(llm, open_dialogues, config, stop):
                    if row is not None:
                        rows[row["id"]] = row
                        out.write(json.dumps(row, ensure_ascii=False) + "\n")
                        out.flush()
                    if on_progress is not None:
                        on_progress(AnswerProgress(len(rows), len(self.dialogues), rate))
        if len(rows) < len(self.dialogues):
            return None
        if not self.file.exists():
            with replacing(self.file) as draft:
                lines = [json.dumps(rows[number], ensure_ascii=False) + "\n" for number in sorted(rows)]
                draft.write_text("".join(lines), encoding="utf-8")
            self.part.unlink(missing_ok=True)
        return self.file


def answered(
    llm: Llm, dialogues: Sequence[Dialogue], config: AnswerConfig, stop: Callable[[], bool]
) -> Iterator[tuple[dict[str, Any] | None, float]]:
    """Rows as they are finished, and tokens per second so far; after every round of the engine at least one item,
    with no row where none was finished."""
    if not has_template(llm.tokenizer):
        raise ValueError("--answers target needs a target with a chat template")
    for candidate in dialogues:  # what could not be learned is not answered first
        script = [message or {"role": "assistant", "content": "answer"} for message in candidate.script]
        try:
            check_calls(script, llm.tokenizer, candidate.tools)
        except ValueError as error:
            raise ValueError(f"conversation {candidate.number + 1}: {error}") from None
    waiting, running = deque(dialogues), dict[int, Dialogue]()
    start_s, num_tokens = time.perf_counter(), 0
    try:
        while (waiting or running) and not stop():
            while waiting and len(running) < config.batch:
                _ask(llm, waiting.popleft(), config, running)
            finished: list[dict[str, Any] | None] = []
            for run, emission in llm.engine.step():
                dialogue = running.get(run.id)
                if dialogue is None:
                    continue
                dialogue.tokens += emission.token_ids
                num_tokens += len(emission.token_ids)
                if emission.finish_reason is None:
                    continue
                del running[run.id]
                if emission.error is not None:
                    raise ValueError(f"conversation {dialogue.number + 1} cannot be answered: {emission.error}")
                _take(llm, dialogue, emission.finish_reason)
                if dialogue.advance():
                    _ask(llm, dialogue, config, running)
                else:
                    finished.append(dialogue.row())
            rate = num_tokens / max(time.perf_counter() - start_s, 1e-9)
            yield from ((row, rate) for row in finished or [None])
    finally:
        for request in running:
            llm.engine.cancel(request)


def _ask(llm: Llm, dialogue: Dialogue, config: AnswerConfig, running: dict[int, Dialogue]) -> None:
    """Let the engine write the next answer; where the context has no more room, the conversation ends before it."""
    dialogue.advance()
    more = {"tools": dialogue.tools} if dialogue.tools else {}
    prompt = render(dialogue.messages, llm.tokenizer, **more)
    room = llm.target.context_length - len(prompt)
    if room < 1:
        raise ValueError(
            f"conversation {dialogue.number + 1} has {len(prompt)} tokens, and the target's context holds "
            f"{llm.target.context_length}: leave it out"
        )
    dialogue.tokens = []
    options: dict[str, Any] = {"max_new_tokens": min(config.tokens, room), "temperature": config.temperature}
    seed = (config.seed * 1_000_003 + 1009 * dialogue.number + len(dialogue.messages)) % 2**31
    running[llm.engine.add(llm.request(prompt, **options, seed=seed))] = dialogue


def _take(llm: Llm, dialogue: Dialogue, reason: str) -> None:
    """The answer becomes a message."""
    if reason == "length":
        dialogue.unfinished.append(len(dialogue.messages))
    tokenizer: Any = llm.tokenizer
    text = tokenizer.decode(dialogue.tokens, skip_special_tokens=True)
    dialogue.messages.append({"role": "assistant", "content": text})
