"""The page on conditional sampling: its code prints what it says, and its numbers are computed here again."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Sequence

import pytest
import torch
from pages import DOCS, blocks

import foretoken as ft
from foretoken.llm import Llm
from foretoken.models.base import Feed

PAGE = DOCS / "explain" / "conditional.md"
TEXT = PAGE.read_text(encoding="utf-8")
Probabilities = dict[str, tuple[float, float, float]]
"""By string: log-probability, probability under masking, probability given the language."""


def compared(steps: dict[str, tuple[Sequence[int], Sequence[torch.Tensor]]]) -> Probabilities:
    """Masked and conditional probabilities from each string's tokens (the end included) and log-distributions [V]."""
    outputs = [tuple(tokens) for tokens, _ in steps.values()]
    logs, masked = {}, {}
    for name, (tokens, rows) in steps.items():
        output = tuple(tokens)
        logs[name] = sum(float(row[token]) for row, token in zip(rows, output, strict=True))
        masked[name] = 1.0
        for i, row in enumerate(rows):
            allowed = sorted({other[i] for other in outputs if other[:i] == output[:i] and len(other) > i})
            masked[name] *= float((row[output[i]] - row[allowed].logsumexp(0)).exp())
    total = sum(math.exp(log) for log in logs.values())
    return {name: (logs[name], masked[name], math.exp(logs[name]) / total) for name in steps}


def variation(probabilities: Probabilities) -> float:
    return sum(abs(masked - conditional) for _, masked, conditional in probabilities.values()) / 2


def scored(llm: Llm, prompt: str, strings: Sequence[str]) -> Probabilities:
    tokenizer, steps = llm.tokenizer, {}
    assert tokenizer is not None
    for string in strings:
        before, tokens = llm.encode(prompt), [*tokenizer(string, add_special_tokens=False)["input_ids"], 0]
        sequence = llm.target.open()
        logits = llm.target.forward([Feed(sequence, [*before, *tokens[:-1]])])[0].logits
        llm.target.release(sequence)
        steps[string] = (tokens, list(logits[len(before) - 1 :].double().log_softmax(-1)))
    return compared(steps)


def cells(pattern: str) -> list[list[str]]:
    return [[cell.strip("` ") for cell in line.split("|")[1:-1]] for line in re.findall(pattern, TEXT, re.M)]


def test_the_code_prints_what_the_page_says() -> None:
    printed = io.StringIO()
    names: dict[str, object] = {}
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    with contextlib.redirect_stdout(printed):
        for block in blocks(PAGE, "python"):
            exec(compile(block, PAGE.name, "exec"), names)
    assert [printed.getvalue()] == blocks(PAGE, "text")
    outputs = names["outputs"]
    assert isinstance(outputs, list)
    assert {output.text for output in outputs} <= {"get_weather", "get_time", "search"}


def test_the_example_by_hand() -> None:
    p = {"refuse": 0.9 * 0.001, "reject": 0.1 * 1.0}
    masked = {"refuse": 0.9 / (0.9 + 0.1), "reject": 0.1 / (0.9 + 0.1)}
    rows = cells(r"^\| `re[fj]\w+` \| \..*$")
    assert [row[0] for row in rows] == ["refuse", "reject"]
    for name, *numbers in rows:
        expected = (p[name], masked[name], p[name] / sum(p.values()))
        assert [float(number) for number in numbers] == pytest.approx(expected, abs=5e-5)
    assert f"is {masked['refuse'] - p['refuse'] / sum(p.values()):.4f}.".replace("0.", ".") in TEXT


def test_the_numbers_of_the_built_in_model() -> None:
    llm = ft.load("builtin", None, dtype="float32", prefix_cache=False)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| `.*\| -\d.*$", TEXT, re.M)]
    assert len(table) == 5
    variations = []
    for prompt in dict.fromkeys(row[0] for row in table):
        rows = {row[1].strip("`"): row for row in table if row[0] == prompt}
        probabilities = scored(llm, prompt[1:-1], list(rows))
        for name, (_, _, tokens, log, masked, conditional) in rows.items():
            assert re.findall("`([^`]*)`", tokens) == [llm.tokenizer.decode([t]) for t in llm.encode(name)]  # type: ignore[union-attr]
            # Rounding of the network's float32 differs between machines, by far less than what is shown.
            assert float(log) == pytest.approx(probabilities[name][0], abs=0.06)
            assert (float(masked), float(conditional)) == pytest.approx(probabilities[name][1:], abs=2e-4)
        variations.append(variation(probabilities))
    match = re.search(r"total variation is (\.\d+) for the first prompt and (\.\d+) for the second", TEXT)
    assert match is not None
    assert [float(number) for number in match.groups()] == pytest.approx(variations, abs=0.006)


def test_the_limits_are_the_codes() -> None:
    from foretoken.engine import conditional

    language = pytest.importorskip("foretoken.server.grammar.language", reason="the extra 'grammar' is not installed")
    assert f"{language.MOST_STRINGS:,} of up to {language.MOST_BYTES:,} bytes" in TEXT
    assert f"| {conditional.MOST_NODES - 1:,} |" in TEXT
    width = conditional.LanguageRound.width
    assert f"up to {width - 1} tokens" in TEXT and f"pieces of {width}\ntokens" in TEXT
