"""Lookahead decoding: golden vectors, the method step by step against its plain form, exactness, the edges."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from foretoken import registry
from foretoken.core import Budget, Context, Rng, Scores, TokenTree, Verdict
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.lookahead import LookaheadDrafter, NgramPool, _Lookahead
from foretoken.methods.trees.operations import first_nodes, select
from foretoken.methods.verifiers.compatibility import verifiers_for
from foretoken.models.base import LanguageModel
from foretoken.models.cache.masks import ancestor_matrix
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.table import TableModel
from toys import FALSE_ALARM, MarkovTable, engine, joint_distribution, llamas, outputs, sampled_p_value, serve, tables

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3], [0, 0, 31, 0]]


class Recording(LookaheadDrafter):
    """Keeps what it proposed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trees: list[TokenTree] = []

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        self.trees.append(super().propose(context, budget))
        return self.trees[-1]


class OnAndOff(Controller):
    """A draft of changing depth and size, now and then none."""

    name = "on_and_off"

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget((3, 0, 9, 1)[len(context.tokens) % 4], (2, 64, 5)[len(context.tokens) % 3])


def a_context(tokens: list[int]) -> Context:
    return Context(1, tokens, len(tokens), Sampler(SamplingParams()), Rng(0))


def a_target(vocab: int = 12, **more: Any) -> MarkovTable:
    return MarkovTable(TableModel.random(vocab, seed=6, sharpness=3.0).distribution, vocab, **more)


@cache
def plain_greedy() -> list[list[int]]:
    return outputs(engine(llamas()[0]), [Request(p, max_new_tokens=60) for p in PROMPTS])


# -- golden vectors --------------------------------------------------------------------------------------------------


def test_golden_mask_and_positions() -> None:
    """W=3, N=3, one guess; the order is e0 e1 e2 | a0 a1 a2 | g0 g1."""
    drafter = LookaheadDrafter(w=3, n=3, g=1)
    context = a_context([4, 9])
    drafter.start(context)
    state: _Lookahead = context.state[drafter]
    state.rows = [[11, 12], [20, 21, 22]]
    state.pool.add(9, (30, 31))
    tree = drafter.propose(context, Budget(10, 64))
    assert tree.tokens == (9, 30, 31, 11, 12, 20, 21, 22)
    order = [0, 3, 4, 5, 6, 7, 1, 2]
    assert [tree.tokens[node] for node in order] == [9, 11, 12, 20, 21, 22, 30, 31]
    golden = [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 0, 1, 1],
    ]
    assert ancestor_matrix(tree.parents)[np.ix_(order, order)].astype(int).tolist() == golden
    assert [tree.depths[node] for node in order] == [0, 1, 2, 1, 2, 3, 1, 2]
    assert [tree.probes[node] for node in order] == [False] + [True] * 5 + [False] * 2
    assert tree.num_drafts == 2


@pytest.mark.parametrize(("w", "n"), [(3, 4), (7, 5), (1, 3), (5, 3), (15, 7), (4, 2)])
def test_sizes_after_the_warm_up(w: int, n: int) -> None:
    drafter = Recording(w=w, n=n, g=2)
    serving = engine(a_target(), drafter)
    serving.add(Request([1, 2, 3], max_new_tokens=60))
    for step in range(n - 2):
        _, emission = serving.step()[0]
        assert len(emission.token_ids) == 1  # nothing to guess yet
        assert len(drafter.trees[step]) == (step + 1) * (w + n - 2 - step)  # rows times columns, the root included
    serving.step()
    state: _Lookahead = serving.requests.running[0].context.state[drafter]
    assert [len(row) for row in state.rows] == [w - 1] + [w] * (n - 2)
    assert sum(drafter.trees[-1].probes) == w * (n - 1) - 1
    assert 1 <= len(state.pool) <= w


def test_the_pool_forgets_the_least_recent() -> None:
    pool = NgramPool(2)
    for gram in [(1, 1), (2, 2), (1, 1), (3, 3)]:
        pool.add(7, gram)
    pool.add(8, (9, 9))
    assert pool.of(7) == [(3, 3), (1, 1)]
    assert pool.of(8) == [(9, 9)]
    assert pool.of(0) == []
    assert len(pool) == 3


