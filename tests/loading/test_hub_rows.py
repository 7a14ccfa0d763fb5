"""A batch of ``model.generate``'s hook: what was made for all rows, or would treat rows differently."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.logits_process import EncoderRepetitionPenaltyLogitsProcessor

import foretoken as ft
from test_hub import MASK, ONE, THREE, both, llama


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def ours(model: Any, ids: torch.Tensor = THREE, **options: Any) -> Any:
    how = {"custom_generate": ft.custom_generate, "drafter": "ngram", "max_new_tokens": 8, "do_sample": False}
    return model.generate(ids, **{**how, **options})


class Bias(LogitsProcessor):
    """A rule of its own for each of three rows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.eye(3, scores.shape[1])


class Nothing(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return None


class Narrow(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :5]


class Done(StoppingCriteria):
    """Remembers which of three rows have ended."""

    def __init__(self) -> None:
        self.done = torch.zeros(3, dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.done |= input_ids[:, -1] == 3
        return self.done


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (Bias(), "Bias returned 3 rows for one: it is called one row at a time; use a batch of one"),
        (Nothing(), r"Nothing returned NoneType for scores of shape \[1, 24\]: it is called one row at a time"),
        (Narrow(), r"Narrow returned scores of shape \[1, 5\] for \[1, 24\]: it is called one row at a time"),
    ],
    ids=["rows", "nothing", "narrow"],
)
@pytest.mark.parametrize("mask", [None, MASK], ids=["full", "padded"])
def test_scores_of_another_shape_are_refused_by_the_processors_name(
    model: Any, processor: Any, words: str, mask: Any
) -> None:
    with pytest.raises(ValueError, match=words):
        ours(model, attention_mask=mask, logits_processor=[processor])


def test_a_criterion_that_answers_for_several_rows_is_refused(model: Any) -> None:
    with pytest.raises(
        ValueError, match="Done returned 3 rows for one: it is called one row at a time; use a batch of one"
    ):
        ours(model, stopping_criteria=[Done()])


@pytest.mark.parametrize("answer", [True, torch.tensor(True), torch.tensor([True]), [True]], ids=str)
def test_one_answer_has_many_forms(model: Any, answer: Any) -> None:
    def stop(input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return answer

    assert ours(model, ONE, stopping_criteria=[stop]).shape == (1, 6)


def test_a_callers_processor_of_a_batch_is_told_that_rows_come_one_by_one(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Banned(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            for i, _ in enumerate(input_ids):
                scores[i, [18, 10, 22][i]] = -torch.inf
            return scores

    with caplog.at_level(logging.WARNING, "foretoken"):
        ours(model, ONE, logits_processor=[Banned()])
        ours(model, temperature=None, repetition_penalty=1.2, no_repeat_ngram_size=2)
        assert not caplog.records, "one row, and Transformers' own processors"
        for _ in range(2):
            ours(model, logits_processor=[Banned()])
    (line,) = [record.getMessage() for record in caplog.records]
    assert "Banned is called one row at a time, with ids [1, n]: use a batch of one" in line


def test_prefix_constraints_get_the_prompts_index_for_every_sample(model: Any) -> None:
    prompts = set()

    def allowed(prompt: int, sent: torch.Tensor) -> list[int]:
        prompts.add(prompt)
        return [5 + prompt]

    options: dict[str, Any] = {"num_return_sequences": 2, "do_sample": True, "prefix_allowed_tokens_fn": allowed}
    plain, output = both(model, THREE, attention_mask=MASK, max_new_tokens=4, **options)
    assert torch.equal(plain, output) and prompts == {0, 1, 2}


@pytest.mark.parametrize("name", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
@pytest.mark.parametrize("samples", [1, 2])
def test_processors_of_the_prompts_see_their_own(model: Any, name: str, samples: int) -> None:
    value = 1.8 if name == "encoder_repetition_penalty" else 2
    options: dict[str, Any] = {name: value, "num_return_sequences": samples}
    if samples > 1:  # the likeliest token of each step, drawn
        options |= {"do_sample": True, "top_k": 1}
    plain, output = both(model, THREE, attention_mask=MASK, **options)
    assert torch.equal(plain, output) and not torch.equal(plain[0], plain[-1])


def test_a_processor_of_one_prompt_serves_every_row(model: Any) -> None:
    penalty = EncoderRepetitionPenaltyLogitsProcessor(1.8, torch.arange(3, 9)[None])
    plain, output = both(model, THREE, attention_mask=MASK, logits_processor=[penalty])
    assert torch.equal(plain, output)
