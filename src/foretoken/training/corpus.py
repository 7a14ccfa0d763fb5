"""Token files from text folders: reading documents, training a tokenizer, encoding to disk once.

A corpus on disk is one flat ``uint16``/``uint32`` array per split (``train.bin``, ``held.bin``), every document
followed by the tokenizer's end-of-text id, plus ``corpus.json`` with its sources.  Documents are split by a hash of
their content, so a document stays in its split when others are added.  If that holds out too little, the documents with
the smallest hashes are held out, so that of several at least one is.

With conversations among the documents, ``train.learned.bin`` holds a byte per token that tells whether it is learned,
and ``train.starts.bin`` the index of every document's first token (int64); the same for ``held``.  A chat template
writes the end of a conversation itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from foretoken.core.io.documents import TEXT_SUFFIXES, Record, files_below, iter_records
from foretoken.core.io.files import checksum, files_checksum, remove_abandoned, replacing, write_json
from foretoken.core.io.locks import lock
from foretoken.training.chat import ChatBlocks, Piece, chat_pieces, epoch_order

END_OF_TEXT = "<|endoftext|>"
HELD = 0.01
"""Share of the documents that are held out."""
PARTS = ("tokens", "learned", "starts")


def check_text(paths: Sequence[str | Path]) -> None:
    """Raise ``ValueError``, before a model is loaded, for text that :func:`foretoken.core.io.documents.iter_records`
    refuses, and if there is none."""
    if next(iter_records(paths), None) is None:
        raise ValueError(no_text(paths))


def no_text(paths: Sequence[str | Path]) -> str:
    """Error message for paths without text."""
    faults = [fault for path in paths if (fault := _fault(Path(path)))]
    if len(faults) == len(paths):
        return "; ".join(faults)
    return f"no text found in {', '.join(map(str, paths))}: give .py, .txt, .md or .jsonl"


def _fault(file: Path) -> str:
    """Reason why a single file of a known kind holds no text; empty for a folder or if unknown."""
    if not file.is_file() or file.suffix not in (*TEXT_SUFFIXES, ".jsonl"):
        return ""
    raw = file.read_bytes()
    try:
        return "" if raw.decode("utf-8").strip() else f"{file} is empty"
    except UnicodeDecodeError:
        return f"{file} is not UTF-8 text"


def held_below(records: Iterable[Record], fraction: float) -> tuple[int, bool]:
    """The hash below which documents are held out, and whether there are conversations among them.

    It is ``fraction`` of all hashes, or more if that would hold out none of several documents, or few conversations.
    """
    hashes, chat = list[int](), False
    for record in records:
        hashes.append(_hash(record))
        chat = chat or record.row is not None
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        return 0, chat  # a single document is for training
    # Least number of conversations held out: 16, but no more than an eighth
    least = max(1, min(16, len(distinct) // 8) if chat else 1)
    return max(round(fraction * 2**64), distinct[least - 1] + 1), chat


def _hash(record: Record) -> int:
    return int(checksum(record.content), 16)


def train_tokenizer(documents: Iterable[str], vocab_size: int, out: Path) -> None:
    """Train a byte-level BPE tokenizer and save it in Hugging Face's layout to ``out``, whole or not at all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as draft:
        fast.save_pretrained(draft)


def stored_corpus(paths: Sequence[str | Path], tokenizer: Any, out: Path) -> dict[str, Any] | None:
    """The description in ``out/corpus.json`` if it is for the same paths and tokenizer, else ``None``."""
    card = out / "corpus.json"
    if not card.exists():
        return None
    description: dict[str, Any] = json.loads(card.read_text())
    identity = _identity(paths, tokenizer)
    if description.get("chat"):
        identity["template"] = _template(tokenizer)
    return description if all(description.get(k) == v for k, v in identity.items()) else None


def _template(tokenizer: Any) -> str:
    return checksum(json.dumps(getattr(tokenizer, "chat_template", None)))


def _identity(paths: Sequence[str | Path], tokenizer: Any) -> dict[str, Any]:
    return {
        "paths": [str(p) for p in paths],
        "files": _listed(paths),
        "held_fraction": HELD,
        "reading": 2,  # version of the conversion of rows to text: a corpus of an earlier one is rebuilt
        "vocab": checksum(json.dumps(sorted(tokenizer.get_vocab().items()))),
    }