def test_the_guesses_of_a_key_are_a_trie() -> None:
    drafter = LookaheadDrafter(w=1, n=4, g=4)
    context = a_context([4, 9])
    drafter.start(context)
    for gram in [(1, 2, 3), (5, 5, 5), (1, 2, 4)]:
        context.state[drafter].pool.add(9, gram)
    tree = drafter.propose(context, Budget(6, 64))
    drafts = first_nodes(tree, tree.num_drafts)
    assert (drafts.tokens, drafts.parents) == ((9, 1, 2, 4, 5, 5, 5, 3), (-1, 0, 1, 2, 0, 4, 5, 2))
    assert drafter.propose(context, Budget(1, 64)).children[0] == (1, 2)
    assert drafter.propose(context, Budget(6, 3)).num_drafts == 3
    assert drafter.propose(context, Budget(6, 3)).tokens[1:4] == (1, 2, 4)


def test_the_worked_example_of_the_docs() -> None:
    """'a rose is a rose is ...': three rounds of one token, then N tokens a round, the bonus token among them."""
    target = TableModel(lambda prefix: torch.eye(3, dtype=torch.float64)[(prefix[-1] + 1) % 3], 3)
    drafter = Recording(w=3, n=3, g=2)
    serving = engine(target, drafter)
    serving.add(Request([0, 1, 2, 0], max_new_tokens=12))
    emitted, rows = [], []
    while serving.busy:
        run, emission = serving.step()[0]
        emitted.append(list(emission.token_ids))
        if emission.finish_reason is None:
            rows.append([list(row) for row in run.context.state[drafter].rows])
            pool = run.context.state[drafter].pool
    assert emitted == [[1], [2], [0], [1, 2, 0], [1, 2, 0], [1, 2, 0]]
    assert rows[:3] == [[[0, 1], [1, 1, 2]], [[1, 2], [2, 2, 0]], [[2, 0], [0, 0, 1]]]
    assert pool.of(0) == [(1, 2), (0, 1)]
    assert drafter.trees[3].tokens == (0, 1, 2, 2, 0, 0, 0, 1)


# -- the method step by step -----------------------------------------------------------------------------------------


class Plain:
    """The method written directly: lists, prefixes, no tree.  ``best`` is the target's argmax."""

    def __init__(self, best: Callable[[list[int]], int], text: Sequence[int], w: int, n: int, g: int) -> None:
        self.best, self.text, self.w, self.n, self.g = best, list(text), w, n, g
        self.random, self.prompt = random.Random(0), list(text)
        self.rows = [self.random.choices(self.prompt, k=w + n - 3)]
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def scored(self) -> list[int]:
        """What the target says after the last row, column by column."""
        first = [self.text[-1], *self.rows[0]]
        answers = []
        for j in range(len(first)):
            column = [row[j] for row in self.rows[1:]]
            answers.append(self.best(self.text[:-1] + first[: j + 1] + column))
        return answers

    def accepted(self) -> list[int]:
        """The longest guess that the target says itself."""
        longest: list[int] = []
        for guess in self.pool.get(self.text[-1], []):
            right = 0
            while right < len(guess) and self.best(self.text + list(guess[:right])) == guess[right]:
                right += 1
            if right > len(longest):
                longest = list(guess[:right])
        return longest

    def round(self, shift: str) -> None:
        answers, accepted = self.scored(), self.accepted()
        first = [self.text[-1], *self.rows[0]]
        if len(self.rows) < self.n - 1:
            self.rows = [row[1:] for row in self.rows] + [answers[1:]]
        else:
            for j, answer in enumerate(answers):
                grams = self.pool.setdefault(first[j], [])
                gram = (*(row[j] for row in self.rows[1:]), answer)
                if gram in grams:
                    grams.remove(gram)
                grams.append(gram)
                if self.g:
                    del grams[: -self.g]
            below = [*self.rows[1:], answers]
            for _ in range(len(accepted) if shift == "accepted" else 0):
                below = [*below[1:], list(below[1])]
            self.rows = [below[0][1:], *below[1:]]
            if shift == "refill":  # one more column for every accepted token, random tokens behind
                gone = len(accepted)
                self.rows = [row[gone:] + self.random.choices(self.prompt, k=min(gone, len(row))) for row in self.rows]
        self.text += accepted
        self.text.append(self.best(self.text))


