"""A string of a finite language is drawn from the model's distribution on condition that the output is in it.

The distribution of the rule is enumerated and compared with brute force over the language; that of masking, token by
token, is caught by the same comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from finite_languages import END, OTHER_END, PROMPT, STRINGS, Numbers, model, request
from scipy.stats import chi2
from torch import Tensor

from foretoken.core import Context, OptionError, Rng, Scores, TokenTree
from foretoken.core.constraints import FiniteLanguage
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.conditional import (
    LanguageRound,
    pieces,
    score_in_pieces,
    step_log_probs,
    string_log_probs,
    tree_of,
    whole_params,
)
from foretoken.engine.joining import join
from foretoken.engine.request import Request
from foretoken.llm import Llm
from foretoken.loading.generation_defaults import GenerationDefaults
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.verifiers.base import Coins
from foretoken.models.base import Capabilities, Feed, LanguageModel, SequenceState
from foretoken.models.other.table import TableModel
from toys import CAUGHT, FALSE_ALARM, chi_square, engine, llamas, serve, tables

TRIES = {
    "prefixes of each other": STRINGS,
    "with the empty string": [(), (1,), (1, 1), (5, 2)],
    "one string": [(4, 4, 1)],
    "the empty string alone": [()],
    "wide": [(a, b) for a in range(1, 6) for b in range(1, 6)],
}
SAMPLING = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.4),
    "penalties": SamplingParams(temperature=1.3, presence_penalty=0.8, frequency_penalty=0.3, repetition_penalty=1.4),
    "bias": SamplingParams(temperature=0.9, logit_bias={2: 1.5, 5: -2.0, END: 0.7}),
}


def brute_force(
    target: TableModel, strings: Sequence[Sequence[int]], params: SamplingParams, ends: Sequence[int] = (END,)
) -> dict[tuple[int, ...], float]:
    """Probability of every output (string and end), given that it is one of these."""
    sampler = Sampler(params, len(PROMPT))

    def p(token: int, before: Sequence[int]) -> float:
        prefix = [*PROMPT, *before]
        return float(sampler.distribution(target.distribution(prefix).log(), prefix)[token])

    chances = {
        (*string, end): math.prod(p(token, string[:i]) for i, token in enumerate(string)) * p(end, string)
        for string in strings
        for end in ends
    }
    total = sum(chances.values())
    return {output: chance / total for output, chance in chances.items()}


def masked(
    target: TableModel, strings: Sequence[Sequence[int]], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of every output under masking: each step forbids the tokens that lead to no string."""
    outputs = [(*string, END) for string in strings]
    sampler = Sampler(params, len(PROMPT))
    chances = {}
    for output in outputs:
        chance = 1.0
        for i, token in enumerate(output):
            prefix = [*PROMPT, *output[:i]]
            p = sampler.distribution(target.distribution(prefix).log(), prefix)
            allowed = sorted({other[i] for other in outputs if len(other) > i and other[:i] == output[:i]})
            chance *= float(p[token] / p[allowed].sum())
        chances[output] = chance
    return chances


def total_variation(first: dict[tuple[int, ...], float], second: dict[tuple[int, ...], float]) -> float:
    return sum(abs(first.get(output, 0.0) - second.get(output, 0.0)) for output in {*first, *second}) / 2


def opened(target: LanguageModel, params: SamplingParams) -> Context:
    """A request behind its prompt."""
    sequence = target.open()
    target.prefill(sequence, PROMPT[:-1])
    context = Context(1, list(PROMPT), len(PROMPT), Sampler(whole_params(params), len(PROMPT)), Rng(0))
    context.sequence = sequence
    return context


def distribution_of_rule(
    target: TableModel, language: FiniteLanguage, params: SamplingParams, ends: frozenset[int], width: int | None
) -> dict[tuple[int, ...], float]:
    """What the rule draws from: the normalised weights of all (string, end)."""
    context, tree = opened(target, params), tree_of(language, PROMPT[-1])
    if width == 0:
        logits = target.forward([Feed(context.sequence, tree.tokens, tree.parents)])[0].logits
        parts = step_log_probs(tree, Scores(logits, tree, context.tokens, context.sampler), ends)
    else:
        parts = score_in_pieces(target, context, tree, ends, width)
        assert not context.sequence.scratch_tokens and context.sequence.tokens == PROMPT[:-1]
    weights = string_log_probs(tree, language.whole, *parts).exp()
    weights /= weights.sum()
    return {
        (*language.string(node), end): float(weights[node, i])
        for node in range(len(tree))
        if language.whole[node]
        for i, end in enumerate(sorted(ends))
    }


