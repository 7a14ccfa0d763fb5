"""Blockwise parallel decoding: the heads' numbers, how many calls a text costs, one head per step, the lossy rules."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import foretoken as ft
from foretoken.cli.main import main
from foretoken.core import Budget, Context, Kind, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request, Running
from foretoken.loading import load_model
from foretoken.methods.controllers.confidence import ConfidenceController
from foretoken.methods.drafters.bpd import BpdDrafter
from foretoken.methods.drafters.nets.bpd import BpdConfig, BpdHeads
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models.base import Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.registry import make
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.bpd import BpdRecipe
from toys import engine, llama, llamas, serve

PROMPT = [3, 1, 4, 1, 5]
NEW = 24
K = 4


def heads(k: int = K, seed: int = 0, **options: Any) -> BpdHeads:
    """Heads with random weights."""
    net = BpdHeads(BpdConfig(TargetParts(llamas()[0]).hidden_size, k, 8, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return net


def context_with(hidden: Tensor) -> Context:
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(SamplingParams()), Rng(0))
    context.hidden = {"last": hidden}
    return context


# -- the network -----------------------------------------------------------------------------------------------------


def by_hand(norm: str) -> BpdHeads:
    """Two heads of one unit each on states of two numbers."""
    net = BpdHeads(BpdConfig(2, k=3, width=1, norm=norm))
    values = {
        "up.weight": [[1.0, 0.0], [0.0, -1.0]],
        "up.bias": [0.0, 1.0],
        "down.weight": [[2.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, -4.0]],
        "down.bias": [0.0, 2.0, -1.0, 0.0],
        "norms.0.weight": [1.0, 10.0],
        "norms.1.weight": [2.0, 1.0],
    }
    net.load_state_dict({name: torch.tensor(value) for name, value in values.items()}, strict=norm == "rms")
    return net


# h = (1, 2): units relu(1, -1) = (1, 0); head 2: h + (2, 2) = (3, 4), root mean square 3.5355; head 3: (0, 3), 2.1213.
# h = (3, 0): units (3, 1); head 2: h + (7, 2) = (10, 2), root mean square 7.2111; head 3: (2, -1), 1.5811.
# Layer norm brings two numbers to (-1, 1) or (1, -1).
GOLDEN = {
    "rms": [[[0.8485, 11.3137], [1.3868, 2.7735]], [[0.0, 1.4142], [2.5298, -0.6325]]],
    "layer": [[[-1.0, 10.0], [1.0, -10.0]], [[-2.0, 1.0], [2.0, -1.0]]],
}


@pytest.mark.parametrize("norm", GOLDEN)
def test_worked_by_hand(norm: str) -> None:
    states = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    with torch.no_grad():
        output = by_hand(norm)(states, [2, 3])
    assert torch.allclose(output, torch.tensor(GOLDEN[norm]), atol=1e-4)


def test_a_head_alone_is_the_head_among_all() -> None:
    net, states = heads(), torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = net(states, [2, 3, 4])
        for i, head in enumerate((2, 3, 4)):
            assert torch.allclose(net(states, [head])[0], together[i], atol=1e-6)


def test_the_hidden_layer_is_shared_and_the_norms_are_not() -> None:
    net, states = heads(), torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    assert net.up.weight.shape == (3 * 8, 16) and net.down.weight.shape == (3 * 16, 3 * 8)
    with torch.no_grad():
        before = net(states, [2, 3, 4])
        net.norms[1].weight.mul_(2.0)  # type: ignore[operator]
        one_norm = net(states, [2, 3, 4])
        net.up.bias[0].add_(5.0)  # type: ignore[operator]
        one_unit = net(states, [2, 3, 4])
    assert [torch.equal(a, b) for a, b in zip(before, one_norm, strict=True)] == [True, False, True]
    assert not any(torch.equal(a, b) for a, b in zip(one_norm, one_unit, strict=True))


def test_a_fresh_head_says_what_the_target_says() -> None:
    """The branch is zero and the norms start at the size of the states: logits are the target's own."""
    network = copy.deepcopy(llama())
    with torch.no_grad():
        network.model.norm.weight.mul_(3.0)
    target = HuggingFaceModel(network)
    recipe = BpdRecipe(target, TargetParts(target), {"k": "3", "width": "4"})
    assert all(torch.allclose(norm.weight, torch.tensor(3.0), rtol=1e-3) for norm in recipe.net.norms)  # type: ignore[arg-type]
    rows = target.forward([Feed(target.open(), PROMPT)], ["last"])[0]
    drafter = recipe.drafter({})
    assert isinstance(drafter, BpdDrafter)
    for logits in drafter.logits(rows.taps["last"].float(), 2):
        assert torch.allclose(logits, rows.logits.float(), atol=0.05 * float(rows.logits.std()))
        assert logits.argmax(-1).tolist() == rows.logits.argmax(-1).tolist()