@pytest.mark.parametrize("shift", ["one", "accepted", "refill"])
@pytest.mark.parametrize(("w", "n", "g"), [(3, 3, 2), (7, 5, 7), (4, 4, 1), (1, 3, 3), (2, 6, 2)])
def test_window_pool_and_text_in_every_round(w: int, n: int, g: int, shift: str) -> None:
    target, prompt = a_target(), [1, 4, 2]
    plain = Plain(lambda prefix: int(target.distribution(prefix).argmax()), prompt, w, n, g)
    drafter = LookaheadDrafter(w, n, g, shift=shift)
    serving = engine(target, drafter)
    serving.add(Request(prompt, max_new_tokens=200))
    lengths = []
    for _ in range(40):
        _, emission = serving.step()[0]
        lengths.append(len(emission.token_ids))
        plain.round(shift)
        context = serving.requests.running[0].context
        state: _Lookahead = context.state[drafter]
        assert context.tokens == plain.text
        assert state.rows == plain.rows
        assert {key: state.pool.of(key)[::-1] for key in plain.pool} == plain.pool
    assert max(lengths) == n, "no n-gram was accepted whole, or the bonus token is missing"


class Cutting(ConstantController):
    """Keeps one draft token of every tree, and the window."""

    def kept(
        self, contexts: Sequence[Context], trees: Sequence[TokenTree], beside: Sequence[TokenTree]
    ) -> list[Sequence[int]]:
        return [[node for node in range(len(tree)) if node < 2 or tree.probes[node]] for tree in trees]


class PlainCut(Plain):
    """The method with the first token of the latest n-gram as the whole draft."""

    def accepted(self) -> list[int]:
        return [gram[0] for gram in self.pool.get(self.text[-1], [])[-1:] if self.best(self.text) == gram[0]]


@pytest.mark.parametrize("in_group", [False, True])
def test_the_window_is_learned_from_beside_drafts_that_were_cut(in_group: bool) -> None:
    target, prompt = a_target(), [1, 4, 2]
    plain = PlainCut(lambda prefix: int(target.distribution(prefix).argmax()), prompt, 3, 4, 2)
    drafter = LookaheadDrafter(3, 4, 2)
    serving = engine(target, EnsembleDrafter([drafter]) if in_group else drafter, controller=Cutting())
    serving.add(Request(prompt, max_new_tokens=200))
    lengths = []
    for _ in range(30):
        _, emission = serving.step()[0]
        lengths.append(len(emission.token_ids))
        plain.round("one")
        context = serving.requests.running[0].context
        state: _Lookahead = context.state[drafter]
        assert (context.tokens, state.rows) == (plain.text, plain.rows)
        assert {key: state.pool.of(key)[::-1] for key in plain.pool} == plain.pool
    assert max(lengths) == 2


@pytest.mark.parametrize(
    ("kept", "rows", "grams"),
    [
        ((0, 3, 4, 5, 6), [[21, 22], [3, 4, 22]], [(9, 20, 3), (11, 21, 4)]),  # the last column is cut
        ((0, 3, 4, 6, 7), [[11, 12], [20, 21, 22]], []),  # the first is, without which the window cannot move
    ],
)
def test_columns_that_were_cut_keep_the_token_above(kept: list[int], rows: object, grams: object) -> None:
    drafter, context = LookaheadDrafter(w=3, n=3, g=1), a_context([4, 9])
    drafter.start(context)
    state: _Lookahead = context.state[drafter]
    state.rows = [[11, 12], [20, 21, 22]]
    state.pool.add(9, (30, 31))
    tree = select(drafter.propose(context, Budget(10, 64)), kept)
    state.pool = NgramPool(1)
    drafter.observe(
        context, tree, Scores(torch.eye(40)[: len(tree)], tree, [4, 9], context.sampler), Verdict((), 0, False)
    )
    assert state.rows == rows
    assert [(key, *gram) for key in (9, 11, 12) for gram in state.pool.of(key)] == grams


def test_all_grams_are_kept_where_no_number_is_set() -> None:
    target, prompt = a_target(), [1, 4, 2]
    plain = Plain(lambda prefix: int(target.distribution(prefix).argmax()), prompt, 5, 3, 0)
    drafter = LookaheadDrafter(5, 3, 0)
    serving = engine(target, drafter)
    serving.add(Request(prompt, max_new_tokens=200))
    for _ in range(30):
        serving.step()
        plain.round("one")
    state: _Lookahead = serving.requests.running[0].context.state[drafter]
    assert {key: state.pool.of(key)[::-1] for key in plain.pool} == plain.pool
    assert max(map(len, plain.pool.values())) > 3


def test_the_window_can_begin_with_any_token() -> None:
    target = a_target()
    drafter = build_drafter("lookahead,w=40,n=3,fill=vocabulary", target, target_source="")
    serving = engine(target, drafter)
    serving.add(Request([1, 1, 1], max_new_tokens=20))
    serving.step()
    state: _Lookahead = serving.requests.running[0].context.state[drafter]
    assert len(set(state.rows[0])) > 5, "the prompt has one token"


