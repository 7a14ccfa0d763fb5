"""Trained heads in our library: the text is that of plain decoding, and the drafts are those of the networks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from foretoken.core import Budget, Context, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, load_model
from foretoken.loading.tokenizers import load_tokenizer
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.blocks import BlockDrafter
from foretoken.methods.drafters.features import FeatureDrafter
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.methods.drafters.shared_vocab import SharedVocabDrafter
from foretoken.methods.drafters.vocabulary import Vocabulary
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.native import library
from foretoken.models.network.layers import WHOLE, LayerPlan
from toys import engine, serve

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"no kernels: {library.why_not()}")

SPECS = ["eagle,nodes=8", "eagle3,nodes=8,depth=3", "mtp", "mtp,width=2,nodes=6", "medusa,nodes=8", "hydra,nodes=8"]
SPECS += ["dflash,nodes=8", "dflash2,nodes=8", "dspark,nodes=8"]
TEXTS = ["def area(width, height):\n    return", "import os\nfor name in", "The city of", "class Queue:\n    def"]
TOKENS = 20
SHARED = 0.8
"""Of the drafts of the library and of the network, at least; they are .86 to 1."""


def ours(dtype: torch.dtype, shapes: Any, names: Sequence[str]) -> str:
    """The library's layout, which on a busy machine is not always the one that is timed as fastest."""
    return "native" if "native" in names else names[-1]


@cache
def target() -> LanguageModel:
    with patch("foretoken.models.linear.packing.fastest_layout", ours):
        return load_model("builtin")


@cache
def prompts() -> list[list[int]]:
    tokenizer: Any = load_tokenizer("builtin")
    return [tokenizer.encode(text) for text in TEXTS]


def drafter_of(spec: str, native: bool = True) -> Drafter:
    drafter: Any = build_drafter(spec, target())
    report = drafter.describe()[0]
    assert report["forward"] == "native" and report["native_off"] == "", report
    if native:
        return drafter  # type: ignore[no-any-return]
    if isinstance(drafter, FeatureDrafter | BlockDrafter):
        drafter.model.native = None
    elif isinstance(drafter, HeadsDrafter):
        drafter._native = []
        if getattr(drafter, "reader", None) is not None:
            drafter.reader.model.native = None  # type: ignore[attr-defined]
    return drafter  # type: ignore[no-any-return]


def requests(mode: str) -> list[Request]:
    params = SamplingParams() if mode == "greedy" else SamplingParams(temperature=0.8)
    return [Request(prompt, params, TOKENS, seed=i) for i, prompt in enumerate(prompts())]


@cache
def plain(mode: str) -> list[list[int]]:
    return [run.output for run in serve(engine(target()), requests(mode))]


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
@pytest.mark.parametrize("spec", SPECS)
def test_texts_of_a_batch_are_those_of_plain_decoding(spec: str, mode: str) -> None:
    """Four requests at once, chains and trees."""
    runs = serve(engine(target(), drafter_of(spec)), requests(mode))
    assert [run.output for run in runs] == plain(mode)
    assert sum(run.stats.num_accepted_tokens for run in runs) > 0


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))}


def shared_drafts(drafter: Drafter, spec: str, requests: Sequence[Request]) -> list[float]:
    """Per round the share of paths that the library and the network of a spec both draft behind the same text."""
    reference, shares = drafter_of(spec, native=False), list[float]()

    def both(call: Any, twin_call: Any) -> Any:
        return lambda *args: (call(*args), twin_call(*args))[0]

    for name in ("start", "observe", "finish"):
        setattr(drafter, name, both(getattr(drafter, name), getattr(reference, name)))
    propose = drafter.propose_batch

    def watched(contexts: Sequence[Any], budgets: Sequence[Any]) -> list[TokenTree]:
        trees = propose(contexts, budgets)
        for tree, twin in zip(trees, reference.propose_batch(contexts, budgets), strict=True):
            native_paths, plain_paths = paths(tree), paths(twin)
            if plain_paths:
                shares.append(len(native_paths & plain_paths) / len(native_paths | plain_paths))
        return trees

    drafter.propose_batch = watched  # type: ignore[method-assign]
    serve(engine(target(), drafter), requests)
    return shares


@pytest.mark.parametrize("spec", SPECS)
def test_drafts_are_those_of_the_network(spec: str) -> None:
    """Rounding exchanges near-ties; a wrong norm, position or weight changes nearly all."""
    shares = shared_drafts(drafter_of(spec), spec, requests("greedy"))
    assert len(shares) > 20 and sum(shares) > SHARED * len(shares)