def _listed(paths: Sequence[str | Path]) -> str:
    """Hash of the files' names, sizes and times.  Copied files are read again, which leaves :func:`text_identity`
    unchanged."""
    files = (file for root in map(Path, paths) for file in (files_below(root) if root.is_dir() else [root]))
    stats = ((str(file), file.stat()) for file in files if file.is_file())
    return checksum(json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]))


def build_corpus(
    paths: Sequence[str | Path], tokenizer: Any, out: Path, on_read: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Encode every document below ``paths`` to ``out/train.bin`` and ``out/held.bin``; reuse matching files.

    Returns the description stored in ``out/corpus.json``: tokens, bytes and documents of each split, and for
    conversations their number and the number of learned tokens.  ``on_read`` is called from time to time with the
    number of documents read.  Raises ``ValueError`` for a missing path, a row that is neither text nor conversation
    (names file and line), text of no tokens, and a tokenizer without an end-of-text token.
    """
    check_end_of_text(tokenizer)
    description = stored_corpus(paths, tokenizer, out)
    if description is None:
        limit, chat = held_below(iter_records(paths), HELD)
        out.mkdir(parents=True, exist_ok=True)
        with (out / "corpus.lock").open("a") as lock_file:  # two runs with different data would mix their files
            lock(lock_file.fileno(), out, "folder", wait=True)
            description = stored_corpus(paths, tokenizer, out) or _encode(paths, tokenizer, out, limit, chat, on_read)
    if description["train"]["tokens"] == 0:
        raise ValueError(no_text(paths))
    return description


def _encode(
    paths: Sequence[str | Path],
    tokenizer: Any,
    out: Path,
    limit: int,
    chat: bool,
    on_read: Callable[[int], None] | None,
) -> dict[str, Any]:
    """Write the files of a corpus; documents whose hash is below ``limit`` are held out."""
    card, identity = out / "corpus.json", _identity(paths, tokenizer)
    remove_abandoned(out)
    card.unlink(missing_ok=True)  # after a kill between two of the files below it would describe others
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    with ExitStack() as stack:
        splits = {name: _Split.open(out, name, np.dtype(dtype), chat, stack) for name in ("train", "held")}
        read = 0
        for batch in _batched(iter_records(paths), 64):
            for record, pieces in zip(batch, _encoded(batch, tokenizer), strict=True):
                splits["held" if _hash(record) < limit else "train"].add(record, pieces)
            read += len(batch)
            if on_read is not None:
                on_read(read)
    rows = {name: split.counts for name, split in splits.items()}
    more = {"chat": True, "template": _template(tokenizer)} if chat else {}
    description = {**identity, "dtype": np.dtype(dtype).name, **more, **rows}
    write_json(card, description)
    return description


def check_end_of_text(tokenizer: Any) -> None:
    """Raise ``ValueError`` for a tokenizer without an end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in {tokenizer.name_or_path} has no end-of-text token, which separates documents"
        )


def text_identity(folder: Path, corpus: Mapping[str, Any]) -> dict[str, Any]:
    """Identifies the text of a corpus in ``folder``, independent of file locations."""
    parts = PARTS if corpus.get("chat") else PARTS[:1]
    files = [part_file(folder, split, part) for split in ("train", "held") for part in parts]
    return {"vocab": corpus["vocab"], "tokens": files_checksum(files)}


@dataclass
class _Split:
    """The open files of one split."""

    dtype: np.dtype[Any]
    files: Mapping[str, IO[bytes]]
    counts: dict[str, int]

    @classmethod
    def open(cls, out: Path, name: str, dtype: np.dtype[Any], chat: bool, stack: ExitStack) -> _Split:
        files = {}
        for part in PARTS if chat else PARTS[:1]:
            draft = stack.enter_context(replacing(part_file(out, name, part)))
            files[part] = stack.enter_context(draft.open("wb"))
        counts = {"documents": 0, "bytes": 0, "tokens": 0, **({"conversations": 0, "learned": 0} if chat else {})}
        return cls(dtype, files, counts)

    def add(self, record: Record, pieces: Sequence[Piece]) -> None:
        counts = self.counts
        counts["documents"] += 1
        counts["bytes"] += len(record.content.encode())
        for ids, learned in pieces:
            if "starts" in self.files:
                np.asarray([counts["tokens"]], np.int64).tofile(self.files["starts"])
                np.asarray(learned, np.uint8).tofile(self.files["learned"])
                counts["learned"] += sum(learned)
            np.asarray(ids, self.dtype).tofile(self.files["tokens"])
            counts["tokens"] += len(ids)
        if record.row is not None:
            counts["conversations"] += 1


