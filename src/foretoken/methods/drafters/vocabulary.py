"""Byte spellings of a tokenizer's tokens, for draft models whose tokenizer is not the target's.

Everything is compared as bytes.  A byte-level token ``Ġname``, a sentencepiece token ``▁name`` and a plain `` name``
all spell ``b" name"``; half a character is a token like any other; and the spellings of a text's tokens add up to the
text, so that positions in two tokenizations of one text can be compared by counting bytes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

ROLES = ("eos", "bos")
"""Special tokens with the same meaning in every tokenizer, whatever their names."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass
class ReadText:
    """One request's tokens in the ids of a draft model with another tokenizer.

    Attributes:
        count: number of the request's tokens that it covers.
        characters: holds back an incomplete character, which is not in ``ids`` yet.
    """

    ids: list[int] = field(default_factory=list)
    count: int = 0
    characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("ignore")
    )


class Vocabulary:
    """The spellings of a tokenizer's tokens.

    Args:
        spellings: per id the bytes that the token adds to a text; a special token spells its own name, and an unused id
            nothing.
        roles: id of the special token of each role (``"eos"``, ``"bos"``) that the tokenizer has.
        encode: text to ids without special tokens around it; by default the longest tokens from left to right.
        prefix: ids that the tokenizer puts before every text.
    """

    def __init__(
        self,
        spellings: Sequence[bytes],
        *,
        special: Sequence[int] = (),
        roles: Mapping[str, int] | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
        prefix: Sequence[int] = (),
    ) -> None:
        self.spellings = list(spellings)
        self.special = frozenset(special)
        self.roles = dict(roles or {})
        self.prefix = tuple(prefix)
        self._encode = encode

    @classmethod
    def of(cls, tokenizer: Any, size: int) -> Vocabulary:
        """The vocabulary of a Transformers or GGUF tokenizer, without ids from ``size`` on, which the model lacks.

        Raises:
            ValueError: the tokenizer marks the ends of words, so that a text does not begin with its tokens' bytes.
        """
        if suffix := _decoders(tokenizer).get("BPEDecoder", {}).get("suffix"):
            raise ValueError(
                f"this tokenizer marks the ends of words ({suffix}), so that no text can be continued byte by byte: "
                "drafts cannot be translated from it or for it; use a draft model with the target's own tokenizer"
            )
        spelling = getattr(tokenizer, "spelling", None)  # a GGUF tokenizer knows the bytes itself
        spell, added = _speller(tokenizer), {} if spelling else tokenizer.added_tokens_decoder
        spellings = [b""] * size
        for name, index in tokenizer.get_vocab().items():
            if index < size:
                spellings[index] = spelling(index) if spelling else name.encode() if index in added else spell(name)
        special = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        special = {index for index in special if index < size}
        roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}

        encode = _encoder(tokenizer)
        whole, bare = tokenizer.encode("a"), encode("a")
        return cls(
            spellings,
            special=sorted(special),
            roles={role: index for role, index in roles.items() if index is not None and index < size},
            encode=encode,
            prefix=[index for index in takewhile(lambda index: index not in bare, whole) if index < size],
        )

    def __len__(self) -> int:
        return len(self.spellings)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens around it."""
        if self._encode is None:
            return self.longest_pieces(text.encode())
        return [index for index in self._encode(text) if index < len(self.spellings)]

    def encode_text(self, text: str) -> list[int]:
        """Ids of a whole text after the tokenizer's prefix, which is not repeated if the text contains it."""
        ids, prefix = self.encode(text), list(self.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def spell(self, text: str) -> list[int]:
        """Ids that spell exactly ``text``, as far as the vocabulary can: the end of a text, not its beginning.

        These are the tokenizer's own ids if they match.  Otherwise (it may add a space, or change or drop characters)
        they are the longest tokens from left to right.  Bytes that no token spells are left out.
        """
        ids, expected = self.encode(text), text.encode()
        return ids if self.bytes_of(ids) == expected else self.longest_pieces(expected)

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        return spelled(self.spellings, ids)

    def longest_pieces(self, text: bytes) -> list[int]:
        """Greedy spelling with ordinary tokens."""
        ids, start = [], 0
        while start < len(text):
            sizes = range(min(self._longest, len(text) - start), 0, -1)
            size = next((n for n in sizes if text[start : start + n] in self.first), 0)
            if size:
                ids.append(self.first[text[start : start + size]])
            start += size or 1
        return ids

    @cached_property
    def first(self) -> dict[bytes, int]:
        """The first ordinary token of every spelling."""
        first_ids: dict[bytes, int] = {}
        for index, spelling in enumerate(self.spellings):
            if spelling and index not in self.special:
                first_ids.setdefault(spelling, index)
        return first_ids

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.first), default=0)


