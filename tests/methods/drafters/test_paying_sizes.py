"""How large drafts are by default: what pays by the cost of the target's calls on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core import Budget, Context, Rng
from foretoken.core.costs import TargetCost
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, load_model, load_tokenizer
from foretoken.methods.drafters import dynamic, features, heads, pass_tokens
from foretoken.methods.drafters.pass_tokens import paying_shape
from foretoken.methods.trees.cost_aware import paying_count
from foretoken.models import call_costs, wrap
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import quick_costs
from foretoken.models.machine import results_file
from foretoken.training.recipes.kangaroo import KangarooRecipe
from toys import engine, llama, llamas, outputs, tables

FREE = TargetCost({1: 1.0, 64: 1.0})
STEEP = TargetCost({1: 1.0, 2: 2.0, 64: 64.0})
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def builtin() -> LanguageModel:
    return load_model("builtin")


def built(spec: str, target: LanguageModel, costs: TargetCost, monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (features, heads, pass_tokens):
        monkeypatch.setattr(module, "quick_costs", lambda target: costs)
    return build_drafter(spec, target, target_source="builtin")


def nodes_of(drafter: Any, target: LanguageModel, count: int = 16) -> float:
    """Mean draft nodes of a round, after the first."""
    running = engine(target, drafter)
    running.add(Request(PROMPT, SamplingParams(), count))
    counts = []
    running.on_round = lambda runs, trees, verdicts, times: counts.extend(tree.num_drafts for tree in trees)
    while running.busy:
        running.step()
    return sum(counts[1:]) / len(counts[1:])


@pytest.mark.parametrize("spec", ["eagle", "eagle3", "medusa", "hydra"])
def test_trees_are_large_where_rows_are_free_and_small_where_they_are_not(
    spec: str, builtin: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, steep = (nodes_of(built(spec, builtin, costs, monkeypatch), builtin) for costs in (FREE, STEEP))
    assert free > 40 and steep < 6
    assert nodes_of(built(f"{spec},nodes=9", builtin, STEEP, monkeypatch), builtin) > 6, "what is asked for is done"


@pytest.mark.parametrize("spec", ["eagle", "dflash", "dflash2", "medusa", "hydra"])
def test_costs_can_be_set(spec: str, builtin: LanguageModel) -> None:
    drafter = build_drafter(f"{spec},nodes=40", builtin, target_source="builtin")
    sizes = []
    for costs in (None, FREE, STEEP, None):
        drafter.costs = costs
        sizes.append(nodes_of(drafter, builtin))
    assert sizes[0] == sizes[1] == sizes[3] > 20 and sizes[2] < 10


def test_costs_cut_no_tree_of_heads_whose_values_nobody_knows(builtin: LanguageModel) -> None:
    shape = [(0,), (1,), (2,), (0, 0), (0, 1)]
    heads: Any = build_drafter("medusa,nodes=40", builtin, target_source="builtin")
    drafter = heads.reshaped(shape)
    size = nodes_of(drafter, builtin)
    drafter.costs = STEEP
    assert nodes_of(drafter, builtin) == size > 4


@pytest.mark.parametrize("name", ["model", "shared_vocab"])
@pytest.mark.parametrize("tree", ["eagle2", "opt_tree", "cost_aware"])
def test_trees_of_draft_models_are_sized_by_the_target(
    name: str, tree: str, builtin: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(dynamic, "quick_costs", lambda model: asked.append(model) or STEEP)
    tokenizer = load_tokenizer("builtin")
    drafter = build_drafter(f"{name},tree={tree}", builtin, target_source="builtin", tokenizer=tokenizer)
    assert asked == [builtin]
    if tree == "cost_aware":
        assert drafter.dynamic.growth.step_cost == drafter.model.weight_bytes / builtin.weight_bytes


def test_the_text_does_not_depend_on_the_costs(builtin: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0.8)):
        request = [Request(PROMPT, params, 24, seed=5)]
        texts = [outputs(engine(builtin, built("eagle", builtin, c, monkeypatch)), request) for c in (FREE, STEEP)]
        assert texts[0] == texts[1]


def test_a_batch_pays_for_the_rows_of_all_its_requests() -> None:
    """Rows cost nothing up to 32: one request has room for 31 nodes, eight share it."""
    costs, values = TargetCost({1: 1.0, 32: 1.0, 64: 33.0}), [0.9 * 0.95**i for i in range(60)]
    assert paying_count(values, costs, 1) == 31 and paying_count(values, costs, 8) == 3


@pytest.mark.parametrize("spec", ["eagle", "medusa", "hydra"])
def test_requests_that_share_a_call_get_smaller_trees_and_their_own_texts(
    spec: str, builtin: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = TargetCost({1: 1.0, 16: 1.0, 64: 8.0})
    drafter = built(spec, builtin, cost, monkeypatch)
    sizes: dict[int, list[int]] = {}
    texts = {}
    for batch in (1, 6):
        running = engine(builtin, drafter)
        running.on_round = lambda runs, trees, _, __: sizes.setdefault(len(runs), []).extend(
            t.num_drafts for t in trees
        )
        texts[batch] = outputs(running, [Request(PROMPT[: 10 + i], SamplingParams(), 16) for i in range(batch)])
    assert max(sizes[6]) < max(sizes[1])
    assert texts[6][0] == texts[1][0]


def test_a_tree_of_a_request_that_draws_is_as_large_in_company(
    builtin: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text would depend on who else is served."""
    drafter = built("medusa", builtin, TargetCost({1: 1.0, 16: 1.0, 64: 8.0}), monkeypatch)
    drawn = Context(0, PROMPT, len(PROMPT), Sampler(SamplingParams(temperature=1.0)), Rng(0))
    greedy = Context(1, PROMPT, len(PROMPT), Sampler(SamplingParams()), Rng(0))
    for context in (drawn, greedy):
        context.hidden = {"last": torch.zeros(1, drafter.parts.hidden_size)}
    sizes = {
        (c.request_id, n): len(drafter.propose_batch([c] * n, [Budget()] * n)[0])
        for c in (drawn, greedy)
        for n in (1, 6)
    }
    assert sizes[0, 1] == sizes[0, 6] and sizes[1, 1] > sizes[1, 6]


