"""Kinds of prompts: what is unambiguous is taken, everything else is refused in one line."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tokenizer import chat_tokenizer
from transformers import BatchEncoding

from core.test_conversation import llm
from foretoken.core.prompts import encode

IDS = [5, 6, 7]
ROWS = [[5, 6, 7], [8, 9, 5]]
MASKED = {"input_ids": [[0, 0, 5, 6], [5, 6, 7, 8]], "attention_mask": [[0, 0, 1, 1], [1, 1, 1, 1]]}


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(IDS),
        range(5, 8),
        array("i", IDS),
        list(np.array(IDS)),
        np.array(IDS),
        np.array([IDS], dtype=np.int32),
        torch.tensor(IDS),
        torch.tensor([IDS]),
        {"input_ids": IDS},
        {"input_ids": [IDS], "attention_mask": [[1, 1, 1]]},
        BatchEncoding({"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}),
        {"input_ids": [0, *IDS], "attention_mask": [0, 1, 1, 1]},
    ],
    ids=repr,
)
def test_one_prompt(prompt: Any) -> None:
    model = llm(chat_tokenizer())
    ids = model.encode(prompt)
    assert ids == IDS and all(type(token) is int for token in ids)
    assert model.generate(prompt, max_new_tokens=4).token_ids == model.generate(IDS, max_new_tokens=4).token_ids


@pytest.mark.parametrize(
    ("prompts", "rows"),
    [
        (ROWS, ROWS),
        (torch.tensor(ROWS), ROWS),
        (np.array(ROWS), ROWS),
        ([torch.tensor(row) for row in ROWS], ROWS),
        ([{"input_ids": row} for row in ROWS], ROWS),
        ({"input_ids": [IDS, [5]]}, [IDS, [5]]),
        (BatchEncoding(MASKED), [[5, 6], [5, 6, 7, 8]]),
        ({name: torch.tensor(rows) for name, rows in MASKED.items()}, [[5, 6], [5, 6, 7, 8]]),
    ],
    ids=str,
)
def test_several_prompts(prompts: Any, rows: list[list[int]]) -> None:
    model = llm(chat_tokenizer())
    expected = [model.generate(row, max_new_tokens=4).token_ids for row in rows]
    assert [out.token_ids for out in model.generate(prompts, max_new_tokens=4)] == expected
    with pytest.raises(ValueError, match="expected one prompt, not a list of 2"):
        model.encode(prompts)


def test_a_tokenizers_output_is_the_text_that_went_in() -> None:
    model, text = llm(chat_tokenizer()), "The cat sat"
    assert model.encode(model.tokenizer(text)) == model.encode(text)
    texts = np.array([text, "The dog"])
    assert [out.token_ids for out in model.generate(texts, max_new_tokens=4)] == [
        model.generate(str(t), max_new_tokens=4).token_ids for t in texts
    ]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1.0, 2.0], "whole numbers.*not 1.0"),
        ([True, 2], "whole numbers.*not True"),
        ([1, "a"], "whole numbers.*not 'a'"),
        ([1, None], "whole numbers.*not None"),
        (torch.tensor([1.5]), "whole numbers.*not 1.5"),
        (torch.tensor([True]), "whole numbers.*not True"),
        (np.array(3), "a single number"),
        (torch.zeros(1, 1, 2, dtype=torch.long), "at most two dimensions"),
        (None, "not None"),
        (5, "not 5"),
        (b"text", "type bytes"),
        ({1, 2}, "type set"),
        pytest.param(iter([1, 2]), "type list_iterator", id="iterator"),
        ({"role": "user", "content": "x"}, "put the message into a list"),
        ({"ids": [1]}, "a mapping needs input_ids"),
        ({"input_ids": "text"}, "cannot be 'text'"),
        ({"input_ids": [1, [2]]}, "mixes numbers and lists"),
        ({"input_ids": ROWS, "attention_mask": [[1, 1, 0], [1, 1, 1]]}, "pad at the left"),
        ({"input_ids": IDS, "attention_mask": [1, 0, 1]}, "pad at the left"),
        ({"input_ids": IDS, "attention_mask": [1, 1]}, "different shapes"),
        ("half \ud800", "half a surrogate pair"),
        ([["a"], ["b"]], "expected one prompt"),
        ([[[1, 2]]], "expected one prompt"),
        ([[]], "prompt is empty"),
        (np.zeros(0, dtype=int), "prompt is empty"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "prompt is empty"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused_in_one_line(prompt: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        llm(chat_tokenizer()).generate(prompt, max_new_tokens=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_that_may_be_filled_up_need_their_mask(side: str) -> None:
    tokens = chat_tokenizer()
    filled = tokens(["The cat sat", "The"], padding=True, padding_side=side, return_tensors="pt")
    assert (filled["attention_mask"] == 0).any()
    with pytest.raises(ValueError, match="with attention_mask"):
        llm(tokens).generate(filled["input_ids"], max_new_tokens=2)


def test_no_prompts_and_no_prompt() -> None:
    assert llm(None).generate([]) == []
    with pytest.raises(ValueError, match="prompt is empty"):
        encode([], None)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([IDS, [], IDS], "prompt 2 of 3: the prompt is empty"),
        (["The cat", None], "prompt 2 of 2: a prompt is text"),
        ([[], IDS], "prompt 1 of 2: the prompt is empty"),
        ([IDS, [10**6]], "prompt 2 of 2: prompt token 1000000 is outside the vocabulary"),
    ],
    ids=repr,
)
def test_of_several_prompts_the_wrong_one_is_named(prompts: Any, words: str) -> None:
    model = llm(chat_tokenizer())
    with pytest.raises(ValueError, match=words):
        model.generate(prompts, max_new_tokens=2)
    assert not model.engine.busy


def test_an_option_is_not_blamed_on_a_prompt() -> None:
    with pytest.raises(ValueError, match=r"^max_new_tokens must be at least 1"):
        llm(None).generate(ROWS, max_new_tokens=0)
