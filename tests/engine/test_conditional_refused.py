"""What cannot go together with a finite language is refused in one line that names the option."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from finite_languages import END, Numbers, model, request

from foretoken.core import OptionError
from foretoken.core.constraints import CannotGoOn, FiniteLanguage
from foretoken.core.sampling import SamplingParams
from foretoken.engine.conditional import MOST_NODES
from foretoken.models.base import Capabilities
from foretoken.models.other.table import TableModel
from toys import engine, serve


class OneWay(TableModel):
    """A target that cannot take tokens back."""

    capabilities = Capabilities(False, False, False, False, False, {"rollback": "its layers keep a running state"})


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"stop": ["3."]}, "stop", "'3.' would end the string '1.2.3.' of"),
    ({"stop_token_ids": frozenset({5})}, "stop_token_ids", "holds token 5, which ends"),
    ({"ignore_eos": True}, "ignore_eos", "ends with end-of-text"),
    ({"params": SamplingParams(temperature=1.0, top_k=5)}, "top_k", "leave it out or give 0"),
    ({"params": SamplingParams(temperature=1.0, top_p=0.9)}, "top_p", "leave it out or give 1.0"),
    ({"params": SamplingParams(temperature=1.0, min_p=0.1)}, "min_p", "leave it out or give 0.0"),
    ({"max_new_tokens": 4}, "max_new_tokens", "has 4 tokens, and end-of-text"),
    ({"language": FiniteLanguage.of(product(range(1, 6), repeat=5))}, "constraint", "more than the limit of 2048"),
    ({"language": FiniteLanguage.of([(1, 0)])}, "constraint", "holds token 0, which ends"),
    ({"language": FiniteLanguage.of([(1, 9)])}, "constraint", "beyond the vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "option", "words"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_is_refused_in_one_line(more: dict[str, Any], option: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        engine(model(), tokenizer=Numbers()).check(request(**more))
    assert "\n" not in str(error.value) and isinstance(error.value, OptionError) and error.value.option == option


def test_the_largest_language_is_taken_and_one_token_more_is_not() -> None:
    strings = list(product(range(1, 6), repeat=5))
    count = next(n for n in range(1600, len(strings)) if len(FiniteLanguage.of(strings[:n])) == MOST_NODES)
    served = engine(model(), tokenizer=Numbers())
    served.check(request(language=FiniteLanguage.of(strings[:count]), max_new_tokens=8))
    language = FiniteLanguage.of(strings[: count + 1])
    assert len(language) == MOST_NODES + 1
    with pytest.raises(OptionError, match=f"{len(language)} tokens as a tree"):
        served.check(request(language=language, max_new_tokens=8))


def test_a_language_of_100_000_strings_is_refused_before_it_is_scored() -> None:
    language = FiniteLanguage.of(product(range(1, 11), repeat=5))
    with pytest.raises(OptionError, match="more than the limit of"):
        engine(model(), tokenizer=Numbers()).check(request(language=language))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (OneWay(model().table, 7, eos_token_ids=(END,)), "its layers keep a running state"),
        (TableModel(model().table, 7), "no end-of-text token"),
    ],
)
def test_targets_that_cannot_are_named(target: TableModel, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        engine(target).check(request())


def test_an_empty_language_and_an_end_inside() -> None:
    with pytest.raises(ValueError, match="the language is empty"):
        FiniteLanguage.of([])
    with pytest.raises(ValueError, match="holds token 0, which ends the text"):
        FiniteLanguage.of([(1, 0, 2)], [0])


def test_a_language_that_other_rules_exclude_ends_its_request_alone() -> None:
    target = model()
    served = engine(target)
    good = request(3)
    alone = serve(engine(target), [good])[0].output
    ids = [served.add(request(1, bad_words=[[1], [2], [4], [5]])), served.add(good)]
    ended = {run.id: run for run, _ in served.step()}
    assert isinstance(ended[ids[0]].error, CannotGoOn) and "any probability" in str(ended[ids[0]].error)
    assert ended[ids[1]].output == alone
