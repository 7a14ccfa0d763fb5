"""Tokenizers from GGUF files with tiny vocabularies: token ids are llama.cpp's, for every way to split words."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from foretoken.loading import LoadError, load_tokenizer
from foretoken.loading.gguf import has_llama_cpp
from foretoken.models.gguf.tokenizer import PRE

TEXTS = [
    "def f(x):\n\treturn  x\n\n\n#### ___ ---- ====",
    "naïve café Ω ﬁ e\u0301 A\u0301\u0327 \u200b\u200d\ufeff",
    "🙂🙂👨‍👩‍👧‍👦🏳️‍🌈 ☃",
    "中文字符，测试。日本語テキスト 한국어",
    "हिन्दी ไทย",
    " leading",
    "tail  ",
    "\n\n\n x\t\ty \r\n\r\n z",
    "   ",
    "",
    "a  b   c    d",
    "don't DON'T we'LL I'm I'M it's 's 't x'S  's",
    "123 4567 89012345 ٣٤٥ ४५६ ½² Ⅷ ǅ ʰ ªº",
    "\u00a0\u3000\u2003x \u2028 a\u0085b",
    "http://a.b/c?d=e&f=g#h …“”‘’—",
    "<|end|>",
    "<|end|> <|user|>\nhi<|end|>\n<|user|>  \n a",
    "a<|end|>b<|end",
    "</s><s> a </s>b",
    "a [TOOL]b  [TOOL]  c",
]
needs_llama_cpp = pytest.mark.skipif(
    not has_llama_cpp(), reason="llama-cpp-python is an extra (pip install 'foretoken[gguf]')"
)


@cache
def corpus() -> list[str]:
    """The texts, and others of the same letters in any order."""
    letters, rng = sorted(set("".join(TEXTS))), random.Random(0)
    return [*TEXTS, *("".join(rng.choices(letters, k=rng.randrange(1, 30))) for _ in range(300))]


@cache
def trained(spaces: str) -> tuple[list[str], list[str]]:
    """Tokens and merges of a vocabulary that was trained on texts as a whole: tokens cross all borders of words, so
    that it matters where texts are split.  Spaces are bytes as all letters, or ``▁``."""
    backend = Tokenizer(models.BPE())
    alphabet: list[str] = []
    if spaces == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [text if spaces == "bytes" else text.replace(" ", spaces) for text in corpus() if not set(text) & set("<[")]
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts * 3, trainer)
    stored = json.loads(backend.to_str())["model"]
    names = sorted(stored["vocab"], key=stored["vocab"].__getitem__)
    return names, [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["merges"]]


def write_bytes(file: Path, pre: str, **values: Any) -> Path:
    """A byte-level vocabulary with three special tokens and one of a user; ``values`` go below ``tokenizer.ggml``."""
    names, merges = trained("bytes")
    special = ["<|end|>", "<|user|>", "<|start|>"]
    kinds = [TokenType.NORMAL] * len(names) + [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED, TokenType.UNUSED]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*names, *special, "[TOOL]", "[PAD]"])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(names))
    writer.add_bos_token_id(len(names) + 2)
    return _end(writer, file, values)


def write_pieces(file: Path, architecture: str = "llama", **values: Any) -> Path:
    """A SentencePiece vocabulary of all bytes and trained pieces."""
    names, _ = trained("▁")
    tokens: list[tuple[str, TokenType]] = [("<unk>", TokenType.UNKNOWN)]
    tokens += [("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    tokens += [("<|end|>", TokenType.CONTROL), ("<|user|>", TokenType.CONTROL), ("<|endoftext|>", TokenType.CONTROL)]
    tokens += [("[TOOL]", TokenType.USER_DEFINED)]
    start = len(tokens)
    tokens += [(name, TokenType.NORMAL) for name in names]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([name for name, _ in tokens])
    writer.add_token_scores([-float(max(0, place - start)) for place in range(len(tokens))])
    writer.add_token_types([int(kind) for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return _end(writer, file, values)


def _end(writer: Any, file: Path, values: dict[str, Any]) -> Path:
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}")
    for key, value in values.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(key.replace("__", ".") if "__" in key else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return file


def same_as_llama_cpp(file: Path, texts: Sequence[str] | None = None) -> None:
    from foretoken.models.other.llama_cpp_tokenizer import LlamaCppTokenizer

    tokenizer, reference = load_tokenizer(file, "native"), LlamaCppTokenizer(file)
    assert tokenizer is not None
    for text in corpus() if texts is None else texts:
        for special in (True, False):
            expected = list(reference.encode(text, add_special_tokens=special))
            assert tokenizer(text, add_special_tokens=special)["input_ids"] == expected, repr(text)


@needs_llama_cpp
@pytest.mark.parametrize("pre", PRE)
def test_words_are_split_as_llama_cpp_does(tmp_path: Path, pre: str) -> None:
    texts = [text for text in corpus() if pre not in OWN or not any(map(is_beyond, text))]
    assert len(texts) > 100
    same_as_llama_cpp(write_bytes(tmp_path / "t.gguf", pre), texts)


OWN = ("tekken", "gpt-4o", "llama4")
"""Patterns with classes of letters that llama.cpp lacks: there we split as the model's own tokenizer does."""


