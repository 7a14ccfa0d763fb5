"""Drafting through text: both directions, what is rewound and held back, and what comes out with one tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import KINDS, TEXT, Writer, save_model, vocabulary

import foretoken as ft
from foretoken.core import Budget, Context, Kind, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.retokenize import RetokenizeDrafter
from foretoken.methods.drafters.vocabulary import Vocabulary
from foretoken.models.base import Feed, SequenceState
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.table import TableModel
from toys import engine, llama, llamas, outputs, serve

T1 = SamplingParams(temperature=1.0)


def spell(*tokens: str, **more: Any) -> Vocabulary:
    return Vocabulary([token.encode() for token in tokens], **more)


def started(drafter: RetokenizeDrafter, tokens: Sequence[int]) -> Context:
    context = Context(0, list(tokens), len(tokens), Sampler(T1), Rng(0))
    drafter.start(context)
    return context


def drafts(drafter: RetokenizeDrafter, context: Context, depth: int = 99, nodes: int = 99) -> list[int]:
    tree = drafter.propose(context, Budget(depth, nodes))
    assert tree.kind is Kind.POINT and tree.is_chain and tree.tokens[0] == context.root
    return list(tree.tokens[1:])


def own(drafter: RetokenizeDrafter, context: Context) -> list[int]:
    """The text in the draft model's ids, up to date."""
    drafter._follow(context, context.state[drafter])
    return list(context.state[drafter].ids)


# -- one tokenizer: the greedy chain of the drafter ``model`` --------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(), T1], ids=["greedy", "sampled"])
def test_equal_tokenizers_draft_the_greedy_chain(params: SamplingParams) -> None:
    """One token per letter: every text has one tokenization, so nothing is lost on the way through text."""
    target, draft = llamas()
    letters = Vocabulary([chr(97 + i).encode() for i in range(32)])
    both = [RetokenizeDrafter(draft, letters, letters, k=4), ModelDrafter(draft, k=4, draw="greedy")]
    requests = [Request(prompt, params, 30, seed=i) for i, prompt in enumerate([[3, 1, 4], [1], [5, 9, 2, 6]])]
    runs, expected = (serve(engine(target, drafter), requests) for drafter in both)
    for run, reference in zip(runs, expected, strict=True):
        assert run.output == reference.output
        assert run.origins == reference.origins
        assert run.stats.num_draft_tokens == reference.stats.num_draft_tokens


def test_the_builtin_draft_model() -> None:
    """Ordinary code is tokenized as the draft model writes it, so as much is accepted as without the way round."""
    prompt = "import os\n\n\ndef main():\n    for name in os.listdir(path):\n"
    direct, translated = (
        ft.load("builtin", drafter=f"{name},k=3", controller="constant").generate(prompt, max_new_tokens=24)
        for name in ("model", "retokenize")
    )
    assert direct.token_ids == translated.token_ids
    assert direct.stats.num_accepted_tokens == translated.stats.num_accepted_tokens > 0


# -- both directions -------------------------------------------------------------------------------------------------

LETTERS = spell(*"abcdefghij ")
PAIRS = spell("ab", "cd", "a", "b", "c", "d", "bc", "e", " ", "ef", "f")


def test_letters_drafted_by_pairs() -> None:
    """The target's a b c | d e f is ab c | d ef for the draft model, and with the d committed ab cd | ef."""
    drafter = RetokenizeDrafter(Writer(PAIRS, "abcdefab"), PAIRS, LETTERS, k=2)
    context = started(drafter, [0, 1, 2])
    assert own(drafter, context) == [0, 4]
    assert drafts(drafter, context) == [3, 4, 5]  # "d" and "ef" are three letters
    context.tokens += [3]
    assert own(drafter, context) == [0, 1]  # "c" was taken back
    assert drafts(drafter, context) == [4, 5, 0, 1]