@pytest.mark.parametrize("cost", [FREE, TargetCost({1: 1.0, 64: 8.0}), STEEP], ids=["free", "sloped", "steep"])
def test_nothing_is_drafted_behind_a_node_that_is_not_kept(
    cost: TargetCost, builtin: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same trees as from all that the network could look at, with fewer of its calls where rows cost something."""
    trees: dict[bool, list[Any]] = {}
    calls = {}
    for pruned in (True, False):
        drafter = built("eagle", builtin, cost, monkeypatch)
        if not pruned:
            expand = drafter._expand
            drafter._expand = lambda tree, *more, d=drafter, e=expand: unpruned(d, e, tree, *more)
        shapes = trees[pruned] = []
        running = engine(builtin, drafter)
        running.on_round = lambda runs, round_trees, _, __, shapes=shapes: shapes.extend(
            (t.tokens, t.parents) for t in round_trees
        )
        before = drafter.model.run_rows
        outputs(running, [Request(PROMPT, SamplingParams(), 24)])
        calls[pruned] = drafter.model.run_rows - before
    assert trees[True] == trees[False]
    assert calls[True] == calls[False] if cost is FREE else calls[True] < calls[False]


def unpruned(drafter: Any, expand: Any, tree: Any, *more: Any) -> None:
    """Expand as where nothing says what a call costs."""
    costs, drafter.costs = drafter.costs, None
    try:
        expand(tree, *more)
    finally:
        drafter.costs = costs


def test_the_shape_of_look_ahead_tokens_by_hand() -> None:
    """k = 2 with two groups: 7 nodes.  With s = (.5, .25) a round of drafts brings 1.75 tokens and one in 1.25 follows
    without."""
    flat, rows = FREE.of, STEEP.of
    assert paying_shape([0.9] * 4, flat) == (4, 5), "all of them where rows are free"
    assert paying_shape([0.1] * 4, rows) == (1, 1)
    assert paying_shape([0.5, 0.5], rows, k=2, groups=2) == (2, 2), "what is asked for is done"
    drafting, plain = 1.75, 1.0
    cost = TargetCost({1: 1.0, 3: 1.0, 7: 1.1, 9: 9.0}).of
    rates = {2: (drafting + 0.25 * plain) / (1.1 + 0.25 * 1.0), 3: drafting / 9.0, 1: (drafting + 0.5) / (1.05 + 0.5)}
    assert paying_shape([0.5, 0.5], cost, k=2)[1] == max(rates, key=lambda groups: rates[groups])


def test_the_built_in_rows_are_not_fed_under_every_node(
    builtin: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draft in six is right: 25 nodes for it are too many wherever a row costs anything."""
    cheap = TargetCost({1: 1.0, 64: 1.8})
    drafter = built("pass_tokens", builtin, cheap, monkeypatch)
    assert (1 + drafter.max_depth) * drafter.max_depth < 13
    everywhere = built("pass_tokens,k=4,groups=5", builtin, cheap, monkeypatch)
    assert (everywhere.max_depth, everywhere.groups) == (4, 5)
    context = Context(0, [3], 1, Sampler(SamplingParams()), Rng(0))
    assert len(everywhere.propose(context, Budget())) == 5


# -- the measurement -------------------------------------------------------------------------------------------------


def test_costs_never_fall_and_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = llamas(torch.float32)[0]
    costs = quick_costs(target)
    seconds = [costs.seconds[count] for count in sorted(costs.seconds)]
    assert seconds == sorted(seconds) and min(costs.seconds) == 1
    monkeypatch.setattr(call_costs, "_measure_quickly", lambda target: pytest.fail("it is known"))
    assert quick_costs(target) is costs
    assert not any(sequence.tokens for sequence in target._sequences), "nothing is left behind"


def test_costs_are_remembered_by_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(call_costs.KEPT, "results", {})
    monkeypatch.setattr(call_costs, "WORTH_KEEPING_S", 0.0)
    monkeypatch.setattr(call_costs, "is_busy", lambda: False)
    first = quick_costs(llamas(torch.float32)[0])
    monkeypatch.setattr(call_costs.KEPT, "results", {})  # another process
    monkeypatch.setattr(call_costs, "_measure_quickly", lambda target: pytest.fail("the file has it"))
    assert quick_costs(llamas(torch.float32)[0]).seconds == first.seconds
    results_file().write_text("{")
    monkeypatch.setattr(call_costs.KEPT, "results", {})
    monkeypatch.setattr(call_costs, "_measure_quickly", lambda target: {1: 7.0})
    assert quick_costs(llamas(torch.float32)[0]).seconds == {1: 7.0}, "a damaged file counts as none"


def test_another_forward_of_the_same_network_has_costs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_costs.KEPT, "results", {})
    monkeypatch.setattr(call_costs, "_measure_quickly", lambda target: {1: next(seconds)})
    seconds, network = iter([5.0, 1.0, 2.0]), llama(dtype=torch.float32)
    public, fast = wrap(network, exact="bitwise", lean=False), wrap(network)
    assert [quick_costs(target).seconds for target in (public, fast, public, fast)] == [{1: 5.0}, {1: 1.0}] * 2
    assert quick_costs(wrap(network)).seconds == {1: 1.0}
    public.graphs = object()  # type: ignore[attr-defined]
    assert quick_costs(public).seconds == {1: 2.0}


