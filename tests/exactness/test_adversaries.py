"""Hand-made situations in which speculative decoders go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from exact_cells import BATCH, TINY, differences, reference
from matrix import SAMPLED_MODES

from foretoken import registry
from foretoken.core import Budget, Context, TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.trees.operations import from_paths
from foretoken.methods.verifiers.base import Verifier
from toys import (
    MarkovTable,
    engine,
    fixed_tables,
    outputs,
    serve,
    tables,
)

PROMPT = [0, 1, 2, 3, 0, 1]
T1 = SAMPLED_MODES["T=1"]

DRAFTERS: dict[str, Callable[[MarkovTable], Drafter]] = {
    "chain": lambda draft: ModelDrafter(draft, k=3),
    "iid-tree": lambda draft: ModelDrafter(draft, tree="3x2", draw="iid"),
    "wor-tree": lambda draft: ModelDrafter(draft, tree="3x2", draw="without_replacement"),
    "greedy-tree": lambda draft: ModelDrafter(draft, tree="2x2", draw="greedy"),
}
each_seed = pytest.mark.parametrize("seed", [None, 1], ids=["drawn", "coupled"])
each_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


def distribution_holds(
    target: MarkovTable,
    drafter: Drafter,
    verifier: Verifier | None = None,
    prompt: Sequence[int] = PROMPT,
    modes: Sequence[str] = ("T=1",),
    lengths: Sequence[int] = (2, 3),
) -> bool:
    """Whether every outcome has the probability that the target gives it."""
    speculative = engine(target, drafter, verifier, max_batch=BATCH)
    results = differences(speculative, reference(target, modes, prompt, lengths), modes, prompt, lengths)
    return all(result.difference < TINY for result in results.values())


# -- distributions
# ------------------------------------------------------------------------------------------------------------


@each_drafter
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]),
        ([0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 1.0, 0.0]),
        ([0.4, 0.3, 0.2, 0.1], [0.94, 0.02, 0.02, 0.02]),
        ([0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
    ],
    ids=["disjoint", "one-hot-q", "duplicate-siblings", "one-hot-p", "only-token-0"],
)
def test_extreme_distributions(drafter: str, p: list[float], q: list[float]) -> None:
    target, draft = fixed_tables(p, q)
    assert distribution_holds(target, DRAFTERS[drafter](draft))


@pytest.mark.parametrize("verifier", ["multi_round", "kseq", "traversal", "match"])
def test_duplicate_siblings_under_every_rule(verifier: str) -> None:
    target, draft = fixed_tables([0.4, 0.3, 0.2, 0.1], [0.85, 0.05, 0.05, 0.05])
    rule = registry.make("verifier", verifier)
    assert distribution_holds(target, ModelDrafter(draft, tree="3x2", draw="iid"), rule)


@each_seed
def test_nothing_is_accepted_from_a_disjoint_draft(seed: int | None) -> None:
    target, draft = fixed_tables([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7])
    for build in DRAFTERS.values():
        (run,) = serve(engine(target, build(draft)), [Request(PROMPT, T1, 30, seed=seed)])
        assert (run.stats.num_accepted_tokens, run.stats.num_drafts) == (0, 30)


@each_seed
@pytest.mark.parametrize("drafter", ["chain", "iid-tree", "wor-tree"])
def test_the_target_accepts_its_own_draws(drafter: str, seed: int | None) -> None:
    """q = p: the first child of every node stands, so every path goes to a leaf."""
    target, _ = tables()
    drafts = DRAFTERS[drafter](target)
    depth = drafts.max_depth
    (run,) = serve(engine(target, drafts), [Request(PROMPT, T1, 10 * (depth + 1), seed=seed)])
    assert run.stats.num_drafts == 10
    assert run.stats.num_accepted_tokens == 10 * depth
    assert run.origins == (["accepted"] * depth + ["bonus"]) * 10


@each_drafter
def test_a_prompt_of_one_token(drafter: str) -> None:
    target, draft = tables(seed=5)
    assert distribution_holds(target, DRAFTERS[drafter](draft), prompt=[0], modes=tuple(SAMPLED_MODES))


@pytest.mark.parametrize("eos", [{3}, {1, 2}], ids=["one-eos", "two-eos"])
@each_drafter
def test_eos_inside_a_draft(drafter: str, eos: set[int]) -> None:
    target, draft = tables(eos_token_ids=eos)
    assert distribution_holds(target, DRAFTERS[drafter](draft), modes=("T=1", "filters"), lengths=(2, 3, 4))


@each_drafter
def test_one_new_token(drafter: str) -> None:
    target, draft = tables()
    speculative = engine(target, DRAFTERS[drafter](draft))
    (run,) = serve(speculative, [Request(PROMPT, T1, 1, seed=0)])
    assert (run.stats.num_drafts, run.stats.num_draft_tokens, run.finish_reason) == (1, 0, "length")
    assert distribution_holds(target, DRAFTERS[drafter](draft), lengths=(1,))


# -- greedy ----------------------------------------------------------------------------------------------------------


def true_output(target: MarkovTable, prompt: Sequence[int], count: int) -> list[int]:
    return outputs(engine(target), [Request(prompt, max_new_tokens=count)])[0]


def test_an_always_wrong_drafter_costs_rounds_only() -> None:
    target, _ = tables()
    truth = true_output(target, PROMPT, 20)

    def wrong(context: Context, budget: Budget) -> TokenTree:
        at = len(context.tokens) - context.prompt_length
        return TokenTree.chain(context.root, [(token + 1) % 4 for token in truth[at : at + budget.max_depth]])

    (run,) = serve(engine(target, ScriptedDrafter(propose=wrong)), [Request(PROMPT, max_new_tokens=20)])
    assert run.output == truth
    assert (run.stats.num_drafts, run.stats.num_accepted_tokens) == (20, 0)


def test_the_true_output_as_draft() -> None:
    target, _ = tables()
    truth = true_output(target, PROMPT, 40)
    drafter = ScriptedDrafter(script=truth, as_output=True)  # drafts of 8, so 9 tokens a round
    (run,) = serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=40)])
    assert run.output == truth
    assert (run.stats.num_drafts, run.stats.num_accepted_tokens) == (5, 35)
    assert run.origins == (["accepted"] * 8 + ["bonus"]) * 4 + ["accepted"] * 3 + ["bonus"]


@pytest.mark.parametrize("places", [[0], [7], [3, 4], [0, 1, 2, 12, 19, 20, 21, 39]])
def test_acceptance_stops_exactly_at_wrong_places(places: list[int]) -> None:
    target, _ = tables()
    truth = true_output(target, PROMPT, 40)
    script = [(token + 1) % 4 if i in places else token for i, token in enumerate(truth)]
    drafter = ScriptedDrafter(script=script, as_output=True)
    (run,) = serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=40)])
    assert run.output == truth
    expected: list[str] = []
    while len(expected) < 40:
        start = len(expected)
        drafted = range(start, min(start + 8, 39))
        failed = next((i for i in drafted if i in places), None)
        stop = drafted.stop if failed is None else failed
        last = "plain" if not drafted else "bonus" if failed is None else "recovered"
        expected += ["accepted"] * (stop - start) + [last]
    assert run.origins == expected


def test_a_tree_whose_right_path_is_not_the_first() -> None:
    target, _ = tables()
    truth = true_output(target, PROMPT, 30)

    def around(context: Context, budget: Budget) -> TokenTree:
        at = len(context.tokens) - context.prompt_length
        path = truth[at : at + min(3, budget.max_depth)]
        wrong = [(token + 1) % 4 for token in path]
        return from_paths(context.root, [wrong, [*path[:1], *wrong[1:]], [*path[:2], *wrong[2:]], path])

    (run,) = serve(engine(target, ScriptedDrafter(propose=around)), [Request(PROMPT, max_new_tokens=28)])
    assert run.output == truth[:28]
    assert (run.stats.num_drafts, run.stats.num_accepted_tokens) == (7, 21)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_empty_drafts_are_plain_decoding(temperature: float) -> None:
    target, _ = tables()
    requests = [Request([3, 2], SamplingParams(temperature=temperature), 12, seed=seed) for seed in range(4)]
    for drafter in (ScriptedDrafter(), NgramDrafter(n=9, min_n=9)):
        assert outputs(engine(target, drafter), requests) == outputs(engine(target), requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@each_drafter
def test_the_context_may_be_filled_to_the_last_token(drafter: str, temperature: float) -> None:
    """Tables raise when anything is scored past the context, the draft model's too."""
    target, draft = tables(context_length=len(PROMPT) + 9)
    params = SamplingParams(temperature=temperature)
    (run,) = serve(engine(target, DRAFTERS[drafter](draft)), [Request(PROMPT, params, 9, seed=3)])
    assert (len(run.output), run.finish_reason) == (9, "length")


