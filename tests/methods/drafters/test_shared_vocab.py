"""The drafter of the common tokens: its distribution, how it reads the target's text, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import KINDS, TEXT, Writer, save_model, tokenizer, vocabulary
from torch import Tensor

import foretoken as ft
from foretoken.core import Budget, Context, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.shared_vocab import SharedVocabDrafter
from foretoken.methods.drafters.vocabulary import Vocabulary
from foretoken.models.base import LanguageModel
from foretoken.models.other.table import TableModel
from toys import (
    CAUGHT,
    FALSE_ALARM,
    engine,
    fixed_tables,
    joint_distribution,
    llamas,
    outputs,
    sampled_p_value,
    serve,
    tables,
)

T1 = SamplingParams(temperature=1.0)
RICH = SamplingParams(0.7, 3, 0.95, 0.05, 1.3, 0.3, 0.2, {1: 0.5})


def spell(*tokens: str, **more: Any) -> Vocabulary:
    return Vocabulary([token.encode() for token in tokens], **more)


def propose(
    drafter: ModelDrafter, prompt: Sequence[int], params: SamplingParams = T1, seed: int = 0, nodes: int = 64
) -> TokenTree:
    context = Context(0, list(prompt), len(prompt), Sampler(params, len(prompt)), Rng(seed))
    drafter.start(context)
    tree = drafter.propose(context, Budget(10, nodes))
    drafter.finish(context)
    assert not context.state
    return tree


def read(drafter: SharedVocabDrafter, tokens: Sequence[int]) -> list[int]:
    context = Context(0, list(tokens), len(tokens), Sampler(T1), Rng(0))
    return list(drafter.read(context))


# -- one tokenizer: the drafter ``model`` ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"k": 4}, {"tree": "3x2x1", "draw": "iid"}, {"tree": "3x2"}, {"tree": "3x2", "draw": "greedy"}], ids=str
)
@pytest.mark.parametrize("params", [SamplingParams(), T1, RICH], ids=["greedy", "T=1", "pipeline"])
def test_equal_vocabularies_draft_as_the_model_drafter(options: dict[str, Any], params: SamplingParams) -> None:
    _, draft = llamas()
    same = Vocabulary([chr(97 + i).encode() for i in range(32)])
    for seed in range(3):
        prompt = [3, 1, 4, 1, 5]
        tree = propose(SharedVocabDrafter(draft, same, same, **options), prompt, params, seed)
        expected = propose(ModelDrafter(draft, **options), prompt, params, seed)
        assert (tree.tokens, tree.parents, tree.kind, tree.q_rows) == (
            expected.tokens,
            expected.parents,
            expected.kind,
            expected.q_rows,
        )
        assert (tree.q is None) == (expected.q is None)
        if tree.q is not None and expected.q is not None:
            assert torch.equal(tree.q, expected.q)


def test_the_builtin_draft_model_drafts_as_the_model_drafter() -> None:
    prompt = "def fibonacci(n):"
    for options in ("k=4", "tree=2x2x1"):
        runs = [
            ft.load("builtin", drafter=f"{name},{options}", controller="constant").generate(
                prompt, max_new_tokens=24, temperature=t, seed=3
            )
            for t in (0.0, 0.8)
            for name in ("model", "shared_vocab")
        ]
        for output, reference in (runs[:2], runs[2:]):
            assert output.token_ids == reference.token_ids
            assert output.stats.num_accepted_tokens_per_pos == reference.stats.num_accepted_tokens_per_pos


# -- the distribution
# ---------------------------------------------------------------------------------------------------------

TARGET, DRAFT = spell("a", "b", "c", "d", "e"), spell("x", "c", "yy", "a", "e")


def test_the_distribution_is_the_draft_models_over_the_common_tokens() -> None:
    """x and yy are no target tokens: q' = (a: 3, c: 1, e: 4) / 8, in the target's ids."""
    draft = TableModel(lambda prefix: [0.1, 0.1, 0.1, 0.3, 0.4], 5)
    tree = propose(SharedVocabDrafter(draft, DRAFT, TARGET, k=2), [0, 1, 2])
    assert tree.q is not None
    expected = torch.tensor([3, 0, 1, 0, 4], dtype=torch.float64) / 8
    torch.testing.assert_close(tree.q, expected.expand(2, 5))
    assert set(tree.tokens[1:]) <= {0, 2, 4}


def test_the_pipeline_comes_after_the_restriction_in_the_targets_ids() -> None:
    draft = TableModel(lambda prefix: [0.1, 0.1, 0.1, 0.3, 0.4], 5)
    params = SamplingParams(temperature=0.5, top_k=2, logit_bias={2: 2.0}, repetition_penalty=1.5)
    tree = propose(SharedVocabDrafter(draft, DRAFT, TARGET, k=1), [0, 1], params)
    scores = torch.tensor([0.3, 0.0, 0.1, 0.0, 0.4], dtype=torch.float64).log()
    assert tree.q is not None
    torch.testing.assert_close(tree.q[0], Sampler(params, 2).distribution(scores, [0, 1]))


def test_the_draft_model_reads_its_own_ids_in_trees() -> None:
    """Every node's distribution is the draft model's after the mapped path."""
    draft = TableModel.random(5, seed=3, order=3)
    drafter = SharedVocabDrafter(draft, DRAFT, TARGET, tree="2x2x1")
    tree = propose(drafter, [0, 2, 4])
    assert len(tree) > 7
    own = {0: 3, 2: 1, 4: 4}
    for node in range(1, len(tree)):
        path = [3, 1, 4, *(own[tree.tokens[i]] for i in tree.path(tree.parents[node])[1:])]
        distribution = draft.distribution(path)
        expected = torch.zeros(5, dtype=torch.float64)
        for token, draft_token in own.items():
            expected[token] = distribution[draft_token]
        q = tree.distribution(node)
        assert q is not None
        torch.testing.assert_close(q, expected / expected.sum())


def test_a_greedy_tree_wider_than_what_is_common() -> None:
    draft = TableModel(lambda prefix: [0.1, 0.1, 0.1, 0.3, 0.4], 5)
    for params in (SamplingParams(), T1):
        tree = propose(SharedVocabDrafter(draft, DRAFT, TARGET, tree="4x4", draw="greedy"), [0], params)
        assert [tree.tokens[node] for node in tree.children[0]] == [4, 0, 2]
        assert len(tree) == 1 + 3 + 9


@pytest.mark.parametrize("options", [{"k": 2}, {"tree": "2x1", "draw": "iid"}, {"tree": "2x1"}], ids=str)
def test_drafts_that_the_target_never_says(options: dict[str, Any]) -> None:
    """The common tokens have no probability: the residual is p, every time."""
    p = [0.0, 0.7, 0.0, 0.3, 0.0]
    target, draft = fixed_tables(p, [0.1, 0.1, 0.1, 0.3, 0.4])
    drafter = SharedVocabDrafter(draft, DRAFT, TARGET, **options)
    modes = {"T=1": T1}
    distributions = {"T=1": joint_distribution(target, T1, [1, 3], 3)}
    assert sampled_p_value(engine(target, drafter), modes, distributions, [1, 3], 3, 400) > FALSE_ALARM
    for seed in (None, 0):
        (run,) = serve(engine(target, drafter), [Request([1, 3], T1, 20, seed=seed)])
        assert (run.stats.num_accepted_tokens, run.stats.num_drafts) == (0, 20)


def test_a_draft_model_without_a_common_continuation() -> None:
    target, draft = fixed_tables([0.2] * 5, [0.5, 0.0, 0.5, 0.0, 0.0])  # x or yy
    for options in ({"k": 2}, {"tree": "2x2"}, {"tree": "2x2", "draw": "greedy"}):
        drafter = SharedVocabDrafter(draft, DRAFT, TARGET, **options)  # type: ignore[arg-type]
        assert len(propose(drafter, [0, 1])) == 1
    for params in (SamplingParams(), T1):
        chain = SharedVocabDrafter(draft, DRAFT, spell("q", "a", "b", "c", "d"), k=3)
        assert len(outputs(engine(target, chain), [Request([1, 2], params, 8, seed=0)])[0]) == 8


def test_nothing_common_is_allowed() -> None:
    """A grammar leaves only tokens that the draft model lacks: an empty draft, and the target's distribution."""

    def only(ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, [1, 3]] = scores[:, [1, 3]]
        return allowed

    target, draft = tables(vocab=5)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, processors=(only,))
        for options in ({"k": 3}, {"tree": "2x2"}, {"tree": "2x2", "draw": "greedy"}):
            drafter = SharedVocabDrafter(draft, DRAFT, TARGET, **options)  # type: ignore[arg-type]
            (run,) = serve(engine(target, drafter), [Request([0, 1], params, 8, seed=0)])
            assert set(run.output) <= {1, 3}


