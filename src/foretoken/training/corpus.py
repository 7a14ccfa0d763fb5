"""Text folders -> token files: reading documents, training a tokenizer, encoding once to disk.

A corpus on disk is one flat ``uint16``/``uint32`` array per split (``train.bin``, ``held.bin``), every document
followed by the tokenizer's end-of-text id, plus ``corpus.json`` that says what it was made from.  Documents are
split by a hash of their content, so a document never changes side when others are added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.io.documents import iter_documents
from foretoken.io.files import checksum, replacing, write_json

END_OF_TEXT = "<|endoftext|>"


def is_held_out(document: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out split: a property of its content alone."""
    return int(checksum(document), 16) < fraction * 2**64


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


def stored_corpus(
    paths: Sequence[str | Path], tokenizer: Any, out: Path, held_fraction: float = 0.01
) -> dict[str, Any] | None:
    """The description in ``out/corpus.json`` when it is of the same paths and tokenizer, else ``None``."""
    card = out / "corpus.json"
    if not card.exists():
        return None
    found: dict[str, Any] = json.loads(card.read_text())
    wanted = _identity(paths, tokenizer, held_fraction)
    return found if all(found.get(k) == v for k, v in wanted.items()) else None


def _identity(paths: Sequence[str | Path], tokenizer: Any, held_fraction: float) -> dict[str, Any]:
    return {
        "paths": [str(p) for p in paths],
        "held_fraction": held_fraction,
        "vocab": checksum(json.dumps(sorted(tokenizer.get_vocab().items()))),
    }


def build_corpus(paths: Sequence[str | Path], tokenizer: Any, out: Path, held_fraction: float = 0.01) -> dict[str, Any]:
    """Encode every document below ``paths`` to ``out/train.bin`` and ``out/held.bin``; reuse them when they match.

    Returns the description that is stored in ``out/corpus.json``: tokens, bytes and documents of each split.
    """
    found = stored_corpus(paths, tokenizer, out, held_fraction)
    if found is not None:
        return found
    card, wanted = out / "corpus.json", _identity(paths, tokenizer, held_fraction)
    out.mkdir(parents=True, exist_ok=True)
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    splits: dict[str, dict[str, int]] = {s: {"documents": 0, "bytes": 0, "tokens": 0} for s in ("train", "held")}
    with ExitStack() as stack:
        drafts = {split: stack.enter_context(replacing(out / f"{split}.bin")) for split in splits}
        handles = {split: stack.enter_context(draft.open("wb")) for split, draft in drafts.items()}
        for batch in _batched(iter_documents(paths), 64):
            for text, ids in zip(batch, tokenizer(batch, add_special_tokens=False)["input_ids"], strict=True):
                split = "held" if is_held_out(text, held_fraction) else "train"
                np.asarray([*ids, tokenizer.eos_token_id], dtype=dtype).tofile(handles[split])
                row = splits[split]
                row["documents"] += 1
                row["bytes"] += len(text.encode())
                row["tokens"] += len(ids) + 1
    description = {**wanted, "dtype": np.dtype(dtype).name, **splits}
    write_json(card, description)
    return description


def _batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def read_tokens(file: Path, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """A token file as a read-only array [tokens] (an empty file cannot be mapped, so it is no map)."""
    if file.stat().st_size == 0:
        return np.empty(0, np.dtype(dtype))
    return np.memmap(file, dtype=np.dtype(dtype), mode="r")


class BlockSampler:
    """Fixed-length training blocks from a token file, in an order that is a pure function of (seed, step).

    Nothing has to be stored to resume: step ``s`` always sees the same blocks.
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

    def __call__(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The blocks of one step, int64 [batch, block + 1] (inputs are [:, :-1], labels [:, 1:])."""
        rows = []
        for i in range(step * self.batch, (step + 1) * self.batch):
            epoch, place = divmod(i, self.num_blocks)
            rng = np.random.default_rng((self.seed, epoch))
            start = int(rng.permutation(self.num_blocks)[place]) * self.block
            # A different phase each epoch, so that repeated text is not cut at the same places.
            start = min(start + int(rng.integers(self.block)), len(self.tokens) - self.block - 1)
            rows.append(self.tokens[start : start + self.block + 1].astype(np.int64))
        return np.stack(rows)