def _encoded(records: Sequence[Record], tokenizer: Any) -> list[list[Piece]]:
    """The tokens of documents; all tokens of plain text are learned."""
    texts = [record.content for record in records if record.row is None]
    ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else ())
    documents: list[list[Piece]] = []
    for record in records:
        if record.row is None:
            tokens = [*next(ids), tokenizer.eos_token_id]
            documents.append([(tokens, [True] * len(tokens))])
            continue
        try:
            documents.append(chat_pieces(record.row, tokenizer))
        except ValueError as error:
            raise ValueError(f"{record.location}: {error}") from None
    return documents


def _batched(items: Iterable[Record], size: int) -> Iterator[list[Record]]:
    batch: list[Record] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def part_file(folder: Path, split: str, part: str) -> Path:
    """Path of ``tokens``, ``learned`` or ``starts`` of a split."""
    return folder / (f"{split}.bin" if part == "tokens" else f"{split}.{part}.bin")


def read_chat(folder: Path, split: str, dtype: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Tokens, their learned mask, and the starts of documents, of a corpus with conversations."""
    kinds = zip(PARTS, (dtype, "bool", "int64"), strict=True)
    tokens, learned, starts = (read_tokens(part_file(folder, split, part), kind) for part, kind in kinds)
    return tokens, learned, starts


def corpus_blocks(
    folder: Path, corpus: dict[str, Any], tokenizer: Any, block: int, batch: int, seed: int
) -> BlockSampler | ChatBlocks:
    """Training blocks of a corpus: packed conversations if it has any, else pieces of the text.  Raises ``ValueError``
    if it is too short."""
    if corpus.get("chat"):
        return ChatBlocks(*read_chat(folder, "train", corpus["dtype"]), block, batch, seed, tokenizer.eos_token_id)
    return BlockSampler(folder / "train.bin", corpus["dtype"], block, batch, seed)


def read_tokens(file: Path, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """A token file as a read-only array [tokens]; memory-mapped unless the file is empty, which cannot be mapped."""
    if file.stat().st_size == 0:
        return np.empty(0, np.dtype(dtype))
    return np.memmap(file, dtype=np.dtype(dtype), mode="r")


def spread_blocks(tokens: NDArray[Any], count: int, length: int) -> list[NDArray[np.int64]]:
    """At most ``count`` pieces of ``length`` tokens, evenly spaced over a text."""
    starts = np.unique(np.linspace(0, len(tokens) - length, count).astype(int))
    return [tokens[start : start + length].astype(np.int64) for start in starts]


class BlockSampler:
    """Fixed-length training blocks from a token file, in an order that is a pure function of (seed, step).

    Resuming needs no stored state: step ``s`` always sees the same blocks.
    """

    def __init__(self, file: Path, dtype: str, block: int, batch: int, seed: int) -> None:
        self.tokens = read_tokens(file, dtype)
        self.block, self.batch, self.seed = block, batch, seed
        self.num_blocks = (len(self.tokens) - 1) // block
        if self.num_blocks < batch:
            raise ValueError(
                f"the data is too short: {len(self.tokens)} tokens give {max(self.num_blocks, 0)} blocks of {block}, "
                f"and one step needs {batch}; give more text or a smaller --context or --batch-size"
            )

    @property
    def learned_ids(self) -> NDArray[Any]:
        return self.tokens

    def learned_of(self, step: int) -> None:
        """Nothing: all tokens are predicted."""

    def __call__(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The blocks of one step, int64 [batch, block + 1] (inputs are [:, :-1], labels [:, 1:])."""
        rows = []
        for i in range(step * self.batch, (step + 1) * self.batch):
            epoch, index = divmod(i, self.num_blocks)
            # A different phase each epoch, so that repeated text is not cut at the same positions.
            order, phase = epoch_order(self.seed, epoch, self.num_blocks, self.block)
            start = min(int(order[index]) * self.block + phase, len(self.tokens) - self.block - 1)
            rows.append(self.tokens[start : start + self.block + 1].astype(np.int64))
        return np.stack(rows)
