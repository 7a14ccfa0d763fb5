"""Early exit: what a round costs, when everything is accepted, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretoken.core import Budget
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.confidence import ConfidenceController
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.models.base import CapabilityError
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.taps import decoder_layers
from models.checkpoints import new_model, prompt_of
from toys import engine, layer_runs, outputs, serve, tables

LAYERS = 5
PROMPTS = [prompt_of(9), prompt_of(1, seed=1), prompt_of(17, seed=2), prompt_of(4, seed=3)]


def model(name: str = "llama", lean: bool = True, silent_from: int | None = None) -> HuggingFaceModel:
    """A deep toy; layers from ``silent_from`` on add nothing to the residual stream."""
    network = new_model(name, num_hidden_layers=LAYERS).double()
    for layer in decoder_layers(network)[silent_from:] if silent_from is not None else ():
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return HuggingFaceModel(network, lean=lean)


# -- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
@pytest.mark.parametrize("exit_layer", [1, 3])
@pytest.mark.parametrize(
    ("options", "controller", "levels"),
    [
        ({"k": 3}, None, lambda drafts: drafts),
        ({"k": 6}, ConfidenceController(0.05), lambda drafts: drafts),
        ({"tree": "2x2x1"}, None, lambda drafts: {0: 0, 2: 1, 6: 2, 10: 3}[drafts]),
    ],
    ids=["chain", "confidence-stop", "tree"],
)
def test_layers_run_in_a_round(
    lean: bool,
    exit_layer: int,
    options: dict[str, int | str],
    controller: Controller | None,
    levels: Callable[[int], int],
) -> None:
    """E per draft step, E for the last drafts, and the other layers once: nothing runs twice."""
    target = model(lean=lean)
    drafter = EarlyExitDrafter(target, layer=exit_layer, **options)  # type: ignore[arg-type]
    speculative = engine(target, drafter, controller=controller)
    speculative.add(Request(PROMPTS[0], SamplingParams(temperature=1.0), 40, seed=1, ignore_eos=True))
    speculative.step()
    (run,) = speculative.requests.running
    drafted = set()
    while speculative.busy:
        layers, tokens = layer_runs(target), run.stats.num_draft_tokens
        speculative.step()
        drafts = run.stats.num_draft_tokens - tokens
        drafted.add(drafts)
        steps = levels(drafts)
        assert layer_runs(target) - layers == exit_layer * steps + exit_layer + (LAYERS - exit_layer)
    assert len(drafted) > 1 and max(drafted) >= 3


# -- acceptance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_exit_that_misses_nothing_is_always_right(lean: bool, temperature: float) -> None:
    target = model(lean=lean, silent_from=3)
    params = SamplingParams(temperature=temperature)
    request = Request(PROMPTS[0], params, 40, seed=1, ignore_eos=True)
    (exact,) = serve(engine(target, EarlyExitDrafter(target, layer=3, k=3)), [request])
    assert (exact.stats.num_drafts, exact.stats.num_accepted_tokens) == (10, 30)
    (early,) = serve(engine(target, EarlyExitDrafter(target, layer=1, k=3)), [request])
    assert early.stats.acceptance_rate < 0.9


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gpt_neox", "olmo2"])
def test_families_write_what_they_write_alone(name: str) -> None:
    """Ragged batches of one to four requests give the tokens of plain decoding."""
    target = model(name)
    requests = [Request(prompt, max_new_tokens=18 + i, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    plain = outputs(engine(target), requests)
    for batch, options in ((1, {"k": 3}), (4, {"k": 3}), (3, {"tree": "2x2"})):
        drafter = EarlyExitDrafter(target, layer=LAYERS - 1, **options)  # type: ignore[arg-type]
        assert outputs(engine(target, drafter, max_batch=batch), requests) == plain
    assert len({tuple(tokens) for tokens in plain}) == len(plain)


# -- options ---------------------------------------------------------------------------------------------------------


def test_the_default_is_a_quarter_of_the_layers() -> None:
    deep = HuggingFaceModel(new_model("llama", num_hidden_layers=9))
    assert [EarlyExitDrafter(m).layer for m in (model(), deep)] == [1, 2]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("early_exit,layer=99", "an exit layer from 1 to 4, not 99"),
        ("early_exit,layer=5", "an exit layer from 1 to 4, not 5"),
        ("early_exit,layer=-1", "an exit layer from 1 to 4, not -1"),
        ("early_exit,k=0", "early_exit needs k >= 1"),
        ("early_exit:./folder", "takes no path"),
        ("early_exit,exit=2", "unknown option 'exit'"),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    target = model()
    with pytest.raises(ValueError, match=words) as error:
        build_drafter(spec, target, target_source=target)
    assert "\n" not in str(error.value)


def test_targets_without_layers_are_refused() -> None:
    with pytest.raises(CapabilityError, match="layers can be run one by one"):
        EarlyExitDrafter(tables()[0])


def test_the_budget_is_kept() -> None:
    target = model()
    drafter = EarlyExitDrafter(target, layer=2, tree="3x3")
    speculative = engine(target, drafter)
    speculative.add(Request(PROMPTS[0], max_new_tokens=30, ignore_eos=True))
    speculative.step()
    (run,) = speculative.requests.running
    for depth, nodes in ((2, 5), (1, 64), (2, 1)):
        tree = drafter.propose(run.context, Budget(depth, nodes))
        target.commit(run.sequence, ())
        assert tree.num_drafts <= nodes and max(tree.depths) <= depth
