"""Trees that a draft model grows by its own confidence: ``model:PATH,tree=eagle2`` and its kin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foretoken.core import Budget, Context, Kind, TokenTree
from foretoken.core.costs import TargetCost
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, load_model
from foretoken.methods.controllers.confidence import ConfidenceController
from foretoken.methods.drafters import dynamic
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, llamas, outputs

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GROWTHS = ("eagle2", "opt_tree,threshold=0.05", "cost_aware,node_cost=0.001,step_cost=0.01")
GREEDY, SEEDED, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9), SamplingParams(temperature=0.9)


@pytest.fixture(autouse=True)
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "quick_costs", lambda target: TargetCost({1: 1.0, 64: 1.0}))


def watched(drafter: ModelDrafter) -> list[TokenTree]:
    trees: list[TokenTree] = []
    propose = drafter.propose_batch

    def spied(contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        proposals = propose(contexts, budgets)
        trees.extend(proposals)
        return proposals

    drafter.propose_batch = spied  # type: ignore[method-assign]
    return trees


@pytest.mark.parametrize("tree", GROWTHS)
@pytest.mark.parametrize("request_of", [Request(PROMPT, GREEDY, 24), Request(PROMPT, SEEDED, 24, seed=7)])
def test_greedy_and_seeded_requests_get_a_tree_and_their_own_text(tree: str, request_of: Request) -> None:
    target, draft = llamas()
    trees = watched(drafter := ModelDrafter(draft, 4, tree, target=target))
    texts = outputs(engine(target, drafter), [request_of] * 3)
    assert texts == outputs(engine(target), [request_of] * 3)
    assert any(not tree.is_chain for tree in trees) and max(max(tree.depths) for tree in trees) > 2
    assert all(tree.kind is Kind.POINT and tree.num_drafts <= 60 for tree in trees)


def test_a_request_that_samples_without_noise_gets_a_drawn_chain() -> None:
    target, draft = llamas()
    trees = watched(drafter := ModelDrafter(draft, 4, "eagle2", target=target))
    outputs(engine(target, drafter), [Request(PROMPT, SAMPLED, 24)])
    assert all(tree.is_chain for tree in trees) and any(tree.kind is Kind.IID for tree in trees)


def test_the_likeliest_tokens_do_not_depend_on_the_seed() -> None:
    """With ``draw=greedy`` requests with a seed once got the winners of the race all the same."""
    target, draft = llamas()
    first = []
    for params, seed in ((GREEDY, None), (SAMPLED, None), (SEEDED, 0), (SEEDED, 1)):
        trees = watched(drafter := ModelDrafter(draft, 4, "eagle2", "greedy", target))
        outputs(engine(target, drafter), [Request(PROMPT, params, 8, seed=seed)])
        first.append(trees[0])
    assert first[0].num_drafts > 4 and all(tree == first[0] for tree in first)


def test_the_tree_brings_more_tokens_a_round_than_the_chain() -> None:
    target, draft = llamas()
    rounds = {}
    for tree in ("", "eagle2"):
        trees = watched(drafter := ModelDrafter(draft, 4, tree, target=target))
        outputs(engine(target, drafter), [Request(PROMPT, GREEDY, 60)])
        rounds[tree] = len(trees)
    assert rounds["eagle2"] < rounds[""]


def test_the_likeliest_token_of_every_level_is_the_draft_models_own() -> None:
    """The first path is the greedy chain: the tree adds to it and takes nothing away."""
    target, draft = llamas()
    chain = watched(plain := ModelDrafter(draft, 3))
    outputs(engine(target, plain), [Request(PROMPT, GREEDY, 4)])
    trees = watched(drafter := ModelDrafter(draft, 3, "eagle2", target=target))
    outputs(engine(target, drafter), [Request(PROMPT, GREEDY, 4)])
    first = next(tree for tree in trees if tree.num_drafts)
    paths = {tuple(first.tokens[n] for n in first.path(node)) for node in range(len(first))}
    assert chain[0].tokens in paths


def test_where_rows_cost_something_fewer_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "quick_costs", lambda target: TargetCost({1: 1.0, 64: 40.0}))
    target, draft = llamas()
    trees = watched(drafter := ModelDrafter(draft, 4, "eagle2", target=target))
    texts = outputs(engine(target, drafter), [Request(PROMPT, GREEDY, 24)])
    assert texts == outputs(engine(target), [Request(PROMPT, GREEDY, 24)])
    assert max(tree.num_drafts for tree in trees) < 20


def test_a_stop_rule_ends_paths() -> None:
    target, draft = llamas()
    counts = []
    for controller in (None, ConfidenceController(0.4, adapt=False)):
        trees = watched(drafter := ModelDrafter(draft, 4, "eagle2", target=target))
        outputs(engine(target, drafter, None, controller), [Request(PROMPT, GREEDY, 24)])
        counts.append(sum(tree.num_drafts for tree in trees) / len(trees))
    assert counts[1] < counts[0]


def test_self_drafters_grow_trees_too() -> None:
    target = HuggingFaceModel(llama())
    drafter = EarlyExitDrafter(target, layer=1, tree="eagle2")
    request = [Request(PROMPT, GREEDY, 24), Request(PROMPT[:3], SEEDED, 24, seed=1)]
    assert outputs(engine(target, drafter), request) == outputs(engine(target), request)


def test_what_is_drawn_is_not_chosen_by_confidence() -> None:
    target, draft = llamas()
    with pytest.raises(ValueError, match="drawn trees must not: leave out draw"):
        ModelDrafter(draft, 4, "eagle2", "without_replacement", target)
    with pytest.raises(ValueError, match=r"one of .*sequoia.*eagle2"):
        ModelDrafter(draft, 4, "nonsense")
    with pytest.raises(ValueError, match="unknown option 'size' of tree 'opt_tree'"):
        ModelDrafter(draft, 4, "opt_tree,size=3", target=target)


def test_the_spec() -> None:
    target = load_model("builtin")
    drafter = build_drafter("model,k=6,tree=(opt_tree,threshold=0.1)", target)
    assert isinstance(drafter, ModelDrafter) and drafter.dynamic is not None
    assert (drafter.max_depth, drafter.max_nodes) == (6, 60)
    request = [Request(list(range(40, 60)), GREEDY, 16)]
    with torch.inference_mode():
        assert outputs(engine(target, drafter), request) == outputs(engine(target), request)
