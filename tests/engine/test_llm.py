"""The front door: batches, seeds, streams side by side, interrupts."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tokenizer import tokenizer

from foretoken.core import Budget, Context, TokenTree
from foretoken.llm import Llm, Piece, load
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.prediction import PredictionDrafter
from toys import llamas, tables

PROMPTS = [[0, 1, 2, 3, 0, 1], [3], [2, 2]]


def toy(drafter: Drafter | None = None) -> Llm:
    target, draft = tables()
    return Llm(target, drafter or ModelDrafter(draft), None, ConstantController(), None)


def ids(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def test_a_list_gives_a_list_and_a_prompt_an_output() -> None:
    llm = toy()
    together = llm.generate(PROMPTS, max_new_tokens=9)
    assert [out.token_ids for out in together] == [llm.generate(p, max_new_tokens=9).token_ids for p in PROMPTS]
    assert llm.generate([PROMPTS[0]], max_new_tokens=9)[0].token_ids == together[0].token_ids


def test_seeds_of_a_batch() -> None:
    llm = toy()
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}
    together = llm.generate(PROMPTS, seed=[5, 6, 7], **options)
    for prompt, seed, out in zip(PROMPTS, (5, 6, 7), together, strict=True):
        assert llm.generate(prompt, seed=seed, **options).token_ids == out.token_ids
    same = llm.generate([PROMPTS[0]] * 2, seed=3, **options)
    assert same[0].token_ids == same[1].token_ids == llm.generate(PROMPTS[0], seed=3, **options).token_ids
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        llm.generate(PROMPTS, seed=[1, 2], **options)


@pytest.mark.parametrize("seed", [torch.tensor(3), np.int64(3), np.array(3)])
def test_a_seed_may_be_a_tensor_or_an_array(seed: Any) -> None:
    llm, options = toy(), {"max_new_tokens": 12, "temperature": 1.0}
    expected = llm.generate(PROMPTS[0], seed=3, **options).token_ids
    assert llm.generate(PROMPTS[0], seed=seed, **options).token_ids == expected
    assert ids(list(llm.stream(PROMPTS[0], seed=seed, **options))) == expected
    assert llm.request(PROMPTS[0], seed=seed, **options).seed == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_side_by_side(temperature: float) -> None:
    """Every round serves all streams; none loses what another's reading brought."""
    llm = toy()
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature}
    alone = [llm.generate(p, seed=i, **options).token_ids for i, p in enumerate(PROMPTS)]
    streams = [llm.stream(p, seed=i, **options) for i, p in enumerate(PROMPTS)]
    collected = list(zip_longest(*streams))
    texts = [ids([row[i] for row in collected if row[i] is not None]) for i in range(len(PROMPTS))]
    assert texts == alone


def test_generating_while_streaming() -> None:
    llm = toy()
    expected = [llm.generate(p, max_new_tokens=n).token_ids for p, n in zip(PROMPTS, (8, 40, 8), strict=True)]
    pieces: list[Piece] = []
    for i, piece in enumerate(llm.stream(PROMPTS[0], max_new_tokens=8)):
        pieces.append(piece)
        if i == 0:
            assert llm.generate(PROMPTS[1], max_new_tokens=40).token_ids == expected[1]
            assert llm.generate(PROMPTS[2], max_new_tokens=8).token_ids == expected[2]
    assert ids(pieces) == expected[0]


def test_a_stream_that_is_left_early_is_forgotten() -> None:
    target, draft = llamas()
    llm = Llm(target, ModelDrafter(draft), None, ConstantController(), None)
    stream = llm.stream([3, 4, 5], max_new_tokens=50)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.busy and not target._sequences and not draft._sequences and not llm.calls._boxes


