"""What ends a text and what rules tokens out, together: every pair has a defined end, or is refused by name.

Each is tried with drafts that cross the border in question and without: the texts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tokenizer import Writer, eos, ids_of, tokenizer
from torch import Tensor

import foretoken as ft
from foretoken.core import OptionError
from foretoken.core.constraints import CannotGoOn
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.llm import Llm, Output
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.prediction import PredictionDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.models.other.table import TableModel
from toys import engine, fixed_tables, serve

PROMPT = ids_of("The cat")
STORY = " sat on the mat. The dog ran to the cat. The dog sat."
IDS = ids_of(STORY)


def both(text: str = STORY, script: Sequence[int] = (), then: Sequence[int] = (), **options: Any) -> Output:
    """The output of drafts that are the true output (or ``script``), as plain decoding and the stream have it."""
    ids = [*ids_of(text), *then]
    drafter = ScriptedDrafter(script=[*(script or ids), eos(), 5, 5], as_output=True)
    llm = Llm(Writer(ids, len(PROMPT)), drafter, None, ConstantController(), tokenizer())
    output = llm.generate(PROMPT, **options)
    for other in (llm.plain, Llm(llm.target, NgramDrafter(), None, ConstantController(), tokenizer())):
        result = other.generate(PROMPT, **options)
        assert (result.text, result.token_ids, result.finish_reason, result.stop_reason) == (
            output.text,
            output.token_ids,
            output.finish_reason,
            output.stop_reason,
        )
    pieces = list(llm.stream(PROMPT, **options))
    assert "".join(piece.text for piece in pieces) == output.text
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert pieces[-1].finish_reason == output.finish_reason
    return output


class NotCertain(Writer):
    """A writer that gives every token a chance, so that its text can go on where a token is forbidden."""

    def distribution(self, prefix: Sequence[int]) -> Tensor:
        return super().distribution(prefix) * 0.9999 + 0.0001 / self.vocab_size


def no_dog(ids: Tensor, scores: Tensor) -> Tensor:
    return scores.index_fill(-1, torch.tensor(ids_of(" dog")), -torch.inf)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stop", [" dog"]),
        ("bad_words", ["dog"]),
        ("stop_token_ids", ids_of(" dog")[-1:]),
        ("allowed_token_ids", ids_of(" sat on the mat.")),
        ("logits_processor", [no_dog]),
        ("prediction", IDS),
    ],
)
def test_iterators_serve_every_prompt_and_sample(name: str, values: list[Any]) -> None:
    """The first request exhausted them, and the others ran without the rule."""
    llm = Llm(NotCertain(IDS, len(PROMPT)), PredictionDrafter(), None, ConstantController(), tokenizer())
    calls: tuple[tuple[Any, dict[str, Any]], ...] = (
        ([PROMPT] * 2, {}),
        (PROMPT, {"n": 2, "temperature": 1.0, "seed": 3}),
    )
    for prompts, options in calls:
        from_list, from_iterator = (
            llm.generate(prompts, **{name: given, **options}, max_new_tokens=20) for given in (values, iter(values))
        )
        assert [out.token_ids for out in from_iterator] == [out.token_ids for out in from_list]
        counts = [out.stats.num_accepted_prediction_tokens for out in from_iterator]
        assert all(counts) == (name == "prediction")
        if name != "prediction":
            plain = llm.generate(prompts, **options, max_new_tokens=20)
            assert all(out.token_ids != free.token_ids for out, free in zip(from_list, plain, strict=True))


# -- min_tokens and what ends a text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("least", range(len(IDS)))
def test_a_stop_string_counts_where_a_token_behind_the_least_completes_it(least: int) -> None:
    """The first match that ends behind ``least`` tokens counts, wherever it began; the ends are counted by hand."""
    stop = "The dog"
    ends = [n for n in range(1, len(IDS) + 1) if tokenizer().decode(IDS[:n]).endswith(stop)]
    assert len(ends) == 2  # both matches end with a token of theirs
    output = both(stop=stop, min_tokens=least)
    end = next((n for n in ends if n > least), None)
    if end is None:
        assert (output.text, output.finish_reason) == (STORY, "eos")
    else:
        assert (output.token_ids, output.finish_reason) == (IDS[:end], "stop")
        assert output.text == tokenizer().decode(IDS[:end]).removesuffix(stop)


def test_a_short_stop_string_beside_a_long_one_is_not_met_in_old_text() -> None:
    output = both(stop=["mat", "The dog ran to the cat. The never"], min_tokens=len(ids_of(STORY.split(".")[0])) + 2)
    assert output.text == STORY and output.finish_reason == "eos"


@pytest.mark.parametrize("ends", [{}, {"stop_token_ids": [IDS[3]]}])
def test_ids_that_end_a_text_are_impossible_before_the_least(ends: dict[str, Any]) -> None:
    target, _ = fixed_tables([0.6, 0.3, 0.1], [0.2, 0.2, 0.6])
    target.eos_token_ids = frozenset({0})
    stop = {"stop_token_ids": frozenset({1})} if ends else {}
    for drafter in (None, ScriptedDrafter(script=[2, 2, 2, 2, 0, 1, 0], as_output=True)):
        (run,) = serve(engine(target, drafter), [Request([1, 2], max_new_tokens=9, min_tokens=4, **stop)])
        assert run.output == ([2, 2, 2, 2, 0] if ends else [1, 1, 1, 1, 0]) and run.finish_reason == "eos"


def test_what_is_allowed_runs_out_before_the_least() -> None:
    """Only the end of the text is left, and it wins over ``min_tokens``."""
    target, _ = fixed_tables([0.1, 0.6, 0.3], [0.2, 0.2, 0.6])
    target.eos_token_ids = frozenset({0})
    request = Request(
        [2], max_new_tokens=9, min_tokens=5, allowed_token_ids=frozenset({1, 2}), bad_words=[[1, 1], [1, 2], [2]]
    )
    for drafter in (None, ScriptedDrafter(script=[1, 0, 1], as_output=True)):
        (run,) = serve(engine(target, drafter), [request])
        assert (run.output, run.finish_reason) == ([1, 0], "eos")


def test_ignored_ends_are_not_put_off() -> None:
    target, _ = fixed_tables([0.6, 0.3, 0.1], [0.2, 0.2, 0.6])
    target.eos_token_ids = frozenset({0})
    (run,) = serve(engine(target), [Request([1], max_new_tokens=4, min_tokens=2, ignore_eos=True)])
    assert (run.output, run.finish_reason) == ([0] * 4, "length")
    only = Request([1], max_new_tokens=3, allowed_token_ids=frozenset({2}), ignore_eos=True)
    assert serve(engine(target), [only])[0].output == [2] * 3


# -- constraints -----------------------------------------------------------------------------------------------------


class Spelling:
    """The output is these tokens, and then an end, if there is one."""

    def __init__(self, tokens: Sequence[int], ends: Sequence[int] = ()) -> None:
        self.tokens, self.ends = list(tokens), frozenset(ends)

    @property
    def processor(self) -> Spelling:
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        output = input_ids[0].tolist()
        kept = torch.full_like(scores, -torch.inf)
        if output == self.tokens[: len(output)]:
            follow = [self.tokens[len(output)]] if len(output) < len(self.tokens) else sorted(self.ends)
            kept[:, follow] = scores[:, follow]
        return kept

    def forced(self, output: Sequence[int]) -> list[int]:
        return self.tokens[len(output) :]

    def may_end(self, output: Sequence[int]) -> bool:
        return list(output) == self.tokens


P, Q = [0.1, 0.2, 0.3, 0.15, 0.25], [0.3, 0.1, 0.2, 0.2, 0.2]


def drafters(q: TableModel) -> list[Drafter | None]:
    """None, drafts that cross the end of [3, 1, 2], and a draft model's."""
    return [None, ScriptedDrafter(script=[3, 1, 2, 0, 4, 1, 1], as_output=True), ModelDrafter(q, k=5)]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    ("ends", "options", "expected", "reason"),
    [
        ([0], {"min_tokens": 8}, [3, 1, 2, 0], "eos"),
        ([0], {"ignore_eos": True}, [3, 1, 2, 0], "eos"),
        ([0], {"bad_words": [[0]]}, [3, 1, 2], "stop"),
        ([], {"min_tokens": 8}, [3, 1, 2], "stop"),
        ([], {}, [3, 1, 2], "stop"),
    ],
)
def test_a_constraint_that_is_complete_ends_the_text(
    params: SamplingParams, seed: int | None, ends: list[int], options: dict[str, Any], expected: list[int], reason: str
) -> None:
    target, q = fixed_tables(P, Q)
    for drafter in drafters(q):
        request = Request([1, 4], params, 10, seed=seed, constraint=Spelling([3, 1, 2], ends), logprobs=1, **options)
        (run,) = serve(engine(target, drafter), [request])
        assert (run.output, run.finish_reason) == (expected, reason)
        assert len(run.logprobs) == len(run.origins) == run.stats.num_new_tokens == len(expected)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"allowed_token_ids": frozenset({3, 1, 4})},
            "the constraint and allowed_token_ids allow no token after 2 generated",
        ),
        ({"bad_words": [[1, 2]]}, "the constraint and bad_words allow no token after 2 generated"),
    ],
)
def test_rules_that_leave_nothing_end_their_own_request_alone(
    params: SamplingParams, seed: int | None, options: dict[str, Any], words: str
) -> None:
    target, q = fixed_tables(P, Q)
    beside = Request([2, 2], params, 8, seed=7)
    alone = serve(engine(target), [beside])[0].output
    for drafter in drafters(q):
        request = Request([1, 4], params, 10, seed=seed, constraint=Spelling([3, 1, 2], [0]), **options)
        serving = engine(target, drafter)
        first, second = serving.add(request), serving.add(beside)
        ended = {}
        while serving.busy:
            for run, emission in serving.step():
                if emission.finish_reason is not None:
                    ended[run.id] = (run.output, emission)
        assert isinstance(ended[first][1].error, CannotGoOn) and ended[first][1].finish_reason == "error"
        assert words in str(ended[first][1].error) and "\n" not in str(ended[first][1].error)
        if seed is not None or params.temperature == 0:
            assert ended[second][0] == alone


