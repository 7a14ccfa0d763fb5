"""Speculation on recurrent and hybrid targets writes what plain decoding writes, whatever drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, new_model, prompt_of
from hybrids import HYBRIDS, hybrid, unclamped, whole_float64

import foretoken as ft
from foretoken.lab.parity.report import Settings
from foretoken.lab.parity.run import run_parity
from foretoken.loading.drafters import default_drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.models import wrap
from foretoken.models.base import CapabilityError
from foretoken.models.stateful import StatefulModel

ABLE = [name for name in HYBRIDS if name not in ("mamba", "falcon_mamba", "jamba", "lfm2")]
PROMPTS = [prompt_of(13), prompt_of(1, seed=1), [5, 6, 7, 8] * 3]
NEW = 9
CHAINS = ("suffix,k=4", "jacobi", "ngram_cache")


@pytest.fixture(scope="module", params=ABLE)
def network(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = unclamped(hybrid(request.param))
    with whole_float64(model):
        yield model


@pytest.fixture(scope="module")
def qwen() -> Iterator[Any]:
    model = hybrid("qwen3_5_text")
    with whole_float64(model):
        yield model


def written(target: Any, drafter: Any, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    llm = ft.load(target, drafter=drafter, **{"controller": "constant"} if drafter is not None else {})
    outputs = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True, **options)
    return [list(output.token_ids) for output in outputs]


def by_transformers(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return out[0, len(prompt) :].tolist()


def half_right(truth: list[int], period: int = 3) -> ScriptedDrafter:
    """Right, right, wrong: every round drops a part of its chain."""
    return ScriptedDrafter(
        as_output=True, script=[t if i % period != 2 else (t + 1) % VOCAB for i, t in enumerate(truth)]
    )


def test_greedy_text_is_that_of_plain_decoding_and_of_transformers(network: Any) -> None:
    target = wrap(network)
    assert isinstance(target, StatefulModel)
    prompts = PROMPTS[1:]
    plain = written(target, None, prompts)
    assert plain == [by_transformers(network, prompt) for prompt in prompts]
    assert written(target, "ngram,k=4", prompts) == plain
    for prompt, truth in zip(prompts, plain, strict=True):
        llm = ft.load(target, drafter=half_right(truth), controller="constant,k=4")
        output = llm.generate(prompt, max_new_tokens=NEW, ignore_eos=True)
        assert list(output.token_ids) == truth
        assert 0 < output.stats.num_accepted_tokens < output.stats.num_draft_tokens
    assert not target._states


@pytest.mark.parametrize(
    "options", [{"replay": "lazy", "flush": 0}, {"replay": "lazy", "flush": 2}, {"replay": "lazy"}]
)
def test_every_replay_writes_the_same(qwen: Any, options: dict[str, Any]) -> None:
    plain = written(StatefulModel(qwen), None)
    target = StatefulModel(qwen, **options)
    assert written(target, "ngram,k=4") == plain
    assert written(target, half_right(plain[0]), [PROMPTS[0]]) == plain[:1]


@pytest.mark.parametrize("drafter", CHAINS)
def test_drafters_of_chains_run(qwen: Any, drafter: str) -> None:
    target = StatefulModel(qwen)
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        assert written(target, drafter, PROMPTS[1:], **options) == written(target, None, PROMPTS[1:], **options)


def test_sampled_text_of_a_seed_is_that_of_plain_decoding(network: Any) -> None:
    target = wrap(network)
    options = {"temperature": 8.0, "top_k": 20, "seed": 11}
    plain = written(target, None, PROMPTS[2:], **options)
    assert written(target, "ngram,k=4", PROMPTS[2:], **options) == plain
    assert plain != written(target, None, PROMPTS[2:])


@pytest.mark.parametrize("name", ["olmo_hybrid", "mamba2"])
def test_hybrid_draft_models(name: str) -> None:
    """As the draft of a tree-taking target, and of the same model with other weights, where much is rejected."""
    with whole_float64(network := unclamped(hybrid(name))):
        near = unclamped(hybrid(name))
        with torch.no_grad():
            for weight in near.parameters():
                weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        target, draft = StatefulModel(network), StatefulModel(near)
        plain = written(target, None)
        llm = ft.load(target, drafter=ModelDrafter(draft, k=3), controller="constant")
        outputs = llm.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
        assert [list(o.token_ids) for o in outputs] == plain
        assert 0 < sum(o.stats.num_accepted_tokens for o in outputs) < sum(o.stats.num_draft_tokens for o in outputs)
        seeded = {"temperature": 1.0, "seed": 4}
        assert written(target, ModelDrafter(draft, k=3), **seeded) == written(target, None, **seeded)
        llama = wrap(new_model("llama").double())
        assert written(llama, ModelDrafter(draft, k=3)) == written(llama, None)
        assert not draft._states


def test_forwards_of_a_draft_model(qwen: Any) -> None:
    """k forwards a round, whatever is accepted, but for the first one that reads the prompt."""
    draft = StatefulModel(qwen)
    llm = ft.load(wrap(new_model("llama").double()), drafter=ModelDrafter(draft, k=3), controller="constant")
    output = llm.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)
    assert draft.num_forwards <= 3 * output.stats.num_drafts + 1


@pytest.mark.parametrize(("flush", "worst"), [(0, 2), (100, 1)])
def test_forwards_of_a_round(qwen: Any, flush: int, worst: int) -> None:
    target = StatefulModel(qwen, replay="lazy", flush=flush)
    truth = written(target, None, [PROMPTS[0]])[0]
    for drafter, is_right in ((ScriptedDrafter(as_output=True, script=truth), True), (half_right(truth), False)):
        llm = ft.load(target, drafter=drafter, controller="constant,k=4")
        before = target.num_forwards
        output = llm.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)
        rounds, forwards = output.stats.num_drafts, target.num_forwards - before - 1  # the prompt's
        assert (output.stats.num_accepted_tokens == output.stats.num_draft_tokens) == is_right
        if is_right or worst == 1:
            assert forwards == rounds
        else:
            assert rounds < forwards <= worst * rounds


@pytest.mark.parametrize("options", [{}, {"temperature": 8.0, "top_k": 20, "seed": 11}], ids=["greedy", "seeded"])
def test_batches_are_ragged(qwen: Any, options: dict[str, Any]) -> None:
    target = StatefulModel(qwen)
    plain = written(target, None, **options)
    scripts = {tuple(p): half_right(t, period) for p, t, period in zip(PROMPTS, plain, (2, 3, 7), strict=True)}
    lengths = set[int]()

    class Ragged(ScriptedDrafter):
        """Every request has a script of its own, and a length that changes."""

        def propose(self, context: Any, budget: Any) -> Any:
            depth = 1 + (len(context.tokens) + context.prompt_length) % 4
            lengths.add(depth)
            own = replace(budget, max_depth=min(depth, budget.max_depth))
            return scripts[tuple(context.tokens[: context.prompt_length])].propose(context, own)

    assert written(target, Ragged(), **options) == plain
    assert len(lengths) == 4


def test_trees_are_refused_in_one_line(qwen: Any) -> None:
    for drafter in ("recycling", "lookahead", "retrieval", "ngram,k=4|suffix"):
        try:
            ft.load(qwen, drafter=drafter)
        except ValueError as error:
            assert "\n" not in str(error)
    with pytest.raises(CapabilityError, match="linear_attention layers, whose state cannot be branched"):
        ft.load(qwen, drafter="recycling")
    with pytest.raises(CapabilityError, match="linear_attention"):
        ft.load(qwen, drafter="early_exit,layer=1")


def test_the_front_doors(qwen: Any) -> None:
    """``ft.load(model)``, ``custom_generate`` and ``parity`` speculate without being told how."""
    plain = written(qwen, None)
    llm = ft.load(qwen)
    assert isinstance(llm.target, StatefulModel)
    assert default_drafter(llm.target, qwen) == "ngram"
    assert isinstance(llm.drafter, NgramDrafter)
    assert [list(o.token_ids) for o in llm.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)] == plain
    ids = torch.tensor([PROMPTS[0]])
    mask = torch.ones_like(ids)
    out = qwen.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        custom_generate=ft.custom_generate,
    )
    assert out[0, len(PROMPTS[0]) :].tolist() == plain[0]


def test_parity(qwen: Any) -> None:
    """The distribution of sampled text is tested as well as greedy and seeded ones."""
    draft = wrap(new_model("llama").double())
    settings = Settings(max_new_tokens=4, samples=16, controller="constant")
    report = run_parity(StatefulModel(qwen), None, [ModelDrafter(draft, k=2)], PROMPTS[1:2], settings)
    assert report.passed
    assert {check.mode for check in report.checks} >= {"greedy", "seed", "transformers", "batch"}