def test_rows_of_length_two_grams() -> None:
    """N=2: one row, whose own predictions are the grams; the root's prediction among them."""
    target, prompt = a_target(), [1, 4, 2]
    plain = Plain(lambda prefix: int(target.distribution(prefix).argmax()), prompt, 4, 2, 3)
    drafter = LookaheadDrafter(4, 2, 3)
    serving = engine(target, drafter)
    serving.add(Request(prompt, max_new_tokens=60))
    for _ in range(20):
        serving.step()
        plain.round("one")
        context = serving.requests.running[0].context
        assert (context.tokens, context.state[drafter].rows) == (plain.text, plain.rows)


def test_pool_from_prompt() -> None:
    target, prompt = a_target(), [1, 2, 3, 1, 2, 4, 1, 2]
    drafter = LookaheadDrafter(w=2, n=3, g=3, pool_from_prompt=True)
    context = a_context(prompt)
    drafter.start(context)
    pool: NgramPool = context.state[drafter].pool
    assert pool.of(1) == [(2, 4), (2, 3)]
    assert pool.of(2) == [(4, 1), (3, 1)]
    assert pool.of(4) == [(1, 2)]
    serving = engine(target, drafter)
    serving.add(Request(prompt, max_new_tokens=30))
    for _ in range(8):
        serving.step()
    text = serving.requests.running[0].context.tokens
    pool = serving.requests.running[0].context.state[drafter].pool
    assert pool.of(text[-3])[0] == tuple(text[-2:])
    assert LookaheadDrafter(w=2, n=3, g=3).pool_from_prompt is False


# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("w", [3, 7, 15])
@pytest.mark.parametrize("n", [3, 4, 5, 7])
def test_greedy_output_is_that_of_plain_decoding(n: int, w: int) -> None:
    requests = [Request(p, max_new_tokens=60) for p in PROMPTS]
    for options in ({}, {"shift": "accepted", "pool_from_prompt": True}):
        runs = serve(engine(llamas()[0], LookaheadDrafter(w, n, w, **options), max_batch=2), requests)  # type: ignore[arg-type]
        assert [run.output for run in runs] == plain_greedy()
        assert sum(run.stats.num_accepted_tokens for run in runs) > 30


@pytest.mark.parametrize("bounded", [True, False])
def test_budgets_that_change_and_rounds_without_a_draft(bounded: bool) -> None:
    target = llamas()[0]
    drafter = LookaheadDrafter(5, 4, 3, context_length=target.context_length if bounded else None)
    runs = serve(engine(target, drafter, controller=OnAndOff()), [Request(p, max_new_tokens=60) for p in PROMPTS])
    assert [run.output for run in runs] == plain_greedy()
    assert sum(run.stats.num_accepted_tokens for run in runs) > 5


@pytest.mark.parametrize("options", [{}, {"pool_from_prompt": True, "shift": "accepted"}], ids=["window", "prompt"])
def test_sampled_distribution(options: dict[str, Any]) -> None:
    target, _ = tables()
    modes = {
        "T=1": SamplingParams(temperature=1.0),
        "filters": SamplingParams(temperature=0.7, top_k=3, repetition_penalty=1.3),
    }
    prompt = [0, 1, 2, 3, 0, 1]
    distributions = {mode: joint_distribution(target, params, prompt, 4) for mode, params in modes.items()}
    speculative = engine(target, LookaheadDrafter(3, 3, 2, **options), max_batch=8)
    assert sampled_p_value(speculative, modes, distributions, prompt, 4, 400) > FALSE_ALARM


