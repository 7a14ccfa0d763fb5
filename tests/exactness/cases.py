"""How to build every drafter for the toy models: the one place that a new drafter adds a line to.

``CASES`` maps a registry name to its cases.  A case is a label and a function ``(target, draft) -> drafter``; both are
:class:`~foretoken.models.base.LanguageModel` objects, ``draft`` one that differs a little from ``target``.  A drafter
that needs a network (hidden states, layers) says ``network=True``: its distribution is then tested on a tiny llama
instead of tables.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from trained import taught, trained

from foretoken.core.costs import TargetCost
from foretoken.loading.draft_models import windowed
from foretoken.methods.drafters.ahead import AheadDrafter
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.bpd import BpdDrafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.datastore import Datastore
from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.dflash2 import Dflash2Drafter
from foretoken.methods.drafters.dspark import DsparkDrafter
from foretoken.methods.drafters.eagle import EagleDrafter
from foretoken.methods.drafters.eagle3 import Eagle3Drafter
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.hydra import HydraDrafter
from foretoken.methods.drafters.jacobi import JacobiDrafter
from foretoken.methods.drafters.jump import JumpDrafter
from foretoken.methods.drafters.kangaroo import KangarooDrafter
from foretoken.methods.drafters.known import KnownDrafter
from foretoken.methods.drafters.layer_skip import LayerSkipDrafter
from foretoken.methods.drafters.lookahead import LookaheadDrafter
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.mtp import MtpDrafter
from foretoken.methods.drafters.nets.bpd import BpdConfig, BpdHeads
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.hydra import HydraConfig, HydraHeads
from foretoken.methods.drafters.nets.jump import JumpConfig, JumpNet
from foretoken.methods.drafters.nets.kangaroo import KangarooConfig, KangarooNet
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.nets.mtp import MtpConfig, MtpNet
from foretoken.methods.drafters.nets.pass_tokens import PassTokens, PassTokensConfig
from foretoken.methods.drafters.nets.peagle import PeagleConfig, PeagleNet
from foretoken.methods.drafters.nets.uno import UnoConfig, UnoNet
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.ngram_cache import NgramCacheDrafter
from foretoken.methods.drafters.online import OnlineDrafter
from foretoken.methods.drafters.pard import PardDrafter
from foretoken.methods.drafters.pass_tokens import PassTokensDrafter
from foretoken.methods.drafters.peagle import PeagleDrafter
from foretoken.methods.drafters.prediction import PredictionDrafter
from foretoken.methods.drafters.quantized import QuantizedDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.drafters.retokenize import RetokenizeDrafter
from foretoken.methods.drafters.retrieval import RetrievalDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.drafters.sam import SamDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.drafters.shared_vocab import SharedVocabDrafter
from foretoken.methods.drafters.sparse_kv import SparseKvDrafter
from foretoken.methods.drafters.staged import StagedDrafter
from foretoken.methods.drafters.suffix import SuffixDrafter
from foretoken.methods.drafters.swift import SwiftDrafter
from foretoken.methods.drafters.uno import UnoDrafter
from foretoken.methods.drafters.vocabulary import Vocabulary
from foretoken.methods.trees.cost_aware import CostAware
from foretoken.methods.trees.operations import first_nodes, from_paths
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.heads.mtp import TargetLayerModule
from foretoken.models.forward.heads.stacked import StackedModel, StackedModules
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.variants.gated import linear_shapes
from foretoken.models.variants.second_weights import OwnWeightsModel, Scheme
from foretoken.models.variants.sparse import SparseModel
from foretoken.training.recipes import RECIPES


def predicting(drafter: KnownDrafter) -> KnownDrafter:
    """With a prediction for every request."""
    drafter.prediction.default = [0, 1, 2, 3, 1, 1, 0, 2]
    return drafter


def random_weights(net: Any, scale: float = 0.4) -> Any:
    """A network whose guesses are right by chance only."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return net


def few_tokens(model: LanguageModel, quantised: bool = False, first: int = 1) -> DraftHead:
    """A projection to every second token: of four a processor may leave none of them."""
    return DraftHead(TargetParts(model), torch.arange(first, model.vocab_size, 2), quantised=quantised)


def near_sighted(draft: LanguageModel) -> LanguageModel:
    """A draft model that reads three tokens back, and the first one."""
    return windowed(draft, Window(3, 1))


def guessing_few(drafter: Any, model: LanguageModel) -> Drafter:
    """A drafter with the network ``model`` that guesses every second token only."""
    drafter.head = few_tokens(model)
    guesser: Drafter = drafter
    return guesser


