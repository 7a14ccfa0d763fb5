"""``foretoken parity``: right pairs pass, planted differences fail, ties are told from bugs."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from foretoken.core import Rng, TokenTree
from foretoken.lab.parity.difference import Difference, first_difference, next_logits, tie_tolerance
from foretoken.lab.parity.distribution import chi_square, uniform_value, uniformity, upper_tail
from foretoken.lab.parity.report import Check
from foretoken.lab.parity.run import Settings, run_parity
from foretoken.lab.prompts import read_prompts
from foretoken.loading import load_model, load_tokenizer
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.other.table import TableModel

FIELDS = {
    "drafter", "verifier", "mode", "prompts", "drafted", "tried", "identical", "ties", "differences", "p_value", "sees",
    "notes",
}  # fmt: skip


def parity(run: Any, target: str, *more: str) -> Any:
    # No false alarms here, whatever is drawn.
    sure = ("--false-alarm", "1e-6")
    return run("parity", "--target", target, "--max-new-tokens", "12", "--samples", "64", *sure, *more)


# -- the command -----------------------------------------------------------------------------------------------------


def test_all_that_fit_pass_and_the_json_is_the_contract(run: Any, target: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("add a\nfor item in items\n")
    result = parity(
        run, target, "--json", "--samples", "16", "--max-new-tokens", "6", "--prompts", str(tmp_path / "prompts.txt")
    )
    assert result.code == 0
    report = result.json
    assert set(report) == {"passed", "tried", "untried", "checks", "exactness", "prompts", "identical", "ties"}
    assert report["passed"] is report["tried"] is True
    texts = [check for check in report["checks"] if check["mode"] != "sampled" and check["tried"]]
    for key in ("prompts", "identical", "ties"):
        assert report[key] == sum(check[key] for check in texts)
    assert report["exactness"] in ("bitwise", "rounding")
    assert all(set(check) == FIELDS for check in report["checks"])
    modes = Counter(check["mode"] for check in report["checks"])
    assert modes["greedy"] == modes["sampled"] >= 2
    assert modes["transformers"] == modes["greedy"] + 1  # plain decoding is compared with it too
    assert "model" not in {check["drafter"] for check in report["checks"]}  # it needs a path on this target
    for check in report["checks"]:
        assert check["differences"] == 0
        assert (check["p_value"] is None) == (check["mode"] != "sampled")
        if check["mode"] != "sampled":
            assert check["identical"] + check["ties"] == check["prompts"]
        if check["mode"] == "seed":  # two prompts: each alone, then both twice in a batch
            assert (check["verifier"], check["prompts"]) == ("coupled", 6)
    assert modes["seed"] == modes["greedy"]


def test_a_profile_replaces_auto(run: Any, target: str, tmp_path: Path) -> None:
    """What is checked is what ``generate --profile`` runs."""
    profile, prompts = tmp_path / "p.json", tmp_path / "prompts.txt"
    profile.write_text(json.dumps({"drafter": "suffix,k=3", "controller": "constant,k=2"}))
    prompts.write_text("for item in items: for item in items:\n")
    options = ("--json", "--mode", "greedy", "--profile", str(profile), "--prompts", str(prompts))
    with_spec = parity(run, target, *options, "--drafter", "suffix,k=3").json["checks"]
    with_auto = parity(run, target, *options, "--drafter", "auto").json["checks"]
    assert with_auto == [{**check, "drafter": "auto"} for check in with_spec]
    every = parity(run, target, *options).json["checks"]
    assert {**with_spec[0]} in every
    profile.write_text('{"drafter": null}')
    result = parity(run, target, *options, "--drafter", "auto")
    assert result.code == 2 and "'none' is plain decoding itself" in result.err


def test_the_backend_reads_the_tokenizer_too_and_is_certified(
    run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certified run is repeated with the backend of the certificate."""
    backends: list[str] = []

    def tokenizer_of(source: str, backend: str = "auto") -> Any:
        backends.append(backend)
        return load_tokenizer(source)

    monkeypatch.setattr("foretoken.loading.load_tokenizer", tokenizer_of)
    monkeypatch.setattr("foretoken.loading.load_model", lambda source, backend, **_: load_model(source))
    file = tmp_path / "parity.json"
    quick = ("--max-new-tokens", "4", "--samples", "0", "--mode", "greedy")
    first = run("parity", target, "--drafter", "ngram", "--backend", "llama.cpp", *quick, "--certificate", str(file))
    assert first.code == 0 and backends == ["llama.cpp"]
    assert json.loads(file.read_text())["model"]["options"]["backend"] == "llama.cpp"
    assert run("parity", "--verify", str(file)).code == 0 and backends == ["llama.cpp"] * 2


