"""The tokenizer inside a GGUF file, as a fast Transformers tokenizer.

It supports byte-level BPE (``gpt2`` in the header), with the word splitting named by ``tokenizer.ggml.pre``, and
SentencePiece's BPE (``llama``), whose merges follow from the token scores.  The splitting rules are those of
llama.cpp's ``llama-vocab.cpp`` and of the models' ``tokenizer.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from foretoken.models.gguf.file import GgufError, GgufFile, UncoveredError

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Splitting:
    """Rule for splitting a text into words, whose bytes are then merged.

    Attributes:
        patterns: applied in order; each isolates its matches within the pieces so far.
        whole: whether a word that is a token stays whole, regardless of the merges.
        bos: whether a text starts with the BOS token, unless the header says otherwise.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False


PRE: dict[str, _Splitting] = {
    # llama.cpp's rule for headers that name no splitting, or one that its converter did not know
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9]{3}")),
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "phi-2", "jais"), _Splitting((GPT2,))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _Splitting((LLAMA3,), whole=True, bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Splitting((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _Splitting((QWEN2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Splitting((r"\p{N}", GPT2))),
    "tekken": _Splitting((TEKKEN,), whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Splitting((GPT4O,))),
}
"""Rules by ``tokenizer.ggml.pre``.  ``tekken``, ``gpt-4o`` and ``llama4`` use the models' own patterns: llama.cpp has
no classes of capital letters and marks beyond ASCII, and splits a few words of such letters differently."""
SPACE = "\u2581"


class Token(IntEnum):
    """Token types (``tokenizer.ggml.token_type``)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(file: GgufFile) -> Any | None:
    """A ``PreTrainedTokenizerFast``; ``None`` if the file has no vocabulary."""
    from transformers import PreTrainedTokenizerFast

    model = file.metadata.get("tokenizer.ggml.model", "no_vocab")
    if model in ("no_vocab", "none"):
        return None
    if model not in ("gpt2", "llama"):
        raise UncoveredError(f"{file.path} has a vocabulary of type {model!r}, which is not supported here")
    names, kinds = _tokens(file)
    backend, adds_bos = _bytes(file, names, kinds) if model == "gpt2" else _pieces(file, names, kinds)
    _add_special(backend, file, names, kinds)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: _token_name(file, f"{key}_token_id", names) for name, key in keys.items()}
    _add_ends(backend, file, names, special, adds_bos)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )
    tokenizer.chat_template = file.metadata.get("tokenizer.chat_template")
    return tokenizer


def end_ids(file: GgufFile) -> list[int]:
    """Ids of all tokens that end a text or a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {int(file.metadata[f"tokenizer.ggml.{key}"]) for key in keys if f"tokenizer.ggml.{key}" in file.metadata}
    if "tokenizer.ggml.tokens" in file.metadata:
        names, kinds = _tokens(file)
        ids_by_name = {name: token_id for token_id, name in enumerate(names)}
        # control tokens that llama.cpp takes for ends in any vocabulary that has them
        ends = (
            "<|eot_id|>",
            "<|im_end|>",
            "<|end|>",
            "<end_of_turn>",
            "<|endoftext|>",
            "<|eom_id|>",
            "<|end_of_text|>",
        )
        ids |= {ids_by_name[name] for name in ends if name in ids_by_name and kinds[ids_by_name[name]] == Token.CONTROL}
    return sorted(ids)


def _tokens(file: GgufFile) -> tuple[Sequence[str], Sequence[int]]:
    names: Sequence[str] | None = file.metadata.get("tokenizer.ggml.tokens")
    if names is None:
        raise GgufError(f"{file.path} lacks tokenizer.ggml.tokens: convert the model again, or pass tokenizer=FOLDER")
    kinds: Sequence[int] = file.metadata.get("tokenizer.ggml.token_type") or [Token.NORMAL] * len(names)
    if len(kinds) != len(names):
        raise GgufError(f"{file.path} has {len(names)} tokens and {len(kinds)} token types: convert the model again")
    return names, kinds


def _token_name(file: GgufFile, key: str, names: Sequence[str]) -> str | None:
    """The name of a special token; ``None`` if the file has none."""
    token_id = file.metadata.get(f"tokenizer.ggml.{key}")
    return names[token_id] if isinstance(token_id, int) and 0 <= token_id < len(names) else None


def _bytes(file: GgufFile, names: Sequence[str], kinds: Sequence[int]) -> tuple[Any, bool]:
    """Byte-level BPE, and whether it adds the BOS token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE:
        raise UncoveredError(
            f"{file.path} has the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not supported here"
        )
    merges = file.metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise GgufError(f"{file.path} lacks tokenizer.ggml.merges: convert the model again, or pass tokenizer=FOLDER")
    rules = PRE[name]
    vocabulary = {token: token_id for token_id, token in enumerate(names) if kinds[token_id] != Token.UNUSED}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    backend = Tokenizer(models.BPE(vocabulary, _usable_merges(pairs, vocabulary), ignore_merges=rules.whole))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, rules.bos


def _pieces(file: GgufFile, names: Sequence[str], kinds: Sequence[int]) -> tuple[Any, bool]:
    """SentencePiece's BPE: spaces are letters, with a fallback to byte tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(names):
        raise GgufError(f"{file.path} lacks tokenizer.ggml.scores of its {len(names)} tokens: convert the model again")
    vocabulary = {token: token_id for token_id, token in enumerate(names) if kinds[token_id] != Token.UNUSED}
    mergeable = {token: scores[token_id] for token, token_id in vocabulary.items() if kinds[token_id] == Token.NORMAL}
    unknown = _token_name(file, "unknown_token_id", names) or next(
        (token for token, token_id in vocabulary.items() if kinds[token_id] == Token.UNKNOWN), None
    )
    model = models.BPE(vocabulary, _merges_of(mergeable), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    before = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*after, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend, True


def _merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens that concatenate to a third, by descending score of the third.

    SentencePiece always merges the pair whose result scores highest; a merge list in that order is equivalent.
    """
    merges = []
    for token, score in scores.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in scores and right in scores:
                merges.append((-score, left, right))
    merges.sort(key=lambda entry: entry[0])
    return [(left, right) for _, left, right in merges]


def _usable_merges(pairs: Sequence[tuple[str, ...]], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges whose parts and result are tokens; others never apply."""
    return [
        (pair[0], pair[1])
        for pair in pairs
        if len(pair) == 2 and pair[0] in vocabulary and pair[1] in vocabulary and pair[0] + pair[1] in vocabulary
    ]


def _add_special(backend: Any, file: GgufFile, names: Sequence[str], kinds: Sequence[int]) -> None:
    """Add the tokens that are matched in a text before it is split."""
    from tokenizers import AddedToken

    strips = _takes_spaces(file)
    special, ordinary = [], []
    for name, kind in zip(names, kinds, strict=True):
        rstrip = strips and name not in ("<unk>", "<s>", "<|endoftext|>")  # these tokens of Phi-3 take no spaces
        if kind in (Token.CONTROL, Token.UNKNOWN):
            special.append(AddedToken(name, normalized=False, special=True, rstrip=rstrip))
        elif kind == Token.USER:
            ordinary.append(AddedToken(name, normalized=False, special=False, rstrip=rstrip))
    backend.add_special_tokens(special)
    backend.add_tokens(ordinary)


def _takes_spaces(file: GgufFile) -> bool:
    """Whether special tokens absorb following spaces, as in Phi-3, which only the model's name in the header shows."""
    name = str(file.metadata.get("general.name", "")).lower()
    phi = file.architecture == "phi3" and file.metadata.get("tokenizer.ggml.model") == "llama"
    return phi or "phi-3" in name or "phi3" in name


def _add_ends(
    backend: Any, file: GgufFile, names: Sequence[str], special: Mapping[str, str | None], adds_bos: bool
) -> None:
    """Configure the tokens that are added to the start and end of a text."""
    from tokenizers import processors

    enabled = {
        "bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "eos_token": bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    used = {name: special[name] for name, on in enabled.items() if on and special[name] is not None}
    before, after = used.get("bos_token"), used.get("eos_token")
    if not used:
        return
    parts = [f"{before}:0"] if before else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*parts, "$A:0", *([f"{after}:0"] if after else [])],
        pair=[*parts, "$A:0", *([f"{before}:1"] if before else []), "$B:1", *([f"{after}:1"] if after else [])],
        special_tokens=[(str(token), names.index(str(token))) for token in used.values()],
    )