def test_rules_that_leave_nothing_to_begin_with_are_refused_at_once() -> None:
    target, _ = fixed_tables(P, Q)
    refusing = engine(target)
    request = Request([1], max_new_tokens=4, constraint=Spelling([3]), allowed_token_ids=frozenset({1, 2}))
    with pytest.raises(OptionError, match="the constraint and allowed_token_ids allow no first token"):
        refusing.add(request)
    with pytest.raises(OptionError, match="allowed_token_ids and bad_words allow no first token"):
        refusing.add(Request([1], max_new_tokens=4, allowed_token_ids=frozenset({2}), bad_words=[[2]]))
    target.eos_token_ids = frozenset({0})
    with pytest.raises(OptionError, match="only end-of-text tokens, and min_tokens=2 forbids them"):
        refusing.add(Request([1], max_new_tokens=4, allowed_token_ids=frozenset({0}), min_tokens=2))
    assert not refusing.busy


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "gave NaN or inf"), (-torch.inf, "logits_processor allow no token")]
)
def test_a_processor_that_spoils_the_scores_is_named(value: float, words: str) -> None:
    target, _ = fixed_tables(P, Q)

    def spoil(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, value) if input_ids.shape[-1] > 3 else scores

    for params in (SamplingParams(processors=(spoil,)), SamplingParams(1.0, processors=(spoil,))):
        with pytest.raises(ValueError, match=words):
            serve(engine(target), [Request([1], params, 6)])