def test_a_broken_draft_model_is_not_taken_for_that() -> None:
    target, _ = tables(vocab=5)
    broken = TableModel(lambda prefix: [float("nan")] * 5, 5)
    with pytest.raises(ValueError, match="NaN"):
        outputs(engine(target, SharedVocabDrafter(broken, DRAFT, TARGET, k=2)), [Request([0, 1], T1, 4, seed=0)])


class Misplaced(SharedVocabDrafter):
    """A planted mistake: tokens are drawn right, and q is recorded with the common tokens in another order."""

    def _finished(self, tree: Any) -> TokenTree:
        order = self._ids[0].tolist()
        for i, distribution in enumerate(tree.distributions):
            tree.distributions[i] = distribution.index_copy(0, torch.tensor(order[1:] + order[:1]), distribution[order])
        return super()._finished(tree)


class Unrestricted(SharedVocabDrafter):
    """A planted mistake: q keeps the mass of tokens that can never be drawn (it does not add up to one)."""

    def _finished(self, tree: Any) -> TokenTree:
        tree.distributions = [distribution * 0.5 for distribution in tree.distributions]
        return super()._finished(tree)


@pytest.mark.parametrize("mistake", [Misplaced, Unrestricted])
def test_planted_mistakes_are_caught(mistake: type[SharedVocabDrafter], monkeypatch: pytest.MonkeyPatch) -> None:
    """By their texts alone: the check of drafters from outside, which sees that q adds up to a half, does not look."""
    monkeypatch.setattr("foretoken.engine.drafting.has_outside", lambda drafter: False)
    target, draft = tables(vocab=5)
    distributions = {"T=1": joint_distribution(target, T1, [0, 2], 3)}
    values = [
        sampled_p_value(engine(target, cls(draft, DRAFT, TARGET, k=2)), {"T=1": T1}, distributions, [0, 2], 3, 1500)
        for cls in (SharedVocabDrafter, mistake)
    ]
    assert values[0] > FALSE_ALARM
    assert values[1] < CAUGHT


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_read_as_it_is(kind: str) -> None:
    drafter = SharedVocabDrafter(Writer(vocabulary(kind)), vocabulary(kind), vocabulary("zoo"))
    vocab = vocabulary(kind)
    ids = read(drafter, vocabulary("zoo").encode(TEXT))
    lead = "<s>" if kind == "pieces" else ""
    text = vocab.bytes_of(ids).decode()
    assert text == lead + TEXT or (kind == "words" and len(text) > 50)  # words alone cannot spell other fragments


