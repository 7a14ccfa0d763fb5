"""Every drafter with a distribution drafts, for a request with noise, the first in the race on it, as points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, NonFiniteLogitsError, Rng, Scores, TokenTree, Verdict
from foretoken.core import scores as scores_module
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.bpd import BpdDrafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.drawing import best, best_ahead, ranked
from foretoken.methods.drafters.eagle import EagleDrafter
from foretoken.methods.drafters.eagle3 import Eagle3Drafter
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.features import FeatureDrafter
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.methods.drafters.hydra import HydraDrafter
from foretoken.methods.drafters.jacobi import JacobiDrafter
from foretoken.methods.drafters.jump import JumpDrafter
from foretoken.methods.drafters.kangaroo import KangarooDrafter
from foretoken.methods.drafters.layer_skip import LayerSkipDrafter
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
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.online import OnlineDrafter
from foretoken.methods.drafters.pass_tokens import PassTokensDrafter
from foretoken.methods.drafters.quantized import QuantizedDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.drafters.shared_vocab import SharedVocabDrafter
from foretoken.methods.drafters.staged import StagedDrafter
from foretoken.methods.drafters.swift import SwiftDrafter
from foretoken.methods.drafters.vocabulary import Vocabulary
from foretoken.methods.trees.base import Candidates
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models.base import Feed, LanguageModel, Rows
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.table import TableModel
from toys import engine, llamas, next_logits, outputs, serve, tables

PROMPT, WRITTEN = [0, 1, 2, 3, 0, 1], [2, 0]
"""Two tokens of the answer are accepted already, so that positions in the text and in the answer differ."""
T1 = SamplingParams(temperature=1.0)
LOOSE = Budget(16, 256)
SEQUOIA = "sequoia,nodes=6,depth=3,acceptance=0.5 0.25 0.2"


def forbids(*tokens: int, after: int | None = None) -> Any:
    """Tokens that are impossible, everywhere or behind one token."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if after is None or int(ids[0, -1]) == after:
            scores[:, list(tokens)] = -torch.inf
        return scores

    return processor


MODES = {
    "T=1": T1,
    "filters": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(temperature=1.2, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={1: 0.7}),
    "processor": SamplingParams(temperature=1.0, processors=(forbids(1, 3), forbids(0, after=2))),
}
each_mode = pytest.mark.parametrize("params", MODES.values(), ids=MODES)


def request(params: SamplingParams = T1, seed: int | None = 0, prompt: Sequence[int] = PROMPT) -> Context:
    """A request in the middle of its answer; without a seed it has no noise."""
    noise = None if seed is None else Noise(seed)
    sampler = Sampler(params, len(prompt), noise)
    return Context(0, [*prompt, *WRITTEN], len(prompt), sampler, Rng(seed or 0))


def propose(drafter: Drafter, context: Context, budget: Budget = LOOSE) -> TokenTree:
    drafter.start(context)
    tree = drafter.propose(context, budget)
    drafter.finish(context)
    return tree


def race(context: Context, logits: Tensor, drafts: Sequence[int], count: int, seen: bool = True) -> list[int]:
    """The definition: the first ``count`` of E_t(v) / q(v), q being the request's own distribution of draft logits [V].

    Penalties see the text and the drafts before, or with ``seen=False`` the text alone.
    """
    sampler = context.sampler
    q = Sampler(sampler.params, sampler.prompt_length).distribution(
        logits, [*context.tokens, *(drafts if seen else ())]
    )
    position = len(context.tokens) + len(drafts) - context.prompt_length
    times = Noise(sampler.noise.seed).exponentials(position, len(q)) / q.double()
    return [token for token in times.argsort().tolist() if float(q[token]) > 0][:count]


def path_of(tree: TokenTree, node: int) -> list[int]:
    return [tree.tokens[i] for i in tree.path(node)[1:]]


def children_of(tree: TokenTree, node: int) -> list[int]:
    return [tree.tokens[child] for child in tree.children[node]]


def check_points(tree: TokenTree) -> None:
    assert tree.kind is Kind.POINT and tree.q is None and not any(row >= 0 for row in tree.q_rows)
    assert len(tree) > 1


def check_races(tree: TokenTree, context: Context, logits: Callable[[list[int]], Tensor]) -> None:
    """Points, and the children of every node the first in the race, in its order."""
    check_points(tree)
    for node in range(len(tree)):
        path, siblings = path_of(tree, node), children_of(tree, node)
        assert siblings == race(context, logits(path), path, len(siblings)), node


# -- what races are made of ------------------------------------------------------------------------------------------


@each_mode
def test_the_ranking_is_the_race(params: SamplingParams) -> None:
    for seed in range(40):
        context = request(params, seed)
        logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        drafts = [2, 5, 2][: seed % 4]
        text = [*context.tokens, *drafts]
        winners = best(ranked(context.sampler, logits[None], [len(text)], [text])[0], 12)
        assert winners == race(context, logits, drafts, 12)


