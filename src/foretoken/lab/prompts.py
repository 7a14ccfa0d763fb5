"""Prompts of a benchmark: built-in ones, and readers of common file formats.

All formats are local files; ``.gz`` files are decompressed.
"""

from __future__ import annotations

import gzip
import json
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from foretoken.core.conversation import from_sharegpt, has_template, render, to_answer
from foretoken.core.names import unknown
from foretoken.options import encode

USUAL = ("prose", "code", "agentic", "repetitive")
"""Categories of the built-in texts that resemble typical use."""
TEXT_SUFFIXES = (".txt", ".md")
FOLDER_SUFFIXES = (".jsonl", ".json", ".txt")
"""Files that are read in a folder of prompts; an ``.md`` there describes them."""
Row = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt of a ``category``: a conversation (``messages``) or a ``text``.

    The text is completed if there are no messages or the tokenizer has no chat template.
    """

    category: str
    text: str
    messages: tuple[dict[str, Any], ...] = ()

    def encode(self, tokenizer: Any, chat: bool = True) -> list[int]:
        """Token ids, by the tokenizer's chat template if ``chat`` is set and the prompt is a conversation."""
        if chat and self.messages and has_template(tokenizer):
            return render(self.messages, tokenizer)
        return encode(self.text, tokenizer)


def _text_of(row: Row, key: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key!r} must be a string")
    return value


def _plain(row: Row) -> BenchPrompt:
    key = "prompt" if "prompt" in row or "text" not in row else "text"
    return BenchPrompt(_text_of(row, "category", "default"), _text_of(row, key))


def _turns(row: Row) -> BenchPrompt:
    """Spec-Bench and MT-bench: the first turn (later ones need the model's own answers)."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise ValueError("'turns' must be a list of strings")
    return BenchPrompt(_text_of(row, "category", "default"), turns[0], ({"role": "user", "content": turns[0]},))


def _humaneval(row: Row) -> BenchPrompt:
    return BenchPrompt("humaneval", _text_of(row, "prompt"))


def _mbpp(row: Row) -> BenchPrompt:
    """The task and its tests as the docstring of a program."""
    tests = row.get("test_list") or []
    if not isinstance(tests, list):
        raise ValueError("'test_list' must be a list")
    lines = "\n".join(str(test) for test in tests)
    return BenchPrompt("mbpp", f'"""\n{_text_of(row, "text")}\n{lines}\n"""\n')


def _gsm8k(row: Row) -> BenchPrompt:
    question = _text_of(row, "question")
    return BenchPrompt("gsm8k", f"Question: {question}\nAnswer:", ({"role": "user", "content": question},))


def _chat(row: Row) -> BenchPrompt:
    """A transcript up to the last message before an assistant's answer."""
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise ValueError("'messages' must be a list of messages")
    return _transcript(row, messages)


def _sharegpt(row: Row) -> BenchPrompt:
    return _transcript(row, from_sharegpt(row.get("conversations")))


def _transcript(row: Row, conversation: list[Any]) -> BenchPrompt:
    messages = to_answer(conversation)
    text = "\n\n".join(f"{message['role']}: {_content_of(message)}" for message in messages)
    return BenchPrompt(_text_of(row, "category", "chat"), f"{text}\n\nassistant:", tuple(messages))


def _content_of(message: Mapping[str, Any]) -> str:
    """A message without a template: its text, or its tool calls."""
    return str(message["content"]) or json.dumps(message.get("tool_calls", ""))


READERS: dict[str, Callable[[Row], BenchPrompt]] = {
    "jsonl": _plain,
    "spec_bench": _turns,
    "mt_bench": _turns,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "gsm8k": _gsm8k,
    "chat": _chat,
    "sharegpt": _sharegpt,
}
FORMATS = ("auto", *READERS, "text")
KEYS = "prompt (and category), turns, question and answer, text and code, text, messages or conversations"


def _format_of(row: Row) -> str:
    """The format implied by a row's keys."""
    if "messages" in row:
        return "chat"
    if "conversations" in row:
        return "sharegpt"
    if "turns" in row:
        return "spec_bench"
    if "prompt" in row:
        return "humaneval" if "entry_point" in row or "canonical_solution" in row else "jsonl"
    if "question" in row:
        return "gsm8k"
    if "text" in row and ("code" in row or "test_list" in row):
        return "mbpp"
    if "text" in row:
        return "jsonl"
    raise ValueError(f"no known prompt in the keys {', '.join(map(repr, row)) or '(none)'}: give {KEYS}")


