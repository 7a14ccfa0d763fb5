"""Our own attention: right to one rounding, and a row's bits depend on what it sees alone."""

from __future__ import annotations

import random

import pytest
import torch
from checkpoints import new_model
from torch import Tensor

import foretoken as ft
from foretoken.loading import load_model
from foretoken.models.base import Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.native import why_not
from foretoken.models.native.attention import SIZES, attention, fits

needs_it = pytest.mark.skipif(why_not() is not None, reason=f"no native kernels: {why_not()}")
HIDDEN = torch.finfo(torch.bfloat16).min
SHAPES = [(1, 6, 2, 1, 1), (1, 6, 2, 5, 37), (3, 4, 4, 2, 130), (2, 8, 1, 7, 300), (1, 40, 2, 3, 70), (2, 14, 2, 9, 96)]
"""Texts, heads, heads of keys, rows, slots."""


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def case(b: int, heads: int, groups: int, n: int, slots: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of larger buffers, and a mask that hides two fifths of the slots."""
    query = numbers(b, n, heads, size, seed=1).transpose(1, 2)
    keys = numbers(b, groups, slots + 9, size, seed=2)[:, :, :slots]
    values = numbers(b + 1, groups, slots + 5, size, seed=3)[1:, :, :slots]
    hidden = torch.rand(b, 1, n, slots, generator=torch.Generator().manual_seed(4)) < 0.4
    mask = torch.zeros(b, 1, n, slots, dtype=torch.bfloat16).masked_fill(hidden, HIDDEN)
    mask[..., 0] = -0.0
    return query, keys, values, mask


def twin(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The same in float64."""
    each = query.shape[1] // keys.shape[1]
    wide = [x.double().repeat_interleave(each, 1) for x in (keys, values)]
    scores = query.double() @ wide[0].transpose(-1, -2) * scale
    return (torch.softmax(scores if mask is None else scores + mask.double(), -1) @ wide[1]).transpose(1, 2)


@needs_it
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [0.125, 3.0])
def test_it_is_the_twin_rounded_once(level: str, size: int, shape: tuple[int, ...], masked: bool, scale: float) -> None:
    query, keys, values, mask = case(*shape, size)  # type: ignore[arg-type]
    used_mask = mask if masked else None
    output, expected = attention(query, keys, values, used_mask, scale), twin(query, keys, values, used_mask, scale)
    assert output.shape == expected.shape and output.dtype == torch.bfloat16
    # Float32 scores of up to 3 x 5 sqrt(size) are off by 2^-22 of that, weights by as much more.
    assert ((output.double() - expected).abs() <= 2**-8 * expected.abs() + 2e-5 * scale * size**0.5 + 1e-5).all()


@needs_it
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rows_bits_depend_on_what_it_sees_alone(level: str, shape: tuple[int, ...]) -> None:
    """A row in a batch, beside other rows and with hidden slots between, has the bits that it has alone."""
    query, keys, values, mask = case(*shape, 64)  # type: ignore[arg-type]
    output = attention(query, keys, values, mask, 0.125)
    for text in range(shape[0]):
        for row in range(shape[3]):
            seen = (mask[text, 0, row] == 0).nonzero()[:, 0]
            single = slice(text, text + 1)
            alone = attention(
                query[single, :, row : row + 1], keys[single][:, :, seen], values[single][:, :, seen], None, 0.125
            )
            assert torch.equal(alone[0, 0], output[text, row])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(attention(query, keys, values, mask, 0.125), output)
    finally:
        torch.set_num_threads(before)


@needs_it
@pytest.mark.parametrize("shape", [(1, 3, 1, 18, 333), (2, 4, 4, 7, 200)], ids=str)
def test_windows_with_the_first_slots_have_the_bits_of_what_they_show(level: str, shape: tuple[int, ...]) -> None:
    """Whole blocks of slots that no row sees lie in front of the windows and between them and the first slots."""
    query, keys, values, _ = case(*shape, 64)  # type: ignore[arg-type]
    rows, slots = shape[3:]
    own, other = torch.arange(slots - rows, slots)[:, None], torch.arange(slots)
    for first in (0, 4):
        visible = (other <= own) & ((other > own - 50) | (other < first))
        mask = torch.zeros(shape[0], 1, rows, slots, dtype=torch.bfloat16).masked_fill(~visible, HIDDEN)
        output = attention(query, keys, values, mask, 0.125)
        for row in range(rows):
            shown = visible[row]
            alone = attention(query[:, :, row : row + 1], keys[:, :, shown], values[:, :, shown], None, 0.125)
            assert torch.equal(alone[:, 0], output[:, row])


@needs_it
def test_a_row_may_hold_what_its_neighbour_does_not_see(level: str) -> None:
    query, keys, values, mask = case(1, 4, 2, 5, 90, 64)
    mask[..., 2, 40] = HIDDEN
    expected = attention(query, keys, values, mask, 0.125)[:, 2]
    keys[:, :, 40], values[:, :, 40] = float("nan"), float("nan")
    output = attention(query, keys, values, mask, 0.125)
    assert torch.equal(output[:, 2], expected)
    assert output.isnan().any()


