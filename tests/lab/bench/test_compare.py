"""Plain and speculative decoding of one prompt: no run profits from another."""

from __future__ import annotations

import pytest

import foretoken as ft
from foretoken.lab.bench.compare import compare
from foretoken.models.huggingface import HuggingFaceModel
from toys import llama

PROMPT = [(place * 7) % 31 for place in range(80)]


@pytest.mark.parametrize("name", ["suffix", "ngram_cache", "recycling,share=true"])
def test_no_run_copies_the_answer_of_an_earlier_one(name: str) -> None:
    """A drafter that remembers answers drafted all of the second run's from the first one's."""
    target = HuggingFaceModel(llama(context=256))
    llm = ft.load(target, f"{name}", controller="constant")
    first = llm.generate(PROMPT, max_new_tokens=24, temperature=0.0, ignore_eos=True)
    result = compare(llm, PROMPT, {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}, repeat=3)
    assert result.identical
    assert result.speculative.output.stats.num_drafts == first.stats.num_drafts
    # Both arms read the whole prompt: only the speculative one has a prefix cache.
    for runs in (result.plain, result.speculative):
        assert runs.output.stats.num_prompt_tokens_computed == len(PROMPT)
