"""The cascade: lengths and forwards, what is recorded, texts that are cut back, options, specs and their errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core import Budget, Context, Kind, Rng, TokenTree
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.controllers.confidence import ConfidenceController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.datastore import Datastore
from foretoken.methods.drafters.jacobi import JacobiDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.nested import works_nested
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.prediction import PredictionDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.drafters.retrieval import RetrievalDrafter
from foretoken.methods.drafters.sam import SamDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.drafters.suffix import SuffixDrafter
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models.base import LanguageModel
from foretoken.models.other.table import TableModel
from foretoken.registry import rows
from toys import engine, llama, llamas, next_logits, outputs, serve, tables

PROMPT = [0, 1, 2, 3, 0, 1]
T1 = SamplingParams(temperature=1.0)
RICH = SamplingParams(0.7, 3, 0.95, 0.05, 1.3, 0.3, 0.2, {1: 0.5})
WIDE = Budget(32, 64)


def request(
    params: SamplingParams = T1, seed: int = 0, prompt: list[int] = PROMPT, noise: Noise | None = None
) -> Context:
    return Context(0, list(prompt), len(prompt), Sampler(params, len(prompt), noise), Rng(seed))


def propose(
    drafter: Drafter,
    params: SamplingParams = T1,
    budget: Budget = WIDE,
    seed: int = 0,
    prompt: list[int] = PROMPT,
    noise: Noise | None = None,
) -> TokenTree:
    context = request(params, seed, prompt, noise)
    drafter.start(context)
    tree = drafter.propose(context, budget)
    drafter.finish(context)
    return tree


def cascade(inner: Drafter | None = None, draft: LanguageModel | None = None, **options: Any) -> CascadeDrafter:
    return CascadeDrafter(draft or tables()[1], inner or NgramDrafter(n=2, k=3), inner_rule, **options)


# -- chains ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "length"),
    [
        (Budget(9, 64), 5),
        (Budget(3, 64), 3),
        (Budget(9, 2), 2),
        (Budget(1, 64), 1),
        (Budget(0, 64), 0),
        (Budget(9, 0), 0),
    ],
)
@pytest.mark.parametrize("params", [T1, SamplingParams()], ids=["sampled", "greedy"])
def test_a_chain_has_the_length_that_was_asked_for(params: SamplingParams, budget: Budget, length: int) -> None:
    """The inner drafter may guess anything: right or wrong, too much or nothing."""
    for inner in (
        NgramDrafter(),
        ScriptedDrafter("1 2 3 0 1 2 3 0 1 2 3 0"),
        ScriptedDrafter(),
        ModelDrafter(tables()[0]),
    ):
        tree = propose(cascade(inner, k=5), params, budget)
        assert tree.is_chain and tree.num_drafts == length


@pytest.mark.parametrize("params", [T1, RICH], ids=["T=1", "pipeline"])
@pytest.mark.parametrize("inner", [NgramDrafter(n=2), ModelDrafter(tables()[0], tree="2x2")], ids=["ngram", "tree"])
def test_recorded_distributions_are_the_distributions_of_the_prefixes(inner: Drafter, params: SamplingParams) -> None:
    draft = tables()[1]
    for seed in range(5):
        tree = propose(cascade(inner, draft, k=4), params, seed=seed)
        assert tree.kind is Kind.IID and tree.q_rows == (-1, 0, 1, 2, 3)
        for node in range(1, 5):
            prefix = [*PROMPT, *tree.tokens[1:node]]
            distribution = Sampler(params, len(PROMPT)).distribution(next_logits(draft, prefix), prefix)
            torch.testing.assert_close(tree.distribution(node), distribution)


def test_greedy_chains_are_what_the_model_would_write() -> None:
    _, draft = llamas()
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    expected = outputs(engine(llamas()[1]), [Request(prompt, max_new_tokens=12)])[0]
    for inner in (NgramDrafter(), ModelDrafter(llamas()[0], k=3), ModelDrafter(llamas()[0], tree="3x2")):
        tree = propose(cascade(inner, draft, k=12), SamplingParams(), prompt=prompt)
        assert (list(tree.tokens[1:]), tree.kind, tree.q) == (expected, Kind.POINT, None)


def test_with_noise_guesses_change_the_time_but_not_the_chain() -> None:
    """The chain is what plain decoding with the draft model and the request's noise writes, whoever guesses."""
    for seed in range(10):
        draft = tables()[1]
        plain = propose(cascade(ScriptedDrafter(), draft, k=6), noise=Noise(seed))
        calls = draft.forward_calls
        guesses = " ".join(map(str, plain.tokens[1:]))
        helped = propose(cascade(ScriptedDrafter(guesses), draft, k=6), noise=Noise(seed))
        assert helped == plain and (plain.kind, plain.q) == (Kind.POINT, None)
        # Every forward is a round, the first of which reads the short prompt: six without a guess, one with the right
        # ones.
        assert (calls, draft.forward_calls - calls) == (6, 1)
        assert propose(cascade(draft=draft, k=6), noise=Noise(seed)) == plain
        (text,) = outputs(engine(draft), [Request(PROMPT, T1, 6, seed=seed)])
        assert list(plain.tokens[1:]) == text


