"""``exact="bitwise"``: in bfloat16 a token's logits inside a tree are those of plain decoding, to the last bit."""

from __future__ import annotations

import random

import pytest
import torch
from checkpoints import new_model, prompt_of
from torch import Tensor

import foretoken as ft
from foretoken.core import Budget, Context, TokenTree
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.trees.operations import from_paths
from foretoken.models.base import Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.layouts import usable_layouts

pytestmark = pytest.mark.skipif(
    len(usable_layouts(torch.bfloat16)) == 1,
    reason="this machine has no bfloat16 matrix product whose bits do not depend on the number of rows",
)

SIZES = {
    "tiny": {},
    "middle": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
}


@pytest.fixture(scope="module", params=SIZES)
def network(request: pytest.FixtureRequest) -> object:
    return new_model("llama", **SIZES[request.param]).bfloat16()


def one_by_one(model: HuggingFaceModel, prompt: list[int], path: list[int]) -> Tensor:
    """[n, V] logits after every token of ``path``, fed and committed one at a time."""
    sequence, rows = model.open(), []
    model.prefill(sequence, prompt)
    for token in path:
        rows.append(model.forward([Feed(sequence, [token])])[0].logits[0])
        model.commit(sequence, [0])
    model.release(sequence)
    return torch.stack(rows)


def in_a_tree(model: HuggingFaceModel, prompt: list[int], path: list[int], rng: random.Random) -> Tensor:
    """The same logits when the path hides in a random tree, beside a ragged neighbour in the batch."""
    tokens, parents, places = list(path[:1]), [-1], [0]
    rest = path[1:]
    while rest:
        if rng.random() < 0.6:  # a node that is not on the path
            tokens.append(rng.randrange(3, 90))
            parents.append(rng.randrange(-1, len(tokens) - 1))
        else:
            tokens.append(rest[0])
            parents.append(places[-1])
            places.append(len(tokens) - 1)
            rest = rest[1:]
    neighbour, sequence = model.open(), model.open()
    model.prefill(neighbour, prompt_of(7, seed=9))
    model.prefill(sequence, prompt)
    rows = model.forward([Feed(sequence, tokens, parents), Feed(neighbour, [5, 6, 7], [-1, 0, 0])])[0].logits
    model.release(sequence)
    model.release(neighbour)
    return rows[places]


def differing_rows(model: HuggingFaceModel, trees: int) -> int:
    """How many of ``8 * trees`` rows have other bits inside a tree than alone."""
    rng, count = random.Random(0), 0
    for i in range(trees):
        prompt, path = prompt_of(10 + 4 * i, seed=i), prompt_of(8, seed=100 + i)
        alone, inside = one_by_one(model, prompt, path), in_a_tree(model, prompt, path, rng)
        count += int((alone != inside).any(-1).sum())
    return count


@pytest.mark.parametrize("lean", [True, False])
def test_a_path_in_a_tree_has_the_bits_of_plain_decoding(network: object, lean: bool) -> None:
    assert differing_rows(HuggingFaceModel(network, exact="bitwise", lean=lean), 20) == 0


def test_the_comparison_sees_a_single_bit(network: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the plain sums of the public forward do depend on where a token is accepted."""
    model = HuggingFaceModel(network, exact="bitwise", lean=False)
    monkeypatch.setattr(model.forwards, "attention", "sdpa")
    assert differing_rows(model, 10) > 0


def test_an_unpacked_model_says_what_it_has_lost() -> None:
    model = HuggingFaceModel(new_model("llama", **SIZES["middle"]).bfloat16(), in_place=True)
    assert model.exactness == "bitwise" and not model.refused
    model.unpack()
    assert model.forward_name == "public" and model.exactness == "rounding"
    assert "public bfloat16 forward" in model.exactness_why


def test_generated_tokens_are_identical(network: object) -> None:
    model = HuggingFaceModel(network, exact="bitwise")
    options = {"max_new_tokens": 60, "ignore_eos": True}
    for seed in range(3):
        prompt = prompt_of(12, seed=seed)
        plain = ft.load(model, drafter=None).generate(prompt, **options).token_ids
        guesses = [token if i % 5 else 3 for i, token in enumerate(plain)]

        def branch(context: Context, budget: Budget, guesses: list[int] = guesses) -> TokenTree:
            right = guesses[len(context.tokens) - context.prompt_length :][: budget.max_depth]
            return from_paths(context.root, [[7, 8, 9][: budget.max_depth], right, [*right[:1], 5][: budget.max_depth]])

        chain = ScriptedDrafter(as_output=True, script=guesses)
        for drafter in (chain, ScriptedDrafter(propose=branch), "ngram"):
            output = ft.load(model, drafter=drafter, controller="constant").generate(prompt, **options)
            assert output.token_ids == plain
            assert output.stats.num_accepted_tokens > 0 or drafter == "ngram"