def medusa(
    target: LanguageModel, nodes: int, random: bool, own: bool = False, few: bool = False, draw: str = "coupled"
) -> MedusaDrafter:
    """Heads with random weights, or fresh ones, which say what the target says of the token before; ``own``: each with
    a projection of its own; ``few``: that guess every second token."""
    parts = TargetParts(target)
    net = MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3, own_projection=own))
    frequent = range(1, parts.vocab_size, 2) if few else ()
    return MedusaDrafter(random_weights(net) if random else net, parts, nodes, frequent=frequent, draw=draw)


def bpd(target: LanguageModel, random: bool, norm: str = "rms") -> BpdDrafter:
    """Heads with random weights, or fresh ones, which say what the target says of the token before."""
    parts = TargetParts(target)
    net = BpdHeads(BpdConfig(parts.hidden_size, k=4, width=6, norm=norm))
    return BpdDrafter(random_weights(net) if random else net, parts)


def kangaroo(target: LanguageModel, few: bool = False, **options: Any) -> KangarooDrafter:
    """A random adapter behind the target's first layer."""
    parts = TargetParts(target)
    net = random_weights(KangarooNet(KangarooConfig(**dataclasses.asdict(LayerConfig.of_target(parts.config)))))
    head = few_tokens(target, first=0) if few else None
    built = KangarooDrafter(target, FeatureModel(net, parts, target, head), **options)
    built.head = head
    return built


def jump(
    target: LanguageModel, few: bool = False, start: int = 1, state: int = 2, width: int = 0, **options: Any
) -> JumpDrafter:
    """A random predictor of what is behind the target's first layer, or before it; the layers after it draft."""
    net = random_weights(JumpNet(JumpConfig(TargetParts(target).hidden_size, start, 2, state, width, inner=6)))
    if start == 0:  # with larger weights rounding in float32 makes q differ by 1e-6 with a row's neighbours
        net.load_state_dict({name: 0.1 * weight for name, weight in net.state_dict().items()})
    return JumpDrafter(target, net, head=few_tokens(target, first=0) if few else None, **options)


def hydra(
    target: LanguageModel,
    nodes: int,
    random: bool,
    prefix: bool = False,
    frequent: Sequence[int] = (),
    draw: str = "coupled",
) -> HydraDrafter:
    """Dependent heads with random weights, or fresh ones, which say what the target says of the token before."""
    parts = TargetParts(target)
    layer = dataclasses.asdict(LayerConfig.of_target(parts.config))
    net = HydraHeads(HydraConfig(parts.hidden_size, parts.vocab_size, 3, prefix=prefix, layer=layer))
    weights = random_weights(net) if random else net
    return HydraDrafter(weights, parts, nodes, frequent=frequent, draw=draw, target=target)


SEQUOIA = "sequoia,nodes=6,depth=3,acceptance=0.5 0.25 0.2"
"""(0), (1), (0,0), (2), (1,0), (0,0,0): places of one level with different numbers of children."""


def feature_drafter(
    drafter: Any, net: Any, config: Any, target: LanguageModel, few: bool = False, **options: Any
) -> Drafter:
    """A random network over the target's features."""
    parts = TargetParts(target)
    shape = dataclasses.asdict(LayerConfig.of_target(parts.config))
    head = few_tokens(target) if few else None
    built: Drafter = drafter(
        FeatureModel(random_weights(net(config(**shape))), parts, target, head), nodes=5, depth=3, **options
    )
    return built


def native_mtp(target: LanguageModel, count: int = 1, few: bool = False, **options: Any) -> MtpDrafter:
    """Random modules of the target's own layer class, as a checkpoint holds them."""
    parts = TargetParts(target)
    modules = [random_weights(TargetLayerModule(parts.network)) for _ in range(count)]
    head = few_tokens(target) if few else None
    if count > 1:
        chain = {"nodes": 3, "depth": 3}
        return MtpDrafter(StackedModel(StackedModules(modules), parts, target, head), **{**chain, **options})
    return MtpDrafter(FeatureModel(modules[0], parts, target, head), nodes=5, depth=3, width=2)


def eagle3(target: LanguageModel, share_head: bool, **options: Any) -> Eagle3Drafter:
    """A random network that can guess every second token, from depths that the target has."""
    parts = TargetParts(target)
    shape = dataclasses.asdict(LayerConfig.of_target(parts.config))
    config = Eagle3Config(**shape, vocab_size=parts.vocab_size, draft_vocab=parts.vocab_size // 2, layers="0,1,2",
                          share_head=share_head)  # fmt: skip
    net = random_weights(Eagle3Net(config))
    net.choose(torch.arange(config.draft_vocab) * 2 + 1)
    return Eagle3Drafter.of(net, parts, target, nodes=5, depth=3, **options)


