"""Parity of sampled outputs: a seeded text is plain decoding's, and an unseeded one can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity_toys import PROMPTS, Planted, differences, models, parity
from torch import Tensor

from foretoken.core import Budget, Context, Rng, Scores, TokenTree, Verdict
from foretoken.core.noise import Noise, random_seed
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.lab.parity import distribution as parity_distribution
from foretoken.lab.parity.checks import Reference
from foretoken.lab.parity.difference import first_difference
from foretoken.lab.parity.report import Check, Report, Settings
from foretoken.lab.parity.run import run_parity
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.suffix import SuffixDrafter
from foretoken.methods.verifiers.base import Coins, Verifier, draw, walk_down
from foretoken.methods.verifiers.block import BlockVerifier
from foretoken.methods.verifiers.coupled import CoupledVerifier
from foretoken.methods.verifiers.point import PointVerifier
from foretoken.methods.verifiers.rejection import RejectionVerifier
from foretoken.models.other.table import TableModel

SEED = 5


def seeds_only(drafter: Any, target: Any = None, **more: Any) -> Check:
    (check,) = parity(drafter, target, modes=["seed"], **more).checks
    return check


# -- what a seed promises --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", ["auto", "bandit,c=0.1", "goodput"])
@pytest.mark.parametrize("verifier", ["auto", "coupled"])
def test_a_seeds_text_is_plain_decodings(verifier: str, controller: str) -> None:
    """Whatever the controller measures, and whatever a drafter learns meanwhile."""
    for drafter in (ModelDrafter(models()[1], tree="2x2"), SuffixDrafter(share=True)):
        check = seeds_only(drafter, verifier=verifier, controller=controller)
        assert (check.verifier, check.prompts, check.identical) == ("coupled", 3 * len(PROMPTS), 3 * len(PROMPTS))
        assert check.p_value is None and not check.notes


def test_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt alone, and twice in one batch, with the seeds and options of the settings."""
    requests: list[tuple[int | None, float, int]] = []
    add = Engine.add

    def noted(self: Engine, request: Request) -> int:
        if self.drafter is not None:
            requests.append((request.seed, request.params.temperature, request.params.top_k))
        return add(self, request)

    monkeypatch.setattr(Engine, "add", noted)
    last = 2**64 - 1
    check = seeds_only(ModelDrafter(models()[1]), seed=last - 1, sampling={"temperature": 0.7, "top_k": 3})
    seeds = [last - 1, last, 0, 1, 2, 3]  # they start anew at the end
    assert requests == [(seed, 0.7, 3) for seed in [*seeds[:3], *seeds]]
    assert check.identical == 9 and check.drafted


class ReadsCoinsOfItsOwn(Planted):
    """The draws come from elsewhere, so that nobody can repeat them."""

    def choose(self, distribution: Tensor, rng: Rng) -> int:
        return draw(distribution, Rng(random_seed()).uniform())


def test_other_draws_of_a_drafter_change_no_coupled_text_but_that_of_other_rules() -> None:
    assert parity(ReadsCoinsOfItsOwn()).passed
    report = parity(ReadsCoinsOfItsOwn(), verifier=RejectionVerifier())
    assert {mode for mode, count in differences(report).items() if count} == {"seed"}
    check = report.checks[-1]
    assert (check.verifier, check.prompts) == ("rejection", 2 * len(PROMPTS))
    assert "the same batch gives another text when repeated, a real difference" in check.notes[0]
    assert check.identical + check.differences == check.prompts


def test_a_rule_with_coins_of_its_own_gives_the_same_batch_again() -> None:
    for controller in ("auto", "goodput", "constant,k=2"):
        check = seeds_only(ModelDrafter(models()[1], k=3), verifier="block", controller=controller)
        assert (check.verifier, check.identical, check.prompts) == ("block", 6, 6) and check.drafted


def test_what_has_no_seed_to_keep() -> None:
    """A drafter that learns drafts differently the second time, and a rule for temperature 0 draws nothing."""
    learns = parity(SuffixDrafter(share=True), verifier=PointVerifier(), modes=["seed"])
    greedy = parity(ModelDrafter(models()[1]), verifier="greedy", modes=["seed"])
    assert learns.checks == greedy.checks == []
    assert seeds_only(SuffixDrafter(share=False), verifier=PointVerifier()).identical == 6


# -- planted errors --------------------------------------------------------------------------------------------------


class ScribblesOnTheNoise(Planted):
    """Reverses the noise of the next position, which the target is about to use."""

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        tree = super().propose(context, budget)
        if context.sampler.noise is not None:
            place = len(context.tokens) - context.prompt_length
            context.sampler.noise.gumbels(place, self.model.vocab_size, torch.device("cpu")).neg_()
        return tree