def test_common_tokens_are_read_one_by_one_and_others_spelled() -> None:
    target, draft = spell("ab", "a", "abc", "d\u00e9"), spell("a", "b", "c", "ab", "d", "\u00e9")
    drafter = SharedVocabDrafter(TableModel.random(6), draft, target)
    assert read(drafter, [1, 0, 2, 3]) == [0, 3, 3, 2, 4, 5]


def test_half_characters_wait_for_the_other_half() -> None:
    bits = "\u6771".encode()
    target = Vocabulary([b"a", bits[:1], bits[1:2], bits[2:], b"b", b"<|end|>"], special=[5])
    draft = spell("a", "b", "\u6771")
    drafter = SharedVocabDrafter(TableModel.random(3), draft, target)
    context = Context(0, [0, 1], 2, Sampler(T1), Rng(0))
    lengths = []
    for token in (2, 3, 4, 1, 4, 1, 5, 0):
        lengths.append(list(drafter.read(context)))
        context.tokens.append(token)
    assert lengths == [[0], [0], [0, 2], [0, 2, 1], [0, 2, 1], [0, 2, 1, 1], [0, 2, 1, 1], [0, 2, 1, 1]]
    assert list(drafter.read(context)) == [0, 2, 1, 1, 0]


def test_the_text_begins_as_the_draft_model_is_used_to() -> None:
    target, draft = vocabulary("zoo"), vocabulary("pieces")
    drafter = SharedVocabDrafter(Writer(draft), draft, target)
    assert read(drafter, target.encode("if n"))[0] == draft.roles["bos"]
    started = spell("<bos>", "a", special=[0], roles={"bos": 0})
    own = spell("a", "<s>", special=[1], roles={"bos": 1}, prefix=[1])
    assert read(SharedVocabDrafter(TableModel.random(2), own, started), [0, 1]) == [1, 0]
    assert read(SharedVocabDrafter(TableModel.random(2), own, started), [1]) == [1, 0]


