"""Log-probabilities of outputs: those of the model itself, whatever drafts and whatever else runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretoken.core.sampling import SamplingParams
from foretoken.engine.logprobs import TokenLogprobs, logprobs_of
from foretoken.engine.request import Request, Running
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.models.base import Feed
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llamas, serve

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
DRAFTERS: dict[str, Callable[[HuggingFaceModel], Drafter | None]] = {
    "none": lambda draft: None,
    "ngram": lambda draft: NgramDrafter(n=2, k=3),
    "tree": lambda draft: ModelDrafter(draft, tree="2x2x1"),
    "recycling": lambda draft: RecyclingDrafter(nodes=12),
}


def forward(tokens: list[int]) -> torch.Tensor:
    """[n, V] log-probabilities after every token, by one forward."""
    target, _ = llamas()
    return torch.log_softmax(target.forward([Feed(target.open(), tokens)])[0].logits, -1)


def check(run: Running, count: int) -> None:
    """One entry per output token, with the model's own probabilities."""
    tokens, start = run.context.tokens, run.context.prompt_length
    expected = forward(tokens)[start - 1 : -1]
    assert [entry.token_id for entry in run.logprobs] == run.output
    for row, entry in zip(expected, run.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-11)
        best = row.topk(count) if count else None
        assert [token for token, _ in entry.top] == (best.indices.tolist() if best else [])
        for (_, value), right in zip(entry.top, best.values.tolist() if best else [], strict=True):
            assert value == pytest.approx(right, abs=1e-11)
        assert all(value == entry.logprob for token, value in entry.top if token == entry.token_id), (
            "not the same number"
        )
        assert list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1])


@pytest.mark.parametrize("name", list(DRAFTERS))
@pytest.mark.parametrize("count", [0, 1, 5, 32, 99])
def test_every_output_token_has_its_own(name: str, count: int) -> None:
    target, draft = llamas()
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.5, top_k=3)]
    requests = [Request(PROMPT[i:], sampling, 20, seed=i, logprobs=count) for i, sampling in enumerate(params)]
    for run in serve(engine(target, DRAFTERS[name](draft)), requests):
        check(run, min(count, 32))


def test_they_are_the_models_own_and_not_those_of_the_sampling() -> None:
    """Temperature, filters, penalties and biases do not show, as in OpenAI's interface."""
    target, _ = llamas()
    odd = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=1.5, logit_bias={3: 5.0})
    (run,) = serve(engine(target), [Request(PROMPT, odd, 12, seed=1, logprobs=3)])
    check(run, 3)


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_asking_for_them_does_not_change_the_text(name: str) -> None:
    texts = []
    for count in (None, 0, 4):
        target, draft = llamas()
        requests = [
            Request(PROMPT, SamplingParams(temperature=1.0), 25, seed=seed, logprobs=count) for seed in range(3)
        ]
        texts.append([run.output for run in serve(engine(target, DRAFTERS[name](draft)), requests)])
    assert texts[0] == texts[1] == texts[2]


def test_emissions_bring_theirs_and_who_did_not_ask_gets_none() -> None:
    target, draft = llamas()
    runner = engine(target, ModelDrafter(draft))
    asking, other = (
        runner.add(Request(PROMPT, max_new_tokens=15, logprobs=1)),
        runner.add(Request(PROMPT, max_new_tokens=15)),
    )
    gained: list[TokenLogprobs] = []
    while runner.busy:
        for run, emission in runner.step():
            assert len(emission.logprobs) == (len(emission.token_ids) if run.id == asking else 0)
            gained += emission.logprobs
            if run.id == asking and emission.finish_reason is not None:
                assert gained == run.logprobs
            assert run.id == asking or run.logprobs == []
    assert other != asking


def test_a_text_that_is_cut_short_has_as_many_as_tokens() -> None:
    target, draft = llamas()
    plain = serve(engine(target), [Request(PROMPT, max_new_tokens=30)])[0].output
    stop = plain[7]
    runner = engine(target, ModelDrafter(draft, k=6))
    (run,) = serve(runner, [Request(PROMPT, max_new_tokens=30, stop_token_ids=frozenset({stop}), logprobs=2)])
    assert run.output == plain[: plain.index(stop) + 1]
    check(run, 2)


def test_sixteen_bits_are_widened_first() -> None:
    logits = torch.tensor([[8.0, 7.0, -9.0]], dtype=torch.bfloat16)
    (entry,) = logprobs_of(logits, [1], 3)
    expected = torch.log_softmax(logits.float(), -1)[0]
    assert entry.logprob == float(expected[1]) and entry.top == tuple(enumerate(expected.tolist()))
    assert logprobs_of(logits, [], 3) == []


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_negative_counts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 0, not -1"):
        engine(llamas()[0]).add(Request(PROMPT, **{name: -1}))  # type: ignore[arg-type]