@needs_it
def test_hidden_slots_may_hold_anything(level: str) -> None:
    query, keys, values, mask = case(1, 6, 2, 5, 37, 64)
    mask[..., 20:24] = HIDDEN
    expected = attention(query, keys, values, mask, 0.125)
    keys[:, :, 20:24], values[:, :, 20:24] = float("nan"), float("inf")
    assert torch.equal(attention(query, keys, values, mask, 0.125), expected)
    values[:, :, 0] = float("nan")
    assert attention(query, keys, values, mask, 0.125).isnan().all()


@needs_it
def test_very_large_and_very_small_scores(level: str) -> None:
    query, keys, values, _ = case(1, 2, 1, 1, 40, 32)
    for factor in (1e-3, 1e3, 1e5):
        output, expected = attention(query, keys, values, None, factor), twin(query, keys, values, None, factor)
        assert torch.isfinite(output).all()
        if factor != 1e5:
            assert ((output.double() - expected).abs() <= 2**-7 * expected.abs() + 2e-3).all()


def test_what_it_fits() -> None:
    assert fits(torch.bfloat16, 64) == (why_not() is None)
    assert not fits(torch.float32, 64) and not fits(None, 64) and not fits(torch.bfloat16, 80)


# -- through the engine ------------------------------------------------------------------------------------------------

DRAFTERS = ("model,k=4", "model,tree=3x2x1", "ngram,k=6", "recycling", "eagle,nodes=15,depth=4", "quantized,k=3")


@needs_it
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bfloat16_text_with_drafts_is_that_of_plain_decoding(drafter: str, temperature: float) -> None:
    """The text is the same by default, alone and in a batch: no near-tie is decided otherwise."""
    prompts = ["def parse(text):\n", "It was a cold morning", "for i in range(10):\n    print(", "The sea"]
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 5 if temperature else None}
    plain = ft.load("builtin", drafter=None, dtype="bfloat16")
    llm = ft.load("builtin", drafter=drafter, dtype="bfloat16", controller="constant")
    expected = [plain.generate(prompt, **options).token_ids for prompt in prompts]
    assert [llm.generate(prompt, **options).token_ids for prompt in prompts] == expected
    assert [output.token_ids for output in llm.generate(prompts, **options)] == expected
    assert [output.token_ids for output in plain.generate(prompts, **options)] == expected


LARGE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = ("mixtral", "olmoe")
FAMILIES = ("mistral", "qwen2", "qwen3", "gemma", "gemma3", "phi3", "olmo2", "granite", *EXPERTS)


def differing_rows(model: HuggingFaceModel, rng: random.Random) -> int:
    """How many of five tokens have other logits inside a tree than token by token."""
    prompt, path = ([rng.randrange(3, model.vocab_size) for _ in range(n)] for n in (30, 5))
    plain, tree = model.open(), model.open()
    model.prefill(plain, prompt)
    model.prefill(tree, prompt)
    rows = []
    for token in path:
        rows.append(model.forward([Feed(plain, [token])])[0].logits[0])
        model.commit(plain, [0])
    others = [rng.randrange(3, model.vocab_size) for _ in range(3)]
    nodes = [path[0], others[0], path[1], path[2], others[1], others[2], path[3], path[4]]
    logits = model.forward([Feed(tree, nodes, [-1, 0, 0, 2, 2, 3, 3, 6])])[0].logits  # the path is 0 - 2 - 3 - 6 - 7
    model.release(plain)
    model.release(tree)
    return int((logits[[0, 2, 3, 6, 7]] != torch.stack(rows)).any(-1).sum())


@needs_it
def test_so_are_the_logits(level: str) -> None:
    model, rng = load_model("builtin", dtype="bfloat16"), random.Random(0)
    assert isinstance(model, HuggingFaceModel) and model.forwards.fast.layers[0].native
    assert [differing_rows(model, rng) for _ in range(4)] == [0] * 4


@needs_it
@pytest.mark.parametrize("name", FAMILIES)
def test_so_are_those_of_other_families(name: str) -> None:
    """Experts are PyTorch's products, whose bits depend on the number of rows where the CPU has no instructions for
    bfloat16: there the check at load must have said so."""
    model, rng = HuggingFaceModel(new_model(name, **LARGE).bfloat16(), in_place=True), random.Random(0)
    assert model.forwards.packing.layout == "native" and model.forwards.fast.layers[0].native
    differing = [differing_rows(model, rng) for _ in range(8)]
    if name in EXPERTS and any(differing):
        assert model.exactness == "rounding"
    else:
        assert differing == [0] * 8 and model.exactness == "bitwise"


@needs_it
def test_on_the_public_forward_they_are_not() -> None:
    """The control: PyTorch's attention and products round otherwise for another number of rows."""
    model, rng = HuggingFaceModel(new_model("llama", **LARGE).bfloat16(), lean=False), random.Random(0)
    assert sum(differing_rows(model, rng) for _ in range(8)) > 0


@needs_it
@pytest.mark.parametrize("wide", range(3))
def test_numbers_of_another_dtype_are_refused(wide: int) -> None:
    tensors = [x.float() if i == wide else x for i, x in enumerate(case(1, 2, 2, 1, 5, 32)[:3])]
    with pytest.raises(RuntimeError, match="attention takes bfloat16, not"):
        attention(*tensors, None, 1.0)