def test_a_wrong_input_is_seen() -> None:
    """The control of the test above: embeddings of other tokens."""
    drafter: Any = drafter_of("eagle3,nodes=8,depth=3")
    embedding = drafter.model.parts.embedding
    drafter.model.parts.embedding = lambda ids: embedding(ids + 1)
    shares = shared_drafts(drafter, "eagle3,nodes=8,depth=3", requests("greedy"))
    assert sum(shares) < SHARED * len(shares)


def test_a_sampled_request_beside_a_greedy_one() -> None:
    """A drawn chain needs the whole distribution, the tree beside it the best tokens only; both come from one call."""
    torch.manual_seed(0)
    sampled = Request(prompts()[0], SamplingParams(temperature=1.0), TOKENS)
    greedy = Request(prompts()[1], SamplingParams(), TOKENS)
    drawn, tree = serve(engine(target(), drafter_of("eagle3,nodes=8")), [sampled, greedy])
    assert tree.output == plain("greedy")[1] and len(drawn.output) == TOKENS
    assert drawn.stats.num_draft_tokens > 0


# -- drafts that are no plain chains of one whole network: the call for these is not theirs ----------------------------


def context_of(tokens: list[int]) -> Context:
    """A greedy request whose text the target has read."""
    sequence = target().open()
    target().prefill(sequence, tokens[:-1])
    params = SamplingParams()
    return Context(0, tokens, len(tokens), Sampler(params, len(tokens)), Rng(0), sequence=sequence)


def chain_of_layers(context: Context, plan: LayerPlan, length: int) -> list[int]:
    """What these layers of the target write behind a text."""
    tokens, parents = [context.root], [-1]
    for node in range(length):
        feed = Feed(context.sequence, tokens[-1:], parents[-1:], wanted=1)
        tokens.append(int(target().forward_part([feed], plan)[0].logits[-1].argmax()))
        parents.append(node)
    context.sequence.clear_scratch()
    return tokens[1:]


@pytest.mark.parametrize(
    "spec", ["early_exit,layer=2,k=4", "layer_skip,attention=2+3+4,mlp=3+4,adaptive=false,k=4", "swift,k=1,nodes=1"]
)
def test_the_target_drafts_with_the_chosen_layers_only(spec: str) -> None:
    drafter: Any = build_drafter(spec, target())
    model: Any = target()
    assert model.forwards.native(WHOLE) is not None
    others = []
    for tokens in prompts():
        context = context_of(tokens)
        drafter.start(context)
        drafted = list(drafter.propose(context, Budget(drafter.max_depth, drafter.max_depth)).tokens[1:])
        context.sequence.clear_scratch()
        assert drafted == chain_of_layers(context, drafter.plan, drafter.max_depth)
        others.append(drafted != chain_of_layers(context, WHOLE, drafter.max_depth))
        drafter.finish(context)
        target().release(context.sequence)
    assert any(others)


def test_another_vocabulary_of_the_same_size_is_translated() -> None:
    wide = load_model("builtin", dtype=torch.float32)
    same: Any = build_drafter("shared_vocab,k=4", wide, tokenizer=load_tokenizer("builtin"))
    # Logits of draft models may be rounded to bfloat16.  Of two that are equal the lower id is drafted, and that is the
    # other one's in the other vocabulary.
    draft = load_model(same.model.model)
    own, last = same.target_vocabulary, same.vocab_size - 1
    reversed_ids = Vocabulary(
        own.spellings[::-1],
        special=[last - token for token in own.special],
        roles={role: last - token for role, token in own.roles.items() if token is not None},
    )
    for tokens in prompts():
        drafts = []
        for vocabulary, text in ((own, tokens), (reversed_ids, [last - token for token in tokens])):
            drafter = SharedVocabDrafter(draft, same.vocabulary, vocabulary, k=4)
            context = context_of(text)
            drafter.start(context)
            drafts.append(drafter.propose(context, Budget(8, 8)).tokens)
            drafter.finish(context)
            target().release(context.sequence)
        assert len(drafts[0]) == 5 and drafts[0] == tuple(last - token for token in drafts[1])


@pytest.mark.parametrize("second", ["layer_skip,attention=2", "swift"])
def test_a_self_drafter_that_guesses_nothing_leaves_the_target_to_the_next(second: str) -> None:
    router: Any = build_drafter(f"router,drafters=((early_exit,vocab=256)|({second}))", target())
    guessable = set(router.drafters[0].head.ids.tolist())
    allowed = [token for token in range(target().vocab_size) if token not in guessable][:50]
    request = Request(prompts()[0], max_new_tokens=8, allowed_token_ids=frozenset(allowed), ignore_eos=True)
    (plain,), (run,) = serve(engine(target()), [request]), serve(engine(target(), router), [request])
    assert run.output == plain.output and run.stats.num_draft_tokens > 0