def test_what_a_busy_machine_tells_is_for_this_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other took .63 s for one row and for 64: 64 seemed free for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(call_costs.KEPT, "results", {})
    monkeypatch.setattr(call_costs, "WORTH_KEEPING_S", 0.0)
    monkeypatch.setattr(call_costs, "is_busy", lambda: True)
    monkeypatch.setattr(call_costs, "_measure_quickly", lambda target: {1: 0.63, 64: 0.64})
    assert quick_costs(llamas(torch.float32)[0]).seconds == {1: 0.63, 64: 0.64}
    assert quick_costs(llamas(torch.float32)[0]).seconds == {1: 0.63, 64: 0.64}, "wrapped anew, measured once"
    monkeypatch.setattr(call_costs.KEPT, "results", {})  # another process, later
    monkeypatch.setattr(call_costs, "is_busy", lambda: False)
    monkeypatch.setattr(call_costs, "_measure_quickly", lambda target: {1: 1.0, 64: 6.6})
    assert quick_costs(llamas(torch.float32)[0]).seconds == {1: 1.0, 64: 6.6}


def test_a_table_has_costs_too() -> None:
    assert quick_costs(tables()[0]).of(1) > 0


def test_kangaroo_exits_behind_a_sixteenth_of_the_layers() -> None:
    class Parts:
        num_layers, config = 32, llamas()[0].config

    recipe = KangarooRecipe.__new__(KangarooRecipe)
    for layers, exit_layer in ((32, 2), (30, 2), (8, 1), (48, 3), (2, 1)):
        recipe.parts = Parts()  # type: ignore[assignment]
        recipe.parts.num_layers = layers
        assert recipe.from_target()["layer"] == exit_layer