class TakesTheRootsNoise(CoupledVerifier):
    """Gives every node the noise of the first new token."""

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        scores.lengths = [len(scores.prefix)] * len(tree)
        scores.as_requested = None
        return super().decide_fast(tree, scores, coins)


class AcceptsLikely(CoupledVerifier):
    """Takes a draft that is likely, whatever the noise says."""

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def choose(node: int, children: Sequence[int]) -> int:
            likely = [tree.tokens[child] for child in children if float(scores.p(node)[tree.tokens[child]]) > 0.15]
            return likely[0] if likely else scores.choice(node)

        return walk_down(tree, choose)


def check_planted(report: Report) -> None:
    """The error is caught by the seeds alone, as real differences."""
    assert {mode for mode, count in differences(report).items() if count} == {"seed"}
    seeds = report.checks[-1]
    assert seeds.differences and not seeds.ties and not report.passed
    assert any("a real difference" in note and "alone" in note for note in seeds.notes)
    assert any("a real difference" in note and "in a batch" in note for note in seeds.notes)


def test_a_drafter_that_changes_the_noise_is_caught() -> None:
    check_planted(parity(ScribblesOnTheNoise()))


@pytest.mark.parametrize("rule", [TakesTheRootsNoise, AcceptsLikely])
def test_a_coupled_rule_that_is_wrong_is_caught(rule: type[Verifier]) -> None:
    check_planted(parity(ModelDrafter(models()[1], k=3), verifier=rule(), modes=["greedy", "seed"]))


# -- ties ------------------------------------------------------------------------------------------------------------


class Rounded(CoupledVerifier):
    """Takes the second best token where it is nearly the best, as rounding might."""

    near = 1e-2

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def choose(node: int, children: Sequence[int]) -> int:
            best = scores.ranking(node).topk(2)
            gap = float(best.values[0] - best.values[1])
            return int(best.indices[int(gap < self.near)])

        return walk_down(tree, choose)


def nearly_tied(gap: float) -> TableModel:
    """A model whose tokens 1 and 2 are ``gap`` apart at the fourth new token of a prompt of one token and this seed."""
    noise = Noise(SEED).gumbels(3, 3, torch.device("cpu"))

    def distribution(prefix: tuple[int, ...]) -> Tensor:
        if len(prefix) != 4:
            return torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        return torch.softmax(torch.tensor([-9.0, 0.0, -gap], dtype=torch.float64) - noise, -1)

    return TableModel(distribution, 3)


@pytest.mark.parametrize(("gap", "ties"), [(1e-11, 2), (1e-3, 0)])
def test_a_gap_within_rounding_is_a_tie_and_a_larger_one_is_not(gap: float, ties: int) -> None:
    settings = Settings(modes=["seed"], verifier=Rounded(), seed=SEED, max_new_tokens=8, controller="constant")
    (check,) = run_parity(nearly_tied(gap), None, ["ngram,n=1"], [[0]], settings).checks
    assert (check.identical, check.ties, check.differences) == (1, ties, 2 - ties)  # the other seed has no such gap
    assert "seed 5, alone, differs from token 3 on" in check.notes[0]


# -- differences of seeded outputs -----------------------------------------------------------------------------------


def gap_of(first: int, other: int, logits: Sequence[float], **params: Any) -> float | None:
    """The gap between two first tokens, where the race would be even if all logits were 0."""
    noise = Noise(SEED)
    even = noise.gumbels(0, len(logits), torch.device("cpu"))
    temperature = params.setdefault("temperature", 1.0)
    distribution = torch.softmax(torch.tensor(logits, dtype=torch.float64) - temperature * even, -1)
    sampler = Sampler(SamplingParams(**params), 1, noise)
    difference = first_difference(TableModel(lambda _: distribution, len(logits)), [0], [first], [other], sampler)
    assert difference is not None and difference.position == 0
    return difference.logit_gap


@pytest.mark.parametrize("temperature", [1.0, 0.25, 3.0])
def test_the_gap_is_one_of_logits_at_every_temperature(temperature: float) -> None:
    gap = gap_of(1, 2, [-1.0, 0.0, -0.125], temperature=temperature)
    assert gap == pytest.approx(0.125)
    assert gap_of(0, 2, [-1.0, 0.0, -0.125], temperature=temperature) == pytest.approx(1.0)


