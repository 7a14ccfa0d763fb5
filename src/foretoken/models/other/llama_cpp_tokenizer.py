"""The tokenizer inside a GGUF file, with the part of Transformers' tokenizer interface that this library uses."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from foretoken.models.other.llama_cpp import GgufError, Weights


class LlamaCppTokenizer:
    """llama.cpp's tokenizer with the vocabulary of a GGUF file, given as a path or opened.

    Attributes:
        chat_template: the file's Jinja template; ``None`` if it has none.
        eos_token_id, bos_token_id, eos_token, bos_token: ids and names; ``None`` if the file has none.

    Raises:
        GgufError: the file cannot be opened, or has no vocabulary.
    """

    def __init__(self, source: str | Path | Weights) -> None:
        weights = source if isinstance(source, Weights) else Weights(source, vocab_only=True)
        self._weights, self._c, self._vocab = weights, weights.library.c, weights.vocab
        if not has_vocabulary(weights):
            raise GgufError(f"{weights.path} holds no vocabulary: pass tokenizer=... or give token ids")
        self.size = int(self._c.llama_vocab_n_tokens(self._vocab))
        self.eos_token_id = self._special(self._c.llama_vocab_eos)
        self.bos_token_id = self._special(self._c.llama_vocab_bos)
        self.chat_template = weights.metadata("tokenizer.chat_template")
        self.eos_token = None if self.eos_token_id is None else self._name(self.eos_token_id)
        self.bos_token = None if self.bos_token_id is None else self._name(self.bos_token_id)
        self._pieces: dict[tuple[int, bool], bytes] = {}

    def __len__(self) -> int:
        return self.size

    def _special(self, ask: Any) -> int | None:
        token = int(ask(self._vocab))
        return token if token >= 0 else None

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Any:
        """``{"input_ids": ...}`` of one text or several."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(item, add_special_tokens) for item in text]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; names of special tokens in it become these tokens, as in Transformers."""
        data = text.encode()
        room = len(data) + 8
        while True:
            ids = (ctypes.c_int32 * room)()
            count = self._c.llama_tokenize(self._vocab, data, len(data), ids, room, add_special_tokens, True)
            if count >= 0:
                return list(ids[:count])
            room = -count

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; incomplete characters become U+FFFD."""
        tokens = [ids] if isinstance(ids, int) else ids
        data = b"".join(self._piece(int(token), skip_special_tokens) for token in tokens)
        return (data.removeprefix(b" ") if self._adds_space else data).decode("utf-8", errors="replace")

    def spelling(self, token: int) -> bytes:
        """Bytes that a token adds to a text; a special token's own name."""
        return self._piece(token, False)

    def _piece(self, token: int, skip_special: bool) -> bytes:
        piece = self._pieces.get((token, skip_special))
        if piece is None:
            buffer = ctypes.create_string_buffer(64)
            size = self._c.llama_token_to_piece(self._vocab, token, buffer, 64, 0, not skip_special)
            if size < 0:
                buffer = ctypes.create_string_buffer(-size)
                size = self._c.llama_token_to_piece(self._vocab, token, buffer, -size, 0, not skip_special)
            piece = self._pieces[token, skip_special] = buffer.raw[:size]
        return piece

    @cached_property
    def _adds_space(self) -> bool:
        """Whether encoding adds a space before a text, which decoding removes."""
        if self._c.llama_vocab_type(self._vocab) != 1:  # LLAMA_VOCAB_TYPE_SPM
            return False
        return self._weights.metadata("tokenizer.ggml.add_space_prefix") != "false"

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of control tokens."""
        return [token for token in range(self.size) if self._c.llama_vocab_is_control(self._vocab, token)]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Name of an id in the file, or names of several."""
        return self._name(ids) if isinstance(ids, int) else [self._name(token) for token in ids]

    def get_vocab(self) -> dict[str, int]:
        """Id of every token by its name in the file, without padding rows."""
        names = (
            (self._c.llama_vocab_get_text(self._vocab, token).decode(errors="replace"), token)
            for token in range(self.size)
            if not self._c.llama_vocab_get_attr(self._vocab, token) & 2  # LLAMA_TOKEN_ATTR_UNUSED
        )
        return dict(names)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **values: Any,
    ) -> Any:
        """A conversation rendered by the file's template: text, ids, or ``{"input_ids": ids}``."""
        if not self.chat_template:
            raise ValueError(f"{self._weights.path} has no chat template: give a prompt instead of messages")
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        values = {"bos_token": self._name(self.bos_token_id), "eos_token": self._name(self.eos_token_id), **values}
        messages: Any = [dict(message) for message in conversation]
        try:
            rendered: Any = render_jinja_template(
                [messages], chat_template=self.chat_template, add_generation_prompt=add_generation_prompt, **values
            )
        except TemplateError as error:
            raise ValueError(f"the chat template of {self._weights.path} rejects the messages: {error}") from None
        text: str = rendered[0][0]
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)  # templates write the BOS token themselves
        return {"input_ids": ids} if return_dict else ids

    def _name(self, token: int | None) -> str:
        return "" if token is None else str(self._c.llama_vocab_get_text(self._vocab, token).decode(errors="replace"))


def has_vocabulary(weights: Weights) -> bool:
    """Whether a file contains a vocabulary (not ``LLAMA_VOCAB_TYPE_NONE``)."""
    return bool(weights.library.c.llama_vocab_type(weights.vocab) != 0)