def is_beyond(letter: str) -> bool:
    """A letter with a case, or a mark, beyond ASCII."""
    return not letter.isascii() and unicodedata.category(letter) in ("Lu", "Ll", "Lt", "Mn", "Mc", "Me")


@needs_llama_cpp
@pytest.mark.parametrize("values", [{}, {"add_space_prefix": False}, {"add_bos_token": False, "add_eos_token": True}])
def test_pieces_are_llama_cpps(tmp_path: Path, values: dict[str, Any]) -> None:
    same_as_llama_cpp(write_pieces(tmp_path / "t.gguf", **values))


@needs_llama_cpp
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_ends_are_those_of_the_header(tmp_path: Path, bos: bool, eos: bool) -> None:
    for pre in ("gpt-2", "llama-bpe"):
        same_as_llama_cpp(write_bytes(tmp_path / "t.gguf", pre, add_bos_token=bos, add_eos_token=eos))


@needs_llama_cpp
@pytest.mark.parametrize("name", ["Phi-3-mini", "PHI3", "Llama"])
def test_special_tokens_take_spaces_as_llama_cpps_do(tmp_path: Path, name: str) -> None:
    same_as_llama_cpp(write_pieces(tmp_path / "t.gguf", general__name=name))


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_phis_special_tokens_take_the_spaces_behind_them(tmp_path: Path, architecture: str) -> None:
    """Whatever the file is called."""
    tokenizer: Any = load_tokenizer(write_pieces(tmp_path / "t.gguf", architecture))
    for token in ("<|user|>", "</s>", "<s>"):
        kept = tokenizer.decode(tokenizer(f"{token} \n a", add_special_tokens=False)["input_ids"])
        takes = architecture == "phi3" and token != "<s>"
        assert kept == (f"{token} a" if takes else f"{token}  \n a")


PIECES = {
    "gpt-2": ["I", "'m", " x", "  ", " 12345", "!!", "\n\n", " a", "\n", "DON", "'", "T"],
    "llama-bpe": ["I", "'m", " x", "  ", " ", "123", "45", "!!\n\n", " a", "\n", "DON", "'T"],
    "qwen2": ["I", "'m", " x", "  ", " ", "1", "2", "3", "4", "5", "!!\n\n", " a", "\n", "DON", "'T"],
    "smollm": ["I", "'m", " x", "   ", "1", "2", "3", "4", "5", "!!", "\n\n", " a", "\n", "DON", "'", "T"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_where_texts_are_split(tmp_path: Path, pre: str) -> None:
    tokenizer = load_tokenizer(write_bytes(tmp_path / "t.gguf", pre))
    assert tokenizer is not None
    text = "I'm x   12345!!\n\n a\nDON'T"
    cut = [text[a:b] for _, (a, b) in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == PIECES[pre]


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_texts_come_back(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "t.gguf"
    tokenizer: Any = load_tokenizer(write_bytes(file, "qwen2") if kind == "bytes" else write_pieces(file))
    for text in corpus():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if "<" not in text and "[" not in text:
            assert tokenizer.decode(ids) == text
    template = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert template == "<|user|>hi<|end|>"
    assert tokenizer.eos_token == ("<|end|>" if kind == "bytes" else "</s>")


# -- bad vocabularies ------------------------------------------------------------------------------------------------


def refused(file: Path, words: str) -> None:
    with pytest.raises(LoadError, match=words) as error:
        load_tokenizer(file, "native")
    assert "\n" not in str(error.value)


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"
    remedy = ": pass tokenizer=FOLDER, or "
    refused(
        write_bytes(file, "never-heard-of"),
        "has the pre-tokenizer 'never-heard-of' .*, which is not supported here" + remedy,
    )
    writer = gguf.GGUFWriter(file, "t5")
    writer.add_tokenizer_model("t5")
    refused(_end(writer, file, {}), "has a vocabulary of type 't5', which is not supported here" + remedy)


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (lambda writer: writer.add_tokenizer_model("gpt2"), "lacks tokenizer.ggml.tokens: convert the model again, or"),
        (lambda writer: _tokens(writer, "gpt2"), "lacks tokenizer.ggml.merges: convert the model again, or pass"),
        (lambda writer: _tokens(writer, "llama"), "lacks tokenizer.ggml.scores of its 2 tokens"),
        (lambda writer: _tokens(writer, "gpt2", [1]), "has 2 tokens and 1 token types: convert the model again"),
        (lambda writer: _numbers(writer), "holds a vocabulary that cannot be read .*: convert the model again, or"),
    ],
)
def test_damaged_vocabularies_are_refused(tmp_path: Path, add: Any, words: str) -> None:
    file = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    add(writer)
    refused(_end(writer, file, {}), words)


def _tokens(writer: Any, model: str, kinds: list[int] | None = None) -> None:
    writer.add_tokenizer_model(model)
    writer.add_token_list(["a", "b"])
    if kinds:
        writer.add_token_types(kinds)


def _numbers(writer: Any) -> None:
    """Numbers where names should be."""
    writer.add_tokenizer_model("gpt2")
    writer.add_array("tokenizer.ggml.tokens", [1, 2])
    writer.add_array("tokenizer.ggml.merges", [1, 2])