def test_a_round_feeds_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens with one right guess each: what hangs where in the model's scratch tree."""
    monkeypatch.setattr("foretoken.methods.drafters.texts.BESIDE", 0)  # the prompt is read before the first round
    draft = tables()[1]
    truth = propose(cascade(ScriptedDrafter(), draft, k=4), SamplingParams()).tokens[1:]
    wrong = (truth[1] + 1) % 4

    def guess(context: Context, budget: Budget) -> TokenTree:
        at = len(context.tokens) - len(PROMPT)
        return TokenTree.chain(context.root, [truth[0], wrong] if at == 0 else [truth[at]])

    context = request(SamplingParams())
    drafter = cascade(ScriptedDrafter(propose=guess), draft, k=4)
    drafter.start(context)
    assert drafter.propose(context, WIDE).tokens[1:] == truth
    sequence = context.state[drafter, "text"]
    assert sequence.tokens == PROMPT[:-1]
    # root, two guesses of which the second fails; truth[1] below the first; truth[2] below it as a guess
    assert sequence.scratch_tokens == [PROMPT[-1], truth[0], wrong, truth[1], truth[2]]
    assert sequence.scratch_parents == [-1, 0, 1, 1, 3]


def test_networks_draft_the_same_in_a_batch() -> None:
    prompts = [[5, 6, 7, 8, 5, 6], [3], [4, 4, 4, 9, 4, 4]]
    target, draft = llamas()

    def drafter() -> CascadeDrafter:
        return CascadeDrafter(draft, ModelDrafter(target, k=2), inner_rule, k=5)

    alone = [propose(drafter(), T1, seed=i, prompt=prompt) for i, prompt in enumerate(prompts)]
    batched = drafter()
    contexts = [request(T1, i, prompt) for i, prompt in enumerate(prompts)]
    for context in contexts:
        batched.start(context)
    together = batched.propose_batch(contexts, [WIDE, WIDE, Budget(2, 64)])
    assert [tree.tokens for tree in together] == [alone[0].tokens, alone[1].tokens, together[2].tokens]
    assert together[2].num_drafts == 2
    torch.testing.assert_close(together[0].q, alone[0].q, rtol=1e-9, atol=1e-12)
    for context in contexts:
        batched.finish(context)
    assert not target._sequences and not draft._sequences


