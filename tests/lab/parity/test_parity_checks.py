"""Parity as a library: planted errors are caught, right parts pass, and the report says what it would have seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity_toys import PROMPTS, SURE, Planted, differences, models, parity
from scipy.stats import chi2, ncx2
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict
from foretoken.engine.stopping import Stopper
from foretoken.lab.parity.distribution import Evidence, noncentral_tail, smallest_seen, uniform_value
from foretoken.lab.parity.report import MODES, Settings
from foretoken.lab.parity.run import run_parity
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.verifiers.base import Coins, Verifier, draw
from foretoken.models.base import SequenceState
from toys import MarkovTable, llamas, tables

# -- what is right passes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", ["auto", "constant,k=3", "heuristic", "goodput"])
def test_a_right_drafter_passes_every_check(controller: str) -> None:
    target, draft = models(eos_token_ids=(3,))
    report = parity(ModelDrafter(draft, k=3), target, controller=controller)
    assert report.passed
    modes = [check.mode for check in report.checks]
    assert modes == ["greedy", "batch", "stop", "sampled", "seed"]
    assert controller == "goodput" or all(check.drafted for check in report.checks)


def test_a_network_passes_with_filters_and_penalties() -> None:
    target, draft = llamas(vocab=6)
    sampling = {"temperature": 0.8, "top_k": 5, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2}
    report = run_parity(
        target,
        None,
        [ModelDrafter(draft, k=3), ModelDrafter(draft, tree="2x2")],
        PROMPTS,
        Settings(max_new_tokens=6, samples=32, sampling=sampling, false_alarm=SURE),
    )
    assert report.passed
    assert [c.mode for c in report.checks if c.drafter == "none"] == ["transformers"]  # penalties are the same there
    assert {c.mode for c in report.checks if c.drafter != "none"} == set(MODES) - {"stop"}  # it has no end-of-text id


def test_bans_of_the_checkpoint_do_not_change_the_text_compared_with() -> None:
    """``generate`` takes from the checkpoint's configuration what a request leaves open."""
    target, draft = llamas(vocab=6)
    target.model.generation_config.no_repeat_ngram_size = 1
    settings = Settings(max_new_tokens=6, samples=8, false_alarm=SURE, modes=["greedy", "transformers"])
    assert run_parity(target, None, [ModelDrafter(draft, k=3)], PROMPTS, settings).passed
    assert target.model.generation_config.no_repeat_ngram_size == 1


def test_modes_are_chosen() -> None:
    assert set(differences(parity(ModelDrafter(models()[1], k=3), modes=["seed", "greedy"]))) == {"greedy", "seed"}


def test_a_prediction_is_given_to_drafters_that_use_it() -> None:
    report = run_parity(
        models()[0], None, ["prediction"], PROMPTS, Settings(samples=16, max_new_tokens=12, controller="constant")
    )
    assert report.passed
    assert all(check.drafted for check in report.checks)


def test_a_drafter_whose_files_cannot_be_read_is_skipped_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(spec: Any, *_: Any, **__: Any) -> Any:
        if str(spec).startswith("ngram") and "cache" not in str(spec):
            return NgramDrafter(n=2, k=3)
        raise OSError("a disk\nerror")

    monkeypatch.setattr("foretoken.lab.parity.run.build_drafter", build)
    settings = Settings("toy", samples=0, max_new_tokens=6, modes=["greedy"])
    report = run_parity(models()[0], None, None, PROMPTS, settings)
    assert report.passed and {check.drafter for check in report.checks} == {"ngram"}
    assert report.skipped and all(line.endswith(": a disk error") for line in report.skipped)


def test_auto_is_what_load_takes() -> None:
    report = run_parity(models()[0], None, ["auto"], PROMPTS, Settings("toy", samples=16, max_new_tokens=12))
    assert report.passed and {check.drafter for check in report.checks} == {"auto"}


# -- planted errors in drafters and rules ----------------------------------------------------------------------------


class WrongDistributionRecorded(Planted):
    def choose(self, distribution: Tensor, rng: Rng) -> int:
        return draw(distribution**2, rng.uniform())


class DropsUnlikely(Planted):
    def keeps(self, distribution: Tensor, token: int) -> bool:
        return float(distribution[token]) >= 0.3


class BreaksOff(Planted):
    def propose(self, context: Context, budget: Budget) -> TokenTree:
        raise KeyError(17)


class AcceptsAll(Verifier):
    name = "rejection"
    kinds = frozenset({Kind.IID, Kind.POINT})
    chains_only = True

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        return Verdict(tuple(range(1, len(tree))), coins.draw(scores.p(len(tree) - 1)), True)