def test_pairs_drafted_by_letters() -> None:
    drafter = RetokenizeDrafter(Writer(LETTERS, "abcdefab"), LETTERS, PAIRS, k=4)
    context = started(drafter, [0])
    assert own(drafter, context) == [0, 1]
    assert drafts(drafter, context) == [1, 9]  # "cd", "ef": fewer than four
    context.tokens += [1]
    assert drafts(drafter, context) == [9, 0]


def test_no_border_no_draft() -> None:
    """The target has ended its text with "c"; the draft goes on with "d", and the target would write "cd"."""
    drafter = RetokenizeDrafter(Writer(LETTERS, "abcdef"), LETTERS, PAIRS, k=2)
    assert drafts(drafter, started(drafter, [0, 4])) == []
    assert drafts(drafter, started(drafter, [0, 1])) == [9]


@pytest.mark.parametrize("lookbehind", [1, 2, 10])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["zoo", "bytes"])
def test_the_draft_models_text_is_the_targets(kind: str, other: str, lookbehind: int) -> None:
    """The draft model reads whole characters of the text, however the text arrives."""
    draft_vocab, target_vocab = vocabulary(kind), vocabulary(other)
    drafter = RetokenizeDrafter(Writer(draft_vocab), draft_vocab, target_vocab, lookbehind=lookbehind)
    ids = target_vocab.encode(TEXT)
    context = started(drafter, ids[:1])
    at = 1
    while at < len(ids):
        step = 1 + at % 3
        context.tokens += ids[at : at + step]
        at += step
        text = draft_vocab.bytes_of(own(drafter, context)).removeprefix(b"<s>")
        expected = target_vocab.bytes_of(context.tokens).decode(errors="ignore").encode()
        if kind != "words":  # which has not all the words that parts of a text make
            assert text.removeprefix(b" ") == expected
    if lookbehind == 10 and kind != "words":
        assert own(drafter, context) == draft_vocab.encode_text(TEXT)


def test_repeated_text_is_counted_right() -> None:
    """Ten equal tokens match ten others at many places."""
    repeating = spell("x", "xx", "y")
    drafter = RetokenizeDrafter(TableModel.random(1), spell("x"), repeating)
    context = started(drafter, [0] * 12)
    for count in (14, 15, 19):
        context.tokens += [0] * (count - len(context.tokens))
        assert own(drafter, context) == [0] * count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_writer_of_the_same_text_is_followed(kind: str, k: int) -> None:
    """A draft model that knows the text proposes right tokens, except in words that a draft cuts short."""
    start = 12
    target_vocab, draft_vocab = vocabulary("zoo"), vocabulary(kind)
    ids = target_vocab.encode(TEXT)
    drafter = RetokenizeDrafter(Writer(draft_vocab), draft_vocab, target_vocab, k=k)
    (run,) = serve(engine(Writer(target_vocab), drafter), [Request(ids[:start], SamplingParams(), 55)])
    assert run.output == ids[start : start + 55]
    if kind != "words" or k == 6:  # words alone cannot go on from the middle of one
        assert run.stats.num_drafts <= {1: 43, 3: 29, 6: 18}[k]


# -- characters and special tokens -----------------------------------------------------------------------------------

EAST = "\u6771".encode()
PARTS = Vocabulary([b"a", EAST[:1], EAST[1:2], EAST[2:], b"b", "\u96f2".encode()[2:]])


def test_half_a_character_is_held_back() -> None:
    drafter = RetokenizeDrafter(Writer(spell("a", "\u6771", "b"), "a\u6771b"), spell("a", "\u6771", "b"), PARTS, k=2)
    context = started(drafter, [0])
    assert drafts(drafter, context) == [1, 2, 3, 4]
    context.tokens += [1]
    assert own(drafter, context) == [0]
    assert drafts(drafter, context) == [2, 3, 4]  # the rest of the character, then b
    context.tokens += [2, 3]
    assert own(drafter, context) == [0, 1]
    assert drafts(drafter, context)[0] == 4


def test_another_character_than_the_one_begun_is_no_draft() -> None:
    drafter = RetokenizeDrafter(Writer(spell("a", "b"), "ab"), spell("a", "b"), PARTS, k=2)
    assert drafts(drafter, started(drafter, [0, 1])) == []
    assert drafts(drafter, started(drafter, [0])) == [4, 0]


