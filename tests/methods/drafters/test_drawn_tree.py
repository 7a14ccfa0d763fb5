"""Trees whose siblings are drawn: their shape, what they carry, who gets one, and that subtrees share no draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from block_toys import drafter_of, random_net
from block_toys import target as block_target
from test_features import FAMILIES, PROMPT, new_drafter
from test_hydra import heads
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Rng, TokenTree
from foretoken.core.costs import TargetCost
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.drawn_tree import DrawnTree, drawn_shape, paying_static_tree, traits_of
from foretoken.methods.drafters.hydra import HydraDrafter
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.trees.counts import Levels, Ranks
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import TargetParts
from toys import engine, llamas, outputs, serve

SAMPLED = SamplingParams(temperature=1.0)
LOOSE = Budget(8, 64)


def context(seed: int = 0) -> Context:
    return Context(0, list(PROMPT), len(PROMPT), Sampler(SAMPLED), Rng(seed))


def spread(size: int = 8) -> Tensor:
    return torch.arange(1.0, size + 1) / sum(range(1, size + 1))


@pytest.mark.parametrize(
    ("places", "expected"), [(Levels((3, 2)), [3, 6]), (Ranks([(0,), (1,), (0, 0), (0, 1)]), [2, 2])]
)
def test_the_shape_is_the_one_that_was_asked_for(places: Any, expected: list[int]) -> None:
    tree = DrawnTree(context(), places, LOOSE, 64).grow(lambda node: spread())
    assert [Counter(tree.depths)[level] for level in (1, 2)] == expected
    assert tree.kind is Kind.WITHOUT_REPLACEMENT and tree.q is not None
    for children in tree.children:
        tokens = [tree.tokens[child] for child in children]
        assert len(set(tokens)) == len(tokens)
        assert len({tree.q_rows[child] for child in children}) <= 1
    assert sorted(set(tree.q_rows[1:])) == list(range(len(tree.q)))


def test_budgets_and_small_supports() -> None:
    one_hot = torch.eye(8)[3]
    tree = DrawnTree(context(), Levels((3, 2)), LOOSE, 64).grow(lambda node: one_hot if node == 0 else spread())
    assert tree.tokens[1:2] == (3,) and len(tree.children[0]) == 1 and len(tree) == 4
    assert len(DrawnTree(context(), Levels((3, 2)), Budget(1, 64), 64).grow(lambda node: spread())) == 4
    assert len(DrawnTree(context(), Levels((3, 2)), Budget(8, 5), 64).grow(lambda node: spread())) == 6
    assert len(DrawnTree(context(), Levels((3, 2)), LOOSE, 4).grow(lambda node: spread())) == 5
    nothing = DrawnTree(context(), Levels((3, 2)), LOOSE, 64).grow(lambda node: None)
    assert nothing == TokenTree.root_only(PROMPT[-1])


def test_a_stop_ends_a_path_behind_the_token() -> None:
    """Tokens above 5 end their path, and stay in the draft."""
    stop = Budget(8, 64, stop=lambda q, chance: chance > float(spread()[5]))
    tree = DrawnTree(context(1), Levels((4, 2)), stop, 64).grow(lambda node: spread())
    assert len(tree.children[0]) == 4
    for child in tree.children[0]:
        assert len(tree.children[child]) == (0 if tree.tokens[child] > 5 else 2)


def test_as_much_of_a_tree_as_pays() -> None:
    whole = drawn_shape("without_replacement", "", "eagle", 24, 5)
    free, expensive = TargetCost({1: 1.0, 64: 1.0}), TargetCost({1: 1.0, 2: 1.5, 3: 2.5, 64: 60.0})
    sizes = [len(paying_static_tree(whole, costs).choices) for costs in (free, expensive)]  # type: ignore[attr-defined]
    assert sizes == [24, 1]
    by_level = drawn_shape("without_replacement", "3x2", "eagle", 24, 5)
    assert paying_static_tree(by_level, expensive) is by_level
    with pytest.raises(ValueError, match="give that beside tree=3x2"):
        drawn_shape("iid", "3x2", "eagle", 24, 5)
    with pytest.raises(ValueError, match=r"positive child counts .* sequoia"):
        drawn_shape("without_replacement", "nonsense", "eagle", 24, 5)


def medusa(target: LanguageModel, draw: str = "without_replacement") -> MedusaDrafter:
    parts = TargetParts(target)
    net = MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return MedusaDrafter(net, parts, 6, draw=draw)


def hydra(target: LanguageModel) -> HydraDrafter:
    parts = TargetParts(target)
    return HydraDrafter(heads(parts), parts, 6, draw="without_replacement")


def makers() -> dict[str, Any]:
    options = {"draw": "without_replacement", "tree": "2x2x1"}
    eagle, mtp = (lambda target, f=family: new_drafter(f, target, nodes=12, depth=3, **options) for family in FAMILIES)
    return {
        "eagle": eagle,
        "mtp": mtp,
        "dflash": lambda target: drafter_of(DflashDrafter, target, random_net(DflashDrafter, target), **options),
        "medusa": medusa,
        "hydra": hydra,
    }


@pytest.mark.parametrize("name", makers())
def test_who_gets_a_drawn_tree(name: str) -> None:
    """Requests that sample without a seed; those with one get points that are coupled, and so do greedy ones."""
    target = block_target()
    drafter = makers()[name](target)
    sampled = Request(PROMPT, SAMPLED, 12)
    for request, drawn in ((sampled, True), (Request(PROMPT, SAMPLED, 12, seed=3), False), (Request(PROMPT), False)):
        trees: list[TokenTree] = []
        running = engine(target, drafter)
        running.on_round = lambda runs, round_trees, *_, seen=trees: seen.extend(round_trees)  # type: ignore[misc]
        serve(running, [request])
        kinds = {tree.kind for tree in trees if len(tree) > 2}
        assert kinds == ({Kind.WITHOUT_REPLACEMENT} if drawn else {Kind.POINT})
        assert not drawn or any(len(children) > 1 for tree in trees for children in tree.children)
    seeded = Request(PROMPT, SAMPLED, 16, seed=5)
    assert outputs(engine(target, drafter), [seeded]) == outputs(engine(target), [seeded])


@pytest.mark.parametrize("name", ["medusa", "dflash"])
def test_subtrees_share_no_draw(name: str) -> None:
    """Places of a level have one distribution, and draws of their own: traversal returns to them one after another."""
    target: LanguageModel = block_target()
    drafter = makers()[name](target)
    different = 0
    running = engine(target, drafter)

    def look(runs: Any, trees: Sequence[TokenTree], *_: Any) -> None:
        nonlocal different
        for tree in trees:
            below = [tuple(tree.tokens[node] for node in tree.children[child]) for child in tree.children[0]]
            below = [tokens for tokens in below if tokens]
            different += len(set(below)) > 1

    running.on_round = look
    serve(running, [Request(PROMPT, SAMPLED, 40) for _ in range(3)])
    assert different > 5


def test_traits() -> None:
    assert traits_of("greedy", True, False).proposals == {(Kind.POINT, True)}
    assert traits_of("iid", True, False).proposals == {(Kind.POINT, True), (Kind.IID, False)}
    assert traits_of("without_replacement", False, True).proposals == {
        (Kind.POINT, False), (Kind.WITHOUT_REPLACEMENT, True)
    }  # fmt: skip
    for sampler in (
        lambda **o: new_drafter(FAMILIES[0], llamas()[0], **o),
        lambda **o: medusa(llamas()[0], **o),
    ):
        with pytest.raises(ValueError, match=r"needs draw=.*not 'other'"):
            sampler(draw="other")
