"""Learned tokens behind the vocabulary: embedded alike on every path, in every family, with gradients to them alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, prompt_of
from torch import Tensor, nn

from foretoken.models.base import CapabilityError, Feed
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.layouts import usable_layouts
from foretoken.models.linear.packing import PackedLinear, Projection
from foretoken.models.network.chains import branch_states
from foretoken.models.network.extra import put_in
from foretoken.models.other.table import TableModel
from toys import llama

FAMILIES = ("llama", "mistral_sliding", "qwen3", "gemma2", "gemma3", "gpt2", "opt", "granite")
K = 3


def load(name: str, tmp_path: Any) -> HuggingFaceModel:
    model = checkpoint(tmp_path, name)
    assert isinstance(model, HuggingFaceModel)
    return model


def rows_for(model: HuggingFaceModel, seed: int = 0) -> Tensor:
    """[K, D] like the token embeddings, as the embedding module hands them out."""
    embeddings = model.model.get_input_embeddings()(torch.arange(model.vocab_size)).detach()
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(K, embeddings.shape[1], generator=generator, dtype=embeddings.dtype) * embeddings.std()


def tree_logits(model: HuggingFaceModel, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
    sequence = model.open()
    model.prefill(sequence, text)
    logits = model.forward([Feed(sequence, tokens, parents)])[0].logits
    model.release(sequence)
    return logits.double()


@pytest.mark.parametrize("lean", [True, False])
def test_the_row_of_a_token_is_that_token(lean: bool) -> None:
    model = HuggingFaceModel(llama(), lean=lean)
    assert model.is_lean == lean
    first = model.extra_embeddings(llama().get_input_embeddings().weight.detach()[[7, 9]].clone())
    ordinary = tree_logits(model, [3, 1, 4], [5, 7, 9, 2], [-1, 0, 1, 2])
    extra = tree_logits(model, [3, 1, 4], [5, first, first + 1, 2], [-1, 0, 1, 2])
    torch.testing.assert_close(extra, ordinary, rtol=0, atol=1e-12)
    other = tree_logits(model, [3, 1, 4], [5, first + 1, first, 2], [-1, 0, 1, 2])
    assert not torch.allclose(other, ordinary, atol=1e-2)


def test_every_owner_has_ids_of_its_own_and_changes_show() -> None:
    model = HuggingFaceModel(llama())
    first, second = torch.zeros(2, 16, dtype=torch.float64), torch.ones(3, 16, dtype=torch.float64)
    assert model.forwards.extra_rows is None
    assert (model.extra_embeddings(first), model.extra_embeddings(second)) == (32, 34)
    assert model.num_ids == 34 + len(second) and model.vocab_size == 32
    # The second is known; the other is equal to a known one, but is another's.
    assert (model.extra_embeddings(second), model.extra_embeddings(first.clone())) == (34, 37)
    before = tree_logits(model, [3], [1, 35], [-1, 0])
    assert torch.equal(tree_logits(model, [3], [1, 36], [-1, 0]), before)
    second[1] = 0.5
    after = tree_logits(model, [3], [1, 35], [-1, 0])
    assert torch.equal(after[0], before[0]) and not torch.allclose(after[1], before[1])


def test_rows_leave_with_their_last_user_unless_others_follow() -> None:
    """The ids of later rows stay as they are."""

    class User:
        pass

    model, users = HuggingFaceModel(llama()), [User() for _ in range(3)]
    first, second = torch.zeros(2, 16, dtype=torch.float64), torch.ones(3, 16, dtype=torch.float64)
    assert [model.extra_embeddings(first, user) for user in users[:2]] == [32, 32]
    assert model.extra_embeddings(second, users[2]) == 34
    del users[:2]
    assert model.forwards.extra_rows is not None and len(model.forwards.extra_rows) == 5
    users.clear()
    assert model.forwards.extra_rows is None and model.num_ids == 32
    assert (model.extra_embeddings(second, User()), model.extra_embeddings(first)) == (32, 32)
    assert model.forwards.extra_rows is not None and len(model.forwards.extra_rows) == 2


def test_ids_that_nobody_has_registered_stay_an_error() -> None:
    with pytest.raises(IndexError):
        tree_logits(HuggingFaceModel(llama()), [3], [1, 32], [-1, 0])


def test_what_cannot_be_extended_is_refused() -> None:
    model = HuggingFaceModel(llama())
    with pytest.raises(ValueError, match=r"must be \[k, 16\], not \[2, 8\]"):
        model.extra_embeddings(torch.zeros(2, 8))
    with pytest.raises(CapabilityError, match="TableModel has no token embedding"):
        TableModel(lambda _: [0.5, 0.5], 2).extra_embeddings(torch.zeros(2, 8))
    inner = FeatureModel(nn.Linear(2, 2), TargetParts(model), model)
    with pytest.raises(CapabilityError, match="FeatureModel has no token embedding"):
        inner.extra_embeddings(torch.zeros(2, 16))


@pytest.mark.parametrize("name", FAMILIES)
def test_probes_and_training_see_the_same(name: str, tmp_path: Any) -> None:
    """Groups below several places of a text, past the end of a window: as probes, and in one masked forward."""
    model = load(name, tmp_path)
    rows = rows_for(model)
    first = model.extra_embeddings(rows)
    text = prompt_of(20)
    columns = [4, 19, 11]
    model.model.requires_grad_(False)
    batch = torch.tensor([text, text[::-1]])
    with torch.no_grad():
        states = branch_states(model, batch, torch.tensor([columns, columns]), rows)
    logits = TargetParts(model).logits(states).double()
    for row, tokens in enumerate(batch.tolist()):
        for group, column in enumerate(columns):
            ids = [tokens[column], *range(first, first + K)]
            expected = tree_logits(model, tokens[:column], ids, range(-1, K))[1:]
            assert float((logits[row, group] - expected).abs().max() / expected.std()) < 1e-4, (row, column)


@pytest.mark.parametrize("name", FAMILIES)
def test_probes_change_no_other_node(name: str, tmp_path: Any) -> None:
    model = load(name, tmp_path)
    text, tokens, parents = prompt_of(9), [5, 6, 7], [-1, 0, 0]
    plain = tree_logits(model, text, tokens, parents)
    first = model.extra_embeddings(rows_for(model))
    probed = tree_logits(model, text, [*tokens, first, first + 1, first, first + 2], [*parents, 0, 3, 2, 5])
    assert float((probed[:3] - plain).abs().max() / plain.std()) < 1e-5


def test_gradients_reach_the_rows_and_nothing_else() -> None:
    model = HuggingFaceModel(llama())
    network = model.model.requires_grad_(False)
    tokens, columns = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]), torch.tensor([[0, 5], [2, 3]])
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(K, 16, dtype=torch.float64, generator=generator) * 0.4
    weights = torch.randn(2, 2, K, 16, dtype=torch.float64, generator=generator)

    def value(at: Tensor) -> Tensor:
        return (branch_states(model, tokens, columns, at) * weights).sum()

    value(rows.requires_grad_()).backward()
    gradient, step = rows.grad, 4e-4
    assert gradient is not None
    for row in range(K):
        direction = torch.zeros_like(gradient)
        direction[row] = gradient[row] / gradient[row].norm()
        with torch.no_grad():
            slope = (value(rows + step * direction) - value(rows - step * direction)) / (2 * step)
        assert float(slope) == pytest.approx(float(gradient[row].norm()), rel=1e-3)
    assert all(weight.grad is None for weight in network.parameters())
    network.requires_grad_(True)


def test_rows_keep_their_gradient_in_another_dtype() -> None:
    rows = torch.ones(2, 4, requires_grad=True)
    embedded = put_in(torch.zeros(1, 3, 4, dtype=torch.bfloat16), torch.tensor([[5, 11, 2]]), rows, 10)
    assert embedded.dtype == torch.bfloat16 and embedded[0, :, 0].tolist() == [0, 1, 0]
    embedded.float().sum().backward()
    assert rows.grad is not None and rows.grad[:, 0].tolist() == [0, 1]


def test_a_packed_layer_has_a_derivative() -> None:
    linear = nn.Linear(64, 48).to(torch.bfloat16)
    layout = usable_layouts(torch.bfloat16)[-1]
    if layout == "plain":
        pytest.skip("this machine does not pack weights")
    packed = PackedLinear(Projection(linear.weight.detach(), linear.bias.detach(), layout))
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    gradients = []
    for layer in (linear, packed):
        inputs = x.clone().requires_grad_()
        layer(inputs).float().square().sum().backward()
        assert inputs.grad is not None
        gradients.append(inputs.grad.float())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.05, atol=0.05)