@pytest.mark.parametrize("rule", verifiers_for([(LookaheadDrafter().traits.kind, True)], greedy=False))
def test_probes_change_no_verdict(rule: str) -> None:
    """The same coins, or the same noise, decide the same with and without the window; no probe is ever accepted."""
    target, prompt = a_target(4), [1, 3, 2]
    params = SamplingParams(temperature=1.0)
    drafter = LookaheadDrafter(w=3, n=3, g=4)
    context = Context(1, prompt, 3, Sampler(params), Rng(0))
    drafter.start(context)
    state: _Lookahead = context.state[drafter]
    state.rows = [[0, 1], [1, 2, 3]]
    for gram in [(1, 3), (0, 2), (1, 0), (3, 1)]:
        state.pool.add(2, gram)
    tree = drafter.propose(context, Budget(5, 64))
    bare = first_nodes(tree, tree.num_drafts)
    bare = TokenTree(bare.tokens, bare.parents)
    verifier = registry.make("verifier", rule)
    accepted = 0
    for seed in range(200):
        verdicts = []
        sampler = Sampler(params, 3, Noise(seed) if verifier.races else None)
        for each in (tree, bare):
            distributions = [
                target.distribution(prompt + [each.tokens[i] for i in each.path(node)[1:]]) for node in range(len(each))
            ]
            scores = Scores(torch.stack(distributions).log(), each, prompt, sampler)
            verdicts.append(verifier.verify(each, scores, Rng(seed)))
        assert verdicts[0] == verdicts[1]
        assert all(node < len(bare) for node in verdicts[0].path)
        accepted += len(verdicts[0].path)
    assert accepted > 50


# -- the end of the context ------------------------------------------------------------------------------------------


@cache
def gpt2() -> GPT2LMHeadModel:
    """Positions are a table of 32 rows: one step past it is an error."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config).to(torch.float64).eval()


def targets(kind: str) -> LanguageModel:
    return HuggingFaceModel(gpt2()) if kind == "gpt2" else a_target(16, context_length=32)


@pytest.mark.parametrize("kind", ["table", "gpt2"])
@pytest.mark.parametrize("bounded", [True, False])
def test_no_probe_past_the_context(kind: str, bounded: bool) -> None:
    requests = [
        Request([1, 2, 3], max_new_tokens=29),
        Request([4] * 30, max_new_tokens=2),
        Request([5], max_new_tokens=9),
    ]
    target = targets(kind)
    for k in (None, 2):
        drafter = Recording(6, 4, 3, pool_from_prompt=True, context_length=target.context_length if bounded else None)
        speculative = engine(target, drafter, controller=ConstantController(k, 64), max_batch=1)
        assert outputs(speculative, requests) == outputs(engine(targets(kind)), requests)
        assert any(any(tree.probes) for tree in drafter.trees)


@pytest.mark.parametrize("kind", ["table", "gpt2"])
def test_a_probe_past_the_context_is_noticed(kind: str) -> None:
    """What the test above would see if the window were not cut."""
    speculative = engine(targets(kind), LookaheadDrafter(6, 4, 3, context_length=1000))
    with pytest.raises(IndexError):
        outputs(speculative, [Request([1, 2, 3], max_new_tokens=29)])


def test_a_known_context_keeps_the_window_whatever_the_budget() -> None:
    drafter = Recording(7, 5, 7, context_length=10_000)
    serve(engine(a_target(), drafter, controller=ConstantController(k=1)), [Request([1, 2], max_new_tokens=40)])
    full = drafter.trees[3:-1]
    assert {sum(tree.probes) for tree in full} == {7 * 4 - 1}
    assert max(tree.num_drafts for tree in full) >= 1
    assert all(tree.depths[node] == 1 for tree in full for node in range(1, tree.num_drafts + 1))


# -- bad input, registry ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"n": 1}, "n >= 2"),
        ({"w": 0}, "w >= 1"),
        ({"g": -1}, "g >= 0"),
        ({"shift": "two"}, "'one', 'accepted' or 'refill'"),
        ({"fill": "text"}, "'prompt' or 'vocabulary'"),
        ({"fill": "vocabulary"}, "vocab_size"),
    ],
)
def test_bad_options(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        LookaheadDrafter(**options)


def test_spec_strings() -> None:
    target = a_target(context_length=77)
    drafter = build_drafter(registry.find("drafter", "lookahead").example, target)
    assert isinstance(drafter, LookaheadDrafter)
    assert (drafter.w, drafter.n, drafter.g, drafter.context_length) == (7, 5, 7, 77)
    assert (drafter.max_depth, drafter.max_nodes) == (4, 28)
    assert LookaheadDrafter(7, 5, 7).max_depth == 9  # deep enough for the window, too
    for spec, word in [("lookahead:here", "no path"), ("lookahead,n=1", "n >= 2"), ("lookahead,k=3", "unknown option")]:
        with pytest.raises(ValueError, match=word):
            build_drafter(spec, target)


def test_no_state_is_left_behind() -> None:
    drafter = LookaheadDrafter()
    run = serve(engine(a_target(), drafter), [Request([1, 2], max_new_tokens=5)])[0]
    assert drafter not in run.context.state