# -- drafting --------------------------------------------------------------------------------------------------------


def test_the_proposal_is_the_chain_of_the_heads() -> None:
    net = heads()
    drafter = BpdDrafter(net, TargetParts(llamas()[0]))
    states = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    tree = drafter.propose(context_with(states), Budget(max_depth=8))
    expected = drafter.logits(states[-1:], 3)[:, 0].argmax(-1).tolist()
    assert list(tree.tokens) == [PROMPT[-1], *expected] and tree.is_chain
    assert tree.kind is Kind.POINT and tree.q is None
    assert (drafter.max_depth, drafter.max_nodes, drafter.traits.draws_trees) == (K - 1, K - 1, False)


def test_k_and_budgets_cut_the_chain() -> None:
    net, parts = heads(), TargetParts(llamas()[0])
    context = context_with(torch.ones(1, 16))
    whole = list(BpdDrafter(net, parts).propose(context, Budget(max_depth=8)).tokens)
    assert list(BpdDrafter(net, parts, k=2).propose(context, Budget(max_depth=8)).tokens) == whole[:2]
    drafter = BpdDrafter(net, parts)
    for budget, length in ((Budget(max_depth=2), 3), (Budget(max_depth=8, max_nodes=1), 2), (Budget(max_nodes=0), 1)):
        assert list(drafter.propose(context, budget).tokens) == whole[:length]
    assert len(drafter.propose(context_with(torch.empty(0, 16)), Budget())) == 1


def test_a_doubtful_token_is_the_last_one() -> None:
    """The stop keeps the token that it looked at."""
    drafter = BpdDrafter(heads(), TargetParts(llamas()[0]))
    state = torch.randn(1, 16, generator=torch.Generator().manual_seed(2))
    sure = torch.softmax(drafter.logits(state, 3)[:, 0].float(), -1).max(-1).values.tolist()
    for threshold in (0.0, min(sure[:2]) + 1e-4, 1.0):
        expected = next((i + 1 for i, p in enumerate(sure) if p < threshold), 3)
        tree = drafter.propose(context_with(state), Budget(max_depth=8, min_confidence=threshold))
        assert tree.num_drafts == expected
    run = serve(engine(llamas()[0], drafter, None, ConfidenceController(1.0)), [Request(PROMPT, max_new_tokens=8)])[0]
    assert run.stats.num_draft_tokens <= run.stats.num_drafts


def test_a_batch_is_its_requests() -> None:
    drafter = BpdDrafter(heads(), TargetParts(llamas()[0]))
    contexts = [context_with(torch.full((1, 16), float(i))) for i in range(4)]
    contexts[1].hidden = {}
    budgets = [Budget(max_depth=depth) for depth in (3, 3, 1, 2)]
    together = drafter.propose_batch(contexts, budgets)
    alone = [drafter.propose(c, b) for c, b in zip(contexts, budgets, strict=True)]
    assert [t.tokens for t in together] == [t.tokens for t in alone]
    assert [t.num_drafts for t in together] == [3, 0, 1, 2]


# -- what a text costs -----------------------------------------------------------------------------------------------


