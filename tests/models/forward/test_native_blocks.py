"""Medusa's and Hydra's heads in one native call: what their networks say, with the weights of the moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import new_model
from torch import Tensor, nn

from foretoken.core import Context
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.methods.drafters.hydra import HydraDrafter
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.nets.hydra import HydraConfig, HydraHeads
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.native import library

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"no kernels: {library.why_not()}")

NEAR = 0.03
VOCAB, SIZE, HEADS = 97, 48, 3
CASES = [
    (cls, layers, own, frequent)
    for cls in (MedusaDrafter, HydraDrafter)
    for layers, own, frequent in ((1, False, ()), (3, False, (4, 60, 7)), (2, True, ()), (2, True, (4, 60, 7)))
]


def drafter_of(cls: Any, layers: int, own: bool, frequent: tuple[int, ...]) -> HeadsDrafter:
    """One with random weights."""
    target = HuggingFaceModel(new_model("llama").float())
    shape: dict[str, Any] = {"hidden_size": SIZE, "vocab_size": VOCAB, "heads": HEADS, "layers": layers}
    config, heads = (MedusaConfig, MedusaHeads) if cls is MedusaDrafter else (HydraConfig, HydraHeads)
    net: Any = heads(config(**shape, own_projection=own))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=draws) * 0.1)
    drafter: HeadsDrafter = cls(net.float(), TargetParts(target), frequent=frequent)
    assert drafter._native and drafter.native_off == "" and drafter.describe()[0]["forward"] == "native"
    return drafter


def inputs_of(drafter: HeadsDrafter, head: int, rows: int = 5) -> Tensor:
    width = SIZE * (head + 2 if isinstance(drafter, HydraDrafter) else 1)
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(head))


def off(drafter: HeadsDrafter) -> float:
    """How far the library's logits are from the network's, as a share of their size."""
    worst = 0.0
    for head, native in enumerate(drafter._native):
        inputs = inputs_of(drafter, head)
        with torch.inference_mode():
            exact = drafter.rows(head, inputs)
        logits = native(inputs, 2).whole()
        assert logits.shape == exact.shape
        worst = max(worst, float((logits - exact).norm() / exact.norm()))
    return worst


@pytest.mark.parametrize("case", CASES)
def test_heads_say_what_their_network_says(level: str, case: Any) -> None:
    assert 0 < off(drafter_of(*case)) < NEAR


@pytest.mark.parametrize("case", CASES)
def test_best_tokens_are_those_of_the_logits(case: Any) -> None:
    drafter = drafter_of(*case)
    for head, native in enumerate(drafter._native):
        answer = native(inputs_of(drafter, head), 2)
        logits = drafter.head.widened(answer.whole())
        assert torch.equal(logits.gather(-1, torch.tensor(answer.tokens)), logits.topk(2, -1).values)


@pytest.mark.parametrize("case", CASES[1::4])
def test_a_row_has_the_same_bits_in_any_company(level: str, case: Any) -> None:
    drafter = drafter_of(*case)
    for head, native in enumerate(drafter._native):
        inputs = inputs_of(drafter, head, rows=7)
        together = native(inputs, 1).logits.unflatten(0, (-1, 7))
        for row in range(7):
            assert torch.equal(native(inputs[row : row + 1], 1).logits, together[:, row])


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("case", CASES[1::4])
def test_heads_follow_weights_that_change(case: Any, follows: bool) -> None:
    """Writes that PyTorch does not count, too; without a look at them the difference is seen."""
    drafter = drafter_of(*case)
    assert off(drafter) < NEAR
    for weight in drafter.heads.parameters():
        weight.data.mul_(-1.5)
    if follows:
        drafter.renew()
    assert (off(drafter) < NEAR) == follows


def test_a_hook_is_called_from_then_on() -> None:
    drafter = drafter_of(*CASES[0])
    next(m for m in drafter.heads.modules() if isinstance(m, nn.Linear)).register_forward_hook(lambda *_: None)
    drafter.renew()
    assert not drafter._native and "hooks" in drafter.native_off
    assert drafter.describe()[0]["forward"] == "lean"


def test_what_is_not_covered_says_why() -> None:
    target = HuggingFaceModel(new_model("llama").double())
    heads = MedusaHeads(MedusaConfig(SIZE, VOCAB)).double()
    drafter = MedusaDrafter(heads, TargetParts(target))
    assert not drafter._native and "float64" in drafter.native_off


def test_all_requests_of_a_batch_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole logits are made for a stop rule, and for nobody else."""
    from foretoken.core import Budget, Rng
    from foretoken.core.sampling import Sampler, SamplingParams

    drafter, calls = drafter_of(*CASES[0]), []
    native = drafter._native[0]
    drafter._native = [lambda inputs, top: calls.append(inputs.shape) or native(inputs, top)]  # type: ignore[list-item,func-returns-value]
    monkeypatch.setattr(drafter, "renew", lambda: None)
    contexts = [Context(i, [1, 2, i], 3, Sampler(SamplingParams()), Rng(0)) for i in range(3)]
    for i, context in enumerate(contexts):
        context.hidden = {"last": torch.randn(2, SIZE, generator=torch.Generator().manual_seed(i))}
    trees = drafter.propose_batch(contexts, [Budget(3, 8)] * 3)
    assert calls == [(3, SIZE)] and all(len(tree) == 9 for tree in trees)
    sure = drafter.propose_batch(contexts, [Budget(3, 8, min_confidence=0.999)] * 3)
    assert all(max(tree.depths) == 1 for tree in sure)
