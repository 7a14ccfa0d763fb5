"""One beginning-of-text token before a text, whether the text or the tokenizer brings it."""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from foretoken.core.bos import ids_with_one_bos
from foretoken.llm import Llm
from toys import tables

BOS, HI, YOU = 0, 2, 3


@cache
def tokenizer(adds: bool) -> PreTrainedTokenizerFast:
    """Words, with ``<s>`` put before every text or not."""
    words = Tokenizer(models.WordLevel({"<s>": BOS, "?": 1, "hi": HI, "you": YOU}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="?")


@pytest.mark.parametrize(
    ("adds", "text", "special", "expected"),
    [
        (True, "hi you", True, [BOS, HI, YOU]),
        (True, "<s>hi you", True, [BOS, HI, YOU]),
        (True, "<s> hi<s>", True, [BOS, HI, BOS]),
        (True, "<s><s>hi", True, [BOS, BOS, HI]),
        (True, "<s>hi", False, [BOS, HI]),
        (True, "<s><s>hi", False, [BOS, BOS, HI]),
        (True, "<s>", True, [BOS]),
        (False, "hi", True, [HI]),
        (False, "<s><s>hi", True, [BOS, BOS, HI]),
    ],
)
def test_ids_of_a_text(adds: bool, text: str, special: bool, expected: list[int]) -> None:
    hf_tokenizer = tokenizer(adds)
    if adds and special and text.startswith("<s>"):
        assert hf_tokenizer(text)["input_ids"] == [BOS, *expected]  # the fault that is mended
    assert ids_with_one_bos(text, hf_tokenizer, special) == expected


def test_a_prompt_of_the_library() -> None:
    target, _ = tables()
    llm = Llm(target, None, None, None, tokenizer(True))
    assert llm.encode("<s>hi you") == llm.encode("hi you") == [BOS, HI, YOU]
    assert llm.request("<s>hi you").prompt == [BOS, HI, YOU]