@cache
def greedy_text() -> tuple[int, ...]:
    """The prompt, and more of its greedy continuation than any test asks for."""
    run = serve(engine(llamas()[0]), [Request(PROMPT, max_new_tokens=NEW + 2 * K)])[0]
    return (*PROMPT, *run.output)


def memorised(right: int) -> BpdHeads:
    """Heads that know that text by heart: 2 to ``right`` say what comes, those above it something else.

    More hidden units than places: the branches that turn every state into a wanted one are a linear problem.
    """
    parts, tokens = TargetParts(llamas()[0]), torch.tensor(greedy_text())
    states = parts.features(tokens[None, :-K], ("last",))["last"][0]  # [n, D]
    saying = torch.linalg.pinv(parts.head.weight.detach())  # [D, V]: the state whose largest logit is a given token's
    net = BpdHeads(BpdConfig(parts.hidden_size, K, width=64))
    with torch.no_grad():
        net.up.weight.copy_(torch.randn(net.up.weight.shape, generator=torch.Generator().manual_seed(0)))
        net.up.bias.copy_(torch.randn(net.up.bias.shape, generator=torch.Generator().manual_seed(1)))
        units = F.relu(net.up.double()(states))
        for head in range(2, K + 1):
            labels = tokens[head : head + len(states)]
            labels = labels if head <= right else (labels + 1) % parts.vocab_size
            rows = slice((head - 2) * parts.hidden_size, (head - 1) * parts.hidden_size)
            net.down.weight[rows] = torch.linalg.lstsq(units, saying[:, labels].T - states).solution.T
    return net.float()


def calls_and_run(drafter: BpdDrafter | None, prompt: list[int], count: int) -> tuple[int, Running]:
    """Calls of the target's network, the prompt's included, and the finished request."""
    target = llamas()[0]
    forward, calls = target.forward, []

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return forward(*args, **more)

    target.forward = counted  # type: ignore[method-assign]
    run = serve(engine(target, drafter), [Request(prompt, max_new_tokens=count)])[0]
    return len(calls), run


@pytest.mark.parametrize("khat", [1, 2, 3, 4])
def test_m_tokens_cost_m_over_khat_calls_and_one(khat: int) -> None:
    """k heads of which the first khat are right; the rounds are the calls but the prompt's."""
    drafter = BpdDrafter(memorised(right=khat), TargetParts(llamas()[0]))
    calls, run = calls_and_run(drafter, PROMPT, NEW)
    assert run.output == list(greedy_text()[len(PROMPT) :][:NEW])
    assert run.stats.num_drafts == NEW // khat
    assert calls == NEW // khat + 1
    assert run.stats.mean_acceptance_length == khat


@pytest.mark.parametrize("k", [2, 3, 4])
def test_heads_that_are_always_right_fill_the_block(k: int) -> None:
    drafter = BpdDrafter(memorised(right=K), TargetParts(llamas()[0]), k=k)
    calls, run = calls_and_run(drafter, PROMPT, NEW)
    assert calls == NEW // k + 1 and run.stats.acceptance_rate == 1.0
    calls, _ = calls_and_run(drafter, PROMPT, NEW + 1)
    assert calls == NEW // k + 2  # one token more is one call more


def test_a_prompt_of_one_token_has_no_state_to_guess_from() -> None:
    drafter = BpdDrafter(heads(), TargetParts(llamas()[0]))
    plain = serve(engine(llamas()[0]), [Request(PROMPT[:1], max_new_tokens=8)])[0]
    _, run = calls_and_run(drafter, PROMPT[:1], 8)
    assert run.output == plain.output and run.origins[0] == "plain"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_heads_cost_nothing_but_calls(seed: int) -> None:
    """Right by chance once in 32 times: khat is 1 but for that, and the text is the target's."""
    calls, run = calls_and_run(BpdDrafter(heads(seed=seed), TargetParts(llamas()[0])), PROMPT, NEW)
    assert run.output == list(greedy_text()[len(PROMPT) :][:NEW])
    assert run.stats.mean_acceptance_length < 1.2 and NEW * 0.8 < calls <= NEW + 1