def peagle(target: LanguageModel, shape: dict[str, Any], **options: Any) -> PeagleDrafter:
    """A random network of two layers that can guess every second token, or what ``shape`` says."""
    parts = TargetParts(target)
    layer = dataclasses.asdict(LayerConfig.of_target(parts.config))
    defaults = {
        "vocab_size": parts.vocab_size,
        "draft_vocab": parts.vocab_size // 2,
        "layers": "0,1,2",
        "num_layers": 2,
    }
    config = PeagleConfig(**{**layer, **defaults, "places": 3, **shape})
    net = random_weights(PeagleNet(config))
    net.choose(
        torch.arange(config.num_draft_ids) if not config.draft_vocab else torch.arange(config.draft_vocab) * 2 + 1
    )
    return PeagleDrafter.of(net, parts, target, **{"nodes": 5, **options})


def block(drafter: Any, target: LanguageModel, shape: dict[str, Any], **options: Any) -> Drafter:
    """A random network of two layers that guesses blocks of four, or that and more for ``shape``."""
    parts = TargetParts(target)
    layer = dataclasses.asdict(LayerConfig.of_target(parts.config))
    config = drafter.net_config(
        **{**layer, "vocab_size": parts.vocab_size, "layers": 2, "taps": "1,2", "block": 4, **shape}
    )
    net = random_weights(drafter.net_class(config))
    built: Drafter = drafter.of(net, parts, target, **{"nodes": 5, **options})
    return built


BLOCKS: dict[Any, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    DflashDrafter: {
        "drawn": ({}, {}),
        "points": ({"causal": "1", "reach": "0,3"}, {"draw": "greedy"}),
        "chain": ({"from_anchor": True, "sinks": True, "own_mask": True}, {"width": 1, "depth": 2}),
        "wor-tree": ({}, {"draw": "without_replacement", "tree": "2x2x1"}),
    },
    Dflash2Drafter: {
        "drawn": ({"group": 4, "top": 3}, {}),
        "points": ({"group": 8, "conv": 3, "draft_vocab": 3}, {"draw": "greedy"}),
        "wor-tree": ({"group": 4, "top": 3}, {"draw": "without_replacement", "tree": "3x2x1"}),
    },
    DsparkDrafter: {
        "drawn": ({"top": 3}, {}),
        "gated": ({"head": "gated", "confidence": "state"}, {"draw": "greedy", "stop": 0.2}),
        "rnn": ({"head": "rnn", "from_anchor": False}, {"stop": 0.1, "depth": 2}),
        "wor-tree": ({"top": 3, "confidence": "state"}, {"draw": "without_replacement", "tree": "2x2x1", "stop": 0.2}),
    },
}
"""By drafter, shapes of networks and options."""


def pard2(target: LanguageModel, draft: Any, **options: Any) -> PardDrafter:
    """A draft model with a random projection of two of the target's states beside its tokens."""
    network, size = copy.deepcopy(draft.model), TargetParts(target).hidden_size
    network.target_proj = random_weights(torch.nn.Linear(2 * size, size)).to(network.dtype)
    network.config.pard2_target_layers, network.config.pard2_scale = [-1, 1], 0.3
    return PardDrafter(HuggingFaceModel(network), k=3, mask=3, nodes=5, target=target, **options)


def pass_tokens(target: LanguageModel, learned: int, **options: Any) -> PassTokensDrafter:
    """Random look-ahead tokens."""
    net = PassTokens(PassTokensConfig(TargetParts(target).hidden_size, learned))
    return PassTokensDrafter(random_weights(net), target, **options)


def uno(target: Any, few: bool = False, shape: dict[str, Any] | None = None, **options: Any) -> UnoDrafter:
    """Random updates of the target's layers, noise from all of its tokens."""
    settings = {"places": 4, "rank": 2, "mask_token": target.vocab_size, **(shape or {})}
    net = UnoNet(UnoConfig(target.vocab_size, target.num_layers, linear_shapes(target.model), **settings))
    return UnoDrafter(
        target, random_weights(net, 0.3), **{"nodes": 6, **options}, head=few_tokens(target) if few else None
    )


def grown(target: LanguageModel, draft: LanguageModel, tree: str, draw: str) -> ModelDrafter:
    """A tree that follows the draft's confidence, for a machine where rows are free: how many nodes pay would depend on
    how many requests share a call, and distributions are enumerated in calls of any size."""
    drafter = ModelDrafter(draft, 3, tree, draw, target)
    assert drafter.dynamic is not None
    drafter.dynamic.costs = TargetCost({1: 1.0, 64: 1.0})
    if isinstance(drafter.dynamic.growth, CostAware):
        drafter.dynamic.growth.cost = drafter.dynamic.costs.relative
    return drafter