@pytest.mark.parametrize("greedy", [True, False])
def test_a_stop_keeps_the_token_that_triggered_it(greedy: bool) -> None:
    draft = tables()[1]
    lengths = set()
    for seed in range(20):
        prompt = [seed % 4, seed // 4 % 4, 1]
        params = SamplingParams() if greedy else T1
        whole = propose(cascade(draft=draft, k=6), params, seed=seed, prompt=prompt)
        cut = propose(cascade(draft=draft, k=6), params, Budget(9, 64, min_confidence=0.5), seed, prompt)
        chances = [
            float(torch.softmax(next_logits(draft, [*prompt, *whole.tokens[1:node]]), -1)[whole.tokens[node]])
            for node in range(1, 7)
        ]
        length = next((i + 1 for i, chance in enumerate(chances) if chance < 0.5), 6)
        assert cut.tokens == whole.tokens[: length + 1]
        lengths.add(length)
    assert len(lengths) > 1
    drafter = cascade(draft=draft, k=6)
    assert serve(engine(tables()[0], drafter, None, ConfidenceController(0.4)), [Request(PROMPT, T1, 30, seed=1)])


@pytest.mark.parametrize("length", [1, 7, 8, 11, 12, 13, 20])
def test_nothing_is_read_past_the_models_context(length: int) -> None:
    """Tables raise there.  With 12 places and a text of n tokens, 13 - n can be written."""
    draft = tables(context_length=12)[1]
    inner = ModelDrafter(tables(context_length=9)[0], k=3)
    tree = propose(cascade(inner, draft, k=4), prompt=([0, 1, 2, 3] * 5)[:length])
    assert tree.num_drafts == max(0, min(4, 13 - length))


# -- the horizontal cascade, and lenience ----------------------------------------------------------------------------


def test_late_tokens_come_from_the_late_drafter_with_its_distributions() -> None:
    target, draft = tables()
    drafter = cascade(draft=draft, k=5, early=2, late=ModelDrafter(target, k=9))
    tree = propose(drafter)
    assert tree.q_rows == (-1, 0, 1, 2, 3, 4)
    for node in range(1, 6):
        distribution = (draft if node <= 2 else target).distribution([*PROMPT, *tree.tokens[1:node]])
        torch.testing.assert_close(tree.distribution(node), distribution)
    mixed = propose(cascade(draft=draft, k=5, early=3, late=ScriptedDrafter("3 2 1")))
    assert (mixed.kind, mixed.q_rows, mixed.tokens[4:]) == (Kind.IID, (-1, 0, 1, 2, -1, -1), (3, 2))
    greedy = propose(cascade(draft=draft, k=5, early=3, late=ModelDrafter(target)), SamplingParams())
    assert (greedy.kind, greedy.num_drafts) == (Kind.POINT, 5)
    assert propose(cascade(draft=draft, k=5, early=3, late=ScriptedDrafter())).num_drafts == 3
    assert propose(cascade(draft=draft, k=5, early=3, late=ScriptedDrafter("1 1")), budget=Budget(2, 9)).num_drafts == 2


def test_one_drafter_may_be_inner_and_late() -> None:
    target, draft = llamas()
    both = ModelDrafter(target, k=3)
    drafter = CascadeDrafter(draft, both, inner_rule, k=5, early=3, late=both)
    assert propose(drafter, prompt=[5, 6, 7, 8]).num_drafts == 5
    assert not target._sequences and not draft._sequences


@pytest.mark.parametrize(("lenience", "tokens"), [(1.0, (0, 0)), (2.0, (0, 0)), (2.4, (0, 0)), (2.6, (1, 1))])
def test_lenience(lenience: float, tokens: tuple[int, int]) -> None:
    """Distribution (.5, .4, .1) and guesses of token 1: it is accepted when .4 > 1 / lenience; token 2 needs a lenience
    above 10."""
    model = TableModel(lambda prefix: [0.5, 0.4, 0.1], 3)
    tree = propose(cascade(ScriptedDrafter("1 1 1"), model, k=2, lenience=lenience), SamplingParams())
    # The last token is always the model's own: nothing is guessed for it.
    assert tree.tokens[1:] == (tokens[0], 0)
    other = propose(cascade(ScriptedDrafter("2 2 2"), model, k=2, lenience=lenience), SamplingParams())
    assert other.tokens[1:] == (0, 0)
    sampled = propose(cascade(ScriptedDrafter("1 1 1"), model, k=2, lenience=lenience))
    if lenience > 1:
        assert (sampled.kind, sampled.tokens) == (Kind.POINT, tree.tokens)


def test_a_lenient_review_prefers_the_best_token() -> None:
    model = TableModel(lambda prefix: [0.5, 0.4, 0.1], 3)
    both = ScriptedDrafter(propose=lambda c, b: TokenTree((c.root, 2, 1, 0), (-1, 0, 0, 0)))
    assert propose(cascade(both, model, k=2, lenience=20.0), SamplingParams()).tokens[1:] == (0, 0)
    worse = ScriptedDrafter(propose=lambda c, b: TokenTree((c.root, 2, 1), (-1, 0, 0)))
    assert propose(cascade(worse, model, k=2, lenience=20.0), SamplingParams()).tokens[1:] == (1, 0)


def test_whether_drafts_depend_on_other_requests() -> None:
    shared, own = RecyclingDrafter(nodes=4), RecyclingDrafter(nodes=4, share=False)
    assert cascade(shared).traits.shares_state and cascade(shared, lenience=4.0).traits.shares_state
    assert not cascade(own, lenience=4.0).traits.shares_state
    assert not cascade(ModelDrafter(tables()[0])).traits.shares_state


# -- texts that are cut back -----------------------------------------------------------------------------------------


def indexed(drafter: Drafter, context: Context) -> Any:
    """The drafter's proposals for every budget, which are all that can be seen of its state."""
    return [drafter.propose(context, Budget(n, n)) for n in (1, 3, 8)]


@pytest.mark.parametrize(
    "build",
    [
        lambda: NgramDrafter(n=3, k=6),
        lambda: NgramDrafter(n=3, k=6, match="first"),
        lambda: PredictionDrafter(k=6, default=[1, 0, 1, 1, 2, 0, 1, 2, 2, 0, 1, 0] * 3),
        lambda: RetrievalDrafter(Datastore.from_documents([[0, 1, 2, 0, 0, 1], [0, 1, 0, 2]]), min_n=1),
        lambda: ModelDrafter(tables()[1], k=3, draw="greedy"),
        lambda: ModelDrafter(llamas(vocab=4)[1], k=3, draw="greedy"),
        lambda: cascade(k=4),
        lambda: cascade(cascade(draft=tables(seed=4)[1], k=3), k=4),
        lambda: ScriptedDrafter("1 2 1"),
    ],
    ids=["ngram", "ngram-first", "prediction", "retrieval", "model", "network", "cascade", "deep", "scripted"],
)
def test_a_cut_text_leaves_no_trace(build: Callable[[], Drafter]) -> None:
    """Grow and cut a text at random; every proposal equals that of a drafter that has read the result only."""
    assert works_nested(build())
    drawn = random.Random(1)
    context = request(SamplingParams())
    drafter = build()
    drafter.start(context)
    for _ in range(40):
        if drawn.random() < 0.5 and len(context.tokens) > len(PROMPT):
            length = drawn.randrange(len(PROMPT), len(context.tokens))
            del context.tokens[length:]
            drafter.rewind(context, length)
        if drawn.random() < 0.8:
            context.tokens.extend(drawn.choices(range(3), k=drawn.randrange(1, 5)))
        fresh, again = build(), request(SamplingParams())
        again.tokens = list(context.tokens)
        fresh.start(again)
        if isinstance(fresh, PredictionDrafter):
            assert indexed(drafter, context) == indexed(fresh, again)
        else:
            assert [t.tokens for t in indexed(drafter, context)] == [t.tokens for t in indexed(fresh, again)]
        fresh.finish(again)


def test_models_go_back() -> None:
    from foretoken.models.base import Feed
    from foretoken.models.sequential import SequentialModel

    models: list[LanguageModel] = [tables(8)[0], llamas(vocab=8)[0], SequentialModel(llama(vocab=8))]
    for model in models:
        sequence = model.open()
        model.prefill(sequence, [1, 2, 3, 4, 5, 6])
        model.forward([Feed(sequence, [7, 0], wanted=0)])
        model.rewind(sequence, 3)
        assert (sequence.tokens, sequence.scratch_tokens) == ([1, 2, 3], [])
        logits = model.forward([Feed(sequence, [5, 2], wanted=1)])[0].logits[0]
        torch.testing.assert_close(logits, next_logits(model, [1, 2, 3, 5, 2]))
        model.rewind(sequence, 0)
        assert sequence.tokens == []


def test_the_inner_text_follows_the_output() -> None:
    """After every round the draft model holds a prefix of the text; a proposal makes the inner text the text again."""
    target, draft = llamas()
    inner = NgramDrafter(n=2, k=3)
    drafter = CascadeDrafter(draft, inner, inner_rule, k=4)
    speculative = engine(target, drafter, max_batch=3)
    for seed, prompt in enumerate(([5, 6, 7, 8, 5, 6], [3], [4, 5, 4, 5, 4])):
        speculative.add(Request(prompt, SamplingParams(temperature=seed % 2), 20 + 5 * seed, seed=seed))
    cut = 0
    while speculative.busy:
        speculative.step()
        for run in speculative.requests.running:
            inside, sequence = run.context.state[drafter], run.context.state[drafter, "text"]
            tokens = run.context.tokens
            assert tokens[: inside.shared] == inside.context.tokens[: inside.shared]
            assert tokens[: len(sequence.tokens)] == sequence.tokens
            cut += inside.context.tokens[: len(tokens)] != tokens[: len(inside.context.tokens)]
            inside.follow(tokens)
            assert inside.context.tokens == tokens
            assert inner.source(inside.context).text == tokens
    assert cut > 5
    assert not draft._sequences


def test_inner_drafters_do_not_learn_rejected_drafts() -> None:
    ended: list[list[int]] = []

    class Watched(ScriptedDrafter):
        def finish(self, context: Context) -> None:
            ended.append(list(context.tokens))

    target, draft = tables()
    drafter = cascade(Watched("1 2 3"), draft, k=4)
    (run,) = serve(engine(target, drafter), [Request(PROMPT, T1, 20, seed=2)])
    assert ended == [[*PROMPT, *run.output]]


# -- vocabularies of other widths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(), RICH], ids=["greedy", "pipeline"])
def test_the_target_may_be_padded_wider_than_its_drafts(params: SamplingParams) -> None:
    target = TableModel.random(6, seed=1)
    middle, bottom = TableModel.random(5, seed=2), TableModel.random(4, seed=3)
    drafter = CascadeDrafter(middle, ModelDrafter(bottom, k=2, target=target), inner_rule, k=4, target=target)
    for seed in range(5):
        tree = propose(drafter, params, seed=seed, prompt=[0, 5, 4, 1])
        assert tree.num_drafts == 4 and max(tree.tokens[1:]) < 5
        assert tree.q is None or tree.q.shape == (4, 6)
    copied = CascadeDrafter(middle, NgramDrafter(), inner_rule, k=4, target=target)
    assert max(propose(copied, params, prompt=[5, 4, 5, 4, 5]).tokens[1:]) < 5


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "cascade needs k >= 1, not 0"),
        ({"k": 4, "early": 2}, "needs a drafter for the tokens after early=2: give late=SPEC"),
        ({"k": 4, "late": NgramDrafter()}, "late=ngram needs early between 1 and k - 1 = 3, not 0"),
        ({"k": 4, "early": 4, "late": NgramDrafter()}, "between 1 and k - 1 = 3, not 4"),
        ({"k": 4, "early": -1, "late": NgramDrafter()}, "between 1 and k - 1 = 3, not -1"),
        ({"k": 4, "early": 2, "late": RecyclingDrafter()}, "late drafter of chains, and 'recycling' drafts trees"),
        ({"k": 4, "early": 2, "late": SamDrafter()}, "cannot use 'sam' inside"),
        ({"lenience": 0.5}, "lenience >= 1, not 0.5"),
        ({"lenience": float("nan")}, "lenience >= 1, not nan"),
        ({"inner": SuffixDrafter()}, "cannot use 'suffix' inside"),
        ({"inner": JacobiDrafter()}, "cannot use 'jacobi' inside.*use for example ngram or model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        cascade(**options)
    assert "\n" not in str(error.value)


def built(spec: str, **more: Any) -> Any:
    target = tables(vocab=8192, seed=9)[0] if not more else tables()[0]
    return build_drafter(spec, target, **{"target_source": "builtin", **more})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cascade,inner=nonsense", "unknown drafter 'nonsense': choose one of model"),
        ("cascade,inner=(ngram,x=1)", "unknown option 'x' of drafter 'ngram'"),
        ("cascade,inner=none", "cascade cannot use 'none' inside: choose one of model"),
        ("cascade,inner=sam", "cascade cannot use 'sam' inside: choose one of "),
        ("cascade,early=2,late=jacobi", "cascade cannot use 'jacobi' inside: choose one of "),
        ("cascade,inner=model", "drafter 'model' needs a path for this target: model:PATH"),
        ("cascade,inner=cascade", "drafter 'cascade' needs a path for this target: cascade:PATH"),
        ("cascade,x=1", "unknown option 'x' of drafter 'cascade': valid ones: k, early, lenience, inner, late"),
        ("staged,late=ngram", "unknown option 'late' of drafter 'staged': valid ones: k, width, tree, inner, quantize"),
        ("cascade,k=0", "cascade needs k >= 1"),
        ("cascade,k=3,early=3,late=ngram", "early between 1 and k - 1 = 2, not 3"),
        ("cascade:/nowhere", "/nowhere is not a folder"),
    ],
)
def test_wrong_specs(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        built(spec)
    assert "\n" not in str(error.value)
    if "inside" in words:
        able = str(error.value).partition("choose one of ")[2].split(", ")
        assert able == [row.name for row in rows("drafter") if works_nested(row.load())]
        assert {"ngram", "model", "cascade", "staged"} <= set(able)


def test_the_middle_must_share_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="do not share a tokenizer"):
        build_drafter("cascade:builtin", tables()[0], target_source="elsewhere")
    with pytest.raises(ValueError, match="drafter 'cascade' needs a path for this target: cascade:PATH"):
        build_drafter("cascade", tables()[0], target_source="elsewhere")


