"""Finite languages from schemas, expressions and grammars: all strings as the tokenizer spells them, or one line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

import foretoken as ft
from foretoken.core.constraints import FiniteLanguage
from foretoken.llm import Llm

pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")

from foretoken.server.grammar import compile_constraint, compile_language

NAMES = ["get_weather", "get_time", "get", "search", "search_web", "naïve", "a b"]
RECORD = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}, "days": {"type": "integer", "minimum": 0, "maximum": 11}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
FINITE: list[tuple[str, Any, Sequence[str]]] = [
    ("choice", NAMES, NAMES),
    ("choice", ["yes"], ["yes"]),
    ("json_schema", {"enum": ["a", "bb", 3, None, True]}, ['"a"', '"bb"', "3", "null", "true"]),
    ("json_schema", {"const": {"x": [1, "é"]}}, [json.dumps({"x": [1, "é"]}, ensure_ascii=False)]),
    ("json_schema", RECORD, [json.dumps({"unit": u, "days": d}) for u, d in product("cf", range(12))]),
    ("regex", "(ab|cd)?[0-3]{2}", [f"{a}{b}{c}" for a, b, c in product(["", "ab", "cd"], range(4), range(4))]),
    ("grammar", 'start: ("yes" | "no") " sir"?', ["yes", "no", "yes sir", "no sir"]),
]
BAD: list[tuple[str, Any, str]] = [
    ("regex", "[0-9]{5}", "not finite, or too large .* it has more than 2048 strings"),  # 10^5 strings
    ("choice", [f"word {i}" for i in range(100_000)], "the choice has 100000 strings, and .* takes 2048"),
    ("choice", [f"{i}" for i in range(3000)], "the choice has 3000 strings, and .* takes 2048"),
    ("choice", ["a" * 5000], "the choice has 5000 bytes in one string, and .* takes 4096"),
    ("choice", [f"{i:04}" * 20 for i in range(2000)], "the choice has 160000 characters, and .* takes 65536"),
    ("choice", ["a", "\ud800"], "the choice is not text"),
    ("regex", "a*", "not finite, or too large"),
    ("regex", "a*b", "not finite, or too large"),
    ("regex", "a{5000}", "not finite, or too large"),
    ("json_object", None, "not finite, or too large"),
    ("json_schema", {"type": "string"}, "not finite, or too large"),
    ("grammar", 'start: "(" start ")" | "x"', "not finite, or too large"),
    ("regex", r"[^\s\S]", "no text fits it"),
    ("json_schema", {"enum": []}, "cannot be compiled"),
    ("choice", [], "at least one non-empty string"),
    ("choice", ["a", 5], "a list of strings"),
    ("choice", ["a", "<|endoftext|>"], "it is the special token 0"),
    ("grammar", 'start: "a" <[5]>', "supports strings only"),
    ("regex", "(unclosed", "cannot be compiled"),
]


@pytest.fixture(scope="module")
def llm() -> Llm:
    return ft.load("builtin", None, dtype="float32", prefix_cache=False)


def language(llm: Llm, kind: str, spec: Any) -> FiniteLanguage:
    return compile_language(kind, spec, llm.tokenizer, llm.target.vocab_size)


@pytest.mark.parametrize(("kind", "spec", "strings"), FINITE)
def test_all_strings_are_found(llm: Llm, kind: str, spec: Any, strings: Sequence[str]) -> None:
    compiled = language(llm, kind, spec)
    tokenizer: Any = llm.tokenizer
    assert sorted(tokenizer.decode(ids) for ids in compiled.strings) == sorted(strings)
    assert all(
        tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids for ids in compiled.strings
    )
    assert compiled.ends == {0}
    rule = compile_constraint(kind, spec, llm.tokenizer, llm.target.vocab_size)
    assert all(rule.fits([], ids) == len(ids) and rule.may_end(ids) for ids in compiled.strings)


@pytest.mark.parametrize(("kind", "spec", "words"), BAD, ids=range(len(BAD)))
def test_what_is_no_finite_language_is_refused_in_one_line(llm: Llm, kind: str, spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        language(llm, kind, spec)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        ("WALK_S", 0.0, "listing its strings takes more than 0 s"),
        ("MOST_STEPS", 9, "it has more than 9 bytes in all strings"),
        ("MOST_BYTES", 1, "it has a string of more than 1 bytes"),
        ("MOST_STRINGS", 99, "it has more than 99 strings"),
    ],
)
def test_listing_ends_in_time_and_names_the_limit(
    llm: Llm, monkeypatch: pytest.MonkeyPatch, limit: str, most: float, words: str
) -> None:
    monkeypatch.setattr(f"foretoken.server.grammar.language.{limit}", most)
    with pytest.raises(ValueError, match=f"too large for conditional sampling: {words}"):
        language(llm, "regex", "[0-9]{2}")


@pytest.mark.parametrize(("count", "length"), [(60, 400), (14, 4000), (2000, 30)])
def test_a_choice_within_the_limits_is_taken_as_it_is_listed(llm: Llm, count: int, length: int) -> None:
    """It was walked byte by byte as an expression: too long, or with too many characters."""
    texts = [f"{i} {'ab cd ' * length}"[:length] for i in range(count)]
    compiled = language(llm, "choice", [*texts, texts[0]])
    tokenizer: Any = llm.tokenizer
    assert sorted(tokenizer.decode(ids) for ids in compiled.strings) == sorted(texts)


@pytest.mark.parametrize("drafter", [None, "ngram", "model,k=3", "known,inner=ngram"])
def test_outputs_are_strings_whatever_drafts(llm: Llm, drafter: str | None) -> None:
    other = llm if drafter is None else ft.load("builtin", drafter, dtype="float32", prefix_cache=False)
    names = language(llm, "choice", NAMES)
    pattern = language(llm, "regex", "[0-9]{2}")  # 111 nodes: in pieces
    cases: list[dict[str, Any]] = [
        {"temperature": t, "seed": seed, "constraint": rule}
        for rule in (names, pattern)
        for t, seed in ((0.0, None), (1.5, 1), (1.5, 2))
    ]
    for options in cases:
        expected = llm.generate("The tool is ", max_new_tokens=8, logprobs=1, **options)
        output = other.generate("The tool is ", max_new_tokens=8, logprobs=1, **options)
        assert output.token_ids == expected.token_ids and output.finish_reason == "eos"
        assert output.text in NAMES or re.fullmatch("[0-9]{2}", output.text)
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
        assert output.stats.num_drafts == 1