def test_rows_without_hope_are_left_alone() -> None:
    """A row in which nothing is possible is -inf throughout; the others are as they would be alone."""
    sampler = request(SamplingParams(temperature=1.0, processors=(forbids(*range(6), after=4),))).sampler
    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    prefixes = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    scores = ranked(sampler, rows, [9, 9, 10], prefixes)
    assert best(scores[1], 3) == [] and bool((scores[1] == -torch.inf).all())
    for row in (0, 2):
        assert torch.equal(
            scores[row], ranked(sampler, rows[row : row + 1], [9 + row // 2], [prefixes[row]])[0].double()
        )
    assert best(torch.tensor([0.0, -torch.inf, 1.0]), 3) == [2, 0]
    rows[1, 2] = torch.nan
    with pytest.raises(NonFiniteLogitsError):
        ranked(sampler, rows, [9, 9, 10], prefixes)


def test_rows_of_several_requests_race_each_on_its_noise() -> None:
    """Requests without noise beside them get the largest logits."""
    contexts = [request(seed=1), request(seed=None), request(MODES["filters"], 2), request(SamplingParams(), 3)]
    generator = torch.Generator().manual_seed(0)
    owners = [contexts[i] for i in (0, 1, 2, 3, 0, 2)]
    ahead = [0, 0, 1, 1, 2, 0]
    logits = torch.randn(6, 20, generator=generator)
    before = logits.clone()
    winners = best_ahead(logits, owners, ahead, 4)
    assert torch.equal(logits, before)
    for row, (context, skipped, tokens) in enumerate(zip(owners, ahead, winners, strict=True)):
        if context.sampler.noise is None:
            assert tokens == logits[row].topk(4).indices.tolist()
        else:
            order = race(context, logits[row].double(), [0] * skipped, 4, seen=False)
            assert tokens[: len(order)] == order and len(tokens) == 4


# -- a draft model ---------------------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("options", [{"k": 4}, {"tree": "3x2x1"}, {"tree": SEQUOIA}, {"tree": "3x2", "draw": "iid"}])
def test_draft_models(options: dict[str, Any], params: SamplingParams) -> None:
    draft = tables(vocab=7)[1]
    for seed in range(5):
        drafter, context = ModelDrafter(draft, **options), request(params, seed)
        tree = propose(drafter, context)
        check_races(tree, context, lambda path, c=context: next_logits(draft, [*c.tokens, *path]))
        greedy = propose(drafter, request(SamplingParams()))
        if params is T1:
            assert tree.parents == greedy.parents  # the same shape
        assert {len(children_of(tree, 0))} == {len(children_of(greedy, 0))}
        for budget in (Budget(2, 64), Budget(9, 3)):
            small = propose(drafter, request(params, seed), budget)
            assert max(small.depths) <= budget.max_depth and small.num_drafts <= budget.max_nodes
            check_races(small, context, lambda path, c=context: next_logits(draft, [*c.tokens, *path]))


@pytest.mark.parametrize("options", [{"k": 3}, {"tree": "2x2"}])
def test_draft_models_serve_a_batch_as_its_requests(options: dict[str, Any]) -> None:
    """Requests with noise of several recipes, greedy ones and unseeded ones: what each is proposed alone."""
    target, draft = llamas()
    modes = [*MODES.values(), T1, T1, MODES["filters"], SamplingParams()]
    seeds = [0, 1, 2, 3, 4, None, 5, None]

    def contexts() -> list[Context]:
        return [request(params, seed) for params, seed in zip(modes, seeds, strict=True)]

    drafter = ModelDrafter(draft, target=target, **options)
    alone = [propose(drafter, context) for context in contexts()]
    many = contexts()
    for context in many:
        drafter.start(context)
    trees = drafter.propose_batch(many, [LOOSE] * len(many))
    assert [(tree.tokens, tree.parents) for tree in trees] == [(tree.tokens, tree.parents) for tree in alone]
    assert [tree.kind is Kind.POINT for tree in trees] == [context.sampler.fixed for context in many]


def test_a_stop_by_confidence_suppresses_later_tokens_only() -> None:
    """The confidence is the draft's share of the perturbed distribution: log q plus noise, through a softmax."""
    draft, lengths = tables(vocab=5)[1], set()
    for seed in range(20):
        context = request(seed=seed)
        whole = propose(ModelDrafter(draft, k=5), context)
        short = propose(ModelDrafter(draft, k=5), request(seed=seed), Budget(5, 64, min_confidence=0.5))
        assert short.tokens == whole.tokens[: len(short)]
        shares = []
        for node in range(len(whole) - 1):
            text = [*context.tokens, *path_of(whole, node)]
            ranking = ranked(context.sampler, next_logits(draft, text)[None], [len(text)], None)[0]
            shares.append(float(ranking.softmax(-1).max()))
        expected = next((i + 1 for i, share in enumerate(shares) if share < 0.5), 5)
        assert short.num_drafts == expected
        lengths.add(expected)
    assert len(lengths) > 2


def common_letters(size: int) -> tuple[Vocabulary, Vocabulary, dict[int, int]]:
    """A target's vocabulary, a draft model's in another order with every third letter missing, and the pairs."""
    letters = [chr(97 + i).encode() for i in range(size)]
    shuffled = [(letters[i] if i % 3 != 2 else letters[i] * 2) for i in (3 * i % size for i in range(size))]
    return (
        Vocabulary(letters),
        Vocabulary(shuffled),
        {letters.index(t): i for i, t in enumerate(shuffled) if t in letters},
    )


@pytest.mark.parametrize("options", [{"k": 3}, {"tree": "4x3"}])
@pytest.mark.parametrize("mode", ["T=1", "filters", "processor"])
def test_draft_models_of_another_vocabulary(options: dict[str, Any], mode: str) -> None:
    size = 7
    draft = tables(vocab=size)[1]
    target_vocab, draft_vocab, pairs = common_letters(size)
    for seed in range(5):
        drafter, context = SharedVocabDrafter(draft, draft_vocab, target_vocab, **options), request(MODES[mode], seed)
        tree = propose(drafter, context)
        read = list(drafter.read(request(MODES[mode], seed)))

        def logits(path: list[int], read: list[int] = read) -> Tensor:
            wide = torch.full((size,), -torch.inf, dtype=torch.float64)
            own = next_logits(draft, [*read, *(pairs[token] for token in path)])
            wide[list(pairs)] = own[list(pairs.values())]
            return wide

        check_races(tree, context, logits)


@dataclass
class Choice:
    """One choice of candidates: of which request, behind what, from which logits, how many were wanted and chosen."""

    context: Context
    drafts: list[int]
    logits: Tensor
    width: int
    chosen: list[int]


@contextmanager
def watched(drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Choice]]:
    """All choices that a drafter makes, each with the text as it was then."""
    choices: list[Choice] = []
    candidates = type(drafter)._candidates

    def noted(self: ModelDrafter, tree: Growing, logits: Tensor, parent: int, width: int) -> Any:
        distribution, chosen = candidates(self, tree, logits, parent, width)
        then = replace(tree.context, tokens=list(tree.context.tokens))
        choices.append(Choice(then, list(tree.path_of[parent]), logits.clone(), width, list(chosen)))
        return distribution, chosen

    with monkeypatch.context() as patch:
        patch.setattr(type(drafter), "_candidates", noted)
        yield choices


def check_choices(choices: Sequence[Choice]) -> None:
    assert choices
    for choice in choices:
        assert choice.chosen == race(choice.context, choice.logits.double(), choice.drafts, choice.width)


def layer_of(target: LanguageModel) -> dict[str, Any]:
    return asdict(LayerConfig.of_target(TargetParts(target).config))


def random_net(net: Any, scale: float = 0.4) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return net.eval()


def kangaroo(target: LanguageModel, **options: Any) -> KangarooDrafter:
    net = random_net(KangarooNet(KangarooConfig(**layer_of(target))))
    return KangarooDrafter(target, FeatureModel(net, TargetParts(target), target), **options)


def jump(target: LanguageModel, **options: Any) -> JumpDrafter:
    return JumpDrafter(target, random_net(JumpNet(JumpConfig(TargetParts(target).hidden_size, 1, 2, 2))), **options)


OWN_LAYERS: dict[str, Callable[[LanguageModel, LanguageModel], ModelDrafter]] = {
    "early_exit": lambda target, draft: EarlyExitDrafter(target, layer=1, k=3),
    "early_exit-tree": lambda target, draft: EarlyExitDrafter(target, layer=1, tree="2x2x1"),
    "layer_skip": lambda target, draft: LayerSkipDrafter(target, mlp="0", k=3),
    "quantized": lambda target, draft: QuantizedDrafter(target, "8", k=3),
    "kangaroo": lambda target, draft: kangaroo(target, k=3, eta=0.0),
    "kangaroo-tree": lambda target, draft: kangaroo(target, tree="2x2x1"),
    "jump": lambda target, draft: jump(target, k=3),
    "jump-tree": lambda target, draft: jump(target, tree="2x2x1"),
    "online": lambda target, draft: OnlineDrafter(draft, target=target, every=1, budget=1.0, tree="2x2", thread=False),
}


@pytest.mark.parametrize("mode", ["T=1", "penalties"])
@pytest.mark.parametrize("name", OWN_LAYERS)
def test_drafters_that_grow_as_the_model_drafter_does(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas()
    drafter = OWN_LAYERS[name](target, draft)
    with watched(drafter, monkeypatch) as choices:
        serve(engine(target, drafter), [Request(PROMPT, MODES[mode], 16, seed=3)])
    check_choices(choices)
    assert {len(choice.drafts) for choice in choices} >= {0, 1} and len(
        {len(choice.context.tokens) for choice in choices}
    ) > 2


# -- feature drafters ------------------------------------------------------------------------------------------------


def features(target: LanguageModel, family: str, **options: Any) -> FeatureDrafter:
    parts, layer = TargetParts(target), layer_of(target)
    if family == "eagle3":
        config = Eagle3Config(
            **layer, vocab_size=parts.vocab_size, draft_vocab=parts.vocab_size // 2, layers="0,1,2", share_head=True
        )
        net = random_net(Eagle3Net(config))
        net.choose(torch.arange(config.draft_vocab) * 2 + 1)
        return Eagle3Drafter.of(net, parts, target, **options)
    cls, make, shape = {
        "eagle": (EagleDrafter, EagleNet, EagleConfig),
        "mtp": (MtpDrafter, MtpNet, MtpConfig),
    }[family]
    drafter: FeatureDrafter = cls(FeatureModel(random_net(make(shape(**layer))), parts, target), **options)
    return drafter


GROWN = [
    *((family, "eagle2", mode) for family in ("eagle", "eagle3", "mtp") for mode in MODES),
    ("eagle", "opt_tree,threshold=0.1", "T=1"),
    ("eagle", "cost_aware,node_cost=0.05,step_cost=0.02", "T=1"),
]


@pytest.mark.parametrize(("family", "grow", "mode"), GROWN)
def test_dynamic_trees(family: str, grow: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node looked at gets the first of the race below it, with their shares of the perturbed distribution."""
    target = llamas()[0]
    drafter = features(target, family, nodes=6, depth=3, width=3, grow=grow)
    seen_by: list[Candidates] = []
    find = FeatureDrafter._best

    score, scored = FeatureDrafter._sure, dict[int, tuple[Any, Sequence[int], Tensor]]()

    def noted(self: FeatureDrafter, tree: Any, nodes: Sequence[int], logits: Tensor) -> Tensor:
        candidates = score(self, tree, nodes, logits)
        scored[id(candidates)] = tree, nodes, logits
        return candidates

    def checked(self: FeatureDrafter, sure: Tensor) -> Any:
        tokens, values = find(self, sure)
        tree, nodes, logits = scored[id(sure)]
        wide, context = self.widened(logits), tree.context
        for row, node in enumerate(nodes):
            path = tree.candidates.path_tokens(node)
            text = [*context.tokens, *path]
            possible = [token for token, value in zip(tokens[row], values[row], strict=True) if value > -torch.inf]
            assert possible == race(context, wide[row].double(), path, 3)
            ranking = ranked(context.sampler, wide[row : row + 1], [len(text)], [text])[0]
            shares = ranking.softmax(-1)[possible].log().tolist()
            assert values[row][: len(possible)] == pytest.approx(shares, abs=1e-9)
        seen_by.append(tree.candidates)
        return tokens, values

    monkeypatch.setattr(FeatureDrafter, "_sure", noted)
    monkeypatch.setattr(FeatureDrafter, "_best", checked)
    trees: list[TokenTree] = []
    speculative = engine(target, drafter, on_round=lambda runs, round_trees, verdicts, times: trees.extend(round_trees))
    serve(speculative, [Request(PROMPT, MODES[mode], 12, seed=seed) for seed in range(2)])
    drafted = [tree for tree in trees if len(tree) > 1]
    assert len(seen_by) > 8 and any(not tree.is_chain for tree in drafted)
    for tree in drafted:
        check_points(tree)
        for node in range(len(tree)):
            assert len(set(children_of(tree, node))) == len(tree.children[node])


class Oracle(TableModel):
    """A feature network that knows the target: its places begin with the second token of the text."""

    def __init__(self, target: LanguageModel, first: int) -> None:
        super().__init__(lambda prefix: [1.0] * target.vocab_size, target.vocab_size, target.context_length)
        self.target, self.first = target, first

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        answers = []
        for feed, rows in zip(feeds, super().forward(feeds), strict=True):
            last = range(len(feed.sequence.scratch_tokens) - len(rows.logits), len(feed.sequence.scratch_tokens))
            texts = ([self.first, *self._prefix(feed.sequence, node)] for node in last)
            logits = torch.stack([next_logits(self.target, text) for text in texts])
            answers.append(Rows(logits, {"state": torch.zeros(len(logits), 2)}))
        return answers


@each_mode
@pytest.mark.parametrize("options", [{"width": 1, "nodes": 3}, {"width": 2, "nodes": 64}], ids=["chain", "tree"])
def test_a_feature_drafter_that_is_the_target_is_always_right(options: dict[str, int], params: SamplingParams) -> None:
    target = llamas()[0]
    drafter = EagleDrafter(Oracle(llamas()[0], PROMPT[0]), depth=3, **options)  # type: ignore[arg-type]
    runs = serve(engine(target, drafter), [Request(PROMPT, params, 17, seed=seed) for seed in range(2)])
    assert [run.output for run in runs] == outputs(engine(target), [run.request for run in runs])
    for run in runs:
        assert run.stats.num_drafts == 5 and run.stats.num_accepted_tokens == 12  # 4 + 4 + 4 + 4 + 1 tokens


@each_mode
@pytest.mark.parametrize("options", [{"k": 3}, {"tree": "2x2x2"}, {"tree": SEQUOIA}])
def test_a_draft_model_that_is_the_target_is_always_right(options: dict[str, Any], params: SamplingParams) -> None:
    target = llamas()[0]
    requests = [Request(PROMPT, params, 17, seed=seed) for seed in range(3)]
    runs = serve(engine(target, ModelDrafter(llamas()[0], **options)), requests)
    assert {run.stats.num_drafts for run in runs} == {5}
    assert [run.output for run in runs] == outputs(engine(target), requests)


# -- heads -----------------------------------------------------------------------------------------------------------


def state_of(parts: TargetParts, seed: int = 1) -> Tensor:
    return torch.randn(1, parts.hidden_size, generator=torch.Generator().manual_seed(seed))


def with_state(context: Context, state: Tensor) -> Context:
    context.hidden = {"last": state}
    return context


def check_heads(drafter: HeadsDrafter, context: Context, logits: Callable[[int, list[int]], Tensor]) -> None:
    """Node i + 1 is the candidate of rank ``choices[i][-1]`` behind its parent."""
    tree = drafter.propose(context, LOOSE)
    check_points(tree)
    assert len(tree) == 1 + len(drafter.choices)
    for node, choice in enumerate(drafter.choices, 1):
        path = path_of(tree, tree.parents[node])
        order = race(context, logits(len(path), path).double(), path, 99, seen=False)
        if choice[-1] < len(order):  # below that nothing possible is left, and the place is filled all the same
            assert tree.tokens[node] == order[choice[-1]]


def medusa(target: LanguageModel, nodes: int) -> MedusaDrafter:
    parts = TargetParts(target)
    return MedusaDrafter(random_net(MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))), parts, nodes)


def bpd(target: LanguageModel) -> BpdDrafter:
    parts = TargetParts(target)
    return BpdDrafter(random_net(BpdHeads(BpdConfig(parts.hidden_size, k=4, width=6))), parts)


@each_mode
def test_medusa(params: SamplingParams) -> None:
    parts = TargetParts(llamas()[0])
    drafter, state = medusa(llamas()[0], 10), state_of(parts)
    with torch.inference_mode():
        logits = drafter.logits(state)
    for seed in range(5):
        check_heads(drafter, with_state(request(params, seed), state), lambda depth, path: logits[depth, 0])


@each_mode
def test_hydra(params: SamplingParams) -> None:
    """Its heads read the path, which the race chose."""
    parts = TargetParts(llamas()[0])
    net = random_net(HydraHeads(HydraConfig(parts.hidden_size, parts.vocab_size, 3, layer=layer_of(llamas()[0]))))
    drafter, state = HydraDrafter(net, parts, 10), state_of(parts)
    for seed in range(5):
        context = with_state(request(params, seed), state)

        @torch.inference_mode()
        def logits(depth: int, path: list[int], context: Context = context) -> Tensor:
            read = [parts.embedding([token]).float() for token in (context.root, *path)]
            return drafter.project(depth, net(depth, torch.cat([state, *read], -1)))[0]

        check_heads(drafter, context, logits)


@each_mode
def test_bpd(params: SamplingParams) -> None:
    parts = TargetParts(llamas()[0])
    drafter = bpd(llamas()[0])
    states = [state_of(parts, seed) for seed in range(4)]
    contexts = [with_state(request(params, seed), state) for seed, state in enumerate(states)]
    contexts.append(with_state(request(params, None), states[0]))
    trees = drafter.propose_batch(contexts, [LOOSE, Budget(2, 9), LOOSE, LOOSE, LOOSE])
    assert [tree.num_drafts for tree in trees] == [3, 2, 3, 3, 3]
    for tree, context in zip(trees, contexts, strict=True):
        check_points(tree)
        with torch.inference_mode():
            logits = drafter.logits(context.hidden["last"], 3)[:, 0].double()
        for place in range(tree.num_drafts):
            drafts = list(tree.tokens[1 : place + 1])
            if context.sampler.noise is None:
                assert tree.tokens[place + 1] == int(logits[place].argmax())
            else:
                assert tree.tokens[place + 1] == race(context, logits[place], drafts, 1, seen=False)[0]


# -- drafts of drafts, look-ahead tokens, own layers -----------------------------------------------------------------


def written(model: LanguageModel, context: Context, count: int, drafts: Sequence[int] = ()) -> list[int]:
    """The tokens that plain decoding of ``model`` writes behind the text and ``drafts`` with the request's noise."""
    tokens = list(drafts)
    for _ in range(count):
        tokens += race(context, next_logits(model, [*context.tokens, *tokens]), tokens, 1)
    return tokens[len(drafts) :]


INNER: dict[str, Callable[[LanguageModel], Drafter]] = {
    "ngram": lambda other: NgramDrafter(n=2, k=3),
    "chain": lambda other: ModelDrafter(other, k=2),
    "tree": lambda other: ModelDrafter(other, tree="2x2"),
    "cascade": lambda other: CascadeDrafter(other, NgramDrafter(n=2, k=2), inner_rule, k=3),
}


@each_mode
@pytest.mark.parametrize("inner", INNER)
def test_cascades_write_what_the_draft_model_would(inner: str, params: SamplingParams) -> None:
    other, draft = tables(vocab=6)
    for seed in range(4):
        context = request(params, seed)
        tree = propose(CascadeDrafter(draft, INNER[inner](other), inner_rule, k=5), context)
        check_points(tree)
        assert list(tree.tokens[1:]) == written(draft, context, 5)


def test_the_guesses_inside_a_cascade_race_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner guesses race on the request's noise at the inner text's positions; they beat the best guesses."""
    forwards = {}
    for draw in ("iid", "greedy"):
        other, draft = tables(vocab=6, closeness=0.8)
        inner = ModelDrafter(other, k=3, draw=draw)
        with watched(inner, monkeypatch) as choices:
            for seed in range(20):
                propose(CascadeDrafter(draft, inner, inner_rule, k=6), request(seed=seed))
        forwards[draw] = draft.forward_calls
        if draw == "iid":
            check_choices(choices)
            assert {len(choice.context.tokens) for choice in choices} > {
                8,
                9,
                10,
            }  # the text that is accepted has eight tokens
    assert forwards["iid"] < 0.8 * forwards["greedy"]


def test_late_tokens_of_a_cascade_race_too() -> None:
    other, draft = tables(vocab=6)
    for seed in range(6):
        context = request(seed=seed)
        late = ModelDrafter(other, k=4)
        tree = propose(CascadeDrafter(draft, NgramDrafter(n=2), inner_rule, k=5, early=2, late=late), context)
        check_points(tree)
        early = written(draft, context, 2)
        assert list(tree.tokens[1:]) == [*early, *written(other, context, 3, early)]


@each_mode
def test_the_siblings_of_a_spine_come_next_in_the_race(params: SamplingParams) -> None:
    draft = tables(vocab=6)[1]
    for seed in range(4):
        context = request(params, seed)
        tree = propose(StagedDrafter(draft, NgramDrafter(n=2), inner_rule, k=3, width=3), context)
        assert list(tree.tokens[1:4]) == written(draft, context, 3)
        check_races(tree, context, lambda path, c=context: next_logits(draft, [*c.tokens, *path]))


@each_mode
@pytest.mark.parametrize("draw", ["iid", "greedy"])
def test_look_ahead_tokens(draw: str, params: SamplingParams) -> None:
    target = llamas()[0]
    net = random_net(PassTokens(PassTokensConfig(TargetParts(target).hidden_size, 3)))
    drafter = PassTokensDrafter(net, target, draw=draw)
    for seed in range(5):
        context = request(params, seed)
        drafter.start(context)
        first = drafter.propose(context, LOOSE)
        logits = torch.randn(len(first), 32, generator=torch.Generator().manual_seed(seed))
        scores = Scores(logits, first, list(context.tokens), context.sampler)
        context.tokens.append(7)
        drafter.observe(context, first, scores, Verdict((), 7, next_is_bonus=True))
        tree = drafter.propose(context, LOOSE)
        drafts = list(tree.tokens[1 : 1 + tree.num_drafts])
        assert len(drafts) == 3 and tree.kind is Kind.POINT and tree.q is None
        for place, token in enumerate(drafts):
            row, before = logits[1 + place], drafts[:place]
            if draw == "iid":
                assert [token] == race(context, row, before, 1)
            else:
                sampler = Sampler(params, len(PROMPT))
                assert token == int(sampler.distribution(row, [*context.tokens, *before]).argmax())


@each_mode
def test_swift(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner goes on, those after it are siblings."""
    target = llamas()[0]
    drafter = SwiftDrafter(target, k=3, threshold=0.0, keep=0, share=False)
    rows: dict[tuple[int, ...], Tensor] = {}
    add = SwiftDrafter._add_children

    def noted(self: SwiftDrafter, tree: Growing, logits: Tensor, parent: int, width: int) -> None:
        rows[tree.path_of[parent]] = logits.clone()
        add(self, tree, logits, parent, width)

    monkeypatch.setattr(SwiftDrafter, "_add_children", noted)
    speculative = engine(target, drafter)
    for seed in range(4):
        speculative.add(Request(PROMPT, params, 30, seed=seed))
        speculative.step()
        (run,) = speculative.requests.running
        for budget in (Budget(3, 64), Budget(3, 4)):
            rows.clear()
            tree = drafter.propose(run.context, budget)
            target.commit(run.sequence, ())
            check_points(tree)
            assert tree.num_drafts <= budget.max_nodes and len(rows) == 3
            for path, logits in rows.items():
                node = len(path)
                siblings = children_of(tree, node)
                assert (
                    siblings == race(run.context, logits, path, len(siblings)) and siblings[0] == tree.tokens[node + 1]
                )
            assert any(len(children) > 1 for children in tree.children) or budget.max_nodes == 4
        speculative.close()


def test_jacobi_iterates_towards_the_text_of_the_seed() -> None:
    """Its predictions are the winners of the positions that they are made for, so right guesses stay."""
    target = llamas()[0]
    seeded = Request(PROMPT, T1, 20, seed=5)
    (text,) = outputs(engine(target), [seeded])
    drafter = JacobiDrafter(m=6)
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(T1, len(PROMPT), Noise(5)), Rng(0))
    drafter.start(context)
    drafter.propose(context, Budget(6, 6))
    drafter._window(context).tokens = [*text[:2], 31, *text[3:6]]  # right but for the third
    tree = drafter.propose(context, Budget(6, 6))
    logits = torch.stack([next_logits(target, [*PROMPT, *tree.tokens[1 : n + 1]]) for n in range(len(tree))])
    scores = Scores(logits, tree, list(PROMPT), context.sampler)
    drafter.observe(context, tree, scores, Verdict((1, 2), text[2], next_is_bonus=False))
    guesses = drafter._window(context).tokens
    assert guesses == [race(context, logits[node], [0] * node, 1)[0] for node in range(3, 7)]


def test_jacobi_drafts_the_same_in_large_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the winners are looked up one by one, when the text of the round is accepted already."""
    trees = []
    for large in (scores_module.LARGE, 2):
        monkeypatch.setattr(scores_module, "LARGE", large)
        for drafter in (JacobiDrafter(m=4), RouterDrafter([JacobiDrafter(m=4)])):
            speculative = engine(llamas()[0], drafter)
            trees.append(rounds(speculative, [Request(PROMPT, T1, 24, seed=seed) for seed in range(3)]))
    texts = [[tree.tokens for tree in each] for each in trees]
    assert all(each == texts[0] for each in texts) and len(texts[0]) > 20


# -- points, impossible tokens, the likeliest ------------------------------------------------------------------------


TABLES: dict[str, Callable[[LanguageModel, LanguageModel], Drafter]] = {
    "ensemble": lambda target, draft: EnsembleDrafter([ModelDrafter(draft, tree="2x1"), ModelDrafter(target, k=2)]),
    "ensemble-iid": lambda target, draft: EnsembleDrafter([ModelDrafter(draft, k=2), NgramDrafter(n=2, k=3)]),
    "router": lambda target, draft: RouterDrafter([ModelDrafter(draft, k=3), RecyclingDrafter(nodes=4)]),
    "cascade": lambda target, draft: CascadeDrafter(draft, ModelDrafter(target, k=2), inner_rule, k=4),
    "lenient": lambda target, draft: CascadeDrafter(draft, NgramDrafter(), inner_rule, k=4, lenience=4.0),
    "staged": lambda target, draft: StagedDrafter(draft, NgramDrafter(n=2, k=3), inner_rule, k=3, width=2),
    "scripted": lambda target, draft: ScriptedDrafter("1 2 0"),
}


def rounds(speculative: Engine, requests: Sequence[Request]) -> list[TokenTree]:
    """All trees with drafts of these requests."""
    trees: list[TokenTree] = []
    speculative.on_round = lambda runs, round_trees, verdicts, times: trees.extend(round_trees)
    serve(speculative, requests)
    return [tree for tree in trees if tree.num_drafts]


@pytest.mark.parametrize("name", TABLES)
def test_groups_and_drafts_of_drafts_propose_points(name: str) -> None:
    target, draft = tables()
    speculative = engine(target, TABLES[name](target, draft), max_batch=2)
    trees = rounds(speculative, [Request(PROMPT, T1, 20, seed=seed) for seed in range(3)])
    assert len(trees) > 5
    for tree in trees:
        check_points(tree)


def test_an_ensemble_joins_the_races_of_its_members() -> None:
    target, draft = tables(vocab=6)
    context = request(seed=4)
    members = [ModelDrafter(draft, tree="3x1"), ModelDrafter(target, tree="2x2")]
    tree = propose(EnsembleDrafter(members), context)
    paths = {tuple(path_of(tree, node)) for node in range(1, len(tree))}
    alone = [propose(member, request(seed=4)) for member in members]
    assert paths == {tuple(path_of(member_tree, node)) for member_tree in alone for node in range(1, len(member_tree))}
    assert len(paths) == tree.num_drafts  # none twice


@pytest.mark.parametrize("seeded", [True, False])
def test_who_races_without_a_seed(seeded: bool) -> None:
    """Heads do, for their drafts are then accepted more often; draws from a distribution do not."""
    target, draft = llamas()
    for drafter, races in (
        (medusa(target, 4), True),
        (features(target, "eagle", width=3), False),
        (features(target, "eagle", width=1), False),
        (features(target, "eagle", width=3, draw="greedy"), False),
        (ModelDrafter(draft, k=2), False),
        (NgramDrafter(n=2), False),
        (None, False),
    ):
        speculative = engine(target, drafter)
        speculative.add(Request(PROMPT, T1, 8, seed=0 if seeded else None))
        speculative.step()
        (run,) = speculative.requests.running
        assert (run.context.sampler.noise is not None) == (races or seeded), drafter


SAMPLERS: dict[str, Callable[[LanguageModel, LanguageModel], Drafter]] = {
    "model": lambda target, draft: ModelDrafter(draft, tree="4x4"),
    "eagle": lambda target, draft: features(target, "eagle", nodes=12, depth=2, width=4),
    "eagle3": lambda target, draft: features(target, "eagle3", nodes=12, depth=2, width=4),
    "swift": lambda target, draft: SwiftDrafter(target, k=2, threshold=0.0, keep=0, share=False),
    "staged": lambda target, draft: StagedDrafter(draft, NgramDrafter(n=2), inner_rule, k=2, width=4),
    "medusa": lambda target, draft: medusa(target, 8),
    "bpd": lambda target, draft: bpd(target),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_tokens_that_a_processor_forbids_are_not_drafted(name: str) -> None:
    target, draft = llamas()
    odd = SamplingParams(temperature=1.0, processors=(forbids(*range(0, 32, 2)),))
    trees = rounds(engine(target, SAMPLERS[name](target, draft)), [Request([1, 3, 5, 1, 3], odd, 12, seed=1)])
    assert trees and all(token % 2 for tree in trees for token in tree.tokens)
    free = rounds(engine(target, SAMPLERS[name](target, draft)), [Request([1, 3, 5, 1, 3], T1, 12, seed=1)])
    assert not all(token % 2 for tree in free for token in tree.tokens)


@pytest.mark.parametrize("name", ["model", "swift", "staged"])
def test_tokens_that_a_filter_leaves_out_are_not_drafted(name: str) -> None:
    target, draft = llamas()
    two = SamplingParams(temperature=1.0, top_k=2)
    widths = []
    for params in (two, T1):
        trees = rounds(engine(target, SAMPLERS[name](target, draft)), [Request(PROMPT, params, 12, seed=1)])
        widths.append(max(len(children) for tree in trees for children in tree.children))
    assert widths[0] <= 2 < widths[1]


@pytest.mark.parametrize("tree", ["1x1x1", "3x2x2"])
def test_nothing_is_drafted_where_nothing_is_possible(tree: str) -> None:
    """The request allows nothing behind token 4: a node that holds it is a leaf."""
    draft = TableModel(lambda prefix: [0.1] * 4 + [0.5, 0.1], 6)
    leaves = 0
    for seed in range(10):
        context = request(SamplingParams(temperature=1.0, processors=(forbids(*range(6), after=4),)), seed)
        proposal = propose(ModelDrafter(draft, tree=tree), context)
        for node in range(1, len(proposal)):
            assert proposal.tokens[node] != 4 or not proposal.children[node]
            leaves += proposal.tokens[node] == 4 and proposal.depths[node] < 3
    assert leaves > 4


def shut_behind(token: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, processors=(forbids(*range(32), after=token),))


def test_look_ahead_tokens_end_where_nothing_is_possible() -> None:
    target = llamas()[0]
    net = random_net(PassTokens(PassTokensConfig(TargetParts(target).hidden_size, 3)))
    drafter = PassTokensDrafter(net, target)
    for seed in range(5):
        context = request(T1, seed)
        drafter.start(context)
        first = drafter.propose(context, LOOSE)
        logits = torch.randn(len(first), 32, generator=torch.Generator().manual_seed(seed))
        scores = Scores(logits, first, list(context.tokens), context.sampler)
        context.tokens.append(7)
        drafter.observe(context, first, scores, Verdict((), 7, next_is_bonus=True))
        (winner,) = race(context, logits[1], (), 1)
        context.sampler = Sampler(shut_behind(winner), len(PROMPT), Noise(seed))
        tree = drafter.propose(context, LOOSE)
        assert tree.tokens[1 : 1 + tree.num_drafts] == (winner,)


def test_swift_ends_where_nothing_is_possible() -> None:
    target = llamas()[0]
    drafter = SwiftDrafter(target, k=3, threshold=0.0, keep=0, share=False)
    speculative = engine(target, drafter)
    speculative.add(Request(PROMPT, T1, 30, seed=0))
    speculative.step()
    (run,) = speculative.requests.running
    winner = drafter.propose(run.context, LOOSE).tokens[1]
    target.commit(run.sequence, ())
    run.context.update(sampler=Sampler(shut_behind(winner), len(PROMPT), Noise(0)))
    tree = drafter.propose(run.context, LOOSE)
    target.commit(run.sequence, ())
    assert tree.tokens[1] == winner and not tree.children[1]


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("mode", ["T=1", "filters", "penalties"])
def test_greedy_drafts_are_the_likeliest_tokens(seed: int | None, mode: str) -> None:
    """Noise has no influence with ``draw=greedy``."""
    draft, context = tables(vocab=7)[1], request(MODES[mode], seed)
    for options in ({"k": 3}, {"tree": "2x2x1"}):
        tree = propose(ModelDrafter(draft, draw="greedy", **options), context)  # type: ignore[arg-type]
        check_points(tree)
        for node in range(len(tree)):
            text = [*context.tokens, *path_of(tree, node)]
            q = Sampler(MODES[mode], len(PROMPT)).distribution(next_logits(draft, text), text)
            siblings = children_of(tree, node)
            assert siblings == q.argsort(descending=True)[: len(siblings)].tolist()


@pytest.mark.parametrize("family", ["eagle", "eagle3", "mtp"])
def test_greedy_dynamic_trees_do_not_depend_on_the_seed(family: str) -> None:
    target = HuggingFaceModel(llamas()[0].model)
    trees = []
    for params, seed in ((SamplingParams(), None), (T1, 0), (T1, 1)):
        speculative = engine(target, features(target, family, nodes=6, depth=3, width=3, draw="greedy"))
        trees.append(rounds(speculative, [Request(PROMPT, params, 8, seed=seed)])[0])
    assert trees[0] == trees[1] == trees[2] and trees[0].num_drafts == 6