def test_the_middle_must_share_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    def save(name: str, words: list[str]) -> Any:
        inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, words[0]))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0])
        llama().save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tokenizer

    target_tokenizer = save("target", ["<unk>", "one", "two"])
    save("draft", ["<unk>", "one", "zwei"])
    target = llamas()[0]
    with pytest.raises(ValueError, match="another tokenizer than the target"):
        build_drafter(f"cascade:{tmp_path}/draft", target, target_source="x", tokenizer=target_tokenizer)
    drafter: Any = build_drafter(
        f"cascade:{tmp_path}/target,k=6,inner=(cascade:{tmp_path}/target,k=3,inner=(ngram,n=2,k=3))",
        target,
        target_source="x",
        tokenizer=target_tokenizer,
    )
    assert (drafter.k, drafter.inner.k, drafter.inner.inner.n) == (6, 3, 2)


def test_specs() -> None:
    drafter = built("cascade,k=6,early=4,late=(ngram,n=2),inner=(ngram,n=4,k=5),lenience=3")
    assert (drafter.k, drafter.early, drafter.late.n, drafter.inner.n, drafter.lenience) == (6, 4, 2, 4, 3.0)
    assert drafter.traits.kind is Kind.POINT
    assert built("cascade").traits.kind is Kind.IID
    assert (built("staged,k=3,width=2").max_nodes, built("staged,k=3,width=2").traits.kind) == (
        6,
        Kind.WITHOUT_REPLACEMENT,
    )
