"""Early exit by saturation: every draft token runs as many layers as it needs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foretoken.core import Budget, Context, TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.layers import LayerPlan
from foretoken.models.network.taps import decoder_layers
from models.checkpoints import new_model, prompt_of
from toys import FALSE_ALARM, engine, joint_distribution, layer_runs, outputs, sampled_p_value

LAYERS = 6
PROMPTS = [prompt_of(9), prompt_of(1, seed=1), prompt_of(17, seed=2), prompt_of(4, seed=3)]
MODES = {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=0.8)}


def model(lean: bool = True, silent_from: int | None = None) -> HuggingFaceModel:
    """A deep toy; layers from ``silent_from`` on add nothing to the residual stream."""
    network = new_model("llama", num_hidden_layers=LAYERS).double()
    for layer in decoder_layers(network)[silent_from:] if silent_from is not None else ():
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return HuggingFaceModel(network, lean=lean)


def requests(mode: str) -> list[Request]:
    return [Request(prompt, MODES[mode], 24, seed=i, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]


def drafted(target: HuggingFaceModel, drafter: EarlyExitDrafter, mode: str = "greedy") -> tuple[list[TokenTree], int]:
    """The trees of a run, checked to be the target's own text, and the layers that drafting ran."""
    trees: list[TokenTree] = []
    layers = 0
    propose = drafter.propose_batch

    def spied(contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        nonlocal layers
        before = layer_runs(target)
        proposals = propose(contexts, budgets)
        layers += int(layer_runs(target) - before)
        trees.extend(proposals)
        return proposals

    drafter.propose_batch = spied  # type: ignore[method-assign]
    texts = outputs(engine(target, drafter), requests(mode))
    assert texts == outputs(engine(target), requests(mode))
    return trees, layers


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
@pytest.mark.parametrize("until", ["margin", "hidden"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tree", ["", "2x2x1", "eagle2"])
def test_the_text_is_the_targets_own(until: str, mode: str, lean: bool, tree: str) -> None:
    target = model(lean)
    trees, _ = drafted(target, EarlyExitDrafter(target, layer=1, k=3, tree=tree, until=until), mode)
    assert any(tree.num_drafts for tree in trees)


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
@pytest.mark.parametrize("tree", ["", "2x2x1"])
def test_a_token_that_is_never_saturated_exits_last(tree: str, lean: bool) -> None:
    """Its drafts are those of a fixed exit there: the layers between have keys and values of every draft before it."""
    target = model(lean)
    never = EarlyExitDrafter(target, layer=1, k=4, tree=tree, until="margin", threshold=1.0, step=1, most=4)
    fixed = EarlyExitDrafter(target, layer=4, k=4, tree=tree)
    assert [t.tokens for t in drafted(target, never)[0]] == [t.tokens for t in drafted(target, fixed)[0]]


def test_a_token_that_is_always_saturated_exits_first() -> None:
    target = model()
    always = EarlyExitDrafter(target, layer=2, k=4, until="hidden", threshold=1e-9)
    fixed = EarlyExitDrafter(target, layer=2, k=4)
    (trees, layers), (fixed_trees, expected) = drafted(target, always), drafted(target, fixed)
    assert [t.tokens for t in trees] == [t.tokens for t in fixed_trees] and layers == expected


def test_hidden_states_that_stand_still_are_saturated() -> None:
    """Layers from the third on do nothing: the first test behind one of them holds, and nothing runs past it."""
    target = model(silent_from=2)
    trees, layers = drafted(target, EarlyExitDrafter(target, layer=1, k=4, until="hidden", threshold=0.9999, step=1))
    levels = sum(1 for tree in trees if tree.num_drafts)
    assert layers > 0 and all(t.num_drafts == 0 or t.depths[-1] for t in trees) and levels
    deepest, most = drafted(
        target, EarlyExitDrafter(target, layer=1, k=4, until="margin", threshold=1.0, step=1, most=5)
    )
    assert layers < most
    assert [t.tokens for t in trees] == [t.tokens for t in deepest], "what they add is nothing"


def test_tokens_exit_at_different_layers() -> None:
    target = model()
    seen: list[int] = []
    forward_on = target.forward_on

    def spied(feeds: Sequence[object], plan: LayerPlan, taps: Sequence[str] = ()) -> object:
        seen.append(plan.end(LAYERS))
        return forward_on(feeds, plan, taps)  # type: ignore[arg-type]

    target.forward_on = spied  # type: ignore[method-assign, assignment]
    drafter = EarlyExitDrafter(target, layer=1, k=4, until="margin", threshold=0.1, step=1, most=5)
    trees, _ = drafted(target, drafter)
    steps = sum(tree.num_drafts for tree in trees)
    assert set(seen) >= {2, 3} and seen.count(5) < seen.count(2) < steps


def test_sampled_output_has_the_targets_distribution() -> None:
    network = new_model("llama", num_hidden_layers=4, vocab_size=6, max_position_embeddings=64).double()
    target = HuggingFaceModel(network)
    prompt, mode = [1, 2, 3, 4], {"T=1": SamplingParams(temperature=1.0)}
    exact = {name: joint_distribution(target, params, prompt, 3) for name, params in mode.items()}
    drafter = EarlyExitDrafter(target, layer=1, k=3, until="margin", threshold=0.2, step=1, most=3)
    assert sampled_p_value(engine(target, drafter, max_batch=64), mode, exact, prompt, 3, 600) > FALSE_ALARM


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("until=entropy", "until must be one of margin, hidden"),
        ("until=margin,threshold=2", r"threshold in \[0, 1\]"),
        ("until=margin,step=-1", "step >= 0"),
        ("until=margin,layer=3,most=2", "most from layer=3 to 5"),
        ("until=margin,most=6", "most from layer=1 to 5"),
        ("threshold=0.4", "with until=margin or until=hidden only"),
    ],
)
def test_bad_options(options: str, words: str) -> None:
    target = model()
    with pytest.raises(ValueError, match=words) as error:
        build_drafter(f"early_exit,{options}", target, target_source=target)
    assert "\n" not in str(error.value)