@pytest.mark.parametrize("width", [0, 1, 2, 5, None], ids=lambda width: f"width {width}")
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
@pytest.mark.parametrize("strings", TRIES.values(), ids=TRIES.keys())
def test_the_distribution_by_enumeration(
    strings: Sequence[Sequence[int]], params: SamplingParams, width: int | None
) -> None:
    """The language is scored whole (width 0), in pieces, and path by path (no width)."""
    for seed in range(3):
        target = model((END, OTHER_END), seed)
        distribution = distribution_of_rule(
            target, FiniteLanguage.of(strings), params, frozenset((END, OTHER_END)), width
        )
        expected = brute_force(target, strings, params, (END, OTHER_END))
        assert distribution.keys() == expected.keys()
        assert total_variation(distribution, expected) < 1e-12
        assert max(abs(distribution[output] - expected[output]) for output in expected) < 1e-12


def test_masking_is_another_distribution_and_is_caught() -> None:
    """Negative control: the comparison above rejects a rule that masks token by token."""
    language = FiniteLanguage.of(STRINGS)
    for seed in range(3):
        target = model(seed=seed)
        expected = brute_force(target, STRINGS, SAMPLING["plain"])
        distribution = distribution_of_rule(target, language, SAMPLING["plain"], frozenset((END,)), 0)
        wrong = masked(target, STRINGS, SAMPLING["plain"])
        assert sum(wrong.values()) == pytest.approx(1.0)
        assert total_variation(distribution, expected) < 1e-12 < 0.05 < total_variation(wrong, expected)


def drawn(target: LanguageModel, strings: Sequence[Sequence[int]], uniforms: Sequence[float], **more: Any) -> list[int]:
    """The output of the rule for these uniforms, by the steps of the loop."""
    params = more.pop("params", SAMPLING["plain"])
    width = more.pop("width", 64)
    ends = frozenset(more.pop("ends", (END,)))
    context = opened(target, params)
    own = LanguageRound(FiniteLanguage.of(strings), ends, params.temperature == 0, uniforms)
    own.width = width
    tree, rule = own.propose(target, context)
    logits = target.forward([Feed(context.sequence, tree.tokens, tree.parents)])[0].logits
    verdict = rule.decide(tree, Scores(logits, tree, context.tokens, context.sampler), Coins(Rng(0)))
    target.commit(context.sequence, [0, *verdict.path])
    return [*(tree.tokens[node] for node in verdict.path), verdict.next_token]


@pytest.mark.parametrize("width", [1, 3, 64])
def test_the_draw_by_enumeration(width: int) -> None:
    """Every output gets an interval of the uniform as long as its probability: tried on both sides of every border."""
    target = model()
    expected = brute_force(target, STRINGS, SAMPLING["plain"])
    border, near = 0.0, 1e-12
    order = sorted(expected)  # nodes are in preorder, so a string comes before those that it begins
    language = FiniteLanguage.of(STRINGS)
    order = [(*string, END) for string in language.strings]
    for output in order:
        assert drawn(target, STRINGS, (border + near, 0.5), width=width) == list(output)
        border += expected[output]
        assert drawn(target, STRINGS, (border - near, 0.5), width=width) == list(output)
    assert border == pytest.approx(1.0, abs=1e-12)


def test_which_end_is_drawn_by_enumeration() -> None:
    target = model((END, OTHER_END))
    expected = brute_force(target, [(1, 2)], SAMPLING["plain"], (END, OTHER_END))
    border = expected[1, 2, END]
    more = {"ends": (END, OTHER_END)}
    assert drawn(target, [(1, 2)], (0.3, border - 1e-12), **more) == [1, 2, END]
    assert drawn(target, [(1, 2)], (0.3, border + 1e-12), **more) == [1, 2, OTHER_END]


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("strings", TRIES.values(), ids=TRIES.keys())
def test_greedy_is_the_most_likely_string(strings: Sequence[Sequence[int]], width: int) -> None:
    for seed in range(5):
        target = model((END, OTHER_END), seed)
        expected = brute_force(target, strings, SAMPLING["plain"], (END, OTHER_END))
        totals: Counter[tuple[int, ...]] = Counter()
        for output, chance in expected.items():
            totals[output[:-1]] += chance  # type: ignore[assignment]
        best = max(totals, key=lambda string: totals[string])
        end = max((END, OTHER_END), key=lambda end: expected[*best, end])
        tokens = drawn(target, strings, (0.9, 0.9), params=SamplingParams(), width=width, ends=(END, OTHER_END))
        assert tokens == [*best, end]