class Interrupting(NgramDrafter):
    """Presses Ctrl-C in the given round."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        self.at -= 1
        if self.at == 0:
            raise KeyboardInterrupt
        return super().propose(context, budget)


@pytest.mark.parametrize("at", [1, 2, 7])
def test_an_interrupted_generate_leaves_nothing_behind(at: int) -> None:
    target, _ = llamas()
    llm = Llm(target, Interrupting(at), None, ConstantController(), None)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 1, 2], [3, 3, 3]], max_new_tokens=20)
    assert not llm.engine.busy and not target._sequences and not llm.calls._boxes
    again = llm.generate([1, 2, 1, 2], max_new_tokens=20)
    assert again.token_ids == llm.plain.generate([1, 2, 1, 2], max_new_tokens=20).token_ids


def test_a_stream_outlives_an_interrupted_generate() -> None:
    llm = toy(Interrupting(4))
    expected = toy().generate(PROMPTS[0], max_new_tokens=25).token_ids
    stream = llm.stream(PROMPTS[0], max_new_tokens=25)
    pieces = [next(stream)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1], max_new_tokens=25)
    pieces.extend(stream)
    assert ids(pieces) == expected


def test_a_dropped_stream_says_so() -> None:
    llm = toy()
    stream = llm.stream(PROMPTS[0], max_new_tokens=25)
    next(stream)
    llm.engine.close()
    with pytest.raises(RuntimeError, match="dropped"):
        next(stream)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]"),
        ({"stop": ""}, "stop"),
        ({"constraint": "json"}, "constraint must come from .*compile_constraint or compile_language, not a str"),
        ({"logits_processor": 5}, "logits_processor must be a list of logits processors, not an int"),
        ({"logits_processor": [5]}, "logits_processor must be a list of logits processors, not an int"),
        ({"logits_processor": lambda ids, scores: scores}, "must be a list of logits processors, not a function"),
        ({"logits_processor": torch.tensor(2)}, "must be a list of logits processors, not a Tensor"),
        ({"stop_token_ids": torch.tensor(2)}, "stop_token_ids must be a list of token ids, not a Tensor"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias token -1 is negative"),
        ({"drafter": "ngram"}, "names a member of a router: this drafter is not a router: leave it out"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], words: str) -> None:
    llm = toy()
    for call in (lambda: llm.generate([0, 1], **options), lambda: next(iter(llm.stream([0, 1], **options)))):
        with pytest.raises(ValueError, match=words) as error:
            call()
        assert "\n" not in str(error.value)
    assert not llm.engine.busy


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_large_whole_numbers_are_numbers(name: str) -> None:
    options = {"temperature": 1.0, "seed": 3, "max_new_tokens": 6}
    texts = [toy().generate([0, 1], **{**options, name: value}).token_ids for value in (2**64, float(2**64))]
    assert texts[0] == texts[1] and len(texts[0]) == 6


def test_all_members_of_an_ensemble_draft_so_none_is_named() -> None:
    target, _ = tables()
    with pytest.raises(
        ValueError, match="drafter='ngram' of a request names a member of a router: this drafter is not a router"
    ):
        load(target, ["ngram", "suffix"]).generate([0, 1], drafter="ngram", max_new_tokens=2)


@pytest.mark.parametrize("controller", ["constant,k=0", "bandit,lengths=0"])
def test_no_member_can_be_named_where_nothing_is_drafted(controller: str) -> None:
    llm = load(tables()[0], "router,drafters=(ngram|suffix)", controller=controller)
    with pytest.raises(ValueError, match="drafter='ngram' of a request has no effect: the controller never drafts"):
        llm.generate([0, 1], drafter="ngram", max_new_tokens=2)
    with pytest.raises(ValueError, match="choose one of ngram, suffix"):
        llm.generate([0, 1], drafter="sam", max_new_tokens=2)
    assert llm.generate([0, 1], max_new_tokens=2).token_ids


@pytest.mark.parametrize("n", [None, "2", 2.0, True])
def test_the_number_of_samples_is_whole(n: Any) -> None:
    with pytest.raises(ValueError, match="n must be a whole number"):
        toy().generate([0, 1], n=n, temperature=1.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_tokens", "this is max_new_tokens here; use one of max_new_tokens, "),
        ("tools", r"llm.chat takes template_kwargs=\{'tools': \[...\]\}; use one of"),
        ("temprature", r"did you mean temperature\? use one of"),
    ],
)
def test_an_unknown_option_is_told_the_right_name(name: str, words: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=f"unknown option '{name}': {words}"):
        toy().generate([0, 1], **options)


def test_a_prediction_may_be_a_tensor_or_an_array() -> None:
    llm = toy(PredictionDrafter())
    plain = llm.generate([0, 1], max_new_tokens=6)
    for prediction in (torch.tensor(plain.token_ids), np.array(plain.token_ids)):
        for out in (llm.generate([0, 1], max_new_tokens=6, prediction=prediction), *_last(llm, prediction)):
            assert out.stats is not None and out.stats.num_accepted_prediction_tokens > 0


def _last(llm: Llm, prediction: Any) -> list[Piece]:
    return list(llm.stream([0, 1], max_new_tokens=6, prediction=prediction))[-1:]


def test_predictions_of_a_batch() -> None:
    llm = toy()
    expected = [llm.generate(prompt, max_new_tokens=6).token_ids for prompt in PROMPTS[:2]]
    for guess in (np.array([0, 1, 2]), torch.tensor([0, 1]), [np.int64(0)], [[0, 1], None], torch.tensor([[0], [1]])):
        assert [out.token_ids for out in llm.generate(PROMPTS[:2], max_new_tokens=6, prediction=guess)] == expected
    for wrong in ([[0, 1]], [[0], [1], [2]]):
        with pytest.raises(ValueError, match="predictions for 2 prompts: give one for all, or one per prompt"):
            llm.generate(PROMPTS[:2], max_new_tokens=6, prediction=wrong)


def test_a_forked_process_is_told_to_load_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy()
    expected = llm.generate([0, 1], max_new_tokens=4).token_ids
    monkeypatch.setattr("os.getpid", lambda: -1)  # as a child sees it
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    with pytest.raises(RuntimeError, match=r"before the process was forked.*load it in each process"):
        llm.generate([0, 1], max_new_tokens=4)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert llm.generate([0, 1], max_new_tokens=4).token_ids == expected


def test_an_answer_of_the_usual_length_ends_with_the_context() -> None:
    target, _ = tables(context_length=60)
    llm = Llm(target, None, None, None, None)
    short, long = llm.generate([[0] * 50, [0] * 3])
    assert (len(short.token_ids), short.finish_reason) == (10, "length")
    assert len(long.token_ids) == 57
    with pytest.raises(ValueError, match="max_new_tokens=64 exceeds the model's context"):
        llm.generate([0] * 50, max_new_tokens=64)
    with pytest.raises(ValueError, match="the prompt has 60 tokens and the model's context is 60"):
        llm.generate([0] * 60)


def test_an_empty_text_is_refused() -> None:
    target, _ = tables()
    llm = Llm(target, None, None, None, tokenizer())
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate("")
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate([[0], []])
    assert not llm.engine.busy
    assert llm.generate([]) == []


def test_load_takes_models_and_objects() -> None:
    target, draft = tables()
    for drafter in ("ngram,n=2,k=3", NgramDrafter(), ModelDrafter(draft), None):
        llm = load(target, drafter, verifier="auto", controller="constant,k=2")
        assert (
            llm.generate([0, 1, 0, 1], max_new_tokens=6).token_ids
            == toy().generate([0, 1, 0, 1], max_new_tokens=6).token_ids
        )
    with pytest.raises(ValueError, match="cannot verify"):
        load(target, "ngram", verifier="kseq")
    with pytest.raises(ValueError, match="unknown verifier 'nonsense': choose one of greedy"):
        load(target, "ngram", verifier="nonsense")
    with pytest.raises(ValueError, match=r"unknown controller .nonsense.: choose one of .*constant"):
        load(target, "ngram", controller="nonsense")
    with pytest.raises(ValueError, match="unknown drafter 'nonsense': choose one of model"):
        load(target, "nonsense")


def test_exact_is_checked_for_objects_too() -> None:
    """A target object that is not exact to the last bit is told, once, and an unknown kind of exactness refused."""
    target, _ = tables()
    with pytest.raises(ValueError, match="exact must be 'distribution', 'bitwise' or 'approximate', not 'nonsense'"):
        load(target, None, exact="nonsense")
    assert load(target, None).describe()["refused"] == []
    for _ in range(2):
        (refused,) = load(target, None, exact="bitwise").describe()["refused"]
        assert (refused["path"], refused["why"]) == ("bitwise", target.exactness_why)
    exact, _ = tables()
    exact.exactness = "bitwise"
    assert load(exact, None, exact="bitwise").describe()["refused"] == []
