"""Tokenizers that differ in everything, made on the spot, and models that write a given text with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foretoken.loading import ZOO, load_tokenizer
from foretoken.methods.drafters.vocabulary import Vocabulary
from foretoken.models.other.table import TableModel

TEXT = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "The cat sat on the mat, the mat, the mat, the mat. It was a caf\u00e9 in \u6771\u4eac \U0001f642!\n"
)
KINDS = ("characters", "words", "bytes", "pieces")
"""One token per character; whole words with their space; byte-level BPE; sentencepiece-like BPE with byte tokens."""


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer by kind; ``"zoo"`` is that of the built-in models."""
    if kind == "zoo":
        return load_tokenizer(str(ZOO / "target"))
    inner = {"characters": _characters, "words": _words, "bytes": _bytes, "pieces": _pieces}[kind]()
    bos = {"bos_token": "<s>"} if kind == "pieces" else {}
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", **bos)


def vocabulary(kind: str) -> Vocabulary:
    """Its vocabulary, as wide as the tokenizer."""
    return Vocabulary.of(tokenizer(kind), len(tokenizer(kind)))


def _characters() -> Tokenizer:
    signs = ["<unk>", "</s>", *sorted(set(TEXT))]
    inner = Tokenizer(models.WordLevel({sign: i for i, sign in enumerate(signs)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def _words() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(r" ?\w+|\s+|[^\w\s]"), "isolated")
    words = ["<unk>", "</s>", *sorted({word for word, _ in split.pre_tokenize_str(TEXT)})]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = split, decoders.Fuse()
    return inner


def _bytes() -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT.split("caf")[0]] * 3, trainer)
    return inner


def _pieces() -> Tokenizer:
    """As Llama 2's: a space before every text, ``\u2581`` for spaces, bytes where a character is missing, a bos."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    lines = TEXT.split("caf")[0].split("\n")
    trained.train_from_iterator([word for line in lines for word in line.split(" ")] * 3, trainer)
    tokens = trained.get_vocab()
    merges = [
        (left, right)
        for joined in sorted(tokens, key=tokens.__getitem__)
        if tokens[joined] > 258
        for left, right in [(joined[:i], joined[i:]) for i in range(1, len(joined))]
        if left in tokens and right in tokens
    ]
    inner = Tokenizer(models.BPE(tokens, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = trained.normalizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    return inner


class Writer(TableModel):
    """Writes a given text with a vocabulary, whatever its beginning is spelled with; one-hot distributions.

    Args:
        vocabulary: of its tokens.
        text: what it writes, prompt included; then zeros.
        offset: characters that it drops behind the prompt (a drafter that is wrong).
    """

    def __init__(self, vocabulary: Vocabulary, text: str = TEXT) -> None:
        super().__init__(lambda prefix: [], len(vocabulary))
        self.vocabulary, self.whole = vocabulary, text.encode()
        self.ends: dict[int, int] = {}
        end = 0
        for token in vocabulary.spell(text):
            self.ends[end] = token
            end += len(vocabulary.spellings[token])

    def distribution(self, prefix: Sequence[int]) -> torch.Tensor:
        """[V] one-hot at the token that continues the text."""
        ordinary = [token for token in prefix if token not in self.vocabulary.special]
        prefix_bytes = self.vocabulary.bytes_of(ordinary)
        prefix_bytes = prefix_bytes.removeprefix(b" ") if not self.whole.startswith(b" ") else prefix_bytes
        rest = self.whole[len(prefix_bytes) :] if self.whole.startswith(prefix_bytes) else b""
        token = self.ends.get(len(prefix_bytes)) if rest else 0
        if token is None:  # inside one of its own tokens
            token = (self.vocabulary.longest_pieces(rest) or [0])[0]
        return torch.nn.functional.one_hot(torch.tensor(token), self.vocab_size).double()


def save_model(folder: Path, kind: str | None, width: int = 0, seed: int = 0) -> Path:
    """A random llama with a tokenizer beside it (``None``: without one)."""
    torch.manual_seed(seed)
    size = width or len(tokenizer(kind or "zoo"))
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    if kind is not None:
        tokenizer(kind).save_pretrained(folder)
    return folder