def test_the_chosen_drafters_are_checked(run: Any, target: str, draft: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "add"}\n{"turns": ["for item", "more"]}\n')
    specs = (f"model:{draft},k=3", f"model:{draft},tree=2x2x1")
    result = parity(run, target, "--drafter", specs[0], "--drafter", specs[1], "--prompts", str(prompts), "--json")
    assert result.code == 0
    checks = result.json["checks"]
    assert [c["drafter"] for c in checks if c["mode"] == "greedy"] == list(specs)
    assert {c["verifier"] for c in checks if c["mode"] == "sampled"} == {"block", "traversal"}
    assert {c["prompts"] for c in checks if c["mode"] == "greedy"} == {2}


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_rule_that_changes_the_output_fails(run: Any, target: str, draft: str, mode: str) -> None:
    rule = {"greedy": "min_block,min_accepted=3", "sampled": "lenient,lenience=0.02"}[mode]
    result = parity(
        run, target, "--drafter", f"model:{draft},k=3", "--verifier", rule, "--allow-lossy", "--json",
        "--samples", "768", "--controller", "constant", "--mode", mode, "--false-alarm", "1e-3",
    )  # fmt: skip
    assert result.code == 1
    assert result.json["passed"] is False
    assert any(check["mode"] == mode and check["differences"] for check in result.json["checks"])