# -- the recipe ------------------------------------------------------------------------------------------------------


def new_recipe(**settings: str) -> BpdRecipe:
    target = HuggingFaceModel(copy.deepcopy(llama()))
    recipe = BpdRecipe(target, TargetParts(target), {"k": "4", "width": "8", **settings})
    recipe.net.load_state_dict(heads().state_dict())
    return recipe


def new_batch(recipe: BpdRecipe, length: int = 9) -> Batch:
    tokens = torch.randint(recipe.parts.vocab_size, (2, length + 1), generator=torch.Generator().manual_seed(4))
    return Batch(tokens, recipe.parts.features(tokens[:, :-1], recipe.taps), recipe.parts)


@pytest.mark.parametrize("labels", ["text", "target"])
@pytest.mark.parametrize("head", [1, 2, 4])
def test_the_loss_of_a_head_place_by_place(head: int, labels: str) -> None:
    """Head i at place t is judged by token t + i, or by the target's distribution of it, at every place that has
    one."""
    recipe = new_recipe(labels=labels)
    batch = new_batch(recipe)
    with torch.no_grad():
        distributions = torch.softmax(recipe.parts.network(batch.tokens).logits.float(), -1)  # [2, n + 1, V]
        losses = []
        for row in range(2):
            for place in range(batch.length + 1 - head):
                state = batch.taps["last"][row, place].float()[None]
                state = state if head == 1 else recipe.net(state, [head])[0]
                log_probs = torch.log_softmax(state @ recipe.parts.head.weight.float().T, -1)[0]
                if head == 1 or labels == "text":
                    losses.append(-log_probs[batch.tokens[row, place + head]])
                else:
                    losses.append(-(distributions[row, place + head - 1] * log_probs).sum())
        assert len(losses) == 2 * (10 - head)
        assert float(recipe.head_loss(batch, head)) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize(("mode", "drawn"), [("frozen", (2, 3, 4)), ("finetune", (1, 2, 3, 4))])