def test_the_plain_drafter_passes() -> None:
    assert parity(Planted()).passed


@pytest.mark.parametrize("drafter", [WrongDistributionRecorded, DropsUnlikely])
def test_wrong_drafters_are_caught_by_the_distribution_alone(drafter: type[Planted]) -> None:
    report = parity(drafter(), samples=1500)
    assert {mode for mode, count in differences(report).items() if count} == {"sampled"}
    assert report.differs and not report.passed


def test_a_rule_that_accepts_all_is_caught_everywhere() -> None:
    counts = differences(parity(Planted(), verifier=AcceptsAll()))
    assert counts["greedy"] and counts["batch"] and counts["sampled"]


def test_what_breaks_off_is_a_difference_and_the_others_go_on() -> None:
    settings = Settings(max_new_tokens=8, samples=32, controller="constant")
    report = run_parity(models()[0], None, [BreaksOff(), "ngram"], PROMPTS, settings)
    broken = [check for check in report.checks if check.drafter == "model"]
    assert all(check.differences == check.prompts for check in broken)
    assert "KeyError: 17" in broken[0].notes[0] and "test_parity_checks.py" in broken[0].notes[0]
    assert not any(check.differences for check in report.checks if check.drafter == "ngram")


# -- planted errors in the target ------------------------------------------------------------------------------------


class ForgetfulTable(MarkovTable):
    """Keeps the wrong token of every accepted draft in what its distribution looks at."""

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        super().commit(sequence, path)
        if len(path) > 1:
            sequence.tokens[-1] = (sequence.tokens[-1] + 1) % self.vocab_size


def test_a_corrupted_table_is_caught() -> None:
    right, draft = tables(closeness=0.9, seed=3)
    report = parity(ModelDrafter(draft, k=1), ForgetfulTable(right.table, right.vocab_size))
    counts = differences(report)
    assert counts["greedy"] and counts["batch"] and counts["sampled"]


@pytest.mark.parametrize("tree", ["", "2x2"])
def test_a_corrupted_cache_is_caught(monkeypatch: pytest.MonkeyPatch, tree: str) -> None:
    target, draft = llamas(vocab=6)
    commit = type(target).commit

    def wrong(self: Any, sequence: SequenceState, path: Sequence[int]) -> None:
        commit(self, sequence, path)
        if self is target and len(path) > 1:  # the entry of an accepted token is not the one that was computed
            place = len(sequence.tokens) - 1
            for store in (*self.cache.keys, *self.cache.values):
                store[sequence.row, :, place] = store[sequence.row, :, 0]

    settings = Settings(max_new_tokens=24, samples=0, modes=["greedy", "transformers", "batch"], controller="constant")
    drafter = ModelDrafter(draft, k=3, tree=tree)
    assert run_parity(target, None, [drafter], PROMPTS, settings).passed
    monkeypatch.setattr(type(target), "commit", wrong)
    report = run_parity(target, None, [drafter], PROMPTS, settings)
    assert all(differences(report).values())


def test_twins_that_disturb_each_other_are_caught_in_the_batch() -> None:
    class Mixed(MarkovTable):
        """Gives the rows of a batch in the wrong order."""

        def forward(self, feeds: Any, taps: Sequence[str] = ()) -> Any:
            rows = super().forward(feeds, taps)
            same = len({len(row.logits) for row in rows}) == 1
            return rows[1:] + rows[:1] if same else rows

    right, draft = models()
    report = parity(ModelDrafter(draft, k=3), Mixed(right.table, right.vocab_size), modes=["greedy", "batch"])
    assert differences(report)["greedy"] == 0 and differences(report)["batch"] > 0


def test_an_output_that_goes_on_behind_its_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tables(closeness=0.9, seed=3, eos_token_ids=(3,))
    push = Stopper.push

    def only_the_last(self: Stopper, tokens: Sequence[int]) -> Any:
        """Looks for an end in the round's last token only: plain decoding never notices."""
        _, reason = push(self, tokens[-1:])
        return len(tokens), reason

    assert not parity(ModelDrafter(draft, k=3), target, modes=["stop"]).differs
    monkeypatch.setattr(Stopper, "push", only_the_last)
    assert differences(parity(ModelDrafter(draft, k=3), target, modes=["stop"]))["stop"] > 0