def test_greedy_differs_from_the_greedy_walk() -> None:
    """The likeliest first token leads to an unlikely string, and the most likely string begins with another one."""
    rows = {(): [0.0, 0.6, 0.4], (1,): [0.1, 0.1, 0.8], (2,): [1.0, 0.0, 0.0]}
    target = TableModel(lambda prefix: rows[prefix[1:]], 3, eos_token_ids=(0,))
    language = FiniteLanguage.of([(1,), (2,)])
    run = serve(engine(target), [Request([2], max_new_tokens=4, language=language)])[0]
    assert run.output == [2, 0] and run.finish_reason == "eos"


def test_the_engine_draws_from_the_distribution() -> None:
    target = model()
    expected = brute_force(target, STRINGS, SAMPLING["plain"])
    runs = serve(engine(target, max_batch=32), [request(seed) for seed in range(3000)])
    counts = Counter(tuple(run.output) for run in runs)
    assert chi2.sf(*chi_square(counts, expected)) > FALSE_ALARM
    assert chi2.sf(*chi_square(counts, masked(target, STRINGS, SAMPLING["plain"]))) < CAUGHT
    assert {run.finish_reason for run in runs} == {"eos"}
    assert all(run.stats.num_drafts == 1 for run in runs)


def test_a_seed_fixes_the_string_whatever_drafts_and_whatever_is_beside_it() -> None:
    target, draft = tables(7, eos_token_ids=(END,))
    language = FiniteLanguage.of(STRINGS)
    alone = [serve(engine(target), [request(seed)])[0].output for seed in range(24)]
    assert len({tuple(output) for output in alone}) > 2
    others = [Request([2, 4, 2, 4], SamplingParams(temperature=t), 12, seed=9, ignore_eos=True) for t in (0.0, 1.0)]
    expected = [run.output for run in serve(engine(target), others)]
    for drafter in (None, NgramDrafter(), ModelDrafter(draft, k=3)):
        for order in (1, -1):
            mixed = [*others, *(request(seed) for seed in range(24))][::order]
            texts = [run.output for run in serve(engine(target, drafter), mixed)][::order]
            assert texts == [*expected, *alone]
    unseeded = serve(engine(target), [request(None) for _ in range(6)])
    assert all(tuple(run.output[:-1]) in STRINGS for run in unseeded)
    assert language.longest == 4


def test_a_language_in_pieces_is_the_same_through_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = llamas()
    strings = [(a, b, c) for a in (3, 4) for b in range(5, 9) for c in (10, 11)]
    requests = [request(seed, language=FiniteLanguage.of(strings, [2]), logprobs=2) for seed in range(6)]
    whole = serve(engine(target), requests)
    monkeypatch.setattr(LanguageRound, "width", 4)
    cut = serve(engine(target), requests)
    assert [run.output for run in cut] == [run.output for run in whole]
    for cut_run, whole_run in zip(cut, whole, strict=True):
        assert [lp.logprob for lp in cut_run.logprobs] == pytest.approx(
            [lp.logprob for lp in whole_run.logprobs], abs=1e-9
        )
        assert len(cut_run.logprobs) == len(cut_run.output)


def test_a_small_language_takes_one_forward_and_a_large_one_its_pieces() -> None:
    target = model()
    served = engine(target)
    for strings, most in ((STRINGS, 1), (list(product(range(1, 6), repeat=3)), 1 + 3)):  # 16 and 156 nodes
        served.add(request(language=FiniteLanguage.of(strings)))
        before = target.forward_calls
        served._admit()
        served.reader.read()
        read = target.forward_calls
        served.step()
        assert target.forward_calls - read == most and read > before and not served.busy


class Chains(TableModel):
    """A target that takes chains of drafts, but no trees."""

    capabilities = Capabilities(tree_mask=False, keep_path=False, taps=False, layer_windows=False)

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> Any:
        for feed in feeds:
            assert TokenTree(feed.tokens, feed.parents or range(-1, len(feed.tokens) - 1)).is_chain
        return super().forward(feeds, taps)


def test_a_target_without_trees_scores_path_by_path() -> None:
    target = Chains(model().table, 7, eos_token_ids=(END,))
    assert [run.output for run in serve(engine(target), [request(seed) for seed in range(8)])] == [
        run.output for run in serve(engine(model()), [request(seed) for seed in range(8)])
    ]