# -- special tokens as stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, {"min_tokens": 3}])
def test_a_special_token_as_a_stop_string_is_its_id(include: bool, more: dict[str, Any]) -> None:
    output = both(STORY[:8], then=[eos(), 7, 7, 7], stop=["<eos>", "never"], include_stop=include, **more)
    assert output.token_ids == [*ids_of(STORY[:8]), eos()]
    assert (output.finish_reason, output.stop_reason) == ("stop", "<eos>")
    assert output.text == STORY[:8] + ("<eos>" if include else "")


# -- kinds of values -------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("allowed_token_ids", "stop_token_ids", "prediction")
        for value in ([-1], [10**6], [1.5], [True], ["a"], 7, {1: 2}, [[1]], [None], [NAN])
        if (name, value) != ("prediction", "a")
    ),
    ("allowed_token_ids", []),
    ("allowed_token_ids", "abc"),
    ("stop_token_ids", torch.tensor([1, 2])),
    *(("logit_bias", value) for value in ({-1: 1.0}, {10**6: 1.0}, {1.5: 1.0}, {True: 1.0}, {"1": 1.0}, [1], "x", 3)),
    *(("logit_bias", {1: value}) for value in (NAN, INF, -INF, "x", None, True, 1e39)),
    *(
        (name, value)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for value in (NAN, INF, -INF, "1", None, True, 1e39)
    ),
    *(
        (name, value)
        for name in (
            "top_k",
            "max_new_tokens",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
            "max_draft_tokens",
            "priority",
        )
        for value in (1.5, NAN, True, "3", -(10**40))
        if (name, value) != ("priority", -(10**40))
    ),
    *(("deadline_s", value) for value in (NAN, 0, -1.0, "1", True)),
    *((name, value) for name in ("ignore_eos", "include_stop", "explain") for value in ("no", 1, None)),
    *(
        (name, value)
        for name in ("stop", "bad_words")
        for value in ("", [""], "\ud800", ["a", "\udfff"], 5, [5], b"x", {"a": 1}, [None])
    ),
    ("prediction", "\ud800"),
    ("min_tokens", 65),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n}-{i}" for i, (n, _) in enumerate(WRONG)])