def test_one_head_per_step_drawn_uniformly(mode: str, drawn: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = new_recipe(mode=mode)
    drawn_heads: list[int] = []
    monkeypatch.setattr(recipe, "head_loss", lambda batch, head: drawn_heads.append(head))
    batch = new_batch(recipe)
    for step in range(600):
        recipe.loss(batch, torch.Generator().manual_seed(step))
    counts = Counter(drawn_heads)
    assert sorted(counts) == list(drawn) and len(drawn_heads) == 600
    assert all(abs(count - 600 / len(drawn)) < 50 for count in counts.values())
    recipe.loss(batch, torch.Generator().manual_seed(7))
    assert drawn_heads[-1] == drawn_heads[7]  # the step's generator alone decides


def test_only_the_drawn_head_learns() -> None:
    recipe = new_recipe()
    recipe.head_loss(new_batch(recipe), 3).backward()
    assert [norm.weight.grad is not None for norm in recipe.net.norms] == [False, True, False]
    assert recipe.net.down.weight.grad is not None
    by_head = recipe.net.down.weight.grad.view(3, 16, -1).abs().sum((1, 2)).tolist()
    assert by_head[0] == by_head[2] == 0.0 < by_head[1]


@pytest.mark.parametrize("head", [1, 3])
def test_finetuning_reaches_the_target(head: int) -> None:
    recipe = new_recipe(mode="finetune")
    assert recipe.trains_target and not new_recipe().trains_target
    tokens = new_batch(recipe).tokens
    network = recipe.parts.network
    states = network(input_ids=tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
    recipe.head_loss(Batch(tokens, {"last": states}, recipe.parts), head).backward()
    assert all(float(weight.grad.abs().sum()) > 0 for weight in (network.lm_head.weight, network.model.norm.weight))
    assert (recipe.net.up.weight.grad is None) == (head == 1)


def test_what_is_stored_is_the_network() -> None:
    recipe = new_recipe(labels="text", mode="finetune", norm="rms")
    assert recipe.stored_config() == {"hidden_size": 16, "k": 4, "width": 8, "norm": "rms"}
    BpdHeads(BpdConfig(**recipe.stored_config())).load_state_dict(recipe.net.state_dict())


# -- the paper's lossy rules, end to end -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fresh heads for the built-in target: they repeat its last word, so that greedy decoding rejects most of them."""
    out = tmp_path_factory.mktemp("heads")
    parts = TargetParts(load_model("builtin"))
    config = BpdConfig(parts.hidden_size, k=3, width=4)
    save_drafter(out, "bpd", asdict(config), BpdHeads(config), parts.fingerprint())
    return out


@pytest.mark.parametrize(
    ("exact", "everything"),
    [
        ("top_k,k=1", "top_k,k=8192"),
        ("distance,eps=0", "distance,eps=8192"),
        ("min_block,min_accepted=0", "min_block,min_accepted=2"),
    ],
)
def test_lossy_rules_from_exact_to_everything(folder: Path, exact: str, everything: str) -> None:
    """A rule is greedy decoding at one end of its range, and accepts every block at the other."""
    prompt = "def add(a, b):\n    return"
    options: dict[str, Any] = {
        "controller": "constant",
        "drafter": f"bpd:{folder}",
        "allow_lossy": True,
        "dtype": "float32",
    }
    llm = ft.load("builtin", verifier=exact, **options)
    plain = llm.plain.generate(prompt, max_new_tokens=18, ignore_eos=True)
    output = llm.generate(prompt, max_new_tokens=18, ignore_eos=True)
    assert output.token_ids == plain.token_ids and output.stats.mean_acceptance_length < 3
    output = ft.load("builtin", verifier=everything, **options).generate(prompt, max_new_tokens=18, ignore_eos=True)
    assert output.token_ids != plain.token_ids
    assert output.stats.mean_acceptance_length == 3 and output.stats.num_drafts == 6


@pytest.mark.parametrize("verifier", ["top_k,k=3", "distance,eps=2", "min_block,min_accepted=1"])
def test_lossy_rules_are_refused_unless_allowed(
    folder: Path, verifier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"lossy by design and needs allow_lossy=True.*Use match, rejection"):
        engine(llamas()[0], BpdDrafter(heads(), TargetParts(llamas()[0])), make("verifier", verifier))
    command = ["generate", "--drafter", f"bpd:{folder}", "--verifier", verifier, "--max-new-tokens", "4", "x"]
    assert main(command) == 2
    assert "lossy" in capsys.readouterr().err
    assert main([*command, "--allow-lossy"]) == 0


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"k": "1"}, "k >= 2"),
        ({"width": "0"}, "width >= 1"),
        ({"norm": "batch"}, "norm must be one of rms, layer"),
        ({"labels": "both"}, "labels must be target or text"),
        ({"mode": "distill"}, "mode must be frozen or finetune"),
        ({"heads": "3"}, "valid ones: k, width, norm, labels, mode"),
    ],
)
def test_settings_out_of_range(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        new_recipe(**settings)


@pytest.mark.parametrize("k", [1, 5])
def test_no_more_heads_than_were_trained(k: int) -> None:
    with pytest.raises(ValueError, match="k from 2 to 4"):
        BpdDrafter(heads(), TargetParts(llamas()[0]), k=k)


def test_blocks_that_are_too_short() -> None:
    recipe = new_recipe()
    assert recipe.head_loss(new_batch(recipe, 4), 4).item() > 0
    with pytest.raises(ValueError, match="too short: use a larger --context"):
        recipe.head_loss(new_batch(recipe, 3), 4)


def test_errors_of_the_command(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for spec, words in (
        (f"bpd:{tmp_path / 'none'}", "no such file or folder"),
        (f"bpd:{tmp_path}", "no trained drafter"),
        (f"bpd:{folder},k=4", "k from 2 to 3"),
        (f"medusa:{folder}", "trained as 'bpd'"),
    ):
        assert main(["generate", "--drafter", spec, "--max-new-tokens", "4", "x"]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