@pytest.mark.parametrize("width", [None, 1, 2, 3, 7, 100])
def test_pieces_are_trees_and_cover_all_nodes(width: int | None) -> None:
    tree = tree_of(FiniteLanguage.of(STRINGS), 3)
    parts = list(pieces(tree, width))
    assert {node for nodes in parts for node in nodes} == set(range(len(tree)))
    for nodes in parts:
        assert nodes[0] == 0 and nodes == sorted(set(nodes))
        assert all(node == 0 or tree.parents[node] in nodes for node in nodes)


def test_the_tree_of_a_language() -> None:
    language = FiniteLanguage.of([(2, 1), (1,), (1, 2), (2, 1)], [0])
    assert language.tokens == (-1, 1, 2, 2, 1) and language.parents == (-1, 0, 1, 0, 3)
    assert language.whole == (False, True, True, False, True)
    assert language.strings == [[1], [1, 2], [2, 1]] and language.longest == 2


def test_other_rules_of_the_request_are_in_the_distribution() -> None:
    """Forbidden strings have probability 0, and the others keep their proportions."""
    target = model()
    expected = brute_force(target, [string for string in STRINGS if 2 not in string], SAMPLING["plain"])
    runs = serve(engine(target, max_batch=32), [request(seed, bad_words=[[2]]) for seed in range(400)])
    assert chi2.sf(*chi_square(Counter(tuple(run.output) for run in runs), expected)) > FALSE_ALARM
    longer = serve(engine(target), [request(seed, min_tokens=3) for seed in range(40)])
    assert {len(run.output) for run in longer} <= {4, 5}


def test_what_ends_a_text_behind_a_string_is_an_end() -> None:
    """A stop token counts as an end of the text, and a stop string that is in no string has nothing to end."""
    target = model()
    expected = brute_force(target, STRINGS, SAMPLING["plain"], (END, OTHER_END))
    served = engine(target, max_batch=32, tokenizer=Numbers())
    more = {"stop_token_ids": frozenset({OTHER_END}), "stop": ["3.4."]}
    runs = serve(served, [request(seed, **more) for seed in range(400)])
    assert chi2.sf(*chi_square(Counter(tuple(run.output) for run in runs), expected)) > FALSE_ALARM
    assert {run.finish_reason for run in runs} == {"eos", "stop"}


def test_an_error_beside_it_does_not_change_the_string() -> None:
    """A batch that fails is tried again request by request; the string is drawn with the same uniforms."""

    def breaks(ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("broken")

    target = model()
    expected = [serve(engine(target), [request(seed)])[0].output for seed in range(4)]
    broken = Request(PROMPT, SamplingParams(temperature=1.0, processors=(breaks,)))
    served = engine(target)
    served.add(broken)
    ids = [served.add(request(seed)) for seed in range(4)]
    ended = {run.id: run.output for run, _ in served.step()}
    assert [ended[i] for i in ids] == expected


def test_the_front_door_takes_a_language_as_a_constraint() -> None:
    """The model's own top-p is left out, since a language would be refused with it."""
    target = model()
    llm = Llm(target, NgramDrafter(), None, ConstantController(), None)
    llm.defaults = GenerationDefaults({"temperature": 1.0, "top_p": 0.8, "top_k": 3}, "a file")
    options: dict[str, Any] = {"constraint": FiniteLanguage.of(STRINGS), "max_new_tokens": 8}
    outputs = llm.generate([PROMPT, PROMPT], seed=4, n=3, **options)
    alone = [llm.generate(PROMPT, seed=seed, **options) for seed in (4, 5, 6)]
    for samples in outputs:
        assert [output.token_ids for output in samples] == [output.token_ids for output in alone]
    assert alone[0].finish_reason == "eos" and alone[0].stats.num_drafts == 1
    pieces_of = list(llm.stream(PROMPT, seed=4, **options))
    assert [token for piece in pieces_of for token in piece.token_ids] == alone[0].token_ids
    traced = llm.generate(PROMPT, seed=4, explain=True, **options)
    assert traced.rounds[0].verifier == traced.rounds[0].drafter == "conditional"
    with pytest.raises(OptionError, match="top_p"):
        llm.generate(PROMPT, top_p=0.9, **options)


def test_the_request_says_why_nothing_else_drafts() -> None:
    run = join(1, request(), model(), None, races=True)
    assert "conditional" in run.request.drafting_choice and run.language_round is not None
    assert run.context.sampler.noise is None and SequenceState(0).num_slots == 0