def test_values_that_cannot_be_are_refused_by_name(name: str, value: Any) -> None:
    llm = Llm(Writer(IDS, len(PROMPT)), None, None, None, tokenizer())
    with pytest.raises(OptionError, match=f"^{name}") as error:
        llm.generate(PROMPT, **{name: value})
    assert error.value.option == name
    assert "\n" not in str(error.value) and str(error.value).encode() and len(str(error.value)) < 200
    assert not llm.engine.busy


def test_numbers_of_numpy_are_numbers() -> None:
    ids, (target, _) = np.array([1, 3]), fixed_tables(P, Q)
    llm = Llm(target, None, None, None, None)
    options: dict[str, Any] = {"allowed_token_ids": ids, "logit_bias": {ids[1]: np.float32(2)}, "top_k": ids[0]}
    assert llm.generate([1], temperature=np.float64(0), max_new_tokens=4, **options).token_ids == [3] * 4


@pytest.mark.parametrize("temperature", [np.float64(0.8), np.float32(0.5), np.float64(0), Fraction(1, 2)])
def test_numbers_of_other_types_decode_as_pythons(temperature: Any) -> None:
    """Under ``auto``, the default controller, they divided by zero; a fraction failed inside NumPy."""
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 1, "top_k": 3}
    llm = ft.load("builtin", "ngram")
    ours = llm.generate("def f(", temperature=float(temperature), **options)
    assert llm.generate("def f(", temperature=temperature, **options).token_ids == ours.token_ids


def test_requests_hold_pythons_numbers() -> None:
    """A length of NumPy's reached the cost model as a depth, where it had no ``bit_length``."""
    whole = dict.fromkeys(("max_new_tokens", "min_tokens", "max_draft_tokens", "logprobs", "priority"), np.int64(3))
    request = Request([0], SamplingParams(np.float32(0.5), top_k=np.int64(3)), **whole, deadline_s=Fraction(1, 2))  # type: ignore[arg-type]
    assert all(type(getattr(request, name)) is int for name in whole) and type(request.deadline_s) is float
    assert type(request.params.temperature) is float and type(request.params.top_k) is int
    assert type(request.params.top_p) is float and replace(request, seed=np.uint64(5)).seed == 5


def test_large_numbers_leave_a_distribution() -> None:
    target, _ = fixed_tables(P, Q)
    for change in (
        {"temperature": 1e30},
        {"repetition_penalty": 1e30},
        {"frequency_penalty": 1e30},
        {"logit_bias": {1: 1e30}},
    ):
        request = Request([1], replace(SamplingParams(1.0), **change), 6, allowed_token_ids=frozenset({1, 2}))
        assert set(serve(engine(target), [request])[0].output) <= {1, 2}
