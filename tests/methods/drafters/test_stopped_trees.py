"""Rules that end a draft early are asked along every path of the trees of heads and features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretoken.core import Budget, Context, TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_controller
from foretoken.methods.controllers.confidence import ConfidenceController
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.controllers.specdec_pp import SpecdecPpController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.eagle import EagleDrafter
from foretoken.methods.drafters.hydra import HydraDrafter
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.methods.drafters.nets.hydra import HydraConfig, HydraHeads
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llamas, outputs

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FAMILIES = ("eagle", "medusa", "hydra")
RULES = ("confidence,adapt=false", "svip,threshold=0.5", "draft_verify", "adaedl", "tapout")


def randomised(net: nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15)
    return net.eval()


def build(family: str, target: HuggingFaceModel) -> Drafter:
    parts = TargetParts(target)
    layer = LayerConfig.of_target(target.config)
    if family == "eagle":
        return EagleDrafter(FeatureModel(randomised(EagleNet(EagleConfig(**asdict(layer)))), parts, target))
    if family == "medusa":
        return MedusaDrafter(randomised(MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))), parts)
    return HydraDrafter(randomised(HydraHeads(HydraConfig(parts.hidden_size, parts.vocab_size, 3, layer=layer))), parts)


class Watched:
    """A drafter's trees, taken on their way to the engine."""

    def __init__(self, drafter: Drafter) -> None:
        self.trees: list[TokenTree] = []
        propose = drafter.propose_batch

        def watched(contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
            proposals = propose(contexts, budgets)
            self.trees += proposals
            return proposals

        drafter.propose_batch = watched  # type: ignore[method-assign]

    @property
    def drafted(self) -> int:
        return sum(tree.num_drafts for tree in self.trees)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_hangs_below_a_token_after_which_the_rule_stops(family: str, params: SamplingParams) -> None:
    """The rule here stops behind tokens that are even; every other path goes on as without it."""
    target = llamas()[0]
    drafter = build(family, target)
    seen: list[tuple[Tensor, float]] = []

    def stop(distribution: Tensor | None, probability: float) -> bool:
        assert distribution is not None and float(distribution.sum()) == pytest.approx(1.0, abs=1e-4)
        seen.append((distribution, probability))
        token = int((distribution.double() - probability).abs().argmin())
        return token % 2 == 0

    class Even(ConstantController):
        def budget(self, context: Context, batch_size: int) -> Budget:
            return Budget(5, 24, stop=stop)

    watched = Watched(drafter)
    request = [Request(PROMPT, params, 24, seed=3)]
    texts = outputs(engine(target, drafter, None, Even()), request)
    assert seen
    for tree in watched.trees:
        inner = set(tree.parents) - {-1, 0}
        assert all(tree.tokens[node] % 2 for node in inner), "an even token has no children"
    assert any(tree.num_drafts > 1 for tree in watched.trees)
    assert texts == outputs(engine(target), request)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_shortens_what_constant_drafts(family: str, rule: str) -> None:
    target = llamas()[0]
    request = [Request(PROMPT, SamplingParams(), 24)]
    drafts = {}
    for spec in ("constant", rule):
        watched = Watched(drafter := build(family, target))
        assert outputs(engine(target, drafter, None, build_controller(spec)), request) == outputs(
            engine(target), request
        )
        drafts[spec] = watched.drafted
    assert drafts[rule] < drafts["constant"]


def test_a_rule_that_never_stops_changes_no_tree() -> None:
    target = llamas()[0]
    request = [Request(PROMPT, SamplingParams(), 24)]
    trees = []
    for controller in (ConstantController(), ConfidenceController(0.0, adapt=False)):
        watched = Watched(drafter := build("eagle", target))
        outputs(engine(target, drafter, None, controller), request)
        trees.append([(tree.tokens, tree.parents) for tree in watched.trees])
    assert trees[0] == trees[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rule_that_reads_a_draft_model_is_refused(family: str) -> None:
    """Heads have no draft model whose hidden states it could read."""
    target = llamas()[0]
    with pytest.raises(ValueError, match=f"drafter '{family}' has none: use drafter model:PATH") as error:
        engine(target, build(family, target), None, SpecdecPpController(nn.Linear(16, 1)))
    assert "\n" not in str(error.value)
