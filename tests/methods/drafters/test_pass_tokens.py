"""PaSS: which look-ahead tokens stand where, what they say in drafting and in training, the edges, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.confidence import ConfidenceController
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.nets.pass_tokens import PassTokens, PassTokensConfig
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.methods.drafters.pass_tokens import PassTokensDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.trees.operations import select
from foretoken.models.base import CapabilityError, Feed, LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.table import TableModel
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.pass_tokens import PassTokensRecipe
from toys import engine, llama, llamas, outputs, serve, tables

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3], [9, 1, 2, 3, 4, 9, 1, 2, 30, 17, 12]]
V = 32


def net_for(target: LanguageModel, k: int, seed: int = 0) -> PassTokens:
    net = PassTokens(PassTokensConfig(TargetParts(target).hidden_size, k))
    net.learned.data.copy_(torch.randn(net.learned.shape, generator=torch.Generator().manual_seed(seed)) * 0.4)
    return net


def drafter_for(target: LanguageModel, learned: int = 3, **options: Any) -> PassTokensDrafter:
    return PassTokensDrafter(net_for(target, learned), target, **options)


def a_context(tokens: list[int], **params: Any) -> Context:
    return Context(0, tokens, len(tokens), Sampler(SamplingParams(**params), len(tokens)), Rng(0))


def logits_of(*tokens: int, sure: float = 5.0) -> Tensor:
    """[n, V] logits whose best tokens are these."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), V).double() * sure


def shown(drafter: PassTokensDrafter, context: Context, tree: TokenTree, path: tuple[int, ...], token: int) -> None:
    """A round after which node i's logits say token i."""
    scores = Scores(logits_of(*range(len(tree))), tree, list(context.tokens), context.sampler)
    context.tokens += [*(tree.tokens[node] for node in path), token]
    drafter.observe(context, tree, scores, Verdict(path, token, next_is_bonus=False))


class OnAndOff(Controller):
    """A draft of changing depth and size, now and then none."""

    name = "on_and_off"

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget((3, 0, 9, 1)[len(context.tokens) % 4], (2, 64, 5)[len(context.tokens) % 3])