# -- what the distribution test would see
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("freedom", "noncentrality"), [(1, 0.0), (5, 2.5), (19, 60.0)])
def test_noncentral_tail_is_scipys(freedom: int, noncentrality: float) -> None:
    expected = ncx2.sf(30.0, freedom, noncentrality) if noncentrality else chi2.sf(30.0, freedom)
    assert noncentral_tail(30.0, freedom, noncentrality) == pytest.approx(expected, rel=1e-8)


def test_a_difference_of_the_size_that_is_seen_is_found_nine_times_in_ten() -> None:
    """Simulated: a distribution on two cells moved by exactly that total variation (there the bound is sharp)."""
    draws, level = 400, 1e-3
    seen = smallest_seen(draws, 1, level)
    counts = torch.binomial(torch.full((4000,), float(draws)), torch.full((4000,), 0.5 + seen))
    statistic = (counts - draws / 2).square() / (draws / 4)
    share = float((statistic > chi2.isf(level, 1)).float().mean())
    assert share == pytest.approx(0.9, abs=0.03)


def _tilted(p: torch.Tensor, by: float) -> torch.Tensor:
    """[V] with a mass of ``by`` moved from the half of unlikely tokens to the others, or back where it is negative."""
    order = p.argsort(descending=True)
    likely = p[order].cumsum(0) - p[order] < 0.5
    q, high, low = p.clone(), order[likely], order[~likely]
    q[high] += by * p[high] / p[high].sum()
    q[low] -= by * p[low] / p[low].sum()
    return q


def _evidence(by: float, drawn: torch.Generator) -> Evidence:
    """Twelve prompts have first tokens that are wrong in alternating directions: together they look right."""
    evidence, coins = Evidence(), Rng(int(torch.randint(1000, (1,), generator=drawn)))
    for prompt in range(12):
        p = torch.softmax(torch.randn(24, generator=torch.Generator().manual_seed(prompt), dtype=torch.float64), 0)
        q = _tilted(p, by if prompt % 2 else -by)
        tokens = torch.multinomial(q, 60, replacement=True, generator=drawn).tolist()
        evidence.followers[prompt, ()], evidence.distributions[prompt, ()] = tokens, p
        evidence.values += [uniform_value(p, token, coins.uniform()) for token in tokens]
    return evidence


def test_what_the_tables_see_is_found_even_where_errors_cancel_in_all_of_them() -> None:
    """The histogram of places cannot promise it.  A little of the error is lost where cells are merged."""
    limit, drawn = 1e-3, torch.Generator().manual_seed(7)
    seen = _evidence(0.0, drawn).sees(limit)
    pvalues = [_evidence(seen, drawn).p_value() for _ in range(60)]
    assert seen < 0.25 and sum(p < limit for p in pvalues) >= 45


def test_more_samples_see_more_and_none_see_nothing() -> None:
    sizes = [smallest_seen(draws, 19, 1e-4) for draws in (0, 10, 250, 1000, 4000)]
    assert sizes[0] == 1.0 and sizes == sorted(sizes, reverse=True)
    assert sizes[4] == pytest.approx(sizes[3] / 2)
    assert smallest_seen(100, 0, 1e-3) == 1.0


def test_the_report_and_its_json_say_what_it_sees() -> None:
    checks = [parity(Planted(), samples=n, modes=["sampled"]).checks[0] for n in (100, 800)]
    assert checks[0].sees is not None and checks[1].sees is not None
    assert 0 < checks[1].sees < checks[0].sees < 1
    shown = checks[0].public()
    assert (shown["sees"], shown["notes"], shown["drafted"]) == (checks[0].sees, checks[0].notes, checks[0].drafted)
    assert shown["tried"] is True


# -- bad settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"samples": -1}, "--samples"),
        ({"false_alarm": 0.0}, "--false-alarm"),
        ({"false_alarm": 1.5}, "--false-alarm"),
        ({"modes": ["greedy", "nosuch"]}, "nosuch"),
        ({"sampling": {"top_p": 2.0}}, "top_p"),
        ({"seed": -1}, "a seed must be"),
    ],
)
def test_bad_settings(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Settings(**wrong)


def test_what_does_not_fit_is_found_before_anything_runs() -> None:
    target, draft = models()
    with pytest.raises(ValueError, match="prompt"):
        run_parity(target, None, ["ngram"], [], Settings())
    with pytest.raises(ValueError, match="plain decoding itself"):
        run_parity(target, None, ["none"], PROMPTS, Settings())
    with pytest.raises(ValueError, match="traversal"):
        run_parity(target, None, [ModelDrafter(draft, tree="2x2")], PROMPTS, Settings(verifier="rejection"))
    assert target.forward_calls == 0