def test_only_new_tokens_are_translated() -> None:
    target, draft = spell("ab", "a"), spell("a", "b")
    drafter = SharedVocabDrafter(TableModel.random(2), draft, target)
    seen: list[int] = []
    translate = drafter._own_ids
    drafter._own_ids = lambda token, reading: seen.append(token) or translate(token, reading)  # type: ignore[method-assign,assignment,func-returns-value]
    context = Context(0, [0, 1, 0], 3, Sampler(T1), Rng(0))
    drafter.read(context)
    seen.clear()
    context.tokens += [0, 1]
    assert list(drafter.read(context)) == [0, 1, 0, 0, 1, 0, 1, 0]
    drafter.read(context)
    assert seen == [0, 1]


def test_a_text_that_the_draft_model_cannot_read_gets_no_draft() -> None:
    target, draft = spell("a", "#", "b"), spell("a", "b")
    drafter = SharedVocabDrafter(TableModel.random(2), draft, target)
    assert len(propose(drafter, [1, 1])) == 1
    table = TableModel(lambda prefix: [0.2, 0.6, 0.2], 3)
    assert outputs(engine(table, drafter), [Request([1], SamplingParams(), 6)]) == [[1] * 6]


@pytest.mark.parametrize(("kind", "rate"), [("characters", 0.15), ("bytes", 0.5), ("pieces", 0.3)])
def test_a_writer_of_the_same_text_is_followed(kind: str, rate: float) -> None:
    """The draft model's next token is right wherever it is also a token of the target."""
    target = Writer(vocabulary("zoo"))
    prompt = vocabulary("zoo").encode(TEXT)[:12]
    drafter = SharedVocabDrafter(Writer(vocabulary(kind)), vocabulary(kind), vocabulary("zoo"), k=3)
    (run,) = serve(engine(target, drafter), [Request(prompt, SamplingParams(), 55)])
    assert run.output == vocabulary("zoo").encode(TEXT)[12:67]
    assert run.stats.acceptance_rate > rate


# -- from a spec -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("options", ["k=4", "tree=2x2x1", "tree=2x2,draw=iid", "tree=2x2,draw=greedy"])
def test_networks_of_other_tokenizers(kind: str, options: str, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft", kind)
    llm = ft.load("builtin", drafter=f"shared_vocab:{draft},{options}", controller="constant", dtype="float32")
    prompts = ["def fib(n):", "It was a caf\u00e9 in \u6771\u4eac"]
    plain = llm.plain.generate(prompts, max_new_tokens=20)
    drafted = llm.generate(prompts, max_new_tokens=20)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert all(out.stats.num_draft_tokens > 20 for out in drafted)
    together = llm.generate(prompts, max_new_tokens=12, temperature=0.8, seed=[1, 2])
    alone = [llm.generate(p, max_new_tokens=12, temperature=0.8, seed=s) for p, s in zip(prompts, (1, 2), strict=True)]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]


def nothing_common(draft: LanguageModel) -> SharedVocabDrafter:
    end = {"special": [1], "roles": {"eos": 1}}
    return SharedVocabDrafter(draft, spell("x", "</s>", **end), spell("a", "<end>", **end))


def test_vocabularies_without_a_common_token_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no token in common with the target's.*'retokenize'") as caught:
        nothing_common(TableModel.random(2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["shared_vocab", "retokenize"])
def test_missing_parts_are_named(name: str, tmp_path: Path) -> None:
    bare = save_model(tmp_path / "bare", None)
    whole = save_model(tmp_path / "whole", "bytes")
    cases = [
        ("builtin", f"{name}:{bare}", "needs the draft model's tokenizer, and .*bare has none: copy tokenizer.json"),
        ("builtin", f"{name}:{tmp_path}/nothing", "is not a folder with a model"),
        ("builtin", f"{name}:{whole},k=0", f"{name} needs k >= 1, not 0"),
        (str(bare), f"{name}:{whole}", f"'{name}' needs the target's tokenizer: pass tokenizer="),
        (str(whole), name, f"needs a path for this target: {name}:PATH"),
    ]
    for target, spec, words in cases:
        with pytest.raises(ValueError, match=words) as caught:
            ft.load(target, drafter=spec)
        assert "\n" not in str(caught.value)
    assert ft.load(str(bare), drafter=f"{name}:{whole}", tokenizer=tokenizer("zoo")).drafter is not None
