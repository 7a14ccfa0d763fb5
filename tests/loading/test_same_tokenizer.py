"""A draft model that shares the target's tokenizer: names of padding ids at the end of the matrix do not count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.loading.tokenizers import check_same_tokenizer

WORDS = {"a": 0, "b": 1, "c": 2}


def tokenizer(**more: int) -> Any:
    return SimpleNamespace(get_vocab=lambda: {**WORDS, **more})


def test_padding_that_converters_name_is_no_difference() -> None:
    check_same_tokenizer(tokenizer(), tokenizer(**{"[PAD3]": 3, "[PAD4]": 4}), "draft")
    check_same_tokenizer(tokenizer(**{"[PAD3]": 3}), tokenizer(), "draft")


@pytest.mark.parametrize("other", [{"d": 3}, {"[PAD3]": 4}, {"[PAD]": 3}])
def test_other_tokens_are(other: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="the draft model draft has another tokenizer than the target"):
        check_same_tokenizer(tokenizer(), tokenizer(**other), "draft")
