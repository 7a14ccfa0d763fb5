"""Planted errors in coupled sampling: each is caught by equality with seeded plain decoding, or by a test of the
distribution where plain decoding has the error too; errors of the draft alone cost acceptance and change no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from matrix import SAMPLED_MODES
from torch import Tensor

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request, Running
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.verifiers import batched
from foretoken.methods.verifiers.base import Coins, Verifier, residual, verdict_at, walk_down
from foretoken.methods.verifiers.coupled import CoupledVerifier
from foretoken.models.base import Feed, LanguageModel, Rows
from foretoken.models.other.table import TableModel
from toys import (
    CAUGHT,
    FALSE_ALARM,
    Distribution,
    MarkovTable,
    engine,
    joint_distribution,
    llamas,
    outputs,
    p_value,
    serve,
    tables,
)

PROMPTS = ([0, 1, 2, 3, 0, 1], [2], [3, 3, 1])
LENGTH = 24
TOKENS = 2
TEXTS = 800
CAUGHT_TEXTS = 3
"""A planted error counts as caught by equality when so many of the twelve texts differ.  One would do."""
T1 = SamplingParams(temperature=1.0)
FILTERS = SamplingParams(temperature=0.8, top_k=2)
Models = tuple[LanguageModel, LanguageModel]
Build = Callable[[LanguageModel], Drafter]


def chain(draft: LanguageModel) -> Drafter:
    return ModelDrafter(draft, k=3)


def tree(draft: LanguageModel) -> Drafter:
    return ModelDrafter(draft, tree="2x2x1")


def requests(params: SamplingParams = T1, seeds: int = 4) -> list[Request]:
    return [Request(prompt, params, LENGTH, seed=seed) for seed in range(seeds) for prompt in PROMPTS]


def differences(speculative: Engine, plain: Engine, params: SamplingParams = T1) -> int:
    """How many texts of a handful of seeds and prompts differ from seeded plain decoding."""
    both = zip(outputs(speculative, requests(params)), outputs(plain, requests(params)), strict=True)
    return sum(text != plain_text for text, plain_text in both)


def rate(runs: Sequence[Running]) -> float:
    """Accepted draft tokens per round."""
    return sum(r.stats.num_accepted_tokens for r in runs) / sum(r.stats.num_drafts for r in runs)


def pair_chance(speculative: Engine, target: LanguageModel, params: SamplingParams = T1, texts: int = TEXTS) -> float:
    """How likely a right engine is to miss the joint distribution of the first two output tokens that much."""
    exact: Distribution = joint_distribution(target, params, PROMPTS[0], TOKENS)
    written = outputs(speculative, [Request(PROMPTS[0], params, TOKENS, seed=seed) for seed in range(texts)])
    return p_value({"": written}, {"": exact}, TOKENS)


# -- the right code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", [tables, llamas], ids=["tables", "llamas"])
@pytest.mark.parametrize("build", [chain, tree, lambda _: NgramDrafter(n=2, k=4)], ids=["chain", "tree", "ngram"])
@pytest.mark.parametrize("mode", ["T=1", *(mode for mode in SAMPLED_MODES if mode != "T=1")])
def test_the_right_code_writes_what_plain_decoding_writes(models: Any, build: Build, mode: str) -> None:
    target, draft = models()
    params = SAMPLED_MODES[mode]
    accepted = 0
    plain = outputs(engine(target), requests(params, 2))
    for size in (1, 5):
        runs = serve(engine(target, build(draft), max_batch=size), requests(params, 2))
        assert [run.output for run in runs] == plain
        accepted += sum(run.stats.num_accepted_tokens for run in runs)
    assert accepted and len({tuple(text) for text in plain}) > 1


@pytest.mark.parametrize("build", [None, chain, tree], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("params", [T1, FILTERS], ids=["T=1", "filters"])
def test_the_right_code_has_the_targets_distribution(build: Build | None, params: SamplingParams) -> None:
    target, draft = tables()
    assert pair_chance(engine(target, build(draft) if build else None), target, params) > FALSE_ALARM


# -- noise of the wrong place ----------------------------------------------------------------------------------------


def test_noise_reused_at_the_next_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both arms share this error, and agree: only the distribution of pairs can tell."""
    exponentials = Noise.exponentials
    monkeypatch.setattr(Noise, "exponentials", lambda self, position, size: exponentials(self, position // 2, size))
    target, draft = tables()
    for build in (None, chain, tree):
        speculative = engine(target, build(draft) if build else None)
        assert differences(speculative, engine(target)) == 0
        assert pair_chance(speculative, target) < CAUGHT


def test_one_noise_for_all_positions_of_a_round_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding is right here: a round of one node has one position."""
    target, draft = tables()
    monkeypatch.setattr(Scores, "lengths", property(lambda self: [len(self.prefix)] * len(self.tree)))
    assert pair_chance(engine(target), target) > FALSE_ALARM
    for build in (chain, tree):
        assert differences(engine(target, build(draft)), engine(target)) >= CAUGHT_TEXTS


@pytest.mark.parametrize(
    "place",
    [
        lambda scores: [len(scores.prefix) + node for node in range(len(scores.tree))],
        lambda scores: [len(scores.prefix) + depth + scores.tree.num_drafts for depth in scores.tree.depths],
        lambda scores: [len(scores.prefix) + depth + 1000 * (depth > 0) for depth in scores.tree.depths],
        lambda scores: [len(scores.prefix) + depth + sum(scores.tree.tokens) for depth in scores.tree.depths],
    ],
    ids=["node-index", "number-of-drafts", "drafted-or-not", "drafted-tokens"],
)
def test_noise_that_depends_on_the_tree_is_caught(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that are right for one round and depend on what was drafted: another text with every drafter."""
    target, draft = tables()
    plain = outputs(engine(target), requests())
    monkeypatch.setattr(Scores, "lengths", property(place))
    texts = outputs(engine(target, tree(draft)), requests())
    assert sum(text != plain_text for text, plain_text in zip(texts, plain, strict=True)) >= CAUGHT_TEXTS


def test_noise_from_a_stream_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next numbers of a generator, whatever the position: right in distribution, and another text."""
    exponentials = Noise.exponentials

    def following(self: Noise, position: int, size: int) -> Tensor:
        self.__dict__["asked"] = self.__dict__.get("asked", -1) + 1
        return exponentials(self, self.__dict__["asked"], size)

    target, draft = tables()
    monkeypatch.setattr(Noise, "exponentials", following)
    monkeypatch.setattr(Noise, "gumbels", lambda self, n, size, device: -self.exponentials(n, size).log())
    assert pair_chance(engine(target), target) > FALSE_ALARM
    assert differences(engine(target, chain(draft)), engine(target)) >= CAUGHT_TEXTS


def test_noise_that_all_requests_share_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality with plain decoding holds, every text alone is fine, and their distribution is one text."""
    exponentials = Noise.exponentials
    monkeypatch.setattr(Noise, "exponentials", lambda self, position, size: exponentials(Noise(0), position, size))
    target, draft = tables()
    assert differences(engine(target, chain(draft)), engine(target)) == 0
    assert pair_chance(engine(target, chain(draft)), target) < CAUGHT


# -- errors of the draft alone ---------------------------------------------------------------------------------------


def without_text_change(patch: Callable[[], Any], build: Build, params: SamplingParams = T1) -> tuple[float, float]:
    """Accepted per round before and after an error of the draft, which leaves all texts as they are."""
    target, draft = tables(closeness=0.7)
    plain = outputs(engine(target), requests(params))
    before = serve(engine(target, build(draft)), requests(params))
    patch()
    after = serve(engine(target, build(draft)), requests(params))
    assert [run.output for run in before] == [run.output for run in after] == plain
    return rate(before), rate(after)


@pytest.mark.parametrize("build", [chain, tree], ids=["chain", "tree"])
def test_the_wrong_position_in_the_draft_costs_acceptance_only(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def patch() -> None:
        length = Growing.length
        monkeypatch.setattr(Growing, "length", lambda self, node: length(self, node) + 1)

    before, after = without_text_change(patch, build)
    assert after < before - 0.3


def unfiltered(sampler: Sampler) -> Sampler:
    return Sampler(SamplingParams(temperature=sampler.params.temperature), sampler.prompt_length, sampler.noise)


@pytest.mark.parametrize("build", [chain, tree], ids=["chain", "tree"])
def test_an_unfiltered_draft_changes_no_text(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain loses acceptance by it; the siblings of a tree cover more of the target's tokens in return."""

    def patch() -> None:
        begin = ModelDrafter._begin

        def begun(self: ModelDrafter, *args: Any) -> Growing:
            growing = begin(self, *args)
            growing.sampler = unfiltered(growing.sampler)
            growing.ranker = None if growing.ranker is None else unfiltered(growing.ranker)
            return growing

        monkeypatch.setattr(ModelDrafter, "_begin", begun)

    before, after = without_text_change(patch, build, FILTERS)
    assert after < before - 0.05 if build is chain else after != before


def test_an_unfiltered_target_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both arms agree on the wrong texts: the distribution tells."""
    target, draft = tables()

    def winner(self: Sampler, noise: Noise, scores: Tensor, position: int) -> int:
        return int((self._tempered(scores[None])[0] + noise.gumbels(position, len(scores), scores.device)).argmax())

    monkeypatch.setattr(Sampler, "_winner_of_kept", winner)
    monkeypatch.setattr(Sampler, "_log_probs", Sampler._tempered)
    for build in (None, chain):
        speculative = engine(target, build(draft) if build else None)
        assert differences(speculative, engine(target), FILTERS) == 0
        assert pair_chance(speculative, target, FILTERS) < CAUGHT


def test_an_unfiltered_race_in_the_batched_call_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target filters a single request and not several: texts then depend on what else is in the batch."""
    target, draft = tables()
    fixed = batched.fixed_tokens
    monkeypatch.setattr(
        batched, "fixed_tokens", lambda each, *rest: fixed([unfiltered(sampler) for sampler in each], *rest)
    )
    alone = outputs(engine(target, max_batch=1), requests(FILTERS))
    together = outputs(engine(target, chain(draft), max_batch=8), requests(FILTERS))
    assert sum(text != batch_text for text, batch_text in zip(alone, together, strict=True)) >= CAUGHT_TEXTS


def test_temperature_forgotten_in_the_race_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tables()
    monkeypatch.setattr(Sampler, "_log_probs", lambda self, scores: scores)
    speculative = engine(target, chain(draft))
    assert differences(speculative, engine(target), SamplingParams(temperature=0.4)) == 0
    assert pair_chance(speculative, target, SamplingParams(temperature=0.4)) < CAUGHT


# -- precision -------------------------------------------------------------------------------------------------------


class Shifted(MarkovTable):
    """The same distributions from logits around 3000, where the steps of float16 are two units."""

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        return [Rows(rows.logits + 3000.0) for rows in super().forward(feeds, taps)]


def test_a_race_in_float16_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution shows it if both arms have it (ties go to the lower id); the texts differ if one arm has it."""
    p, q = tables()
    target = Shifted(p.table, p.vocab_size)
    assert pair_chance(engine(target, chain(q)), target) > FALSE_ALARM
    plain = outputs(engine(target), requests())
    with_noise = Sampler.with_noise
    monkeypatch.setattr(Sampler, "with_noise", lambda self, logs, lengths: with_noise(self, logs, lengths).half())
    # One request per round: the batched call has no part in it.
    assert pair_chance(engine(target, chain(q), max_batch=1), target) < CAUGHT
    texts = outputs(engine(target, chain(q), max_batch=1), requests())
    assert sum(text != plain_text for text, plain_text in zip(texts, plain, strict=True)) >= CAUGHT_TEXTS


MANY = 4096


def test_noise_of_11_bits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniforms of float16 give 2048 runners the same time as another: with 4096 equal tokens low ids win too often."""
    exponentials = Noise.exponentials
    flat = TableModel(lambda _: [1.0] * MANY, MANY)
    blocks: Distribution = {(block,): 1 / 16 for block in range(16)}
    seeded = [Request([0], T1, 1, seed=seed) for seed in range(600)]

    def chance() -> float:
        texts = [[token * 16 // MANY for token in text] for text in outputs(engine(flat), seeded)]
        return p_value({"": texts}, {"": blocks}, 1)

    def coarse(self: Noise, position: int, size: int) -> Tensor:
        uniforms = (-exponentials(self, position, size)).exp()
        return -((uniforms * 2048).ceil() / 2048 - 2.0**-12).log()

    assert chance() > FALSE_ALARM
    plain = outputs(engine(flat), seeded)
    monkeypatch.setattr(Noise, "exponentials", coarse)
    assert chance() < CAUGHT
    assert (
        sum(output != plain_text for output, plain_text in zip(outputs(engine(flat), seeded), plain, strict=True)) > 60
    )


# -- walks that look at the candidates -------------------------------------------------------------------------------


class TakesTheChild(CoupledVerifier):
    """A child that is possible is taken, the winner or not."""

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def choose(node: int, children: Sequence[int]) -> int:
            winner = scores.choice(node)
            tokens = [tree.tokens[child] for child in children]
            likely = [token for token in tokens if float(scores.p(node)[token]) > 0.25]
            return winner if winner in tokens or not likely else likely[0]

        return walk_down(tree, choose)


class NextBest(CoupledVerifier):
    """If no child has the winner, the walk also looks for the second in the race."""

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def choose(node: int, children: Sequence[int]) -> int:
            first, second = scores.ranking(node).topk(2).indices.tolist()
            tokens = [tree.tokens[child] for child in children]
            return second if second in tokens and first not in tokens else first

        return walk_down(tree, choose)


class Residual(CoupledVerifier):
    """After a rejection the token races on norm([p - q]+), as token verification would draw it."""

    draft: LanguageModel

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        path: list[int] = []
        while True:
            node = path[-1] if path else 0
            winner = scores.choice(node)
            matching = [child for child in tree.children[node] if tree.tokens[child] == winner]
            if matching:
                path.append(matching[0])
                continue
            if tree.children[node]:
                q = self.draft.distribution(scores.node_prefix(node))  # type: ignore[attr-defined]
                rest = residual(scores.p(node), q)
                noise = scores.sampler.noise
                assert noise is not None
                times = noise.exponentials(scores.lengths[node] - scores.sampler.prompt_length, len(rest)) / rest
                winner = int(times.argmin())
            return verdict_at(tree, path, winner)


class RacesAgain(CoupledVerifier):
    """The token after a rejection comes from coins, not from the noise: right in distribution, no text of its seed."""

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        verdict = super().decide_fast(tree, scores, coins)
        node = verdict.path[-1] if verdict.path else 0
        if verdict.next_is_bonus and verdict.path:
            return Verdict(verdict.path, coins.draw(scores.p(node)), True)
        return verdict


@pytest.mark.parametrize("rule", [TakesTheChild, NextBest, Residual, RacesAgain])
@pytest.mark.parametrize("build", [chain, tree], ids=["chain", "tree"])
def test_walks_that_fix_up_the_winner_are_caught(rule: type[Verifier], build: Build) -> None:
    target, draft = tables(closeness=0.1)
    verifier = rule()
    if isinstance(verifier, Residual):
        verifier.draft = draft
    assert differences(engine(target, build(draft), verifier), engine(target)) >= CAUGHT_TEXTS


class LeavesOut(CoupledVerifier):
    """No error: tokens that did not win are taken out of the race, which changes nothing."""

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def choose(node: int, children: Sequence[int]) -> int:
            winner, ranking = scores.choice(node), scores.ranking(node).clone()
            tokens = [tree.tokens[child] for child in children]
            ranking[[token for token in tokens if token != winner]] = -torch.inf
            return int(ranking.argmax())

        return walk_down(tree, choose)


def test_taking_losers_out_of_the_race_is_no_error() -> None:
    target, draft = tables()
    assert differences(engine(target, tree(draft), LeavesOut()), engine(target)) == 0