def test_drafts_longer_than_the_room() -> None:
    target, _ = tables(context_length=len(PROMPT) + 5)
    truth = true_output(target, PROMPT, 5)
    for drafter in (ScriptedDrafter(script=[*truth, *truth, *truth], as_output=True), NgramDrafter(n=1, k=50)):
        for count in (1, 2, 3, 5):
            (run,) = serve(engine(target, drafter), [Request(PROMPT, max_new_tokens=count)])
            assert run.output == truth[:count]
            assert run.stats.num_new_tokens == run.stats.num_drafts + run.stats.num_accepted_tokens == count


def test_a_function_that_ignores_the_budget_is_cut_to_the_room() -> None:
    target, _ = tables(context_length=len(PROMPT) + 3)
    truth = true_output(target, PROMPT, 3)
    drafter = ScriptedDrafter(propose=lambda context, budget: from_paths(context.root, [(0,) * 9, (1,) * 9, truth * 3]))
    assert outputs(engine(target, drafter), [Request(PROMPT, max_new_tokens=3)]) == [truth]


def test_eos_inside_an_accepted_draft_cuts_the_rest() -> None:
    target, _ = tables()
    truth = true_output(target, PROMPT, 20)
    for eos in (frozenset({truth[4]}), frozenset({truth[4], truth[6]})):
        ending, _ = tables(eos_token_ids=eos)
        first = next(i for i, token in enumerate(truth) if token in eos)
        drafter = ScriptedDrafter(script=truth, as_output=True)
        requests = [Request(PROMPT, max_new_tokens=20), Request(PROMPT, max_new_tokens=20, ignore_eos=True)]
        ended, ignored = serve(engine(ending, drafter), requests)
        assert (ended.output, ended.finish_reason) == (truth[: first + 1], "eos")
        assert (ignored.output, ignored.finish_reason) == (truth, "length")
        assert ended.stats.num_new_tokens == first + 1


def test_token_zero_drafted_and_predicted() -> None:
    target, draft = fixed_tables([1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    for drafter in (ScriptedDrafter("0 0 0"), NgramDrafter(), *(build(draft) for build in DRAFTERS.values())):
        (run,) = serve(engine(target, drafter), [Request([0], max_new_tokens=20)])
        assert run.output == [0] * 20
        assert run.stats.num_accepted_tokens >= 9