def test_a_draft_ends_before_half_a_character() -> None:
    drafter = RetokenizeDrafter(Writer(PARTS, "ab\u6771"), PARTS, spell("a", "b", "\u6771"), k=2)
    assert drafts(drafter, started(drafter, [0])) == [1]  # b and the first byte of the character
    assert drafts(drafter, started(drafter, [0, 1])) == []


def test_bytes_that_are_no_character_are_passed_over() -> None:
    drafter = RetokenizeDrafter(Writer(spell("a", "b"), "ab"), spell("a", "b"), PARTS, k=1)
    context = started(drafter, [3, 0, 1, 0])  # the end of a character, and the beginning of one that never ends
    assert own(drafter, context) == [0, 0]
    broken = RetokenizeDrafter(TableModel(lambda prefix: [0, 0, 0, 1, 0, 0], 6), PARTS, spell("a", "b"), k=3)
    assert drafts(broken, started(broken, [0, 1])) == []


def test_one_beginning_of_text_only() -> None:
    draft_vocab, target_vocab = vocabulary("pieces"), vocabulary("zoo")
    drafter = RetokenizeDrafter(Writer(draft_vocab), draft_vocab, target_vocab)
    ids = target_vocab.encode(TEXT)
    context = started(drafter, ids[:5])
    for token in ids[5:40]:
        context.tokens.append(token)
        draft_ids = own(drafter, context)
        assert draft_ids[0] == draft_vocab.roles["bos"] and draft_ids.count(draft_vocab.roles["bos"]) == 1
    back = RetokenizeDrafter(Writer(target_vocab), target_vocab, draft_vocab)
    assert own(back, started(back, draft_vocab.encode_text(TEXT))) == target_vocab.encode(" " + TEXT)


def test_special_tokens_are_translated_by_role() -> None:
    draft_vocab, target_vocab = vocabulary("pieces"), vocabulary("zoo")
    drafter = RetokenizeDrafter(Writer(draft_vocab), draft_vocab, target_vocab)
    draft_ids = own(
        drafter,
        started(drafter, [*target_vocab.encode("return"), target_vocab.roles["eos"], *target_vocab.encode(" n")]),
    )
    assert draft_ids.count(draft_vocab.roles["eos"]) == 1
    ender = TableModel(lambda prefix: torch.eye(len(draft_vocab))[draft_vocab.roles["eos"]], len(draft_vocab))
    context = started(ends := RetokenizeDrafter(ender, draft_vocab, target_vocab, k=2), target_vocab.encode("return n"))
    assert drafts(ends, context) == [target_vocab.roles["eos"]] * 2


# -- the draft model's cache and its calls ---------------------------------------------------------------------------


def check_cache(model: HuggingFaceModel, sequence: SequenceState) -> None:
    fresh = HuggingFaceModel(llama(noise=0.3))
    other = fresh.open()
    fresh.prefill(other, sequence.tokens)
    for layers, fresh_layers in ((model.cache.keys, fresh.cache.keys), (model.cache.values, fresh.cache.values)):
        for layer, fresh_layer in zip(layers, fresh_layers, strict=True):
            assert layer is not None and fresh_layer is not None
            count = len(sequence.tokens)
            torch.testing.assert_close(
                layer[sequence.row, :, :count], fresh_layer[other.row, :, :count], rtol=0, atol=1e-11
            )