def common_tokens(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Target id -> draft id of every token in both vocabularies, each id at most once.

    Ordinary tokens are the same if they spell the same bytes (the first id wins if several do), special tokens if they
    have the same role, else the same name.
    """
    pairs = {t: draft.first[spelling] for spelling, t in target.first.items() if spelling in draft.first}
    used_ids: set[int] = set()
    by_role = [
        (target.roles[role], draft.roles[role]) for role in ROLES if role in target.roles and role in draft.roles
    ]
    names = {draft.spellings[d]: d for d in sorted(draft.special, reverse=True) if d not in draft.roles.values()}
    by_name = [
        (t, names[target.spellings[t]])
        for t in sorted(target.special)
        if t not in target.roles.values() and target.spellings[t] in names
    ]
    for t, d in (*by_role, *by_name):
        if t not in pairs and d not in used_ids:
            pairs[t] = d
            used_ids.add(d)
    return pairs


def spelled(spellings: Sequence[bytes], ids: Sequence[int]) -> bytes:
    """Bytes that ids spell; ids beyond the vocabulary (padding of the model's logits) spell nothing."""
    return b"".join(spellings[index] for index in ids if index < len(spellings))


def common_border(vocabulary: Vocabulary, old: Sequence[int], new: Sequence[int], added: int) -> tuple[int, int]:
    """Indices at which two tokenizations can be joined: ``old`` of a text, ``new`` of the same text and ``added`` bytes
    more.

    Returns ``(i, j)``: ``old[:i]`` and ``new[:j]`` end at the same byte with the same token, and nothing later does.
    Bytes are counted from the end, so that a space which a tokenizer puts before a text does not matter, nor does
    repeated text, in which the longest run of equal tokens could be at a wrong index.  Without such a border, the
    beginning of ``old`` if ``new`` has a border there; else the ends of both.
    """
    i, j = len(old), len(new)
    lead = added  # bytes after new[:j] minus bytes after old[:i]
    while True:
        if lead > 0 and j:
            j -= 1
            lead -= len(vocabulary.spellings[new[j]])
        elif lead == 0 and (not i or (j and old[i - 1] == new[j - 1])):
            return i, j
        elif lead <= 0 and i:
            i -= 1
            lead += len(vocabulary.spellings[old[i]])
        else:
            return len(old), len(new)


def translated_spellings(source: Vocabulary, other: Vocabulary) -> list[bytes]:
    """The spellings of ``source``, with special tokens named like those of the same role in ``other``.

    A role that ``other`` lacks spells nothing.
    """
    spellings = list(source.spellings)
    for role in reversed(ROLES):  # where one token has both roles, the first one counts
        if role in source.roles:
            theirs = other.roles.get(role)
            spellings[source.roles[role]] = b"" if theirs is None else other.spellings[theirs]
    return spellings


def whole_characters(text: bytes) -> bytes:
    """The longest beginning that is valid UTF-8, without an incomplete character at the end."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def speller(tokenizer: Any) -> Callable[[int], bytes]:
    """A function from an id to the bytes that its token adds to a text; a special token spells its own name."""
    spelling: Callable[[int], bytes] | None = getattr(tokenizer, "spelling", None)
    if spelling is not None:
        return spelling
    spell, added = _speller(tokenizer), tokenizer.added_tokens_decoder

    def spelled_by(token: int) -> bytes:
        name = str(tokenizer.convert_ids_to_tokens(token) or "")
        return name.encode() if token in added else spell(name)

    return spelled_by


def _encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """A function from a text to ids, without special tokens around it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def encode(text: str) -> Sequence[int]:
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return tokenizer.encode(text, add_special_tokens=False)
        # The same ids without a batch of one and its pool of threads, which costs more than the work.
        return backend.encode(text, add_special_tokens=False).ids

    return encode


def _speller(tokenizer: Any) -> Callable[[str], bytes]:
    """A function from a token's string in the vocabulary to the bytes that it spells."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    kinds = _decoders(tokenizer)
    if "ByteLevel" in kinds:
        return _byte_level
    if "WordPiece" in kinds:  # words, joined with spaces, and parts of words (``##ing``); what follows a word is asked
        return lambda name: backend.decoder.decode(["x", name])[1:].encode()
    if "BPEDecoder" in kinds:  # the end of a word (``</w>``) is a space, but at the end of the text
        return lambda name: backend.decoder.decode([name, "x"])[:-1].encode()
    if backend is not None and backend.decoder is None:
        return lambda name: b" " + name.encode()  # such tokens are words, joined with spaces
    return _sentencepiece


def _decoders(tokenizer: Any) -> dict[str, Any]:
    """The steps of a fast tokenizer's decoder by type; empty for other tokenizers and without a decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = None if decoder is None else json.loads(decoder.__getstate__())
    found: dict[str, Any] = {}
    waiting = [] if state is None else [state]
    while waiting:
        step = waiting.pop()
        found[step["type"]] = step
        waiting += step.get("decoders", ())
    return found


def _sentencepiece(name: str) -> bytes:
    """``▁`` is a space, ``<0x0A>`` a byte."""
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()


def _byte_level(name: str) -> bytes:
    """Each character represents a byte."""
    try:
        return bytes(_BYTE_OF_SIGN[sign] for sign in name)
    except KeyError:
        return name.encode()


def _byte_signs() -> dict[str, int]:
    """Characters of byte-level tokenizers: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    themselves = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(b): b for b in themselves} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_SIGN = _byte_signs()
