"""``foretoken doctor``: measurements and what follows from them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from foretoken.loading import load_model
from foretoken.loading.measured.machine import recommendations, scoring_costs
from foretoken.models.base import Refusal
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.table import TableModel


def test_json(run: Any, target: str, draft: str) -> None:
    before = torch.get_num_threads()
    report = run("doctor", "--target", target, "--drafter", f"model:{draft},k=2", "--repeat", "1", "--json").json
    assert set(report) == {
        "versions", "hardware", "threads", "target", "dtypes", "layouts", "scoring", "draft", "thread_check",
        "recommendations",
    }  # fmt: skip
    assert [row["tokens"] for row in report["scoring"]] == [1, 2, 4, 8, 16, 32, 64]
    assert report["scoring"][0]["ratio"] == 1.0
    assert all(row["median_ms"] > 0 for row in report["scoring"])
    assert report["versions"]["torch"] == torch.__version__
    assert report["draft"]["drafter"] == "model" and report["draft"]["c"] > 0
    assert report["target"]["dtype"] == "float32" and report["target"]["trees"] is True
    assert all(row["linear_rows_ms"] > 0 for row in report["dtypes"] if row["supported"])
    assert {row["dtype"] for row in report["dtypes"]} == {"float32", "bfloat16", "float16", "float64"}
    assert report["recommendations"]
    assert torch.get_num_threads() == before


def test_for_people(run: Any, target: str) -> None:
    result = run("doctor", "--target", target, "--drafter", "none", "--repeat", "1")
    assert result.code == 0
    for words in ("versions", "scoring n tokens", "threads", "recommendations"):
        assert words in result.out
    assert "draft (" not in result.out


def test_it_says_how_exact_the_target_is_and_what_it_was_refused(
    run: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = (Refusal("lean forward", "it is off", "half the speed"), Refusal("graphs", "no GPU", "nothing"))
    description = {
        "exactness": "rounding",
        "exactness_why": "a probe differs",
        "refused": [asdict(refusal) for refusal in refusals],
    }
    describe = HuggingFaceModel.describe
    monkeypatch.setattr(HuggingFaceModel, "describe", lambda self: {**describe(self), **description})
    options = ("doctor", "--target", target, "--drafter", "none", "--repeat", "1")
    lines = run(*options).out.splitlines()
    assert any(
        line.split() == ["exactness", "exact", "up", "to", "rounding", "(a", "probe", "differs)"] for line in lines
    )
    place = next(i for i, line in enumerate(lines) if line.startswith("refused"))
    assert lines[place].endswith(str(refusals[0])) and lines[place + 1].strip() == str(refusals[1])
    assert any(line.startswith("forward") for line in lines) and any(line.startswith("kernels") for line in lines)
    assert {"forward", "weights", "exactness", "exactness_why", "refused"} <= set(
        run(*options, "--json").json["target"]
    )


def test_measuring_leaves_the_cache_as_it_was(target: str) -> None:
    model = load_model(target)
    scoring_costs(model, repeat=1, counts=(1, 8))
    assert model._sequences == []  # type: ignore[attr-defined]


def test_a_short_context_is_measured_as_far_as_it_goes() -> None:
    costs = scoring_costs(TableModel.random(5, context_length=24), repeat=1)
    assert [row["tokens"] for row in costs] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "trees of up to 32 nodes are nearly free"),
        ({"scoring": [{"tokens": 1, "ratio": 1.0}, {"tokens": 4, "ratio": 1.2}, {"tokens": 8, "ratio": 2}]}, "up to 3"),
        ({"scoring": [{"tokens": 1, "ratio": 1.0}, {"tokens": 4, "ratio": 3.0}]}, "short drafts"),
        ({"scoring": [{"tokens": 1, "ratio": 1.0}]}, "plain decoding only"),
        ({"draft": {"drafter": "model", "c": 0.9, "overhead_share": 0.0}}, "too slow to gain"),
        ({"draft": {"drafter": "model", "c": 0.2, "overhead_share": 0.3}}, "30% of a round is bookkeeping"),
        (
            {"thread_check": [{"threads": 1, "one_token_ms": 2.0}, {"threads": 2, "one_token_ms": 90.0}]},
            "set OMP_NUM_THREADS=1",
        ),
        ({"target": {"dtype": "bfloat16"}}, "width runs 3.0 times faster in float32: try --dtype float32"),
        ({"target": {"dtype": "bfloat16"}}, "16 rows at once, as drafts are checked, run 5.0 times faster in float32"),
    ],
)
def test_recommendations(change: dict[str, Any], words: str) -> None:
    report: dict[str, Any] = {
        "scoring": [{"tokens": 1, "ratio": 1.0}, {"tokens": 32, "ratio": 1.1}],
        "draft": {"drafter": "ngram", "c": 0.01, "overhead_share": 0.01},
        "threads": {"torch_threads": 2, "load": 0.5},
        "hardware": {"cores": 2},
        "thread_check": [{"threads": 1, "one_token_ms": 2.0}, {"threads": 2, "one_token_ms": 1.5}],
        "target": {"dtype": "float32"},
        "dtypes": [
            {"dtype": "float32", "supported": True, "linear_ms": 1.0, "linear_rows_ms": 2.0},
            {"dtype": "bfloat16", "supported": True, "linear_ms": 3.0, "linear_rows_ms": 10.0},
        ],
    }
    assert any(words in line for line in recommendations({**report, **change}))


@pytest.mark.parametrize("option", ["--max-new-tokens", "--temperature", "--top-p", "--seed"])
def test_options_of_requests_that_would_change_nothing_are_refused(run: Any, target: str, option: str) -> None:
    result = run("doctor", target, option, "1")
    assert result.code == 2 and f"No such option: {option}" in result.err