def test_what_was_rewritten_is_rewound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three letters join to one token all the time: the cache is that of the new tokens."""
    target, draft = llamas()
    triples = ["".join(three) for three in product("abcd", repeat=3)]
    letters = spell(*("abcd"[i % 4] for i in range(32)))
    drafter = RetokenizeDrafter(draft, spell(*"abcd", *triples[:28]), letters, k=3)
    rewound: list[int] = []
    rewind = draft.rewind
    monkeypatch.setattr(draft, "rewind", lambda s, length: rewound.append(len(s.tokens) - length) or rewind(s, length))
    speculative = engine(target, drafter, max_batch=3)
    for seed in range(3):
        speculative.add(Request([1, 2, 3, seed], T1, 40, seed=seed))
    while speculative.busy:
        speculative.step()
        for run in speculative.requests.running:
            text, sequence = run.context.state[drafter], run.context.state[drafter, "text"]
            assert sequence.tokens == text.ids[: len(sequence.tokens)]
            if sequence.tokens:
                check_cache(draft, sequence)
    assert sum(n > 0 for n in rewound) > 3
    assert not draft._sequences


def test_one_forward_per_token_for_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas()
    letters = Vocabulary([chr(97 + i).encode() for i in range(32)])
    speculative = engine(target, RetokenizeDrafter(draft, letters, letters, k=3))
    for i in range(3):
        speculative.add(Request([3 + i, 4], T1, 30, seed=i))
    speculative.step()
    fed: list[list[int]] = []
    forward = draft.forward

    def counting(feeds: Sequence[Feed], taps: Sequence[str] = ()) -> Any:
        fed.append([len(feed.tokens) for feed in feeds])
        return forward(feeds, taps)

    monkeypatch.setattr(draft, "forward", counting)
    speculative.step()
    assert fed[1:] == [[1, 1, 1]] * 2
    assert len(fed[0]) == 3 and max(fed[0]) <= 2  # what was accepted is not fed again


@pytest.mark.parametrize(("depth", "nodes", "count"), [(99, 99, 6), (2, 99, 2), (5, 99, 5), (99, 1, 1), (99, 0, 0)])
def test_budgets_count_the_targets_tokens(depth: int, nodes: int, count: int) -> None:
    drafter = RetokenizeDrafter(Writer(PAIRS, "abcdcdab"), PAIRS, LETTERS, k=3)
    assert len(drafts(drafter, started(drafter, [0, 1]), depth, nodes)) == count


def test_a_stop_ends_the_draft_behind_the_token() -> None:
    letters = spell("a", "b", "c")
    flat = RetokenizeDrafter(TableModel(lambda prefix: [0.3, 0.4, 0.3], 3), letters, letters, k=5)
    context = started(flat, [0])
    assert list(flat.propose(context, Budget(9, 9, min_confidence=0.5)).tokens) == [0, 1]
    assert list(flat.propose(context, Budget(9, 9, stop=lambda distribution, chance: False)).tokens) == [0, *[1] * 5]


def test_a_text_longer_than_the_draft_models_context() -> None:
    letters = spell(*"abcd")
    short = TableModel.random(4, context_length=12)
    drafter = RetokenizeDrafter(short, letters, letters, k=4)
    target = TableModel.random(4, seed=5)
    for prompt in ([0, 1, 2], [0, 1] * 10):
        plain = outputs(engine(target), [Request(prompt, SamplingParams(), 20)])
        assert outputs(engine(target, drafter), [Request(prompt, SamplingParams(), 20)]) == plain


# -- from a spec -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_networks_of_other_tokenizers(kind: str, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft", kind)
    llm = ft.load("builtin", drafter=f"retokenize:{draft},k=4", controller="constant", dtype="float32")
    prompts = ["def fib(n):", "It was a caf\u00e9 in \u6771\u4eac"]
    plain = llm.plain.generate(prompts, max_new_tokens=20)
    drafted = llm.generate(prompts, max_new_tokens=20)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    together = llm.generate(prompts, max_new_tokens=12, temperature=0.8, seed=[1, 2])
    alone = [llm.generate(p, max_new_tokens=12, temperature=0.8, seed=s) for p, s in zip(prompts, (1, 2), strict=True)]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]


@pytest.mark.parametrize(("options", "words"), [({"k": 0}, "k >= 1, not 0"), ({"lookbehind": 0}, "lookbehind >= 1")])
def test_bad_options(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RetokenizeDrafter(TableModel.random(2), spell("a", "b"), spell("a", "b"), **options)