def test_a_planted_error_fails(run: Any, target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain claims other distributions than those that it was drawn from."""
    arguments = ("--drafter", f"model:{draft},k=3", "--mode", "sampled", "--samples", "512", "--controller", "constant")
    assert parity(run, target, *arguments).code == 0
    finished = ModelDrafter._finished

    def wrong(self: ModelDrafter, tree: Any) -> TokenTree:
        out = finished(self, tree)
        return out if out.q is None else replace(out, q=out.q.square() / out.q.square().sum(-1, keepdim=True))

    monkeypatch.setattr(ModelDrafter, "_finished", wrong)
    failed = parity(run, target, *arguments)
    assert failed.code == 1 and "the sampled distribution differs" in failed.out


def test_a_planted_error_of_seeded_text_fails(
    run: Any, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft reverses the noise that the target is about to use."""
    arguments = ("--drafter", f"model:{draft},k=3", "--mode", "seed", "--mode", "greedy", "--temperature", "0.8")
    assert parity(run, target, *arguments).code == 0
    finished = ModelDrafter._finished

    def wrong(self: ModelDrafter, tree: Any) -> TokenTree:
        for numbers in tree.sampler.noise._cached.values() if tree.sampler.noise else ():
            numbers.neg_()
        return finished(self, tree)

    monkeypatch.setattr(ModelDrafter, "_finished", wrong)
    failed = parity(run, target, *arguments)
    assert failed.code == 1
    assert "with seed 0, alone, differs from token" in failed.out and "a real difference" in failed.out
    checks = {check["mode"]: check for check in parity(run, target, "--json", *arguments).json["checks"]}
    assert checks["seed"]["differences"] and not checks["greedy"]["differences"]
    # A rule with coins of its own has no use for the noise.
    assert parity(run, target, *arguments, "--verifier", "block").code == 0


def test_the_outputs_of_the_distribution_test_are_counted(run: Any, target: str) -> None:
    out = parity(run, target, "--drafter", "ngram", "--mode", "sampled", "--samples", "23").out
    (row,) = [line.split() for line in out.splitlines() if line.startswith(" ngram ")]
    assert row[2:4] == ["sampled", "23"] and "23 outputs each" in out


def test_the_table_keeps_its_columns_on_a_narrow_screen(run: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = parity(run, target, "--drafter", "ngram").out
    assert all(word in out for word in ("drafter", "verifier", "identical", "p-value", "sees", " ngram "))


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_what_was_checked_before_a_signal_is_printed(
    run: Any, target: str, monkeypatch: pytest.MonkeyPatch, number: int, code: int, line: str
) -> None:
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr("foretoken.lab.parity.run.check_sampled", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    result = parity(run, target, "--drafter", "ngram")
    assert result.code == code and signal.getsignal(signal.SIGTERM) == before
    assert "stopped before the end" in result.out and "greedy" in result.out
    assert result.err.splitlines()[-1] == line
    again = parity(run, target, "--drafter", "ngram", "--json")
    assert again.code == code and again.json["passed"] is False and again.json["checks"]


def test_the_printed_rate_is_the_one_that_was_tested_with(
    run: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when Ctrl-C ends the run after the first of two sampled checks."""
    limits: list[float] = []

    def first_only(subject: Any, limit: float) -> Check:
        limits.append(limit)
        if len(limits) == 2:
            raise KeyboardInterrupt
        return replace(subject.check("sampled"), p_value=0.5, sees=0.25)

    monkeypatch.setattr("foretoken.lab.parity.run.check_sampled", first_only)
    result = parity(run, target, "--drafter", "ngram", "--drafter", "suffix", "--mode", "sampled")
    assert result.code == 130 and limits == [5e-7] * 2
    assert "fails with a probability of 5e-07 (all together 5e-07)" in " ".join(result.out.split())


def test_sampling_options_reach_the_checks(run: Any, target: str) -> None:
    more = ("--temperature", "0.7", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.02", "--repetition-penalty", "1.2")
    result = parity(run, target, "--drafter", "ngram", "--drafter", "suffix", *more)
    assert result.code == 0
    assert "found with a probability of 0.9" in result.out and "1e-06" in result.out
    for wrong in (("--repetition-penalty", "0"), ("--false-alarm", "2"), ("--mode", "nosuch")):
        bad = parity(run, target, "--drafter", "ngram", *wrong)
        assert bad.code == 2 and bad.err.count("\n") == 1


def test_for_people(run: Any, target: str, draft: str) -> None:
    assert "passed" in parity(run, target, "--drafter", "ngram", "--samples", "0").out
    rule = ("--verifier", "min_block,min_accepted=3", "--allow-lossy", "--samples", "0")
    failed = parity(run, target, "--drafter", f"model:{draft}", *rule)
    assert failed.code == 1
    assert "FAILED" in failed.out and "a real difference" in failed.out


def test_a_drafter_that_does_not_fit_is_an_error_when_it_was_asked_for(run: Any, target: str) -> None:
    result = parity(run, target, "--drafter", "model")
    assert result.code == 2 and "model:PATH" in result.err


# -- toy targets -----------------------------------------------------------------------------------------------------


def test_a_table_model_has_no_outside_reference() -> None:
    target = TableModel.random(6, seed=3)
    report = run_parity(target, None, ["ngram"], [[1, 2, 1, 2]], Settings(max_new_tokens=12, samples=64))
    assert report.passed
    assert [check.mode for check in report.checks] == ["greedy", "batch", "sampled", "seed"]


def test_nothing_compared_is_not_a_pass() -> None:
    report = run_parity(TableModel.random(6), None, [], [[1]], Settings(samples=0))
    assert report.checks == [] and not report.passed


# -- differences -----------------------------------------------------------------------------------------------------


def tied(gap: float) -> TableModel:
    """After every prefix tokens 1 and 2 lead, ``gap`` apart in logits; token 0 is far behind."""
    return TableModel(lambda _: torch.softmax(torch.tensor([-9.0, 0.0, -gap], dtype=torch.float64), -1), 3)


def test_equal_outputs_have_no_difference() -> None:
    assert first_difference(tied(0.1), [0], [1, 1, 1], [1, 1, 1]) is None


def test_the_gap_is_measured_where_the_outputs_part() -> None:
    difference = first_difference(tied(0.25), [0], [1, 1, 1, 1], [1, 1, 2, 0])
    assert difference is not None
    assert (difference.position, difference.is_tie) == (2, False)
    assert difference.logit_gap == pytest.approx(0.25)


def test_a_gap_within_rounding_is_a_tie_and_a_wrong_token_is_not() -> None:
    target = tied(1e-12)
    near, wrong = first_difference(target, [0], [1], [2]), first_difference(target, [0], [1], [0])
    assert near is not None and near.is_tie
    assert wrong is not None and not wrong.is_tie


def test_an_output_that_ends_early_is_a_real_difference() -> None:
    difference = first_difference(tied(0.0), [0], [1, 1, 1], [1, 1])
    assert difference == Difference(2, None, difference.tolerance if difference else 0.0)
    assert difference is not None and not difference.is_tie


def test_the_tolerance_follows_the_dtype() -> None:
    logits = torch.tensor([-float("inf"), 20.0, 3.0])
    sizes = [tie_tolerance(logits.to(dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert sizes[0] < sizes[1] < sizes[2] < 1


def test_next_logits_release_their_sequence(target: str) -> None:
    from foretoken.loading import load_model

    model = load_model(target)
    first, second = next_logits(model, [1, 2, 3], []), next_logits(model, [1, 2], [3])
    assert torch.equal(first, second) and first.shape == (320,)
    assert model._sequences == []  # type: ignore[attr-defined]


# -- statistics ------------------------------------------------------------------------------------------------------


def test_chi_square_is_scipys() -> None:
    counts, expected = torch.tensor([30.0, 14.0, 34.0, 45.0]), torch.tensor([25.0, 25.0, 35.0, 38.0])
    assert upper_tail(*chi_square(counts, expected)) == pytest.approx(chisquare(counts, expected).pvalue, rel=1e-6)


def test_small_cells_are_merged_and_impossible_tokens_fail() -> None:
    assert upper_tail(*chi_square(torch.tensor([1.0, 0.0, 50.0]), torch.tensor([0.5, 0.5, 50.0]))) > 0.5
    assert upper_tail(*chi_square(torch.tensor([1.0, 50.0]), torch.tensor([0.0, 51.0]))) == 0.0


def test_places_of_true_draws_are_uniform_and_those_of_others_are_not() -> None:
    distribution = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    wrong = torch.tensor([0.35, 0.35, 0.2, 0.1], dtype=torch.float64)
    generator, coins = torch.Generator().manual_seed(5), Rng(6)
    for drawn_from, is_right in ((distribution, True), (wrong, False)):
        tokens = torch.multinomial(drawn_from, 1000, replacement=True, generator=generator).tolist()
        p_value = upper_tail(*uniformity([uniform_value(distribution, token, coins.uniform()) for token in tokens]))
        assert (p_value > 1e-3) is is_right
    assert upper_tail(*uniformity([uniform_value(torch.tensor([1.0, 0.0]), 1, 0.5)] * 9)) == 0.0


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "three"}).encode()))
    (tmp_path / "c.jsonl").write_text(json.dumps({"conversations": [{"from": "human", "value": "four"}]}))
    assert [prompt.text for prompt in read_prompts(tmp_path / "a.txt")] == ["one", "two"]
    assert [prompt.text for prompt in read_prompts(tmp_path / "b.jsonl.gz")] == ["three"]
    assert read_prompts(tmp_path / "c.jsonl")[0].messages == ({"role": "user", "content": "four"},)
    assert len(read_prompts(None)) >= 3
    (tmp_path / "c.jsonl").write_text('{"prompt": "fine"}\n{"messages": [{"role": "user"}]}\n')
    with pytest.raises(ValueError, match=r"c.jsonl, line 2: message 1 needs a 'content'"):
        read_prompts(tmp_path / "c.jsonl")