def _trained(method: str, target: LanguageModel, draft: LanguageModel) -> Drafter:
    return trained(method, target)


@dataclass(frozen=True)
class Case:
    """One way to build a drafter.

    Attributes:
        label: what is special about it.
        build: makes the drafter from a target and a draft model.
        network: whether the target must be a network.
    """

    label: str
    build: Callable[[LanguageModel, LanguageModel], Drafter]
    network: bool = False


def letters(count: int) -> Vocabulary:
    """Token i is the i-th letter."""
    return Vocabulary([chr(97 + i).encode() for i in range(count)])


def other_letters(count: int) -> Vocabulary:
    """The same letters in another order, where every fourth one is joined with the next and missing by itself."""
    order = [(3 * i + 1) % count for i in range(count)]
    return Vocabulary([(chr(97 + i) + chr(98 + i) * (i % 4 == 2)).encode() for i in order])


CASES: dict[str, list[Case]] = {
    "model": [
        Case("chain", lambda target, draft: ModelDrafter(draft, k=3)),
        Case("greedy-chain", lambda target, draft: ModelDrafter(draft, k=3, draw="greedy")),
        Case("iid-tree", lambda target, draft: ModelDrafter(draft, tree="3x2x1", draw="iid")),
        Case("wor-tree", lambda target, draft: ModelDrafter(draft, tree="2x2x1", draw="without_replacement")),
        Case("greedy-tree", lambda target, draft: ModelDrafter(draft, tree="2x2x1", draw="greedy")),
        Case("itself", lambda target, draft: ModelDrafter(target, k=3)),
        Case("window", lambda target, draft: ModelDrafter(near_sighted(draft), k=3), network=True),
        *(
            Case(f"few-{label}", lambda target, draft, o=options: guessing_few(ModelDrafter(draft, **o), draft), True)  # type: ignore[misc]
            for label, options in {
                "chain": {"k": 3},
                "iid-tree": {"tree": "2x2x1", "draw": "iid"},
                "wor-tree": {"tree": "2x2x1"},
                "greedy-tree": {"tree": "2x2x1", "draw": "greedy"},
            }.items()
        ),
        *(
            Case(f"{tree}-{draw}", lambda target, draft, t=tree, d=draw: grown(target, draft, t, d))  # type: ignore[misc]
            for tree, draw in (("eagle2", "iid"), ("opt_tree,threshold=0.05", "iid"), ("cost_aware", "greedy"))
        ),
        *(
            Case(f"sequoia-{draw}", lambda target, draft, d=draw: ModelDrafter(draft, tree=SEQUOIA, draw=d))  # type: ignore[misc]
            for draw in ("without_replacement", "iid", "greedy")
        ),
    ],
    "pard": [
        Case("drawn", lambda target, draft: PardDrafter(draft, k=3, mask=3, nodes=5)),
        Case("points", lambda target, draft: PardDrafter(draft, k=3, mask=0, nodes=5, draw="greedy")),
        Case("chain", lambda target, draft: PardDrafter(draft, k=2, mask=2, width=1)),
        Case("few", lambda target, draft: guessing_few(PardDrafter(draft, k=3, mask=1, nodes=5), draft), network=True),
        Case(
            "wor-tree", lambda target, draft: PardDrafter(draft, k=3, mask=3, draw="without_replacement", tree="2x2x1")
        ),
        Case("window", lambda target, draft: PardDrafter(near_sighted(draft), k=3, mask=3, nodes=5), network=True),
        Case("trained", lambda target, draft: taught(target, draft), network=True),
        Case("states", lambda target, draft: pard2(target, draft), network=True),
        Case("states-points", lambda target, draft: pard2(target, draft, draw="greedy"), network=True),
    ],
    "ahead": [
        Case(label, lambda target, draft, o=options: AheadDrafter(draft, thread=False, **o), network=True)  # type: ignore[misc]
        for label, options in {
            "chain": {"k": 3, "fanout": 1},
            "wide": {"k": 2, "fanout": 3},
            "greedy-chain": {"k": 2, "draw": "greedy"},
        }.items()
    ],
    "online": [
        Case(
            label,
            lambda target, draft, o=options: OnlineDrafter(  # type: ignore[misc]
                draft, target=target, every=1, lr=1e-2, budget=1.0, thread=False, **o
            ),
            network=True,
        )
        for label, options in {
            "chain": {"k": 3},
            "greedy-chain": {"k": 3, "draw": "greedy", "loss": "rkl"},
            "wor-tree": {"tree": "2x2x1", "loss": "tvd"},
        }.items()
    ],
    "shared_vocab": [
        Case(
            label,
            lambda target, draft, o=options: SharedVocabDrafter(  # type: ignore[misc]
                draft, other_letters(draft.vocab_size), letters(target.vocab_size), **o
            ),
        )
        for label, options in {
            "chain": {"k": 3},
            "iid-tree": {"tree": "3x2x1", "draw": "iid"},
            "wor-tree": {"tree": "2x2x1"},
            "greedy-tree": {"tree": "2x2x1", "draw": "greedy"},
        }.items()
    ],
    "retokenize": [
        Case(
            "pairs",
            lambda target, draft: RetokenizeDrafter(
                draft, other_letters(draft.vocab_size), letters(target.vocab_size), k=3
            ),
        ),
        Case(
            "short-window",
            lambda target, draft: RetokenizeDrafter(
                draft, letters(draft.vocab_size), other_letters(target.vocab_size), k=4, lookbehind=1
            ),
        ),
    ],
    "ngram": [
        Case("recent", lambda target, draft: NgramDrafter(n=2, k=3)),
        Case("first", lambda target, draft: NgramDrafter(n=3, k=4, match="first")),
    ],
    "jacobi": [
        Case("repeat", lambda target, draft: JacobiDrafter(m=4)),
        Case("prompt", lambda target, draft: JacobiDrafter(m=3, init="prompt")),
    ],
    "lookahead": [
        Case("window", lambda target, draft: LookaheadDrafter(w=3, n=3, g=2)),
        Case("prompt", lambda target, draft: LookaheadDrafter(w=4, n=4, g=3, pool_from_prompt=True, shift="accepted")),
        Case(
            "refill",
            lambda target, draft: LookaheadDrafter(
                w=4, n=3, g=0, shift="refill", fill="vocabulary", vocab_size=target.vocab_size
            ),
        ),
    ],
    "ngram_cache": [Case("context", lambda target, draft: NgramCacheDrafter(k=3, share=False))],
    "suffix": [
        Case("path", lambda target, draft: SuffixDrafter(k=4, share=False)),
        Case("tree", lambda target, draft: SuffixDrafter(k=6, tree=True, factor=2.0, share=False)),
    ],
    "sam": [
        Case("dynamic", lambda target, draft: SamDrafter(k=3)),
        Case("static", lambda target, draft: SamDrafter(k=3, bias=0, corpus=[[0, 1, 2, 3, 1, 2, 0], [3, 3, 0, 1]])),
    ],
    "recycling": [Case("tree", lambda target, draft: RecyclingDrafter(nodes=6, share=False))],
    "known": [
        Case("predicted", lambda target, draft: predicting(KnownDrafter(ModelDrafter(draft, k=2), k=3))),
        Case("tree", lambda target, draft: predicting(KnownDrafter(ModelDrafter(draft, tree="2x2"), k=2))),
    ],
    "prediction": [Case("text", lambda target, draft: PredictionDrafter(k=3, default=[0, 1, 2, 3, 1, 1, 0, 2]))],
    "retrieval": [
        Case(
            "trie", lambda target, draft: RetrievalDrafter(Datastore.from_documents([[0, 1, 2, 3], [0, 1, 0]]), min_n=1)
        ),
    ],
    "early_exit": [
        Case("chain", lambda target, draft: EarlyExitDrafter(target, layer=1, k=3), network=True),
        Case("wor-tree", lambda target, draft: EarlyExitDrafter(target, layer=1, tree="2x2x1"), network=True),
        *(
            Case(f"until-{test}", lambda target, draft, t=test: EarlyExitDrafter(target, 1, k=3, until=t), network=True)  # type: ignore[misc]
            for test in ("margin", "hidden")
        ),
        Case("few", lambda target, draft: guessing_few(EarlyExitDrafter(target, layer=1, k=3), target), network=True),
        Case(
            "few-until-margin",
            lambda target, draft: guessing_few(EarlyExitDrafter(target, 1, k=3, until="margin"), target),
            network=True,
        ),
    ],
    "layer_skip": [
        Case("chain", lambda target, draft: LayerSkipDrafter(target, attention="1", k=3), network=True),
        Case("greedy-chain", lambda target, draft: LayerSkipDrafter(target, mlp="0", k=3, draw="greedy"), network=True),
        Case("wor-tree", lambda target, draft: LayerSkipDrafter(target, mlp="0-1", tree="2x2x1"), network=True),
    ],
    "quantized": [
        *(
            Case(label, lambda target, draft, o=options: QuantizedDrafter(target, "8", **o), network=True)  # type: ignore[misc]
            for label, options in {
                "chain": {"k": 3},
                "greedy-chain": {"k": 3, "draw": "greedy"},
                "iid-tree": {"tree": "3x2x1", "draw": "iid"},
                "wor-tree": {"tree": "2x2x1"},
            }.items()
        ),
        Case(
            "few",
            lambda target, draft: QuantizedDrafter(target, "8", k=3, head=few_tokens(target, quantised=True)),
            network=True,
        ),
        Case(
            "cascade",
            lambda target, draft: CascadeDrafter(
                OwnWeightsModel(target, Scheme("8")), NgramDrafter(n=2, k=3), inner_rule, k=4
            ),
            network=True,
        ),
        Case(
            "staged",
            lambda target, draft: StagedDrafter(
                OwnWeightsModel(target, Scheme("8")), NgramDrafter(n=2, k=3), inner_rule, k=3, width=2
            ),
            network=True,
        ),
    ],
    "swift": [
        Case(
            "tree",
            lambda target, draft: SwiftDrafter(target, k=3, threshold=0.3, nodes=8, keep=0, window=3, share=False),
            network=True,
        ),
    ],
    "ensemble": [
        Case("chains", lambda target, draft: EnsembleDrafter([ModelDrafter(draft, k=2), ModelDrafter(target, k=2)])),
        Case(
            "iid-point",
            lambda target, draft: EnsembleDrafter(
                [ModelDrafter(draft, tree="2x1", draw="iid"), NgramDrafter(n=2, k=3), JacobiDrafter(m=2)]
            ),
        ),
        Case(
            "wor-iid-point",
            lambda target, draft: EnsembleDrafter(
                [NgramDrafter(n=2, k=2), ModelDrafter(draft, tree="2x1"), ModelDrafter(target, tree="2", draw="iid")]
            ),
        ),
        Case(
            "point",
            lambda target, draft: EnsembleDrafter(
                [LookaheadDrafter(w=3, n=3, g=2), RecyclingDrafter(nodes=4, share=False), NgramDrafter(n=2, k=3)]
            ),
        ),
        Case("coupled", lambda target, draft: EnsembleDrafter([JacobiDrafter(m=3), NgramDrafter(n=2, k=3)])),
    ],
    "router": [
        Case(
            "chains",
            lambda target, draft: RouterDrafter([ModelDrafter(draft, k=3), NgramDrafter(n=2), JacobiDrafter()]),
        ),
        Case(
            "trees",
            lambda target, draft: RouterDrafter(
                [
                    ModelDrafter(draft, tree="2x2"),
                    EnsembleDrafter([ModelDrafter(draft, k=2), RecyclingDrafter(nodes=4, share=False)]),
                    LookaheadDrafter(w=3, n=3, g=2),
                ],
            ),
        ),
        Case(
            "expected",
            lambda target, draft: RouterDrafter(
                [SuffixDrafter(share=False), NgramDrafter(n=2), ModelDrafter(draft, tree="2x2")],
                rule="expected",
                least=1.0,
            ),
        ),
        Case(
            "match",
            lambda target, draft: RouterDrafter(
                [SamDrafter(), NgramDrafter(n=3), RecyclingDrafter(nodes=4, share=False)],
                rule="match",
                least=3,
                bias=(0, 1, 0),
            ),
        ),
        Case("coupled", lambda target, draft: RouterDrafter([NgramDrafter(n=2), JacobiDrafter(m=3)])),
    ],
    "cascade": [
        Case("ngram", lambda target, draft: CascadeDrafter(draft, NgramDrafter(n=2, k=3), inner_rule, k=4)),
        Case("model", lambda target, draft: CascadeDrafter(draft, ModelDrafter(target, k=2), inner_rule, k=4)),
        Case(
            "triforce",
            lambda target, draft: CascadeDrafter(
                SparseModel(target, 6, 2), ModelDrafter(near_sighted(draft), k=2), inner_rule, k=3
            ),
            network=True,
        ),
        Case("tree", lambda target, draft: CascadeDrafter(draft, ModelDrafter(target, tree="2x2"), inner_rule, k=4)),
        Case(
            "deep",
            lambda target, draft: CascadeDrafter(
                draft, CascadeDrafter(target, NgramDrafter(n=2, k=3), inner_rule, k=3), inner_rule, k=5
            ),
        ),
        Case(
            "late-ngram",
            lambda target, draft: CascadeDrafter(
                draft, NgramDrafter(n=2, k=3), inner_rule, k=5, early=2, late=NgramDrafter(n=3, k=4)
            ),
        ),
        Case(
            "late-model",
            lambda target, draft: CascadeDrafter(
                draft, NgramDrafter(n=2, k=3), inner_rule, k=4, early=2, late=ModelDrafter(target, k=4)
            ),
        ),
        Case("lenient", lambda target, draft: CascadeDrafter(draft, NgramDrafter(), inner_rule, k=4, lenience=4.0)),
    ],
    "staged": [
        Case("ngram", lambda target, draft: StagedDrafter(draft, NgramDrafter(n=2, k=3), inner_rule, k=3, width=2)),
        Case("model", lambda target, draft: StagedDrafter(draft, ModelDrafter(target, k=2), inner_rule, k=2, width=3)),
        Case(
            "tree",
            lambda target, draft: StagedDrafter(draft, NgramDrafter(n=1, k=3), inner_rule, tree="2x2x1"),
        ),
        Case(
            "sequoia",
            lambda target, draft: StagedDrafter(draft, ModelDrafter(target, k=2), inner_rule, tree=SEQUOIA),
        ),
    ],
    "sparse_kv": [
        Case("whole", lambda target, draft: SparseKvDrafter(target, k=3), network=True),
        Case(
            "retrieval",
            lambda target, draft: SparseKvDrafter(target, k=3, budget=6, chunk=2, rebuild=5),
            network=True,
        ),
        Case(
            "recent",
            lambda target, draft: SparseKvDrafter(target, tree="2x2x1", budget=17, select="recent", rebuild=3),
            network=True,
        ),
    ],
    "medusa": [
        Case("random", lambda target, draft: medusa(target, 6, random=True), network=True),
        Case("fresh", lambda target, draft: medusa(target, 4, random=False), network=True),
        Case("few", lambda target, draft: medusa(target, 6, random=True, few=True), network=True),
        Case("few-own", lambda target, draft: medusa(target, 6, random=True, own=True, few=True), network=True),
        *(
            Case(
                label,
                lambda target, draft, o=options: medusa(target, 6, draw="without_replacement", **o),  # type: ignore[misc]
                network=True,
            )
            for label, options in {
                "wor-tree": {"random": True},
                "wor-tree-fresh": {"random": False},
                "wor-tree-few": {"random": True, "few": True},
            }.items()
        ),
    ],
    "hydra": [
        Case("random", lambda target, draft: hydra(target, 6, random=True), network=True),
        Case("fresh", lambda target, draft: hydra(target, 4, random=False), network=True),
        Case("prefix", lambda target, draft: hydra(target, 6, random=True, prefix=True), network=True),
        Case("few", lambda target, draft: hydra(target, 6, random=True, frequent=(3, 1)), network=True),
        Case("wor-tree", lambda target, draft: hydra(target, 6, random=True, draw="without_replacement"), network=True),
    ],
    "bpd": [
        Case("random", lambda target, draft: bpd(target, random=True, norm="layer"), network=True),
        Case("fresh", lambda target, draft: bpd(target, random=False), network=True),
    ],
    "eagle": [
        Case(
            label,
            lambda target, draft, g=grow: feature_drafter(  # type: ignore[misc]
                EagleDrafter, EagleNet, EagleConfig, target, grow=g, draw="greedy"
            ),
            network=True,
        )
        for label, grow in {
            "tree": "eagle2",
            "opt-tree": "opt_tree,threshold=0.1",
            "cost-aware": "cost_aware,node_cost=0.05,step_cost=0.02",
        }.items()
    ]
    + [
        Case(
            f"race-{grow.partition(',')[0]}",
            lambda target, draft, g=grow: feature_drafter(  # type: ignore[misc]
                EagleDrafter, EagleNet, EagleConfig, target, grow=g
            ),
            network=True,
        )
        for grow in ("eagle2", "opt_tree,threshold=0.1", "cost_aware,node_cost=0.05,step_cost=0.02")
    ]
    + [
        Case(
            "drawn",
            lambda target, draft: feature_drafter(EagleDrafter, EagleNet, EagleConfig, target, width=1),
            network=True,
        ),
        Case(
            "few",
            lambda target, draft: feature_drafter(EagleDrafter, EagleNet, EagleConfig, target, few=True),
            network=True,
        ),
        *(
            Case(
                label,
                lambda target, draft, o=options: feature_drafter(  # type: ignore[misc]
                    EagleDrafter, EagleNet, EagleConfig, target, draw="without_replacement", **o
                ),
                network=True,
            )
            for label, options in {
                "wor-tree": {"tree": "2x2x1"},
                "wor-tree-sequoia": {"tree": SEQUOIA},
                "wor-tree-few": {"tree": "3x1x1", "few": True},
            }.items()
        ),
    ],
    "eagle3": [
        Case("own-head", lambda target, draft: eagle3(target, share_head=False), network=True),
        Case("target-head", lambda target, draft: eagle3(target, share_head=True), network=True),
        Case("points", lambda target, draft: eagle3(target, share_head=True, draw="greedy"), network=True),
        Case(
            "wor-tree",
            lambda target, draft: eagle3(target, share_head=True, draw="without_replacement", tree="2x2x1"),
            network=True,
        ),
    ],
    "peagle": [
        Case("drawn", lambda target, draft: peagle(target, {}), network=True),
        Case(
            "points",
            lambda target, draft: peagle(target, {"num_layers": 1, "share_head": True}, draw="greedy"),
            network=True,
        ),
        Case(
            "chain",
            lambda target, draft: peagle(target, {"draft_vocab": 0, "own_embedding": True}, width=1, k=4),
            network=True,
        ),
        Case(
            "wor-tree",
            lambda target, draft: peagle(target, {"num_layers": 1}, draw="without_replacement", tree="2x2x1"),
            network=True,
        ),
    ],
    "mtp": [
        Case("drawn", lambda target, draft: feature_drafter(MtpDrafter, MtpNet, MtpConfig, target), network=True),
        Case(
            "points",
            lambda target, draft: feature_drafter(MtpDrafter, MtpNet, MtpConfig, target, draw="greedy"),
            network=True,
        ),
        Case(
            "wor-tree",
            lambda target, draft: feature_drafter(
                MtpDrafter, MtpNet, MtpConfig, target, draw="without_replacement", tree="2x2"
            ),
            network=True,
        ),
        Case("native", lambda target, draft: native_mtp(target), network=True),
        Case("native-stack", lambda target, draft: native_mtp(target, count=2), network=True),
        Case("stack-tree", lambda target, draft: native_mtp(target, count=2, nodes=5, width=2), network=True),
        Case(
            "stack-wor-tree",
            lambda target, draft: native_mtp(target, count=2, draw="without_replacement", tree="2x2x1"),
            network=True,
        ),
        Case("trained-stack", lambda target, draft: trained("mtp", target, modules="2"), network=True),
        Case("few-native-stack", lambda target, draft: native_mtp(target, count=2, few=True), network=True),
    ],
    **{
        kind.name: [
            Case(label, lambda target, draft, k=kind, s=settings: block(k, target, s[0], **s[1]), network=True)  # type: ignore[misc]
            for label, settings in shapes.items()
        ]
        for kind, shapes in BLOCKS.items()
    },
    "kangaroo": [
        Case("chain", lambda target, draft: kangaroo(target, k=3, eta=0.2), network=True),
        Case("wor-tree", lambda target, draft: kangaroo(target, tree="2x2x1"), network=True),
        Case("few", lambda target, draft: kangaroo(target, few=True, k=3, eta=0.02), network=True),
    ],
    "jump": [
        Case("chain", lambda target, draft: jump(target, k=3), network=True),
        Case("own-state", lambda target, draft: jump(target, state=1, width=4, k=3), network=True),
        Case("bottom", lambda target, draft: jump(target, start=0, state=0, k=3), network=True),
        Case("wor-tree", lambda target, draft: jump(target, tree="2x2x1"), network=True),
        Case("few", lambda target, draft: jump(target, few=True, k=3), network=True),
    ],
    "pass_tokens": [
        Case("iid", lambda target, draft: pass_tokens(target, 3), network=True),
        Case("greedy", lambda target, draft: pass_tokens(target, 2, draw="greedy"), network=True),
        Case("two-groups", lambda target, draft: pass_tokens(target, 4, k=3, groups=2), network=True),
    ],
    "uno": [
        Case("drawn", lambda target, draft: uno(target), network=True),
        Case("points", lambda target, draft: uno(target, draw="greedy"), network=True),
        Case(
            "chain",
            lambda target, draft: uno(target, shape={"noise": "mask", "mask_token": 2}, width=1, k=3),
            network=True,
        ),
        Case("wor-tree", lambda target, draft: uno(target, draw="without_replacement", tree="1x2x2"), network=True),
        Case("wor-default", lambda target, draft: uno(target, draw="without_replacement"), network=True),
        Case("few", lambda target, draft: uno(target, few=True), network=True),
    ],
    "scripted": [
        Case("chain", lambda target, draft: ScriptedDrafter("1 2 0")),
        Case(
            "tree",
            lambda target, draft: ScriptedDrafter(
                propose=lambda context, budget: first_nodes(
                    from_paths(context.root, [(0, 1, 2), (0, 2), (2, 0, 1), (3,)]), budget.max_nodes
                )
            ),
        ),
    ],
}

for _method in sorted(RECIPES.keys() - {"early_exit", "jacobi"}):  # those change the target and have no weights
    CASES[_method].append(Case("trained", partial(_trained, _method), network=True))