class Watched(PassTokensDrafter):
    """Notes, for every round, the text up to the last accepted token and what was said below it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.notes: list[tuple[list[int], Tensor]] = []
        self.trees: list[TokenTree] = []

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        self.trees.append(super().propose(context, budget))
        return self.trees[-1]

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        super().observe(context, tree, scores, verdict)
        logits = context.state[self].logits
        if logits is not None:
            self.notes.append((context.tokens[:-1], logits))


# -- the tree --------------------------------------------------------------------------------------------------------


def test_the_first_tree_is_the_root_and_its_group() -> None:
    target = llamas()[0]
    drafter, context = drafter_for(target, 2), a_context([4, 9])
    drafter.start(context)
    tree = drafter.propose(context, Budget(5, 64))
    assert tree.tokens == (9, V, V + 1) and tree.parents == (-1, 0, 1)
    assert tree.num_drafts == 0 and tree.kind is Kind.POINT


def test_the_trees_of_the_worked_example() -> None:
    """k = 2: after [4, 9] the target says 20, and the two tokens below the root say 1 and 2: those are the drafts."""
    target = llamas()[0]
    drafter, context = drafter_for(target, 2), a_context([4, 9])
    drafter.start(context)
    shown(drafter, context, drafter.propose(context, Budget(5, 64)), (), 20)
    tree = drafter.propose(context, Budget(5, 64))
    assert tree.tokens == (20, 1, 2, V, V + 1, V, V + 1, V, V + 1)
    assert tree.parents == (-1, 0, 1, 0, 3, 1, 5, 2, 7)
    assert tree.probes == (False,) * 3 + (True,) * 6
    assert tree.depths == (0, 1, 2, 1, 2, 2, 3, 3, 4)
    assert tree.children == ((1,), (2,), (), (), (), (), (), (), ())
    shown(
        drafter, context, tree, (1,), 21
    )  # the first draft is accepted: its own group, nodes 5 and 6, says what follows
    assert context.tokens == [4, 9, 20, 1, 21]
    assert drafter.propose(context, Budget(5, 64)).tokens[:3] == (21, 5, 6)


@pytest.mark.parametrize(("path", "drafts"), [((), (4, 5, 6)), ((1,), (7, 8, 9)), ((1, 2), ()), ((1, 2, 3), ())])
def test_fewer_groups(path: tuple[int, ...], drafts: tuple[int, ...]) -> None:
    """The first two nodes have groups; where the last token that is accepted has none, the next round only asks."""
    target = llamas()[0]
    drafter, context = drafter_for(target, 3, groups=2), a_context([4, 9])
    drafter.start(context)
    shown(drafter, context, drafter.propose(context, Budget(5, 64)), (), 20)
    tree = drafter.propose(context, Budget(5, 64))
    assert len(tree) == 4 + 2 * 3
    shown(drafter, context, tree, path, 21)
    following = drafter.propose(context, Budget(5, 64))
    assert following.tokens[1 : 1 + following.num_drafts] == drafts and len(following) > 1


@pytest.mark.parametrize(
    ("kept", "path", "drafts"),
    [
        ((0, 3, 4), (), (1, 2)),  # both drafts are cut, and with them the look-ahead tokens below them
        ((0, 1, 3, 4, 5, 6), (), (2, 3)),
        ((0, 1, 3, 4, 5, 6), (1,), (4, 5)),
        ((0, 1, 3, 4, 5), (1,), (4,)),  # what is left of a group
        ((0, 1, 3, 4), (1,), ()),
    ],
)
def test_a_tree_that_was_cut_is_learned_from(kept: list[int], path: tuple[int, ...], drafts: tuple[int, ...]) -> None:
    target = llamas()[0]
    drafter, context = drafter_for(target, 2), a_context([4, 9])
    drafter.start(context)
    shown(drafter, context, drafter.propose(context, Budget(5, 64)), (), 20)
    shown(drafter, context, select(drafter.propose(context, Budget(5, 64)), kept), path, 21)
    following = drafter.propose(context, Budget(5, 64))
    assert following.tokens[1 : 1 + following.num_drafts] == drafts


def test_budgets() -> None:
    target = llamas()[0]
    drafter = drafter_for(target, 3)
    for budget, count in ((Budget(2, 64), 2), (Budget(5, 1), 1), (Budget(5, 64), 3), (Budget(5, 64, 0.99), 1)):
        context = a_context([4, 9])
        shown(drafter, context, drafter.propose(context, Budget(5, 64)), (), 20)
        tree = drafter.propose(context, budget)
        assert tree.num_drafts == count and len(tree) == (1 + count) * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_is_told_what_the_look_ahead_token_believes(temperature: float) -> None:
    drafter, context = drafter_for(llamas()[0], 3), a_context([4, 9], temperature=temperature)
    shown(drafter, context, drafter.propose(context, Budget(5, 64)), (), 20)
    seen: list[float] = []

    def second(distribution: Tensor | None, chance: float) -> bool:
        seen.append(chance)
        return len(seen) == 2

    assert drafter.propose(context, Budget(5, 64, stop=second)).num_drafts == 2  # the token itself stays
    assert all(0 < chance < 1 for chance in seen)


def test_a_tree_of_another_or_none_leaves_nothing_to_draft() -> None:
    target = llamas()[0]
    drafter, context = drafter_for(target, 2), a_context([4, 9])
    drafter.propose(context, Budget(5, 64))
    shown(drafter, context, TokenTree.root_only(9), (), 20)
    assert drafter.propose(context, Budget(5, 64)).num_drafts == 0


def test_drawn_drafts_carry_their_distributions() -> None:
    target = llamas()[0]
    drafter = drafter_for(target, 2)
    context = a_context([4, 9], temperature=0.5, repetition_penalty=1.5)
    tree = drafter.propose(context, Budget(5, 64))
    assert tree.kind is Kind.IID and tree.num_drafts == 0 and tree.distribution(1) is None
    shown(drafter, context, tree, (), 20)
    logits = context.state[drafter].logits
    tree = drafter.propose(context, Budget(5, 64))
    assert tree.kind is Kind.IID and tree.num_drafts == 2
    first, second = tree.distribution(1), tree.distribution(2)
    assert first is not None and second is not None and tree.distribution(3) is None
    torch.testing.assert_close(first, context.sampler.distribution(logits[0], context.tokens))
    torch.testing.assert_close(second, context.sampler.distribution(logits[1], [*context.tokens, tree.tokens[1]]))
    greedy = drafter_for(target, 2, draw="greedy")
    shown(greedy, context, greedy.propose(context, Budget(5, 64)), (), 20)
    assert greedy.traits.kind is Kind.POINT and greedy.propose(context, Budget(5, 64)).q is None


def test_draws_follow_the_distribution() -> None:
    target = llamas()[0]
    drafter, context = drafter_for(target, 1), a_context([4, 9], temperature=1.0)
    drafter.start(context)
    drafter.propose(context, Budget(5, 64))
    state = context.state[drafter]
    counts = torch.zeros(V)
    for _ in range(4000):
        state.logits = logits_of(7, sure=4.0)
        counts[drafter.propose(context, Budget(5, 64)).tokens[1]] += 1
    distribution = torch.softmax(logits_of(7, sure=4.0)[0], -1)
    assert float((counts / 4000 - distribution).abs().max()) < 0.03


# -- drafting and training say the same ------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [True, False])
def test_drafting_says_what_training_sees(lean: bool) -> None:
    """Every round's logits against the recipe's masked forward over the whole text, at the last token that was
    accepted."""
    target = HuggingFaceModel(llama(), lean=lean)
    recipe = PassTokensRecipe(target, TargetParts(target), {"k": "3"})
    net = recipe.net.double()
    net.learned.data.copy_(net_for(target, 3).learned)
    drafter = Watched(net, target)
    runs = serve(engine(target, drafter, max_batch=2), [Request(prompt, max_new_tokens=30) for prompt in PROMPTS])
    assert sum(run.stats.num_accepted_tokens for run in runs) > 0
    assert len(drafter.notes) > 60
    target.model.requires_grad_(False)
    close = 1e-4 if lean else 1e-9  # the modules' norms round to float32, the lean forward's do not
    for text, logits in drafter.notes:
        batch = Batch(torch.tensor([[*text, 0]]), {}, recipe.parts)
        columns = torch.tensor([[len(text) - 1, max(0, len(text) - 2)]])
        with torch.no_grad():
            expected = recipe.parts.logits(recipe.states(batch, columns))[0]
        torch.testing.assert_close(logits, expected[0, : len(logits)], rtol=0, atol=close)
        if len(text) > 1:  # one place off is something else
            assert not torch.allclose(logits, expected[1, : len(logits)], atol=1e-2)
    target.model.requires_grad_(True)


def test_the_loss_is_the_cross_entropy_at_the_right_offsets() -> None:
    """The loss equals a plain loop: look-ahead token i below column c predicts the token at c + i + 1 (i from 1)."""
    target = llamas()[0]
    parts = TargetParts(target)
    target.model.requires_grad_(False)
    tokens = torch.randint(V, (2, 13), generator=torch.Generator().manual_seed(3))
    taps = parts.features(tokens[:, :-1], ("last",))
    distributions = torch.log_softmax(parts.logits(taps["last"]).double(), -1)
    for labels in ("text", "target"):
        recipe = PassTokensRecipe(target, parts, {"k": "3", "labels": labels, "decay": "0.5"})
        recipe.net.double()
        loss = recipe.loss(Batch(tokens, taps, parts), torch.Generator().manual_seed(1))
        columns = torch.randint(12 - 3, (2, 4), generator=torch.Generator().manual_seed(1))
        total = 0.0
        for row in range(2):
            for column in columns[row].tolist():
                said_there = probes_of(target, recipe.net, tokens[row, : column + 1].tolist())
                for i in range(1, 4):
                    log_q = torch.log_softmax(said_there[i - 1], -1)
                    distribution = distributions[row, column + i].exp()
                    part = -(distribution * log_q).sum() if labels == "target" else -log_q[tokens[row, column + i + 1]]
                    total += float(part) * 0.5 ** (i - 1) / (2 * 4) / 1.75
        assert float(loss.detach()) == pytest.approx(total, abs=1e-5)
    target.model.requires_grad_(True)


def probes_of(target: LanguageModel, net: PassTokens, text: list[int]) -> Tensor:
    first = target.extra_embeddings(net.rows.detach())
    sequence = target.open()
    target.prefill(sequence, text[:-1])
    ids = [text[-1], *range(first, first + len(net.rows))]
    logits = target.forward([Feed(sequence, ids)])[0].logits[1:]
    target.release(sequence)
    return logits


def test_training_starts_at_the_mean_embedding() -> None:
    target = llamas()[0]
    parts = TargetParts(target)
    same = PassTokensRecipe(target, parts, {"noise": "0"}).net.rows
    ids = torch.linspace(0, V - 1, 1024).long()
    torch.testing.assert_close(same[0], parts.embedding(ids).float().mean(0))
    assert torch.equal(same[0], same[1])
    apart = PassTokensRecipe(target, parts, {}).net.rows
    assert not torch.equal(apart[0], apart[1])


# -- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"k": 1}, {"k": 4}, {"groups": 1}, {"draw": "greedy"}])
def test_drafts_come_and_go_with_the_budget(options: dict[str, Any]) -> None:
    target = llamas()[0]
    plain = outputs(engine(llamas()[0]), [Request(p, max_new_tokens=40) for p in PROMPTS])
    speculative = engine(target, drafter_for(target, 4, **options), controller=OnAndOff(), max_batch=2)
    assert outputs(speculative, [Request(p, max_new_tokens=40) for p in PROMPTS]) == plain
    for threshold in (0.2, 0.9):
        drafter = drafter_for(target, 4, **options)
        speculative = engine(target, drafter, controller=ConfidenceController(threshold))
        assert outputs(speculative, [Request(p, max_new_tokens=40) for p in PROMPTS]) == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_probe_past_the_end_of_the_context(temperature: float) -> None:
    """A text that fills its context: everything that is fed has a position in it, and the last drafts still come."""
    context = 24
    target = HuggingFaceModel(llama(context=context))
    drafter = Watched(net_for(target, 4), target)
    deepest: list[int] = []
    original = target.forward

    def watched(feeds: Any, taps: Any = ()) -> Any:
        rows = original(feeds, taps)
        deepest.extend(len(f.sequence.tokens) + max(f.sequence.scratch_depths) for f in feeds)
        return rows

    target.forward = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=temperature)
    (run,) = serve(engine(target, drafter), [Request([1, 2, 3], params, context - 3, seed=1)])
    assert len(run.context.tokens) == context and max(deepest) == context - 1
    if temperature == 0:
        plain = outputs(engine(HuggingFaceModel(llama(context=context))), [Request([1, 2, 3], params, context - 3)])
        assert run.output == plain[0]
    full = [tree for tree in drafter.trees if sum(tree.probes) == (1 + tree.num_drafts) * 4]
    assert 0 < len(full) < len(drafter.trees)


@pytest.mark.parametrize("draw", ["iid", "greedy"])
def test_in_an_ensemble_with_one_that_learns_from_trees(draw: str) -> None:
    """Ids behind the vocabulary stay this drafter's own: another member's table never sees them."""
    target = llamas()[0]
    recycling = RecyclingDrafter(nodes=4, share=True)
    speculative = engine(target, EnsembleDrafter([drafter_for(target, draw=draw), recycling]), max_batch=2)
    plain = outputs(engine(llamas()[0]), [Request(p, max_new_tokens=30) for p in PROMPTS])
    assert outputs(speculative, [Request(p, max_new_tokens=30) for p in PROMPTS]) == plain
    outputs(speculative, [Request(p, SamplingParams(temperature=1.0), 30, seed=i) for i, p in enumerate(PROMPTS)])
    assert len(recycling.tenants.of("").followers.rows) == V


def test_two_of_them_on_one_target() -> None:
    target = llamas()[0]
    first, second = drafter_for(target, 2), PassTokensDrafter(net_for(target, 3, seed=5), target)
    assert (first.first, second.first) == (V, V + 2)
    plain = outputs(engine(llamas()[0]), [Request(p, max_new_tokens=30) for p in PROMPTS])
    speculative = engine(target, EnsembleDrafter([first, second]))
    assert outputs(speculative, [Request(p, max_new_tokens=30) for p in PROMPTS]) == plain


# -- bad input -------------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    target = llamas()[0]
    for options, words in (
        ({"k": 4}, "k from 1 to 3"),
        ({"k": -1}, "k from 1 to 3"),
        ({"draw": "without_replacement"}, "draw must be iid or greedy"),
        ({"groups": -1}, "groups >= 0"),
    ):
        with pytest.raises(ValueError, match=words):
            PassTokensDrafter(net_for(target, 3), target, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k >= 1"):
        PassTokensConfig(16, 0)
    with pytest.raises(ValueError, match=r"must be \[k, 16\]"):
        PassTokensDrafter(PassTokens(PassTokensConfig(8, 2)), target)
    with pytest.raises(CapabilityError, match="no token embedding"):
        PassTokensDrafter(PassTokens(PassTokensConfig(8, 2)), tables()[0])
    for settings, words in (({"labels": "none"}, "labels"), ({"noise": "-1"}, "noise"), ({"decay": "0"}, "decay")):
        with pytest.raises(ValueError, match=words):
            PassTokensRecipe(target, TargetParts(target), settings)
    recipe = PassTokensRecipe(target, TargetParts(target), {"k": "4"})
    tokens = torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="too short"):
        recipe.loss(Batch(tokens, {}, recipe.parts), torch.Generator())


def test_folders(tmp_path: Path) -> None:
    target = llamas()[0]
    net, parts = net_for(target, 2), TargetParts(target)
    save_drafter(tmp_path, "pass_tokens", {"hidden_size": 16, "k": 2}, net, parts.fingerprint())
    drafter = build_drafter(f"pass_tokens:{tmp_path},k=1,draw=greedy,groups=1", target, target_source="x")
    assert isinstance(drafter, PassTokensDrafter)
    assert (drafter.max_depth, drafter.draw, drafter.groups) == (1, "greedy", 1)
    assert torch.equal(drafter.net.rows, net.rows.bfloat16().float())
    with pytest.raises(ValueError, match="needs a folder for this target"):
        build_drafter("pass_tokens", target, target_source="x")
    with pytest.raises(ValueError, match="another target"):
        build_drafter(f"pass_tokens:{tmp_path}", llamas(vocab=8)[0], target_source="x")
    with pytest.raises(CapabilityError, match="hidden states"):
        build_drafter(f"pass_tokens:{tmp_path}", TableModel(lambda _: [0.5, 0.5], 2), target_source="x")


def test_ids_of_probes_are_not_compared_with_q() -> None:
    """They lie behind the vocabulary; this class is checked as one from outside, alone and in a group."""
    target = llamas()[0]
    for group in (Watched(net_for(target, 3), target), EnsembleDrafter([Watched(net_for(target, 3), target)])):
        drawn: list[TokenTree] = []
        speculative = engine(target, group)
        speculative.on_round = lambda runs, trees, verdicts, times, drawn=drawn: drawn.extend(trees)
        serve(speculative, [Request(PROMPTS[0], SamplingParams(temperature=1.0), 20, ignore_eos=True)])
        assert any(tree.q is not None and any(tree.probes) for tree in drawn)
