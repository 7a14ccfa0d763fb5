"""Texts of single tokens: with SentencePiece a leading space belongs to the token."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foretoken.engine.logprobs import TokenLogprobs
from foretoken.server.logprobs import TokenTexts, chat_logprobs

IDS = {"\u2581the": 0, "the": 1, "<0xE2>": 2, "</s>": 3, "\u2581": 4}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The decoder of Llama 2."""
    backend = Tokenizer(models.BPE(IDS, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def test_a_token_keeps_its_leading_space(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = TokenTexts(tokenizer)
    assert [texts(token) for token in range(5)] == [" the", "the", "bytes:\\xe2", "</s>", " "]
    assert [texts.shown(token) for token in range(5)] == [" the", "the", "\ufffd", "</s>", " "]
    assert TokenTexts(None).shown(7) == "7" and TokenTexts(None)(7) == "token_id:7"


def test_tokens_that_differ_by_a_space_have_names_of_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    texts, row = TokenTexts(tokenizer), TokenLogprobs(1, -0.5, 1, ((1, -0.5), (0, -1.0)))
    assert texts.top(row, 2) == {"the": -0.5, " the": -1.0}
    for entry in chat_logprobs([row], texts, 2)["content"][0]["top_logprobs"]:
        assert bytes(entry["bytes"]).decode() == entry["token"]