def load_prompts(source: Path | None, format: str = "auto") -> list[BenchPrompt]:
    """Prompts of a file, of all files in a folder, or the built-in ones.  Raises ``ValueError`` for an unknown format,
    no prompts, a format of the built-in ones, or a malformed row (with file and line).

    Args:
        source: ``.jsonl``, ``.json``, ``.txt`` or ``.md`` (one prompt per line), optionally with ``.gz``; a folder of
            them (a warning names what is not read: other files, and ``.md``); ``None`` for the built-in prompts.
        format: one of :data:`FORMATS`; ``auto`` decides for every row.
    """
    if format not in FORMATS:
        raise unknown(f"unknown prompt format {format!r}", format, FORMATS)
    if source is None and format != "auto":
        raise ValueError(f"--format {format} is the format of your own prompts: give --prompts too")
    file = Path(__file__).with_name("builtin_prompts.jsonl") if source is None else source
    files = _files_in(file) if file.is_dir() else [file]
    prompts = [prompt for path in files for prompt in _read(path, format)]
    if not prompts:
        raise ValueError(f"{file} contains no prompts: give text, one prompt a line, or JSONL rows with {KEYS}")
    return prompts


def _files_in(folder: Path, most_names: int = 5) -> list[Path]:
    """Files of prompts in a folder, and a warning that names the others."""
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    files = [entry for entry in entries if entry.is_file() and _suffix(entry) in FOLDER_SUFFIXES]
    others = [entry.name for entry in entries if entry not in files]
    if others:
        more = f" and {len(others) - most_names} more" if len(others) > most_names else ""
        names = ", ".join(others[:most_names]) + more
        warnings.warn(f"{folder}: {names} left out; prompts are read from {', '.join(FOLDER_SUFFIXES)}", stacklevel=3)
    return files


def read_prompts(file: Path | None) -> list[BenchPrompt]:
    """Prompts of a file (:func:`load_prompts`), or a few short built-in texts, which need no template."""
    if file is not None:
        return load_prompts(file)
    texts = (
        "def fibonacci(n):\n    ",
        "import os\n\nfor name in os.listdir('.'):\n    if name.endswith('.py'):\n        print(name)\n\n"
        "for name in os.",
        "It was a dark night, and the rain had not stopped since the morning. ",
        "one two three four one two three four one two three",
    )
    return [BenchPrompt("parity", text) for text in texts]


def prompts_of_kind(tokenizer: Any) -> list[BenchPrompt]:
    """Built-in prompts for a kind of model: questions and tasks if it has a chat template, else texts to continue.

    Consecutive prompts are of different categories.
    """
    if has_template(tokenizer):
        return load_prompts(Path(__file__).with_name("chat_prompts.jsonl"))
    groups = select(load_prompts(None), USUAL)
    rows = zip_longest(*(groups[name] for name in USUAL))
    return [prompt for row in rows for prompt in row if prompt is not None]


def _suffix(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def _read(file: Path, format: str) -> Iterator[BenchPrompt]:
    text = _contents(file)
    if format == "text" or (format == "auto" and _suffix(file) in TEXT_SUFFIXES):
        for line in text.replace("\r\n", "\n").split("\n"):  # not splitlines(): texts may contain U+2028
            if line.strip():
                yield BenchPrompt("text", line)
        return
    for number, row in _rows(file, text):
        try:
            if not isinstance(row, dict):
                raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
            yield READERS[_format_of(row) if format == "auto" else format](row)
        except ValueError as error:
            option = "" if format == "auto" else f" (--format {format})"
            raise ValueError(f"{file}, line {number}: {error}{option}") from None


def _contents(file: Path) -> str:
    raw = file.read_bytes()
    try:
        return (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8-sig")
    except (UnicodeDecodeError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{file} cannot be read as text: {error}") from None


def _rows(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Line numbers and JSON values: one per line, or the whole file if it is ``.json``."""
    if _suffix(file) == ".json":
        value = _parsed(text, file, 1)
        if isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value) and value:
            value = {"messages": value}
        for row in value if isinstance(value, list) else [value]:
            yield 1, row
        return
    # Not splitlines(): JSON strings may contain U+2028 and the like.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _parsed(line, file, number)


def _parsed(text: str, file: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = line + error.lineno - 1
        raise ValueError(
            f"{file}, line {where}: this is not JSON ({error.msg}); plain text needs a name that ends in .txt or .md"
        ) from None
    except RecursionError:
        raise ValueError(f"{file}, line {line}: this is nested too deeply") from None


def select(
    prompts: Sequence[BenchPrompt], categories: Sequence[str] = (), most: int | None = None
) -> dict[str, list[BenchPrompt]]:
    """Prompts by category, in order of appearance: those of ``categories`` (all if empty), at most ``most`` of each,
    evenly spread.  Raises ``ValueError`` for an unknown category."""
    counts = Counter(prompt.category for prompt in prompts)
    for name in categories:
        if name not in counts:
            choices = ", ".join(f"{category} ({count})" for category, count in counts.items())
            raise ValueError(f"no prompts of category {name!r}: choose from {choices}")
    groups: dict[str, list[BenchPrompt]] = {name: [] for name in counts if not categories or name in categories}
    for prompt in prompts:
        if prompt.category in groups:
            groups[prompt.category].append(prompt)
    return {name: spread(group, most) for name, group in groups.items()}


def spread(group: list[T], most: int | None) -> list[T]:
    """At most ``most`` items of a list, evenly spread."""
    if most is None or len(group) <= most:
        return group
    return [group[i * len(group) // most] for i in range(most)]