def test_the_gap_is_one_of_penalised_logits() -> None:
    """Logits 4 and 2: token 0 was in the prompt, so a penalty of 2 makes them equal."""
    target = TableModel(lambda _: torch.softmax(torch.tensor([4.0, 2.0, -5.0], dtype=torch.float64), -1), 3)
    logits = target.distribution([0]).log()
    raw = first_difference(target, [0], [0], [1])
    assert raw is not None and raw.logit_gap == pytest.approx(2.0)
    params = SamplingParams(repetition_penalty=float(logits[1] / logits[0]))
    tied = first_difference(target, [0], [0], [1], Sampler(params, 1))
    assert tied is not None and tied.is_tie and tied.logit_gap == pytest.approx(0.0, abs=1e-9)


def distribution_gap(
    distribution: Sequence[float], tokens: tuple[int, int], seed: int, **params: Any
) -> tuple[bool, float | None]:
    """Whether two first tokens are a tie, and their gap."""
    target = TableModel(lambda _: torch.tensor(distribution, dtype=torch.float64), len(distribution))
    sampler = Sampler(SamplingParams(temperature=1.0, **params), 1, Noise(seed))
    difference = first_difference(target, [0], tokens[:1], tokens[1:], sampler)
    assert difference is not None
    return difference.is_tie, difference.logit_gap


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.75}, {"min_p": 0.5}])
def test_rounding_may_move_a_token_over_the_border_of_a_filter(filters: dict[str, Any]) -> None:
    """Two tokens are kept; the third is so near to the border that rounding might keep it, and then it would follow."""
    near, far = [0.5, 0.25 + 1e-12, 0.25 - 1e-12], [0.5, 0.26, 0.24]
    winner = {}
    for seed in range(100):  # a seed with which the third token wins the race that the filter keeps it from
        noise = Noise(seed).gumbels(0, 3, torch.device("cpu"))
        order = (torch.tensor(near, dtype=torch.float64).log() + noise).argsort(descending=True).tolist()
        winner.setdefault(order[0], (seed, order))
    seed, order = winner[2]
    assert distribution_gap(near, (order[1], 2), seed, **filters) == (True, 0.0)
    assert distribution_gap(far, (order[1], 2), seed, **filters) == (False, None)  # excluded, and no gap tells how far
    # Where the border token is the right one, an output without it is a tie too; the far one is not to be left out.
    seed, order = winner[1]
    assert distribution_gap(near, (1, order[1]), seed, **filters)[0]
    assert not distribution_gap([0.5, 0.3, 0.2], (1, 0), seed, **filters)[0]


def test_drawn_outputs_cannot_be_compared() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), 1)
    with pytest.raises(ValueError, match="noise of their seed"):
        first_difference(models()[0], [0], [1], [1], sampler)


class PrefersNoise(Planted):
    traits = replace(Planted.traits, prefers_noise=True)


@pytest.mark.parametrize(("drafter", "rule"), [(Planted, "block"), (PrefersNoise, "coupled")])
def test_the_report_names_the_rule_that_was_used(
    monkeypatch: pytest.MonkeyPatch, drafter: type[Planted], rule: str
) -> None:
    """Without a seed it is the drafter's best one."""
    used = set()
    for cls in (BlockVerifier, CoupledVerifier):

        def noted(
            self: Verifier, tree: TokenTree, scores: Scores, coins: Coins, real: Any = cls.decide_fast
        ) -> Verdict:
            if len(tree) > 1:
                used.add(self.name)
            verdict: Verdict = real(self, tree, scores, coins)
            return verdict

        monkeypatch.setattr(cls, "decide_fast", noted)
    assert [check.verifier for check in parity(drafter(), modes=["sampled"], samples=64).checks] == [rule] == list(used)
    assert seeds_only(drafter()).verifier == "coupled"


# -- without a seed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["auto", "rejection"])
def test_the_distribution_is_that_of_requests_without_a_seed(monkeypatch: pytest.MonkeyPatch, verifier: str) -> None:
    seeds: list[int | None] = []
    drawn: list[Any] = []
    add, collect = Engine.add, parity_distribution._collect

    def noted(self: Engine, request: Request) -> int:
        if request.params.temperature > 0:
            seeds.append(request.seed)
        return add(self, request)

    def kept(reference: Reference, outputs: Any) -> Any:
        drawn.append(outputs)
        return collect(reference, outputs)

    monkeypatch.setattr(Engine, "add", noted)
    monkeypatch.setattr(parity_distribution, "_collect", kept)
    before = torch.get_rng_state()
    drafter = ModelDrafter(models()[1], k=3)
    reports = [parity(drafter, modes=["sampled"], samples=96, verifier=verifier, seed=seed) for seed in (1, 1, 2)]
    assert seeds == [None] * (3 * 96)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's own draws go on as they would
    assert drawn[0] == drawn[1] != drawn[2]
    assert reports[0].checks[0].verifier == ("block" if verifier == "auto" else "rejection")
