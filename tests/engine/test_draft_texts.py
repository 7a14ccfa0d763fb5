"""What drafters' models read: nothing before a draft, a next turn's new tokens, and a long text in pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foretoken.core import Budget, Context, StepRecord
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.prefixes import SHORTEST
from foretoken.engine.request import Request, Running
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.known import KnownDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.online import OnlineDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.drafters.staged import StagedDrafter
from foretoken.methods.drafters.texts import BESIDE, DraftTexts
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models.base import LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, serve

ROOM = 2**22
T1 = SamplingParams(temperature=1.0)
K = 3
LATE = K + 2
"""Most tokens of the last round of a text, none of which its drafter has read."""
DRAFTERS: dict[str, Callable[[LanguageModel, LanguageModel], Drafter]] = {
    "model": lambda target, draft: ModelDrafter(draft, k=K),
    "tree": lambda target, draft: ModelDrafter(draft, tree="2x2x1"),
    "target itself": lambda target, draft: ModelDrafter(HuggingFaceModel(llama(context=1024)), k=K),
    "online": lambda target, draft: OnlineDrafter(draft, k=K, target=target, every=1000),
    "cascade": lambda target, draft: CascadeDrafter(draft, NgramDrafter(n=2), inner_rule, k=K),
    "staged": lambda target, draft: StagedDrafter(draft, NgramDrafter(n=2), inner_rule, k=K),
    "ensemble": lambda target, draft: EnsembleDrafter([ModelDrafter(draft, k=K), NgramDrafter(n=2, k=K)]),
    "router": lambda target, draft: RouterDrafter([ModelDrafter(draft, k=K), NgramDrafter(n=2)], costs=(0.0, 0.1)),
    "known": lambda target, draft: KnownDrafter(ModelDrafter(draft, k=K)),
}
every_drafter = pytest.mark.parametrize("build", DRAFTERS.values(), ids=list(DRAFTERS))


def text(length: int, start: int = 0) -> list[int]:
    return [(7 * i + i * i // 3 + start) % 31 for i in range(length)]


def models() -> tuple[HuggingFaceModel, HuggingFaceModel]:
    return HuggingFaceModel(llama(context=1024)), HuggingFaceModel(llama(noise=0.3, context=1024))


def new(build: Callable[[LanguageModel, LanguageModel], Drafter] = DRAFTERS["model"], **more: Any) -> Engine:
    target, draft = models()
    return engine(target, build(target, draft), **{"prefix_bytes": ROOM, **more})


def draft_of(runner: Engine) -> HuggingFaceModel:
    assert isinstance(runner.drafter, ModelDrafter) and isinstance(runner.drafter.model, HuggingFaceModel)
    return runner.drafter.model


def serve_one(runner: Engine, prompt: Sequence[int], tokens: int = 16, **more: Any) -> Running:
    (run,) = serve(runner, [Request(prompt, max_new_tokens=tokens, explain=True, **more)])
    return run


def read(run: Running) -> tuple[int, int]:
    """Tokens that the target and the drafter computed before they wrote."""
    return run.stats.num_prompt_tokens_computed, run.stats.num_draft_prompt_tokens_computed


def plain(prompt: Sequence[int], tokens: int = 16, **more: Any) -> list[int]:
    (run,) = serve(engine(models()[0]), [Request(prompt, max_new_tokens=tokens, **more)])
    return run.output


def drafts(run: Running) -> list[list[int]]:
    return [list(trace.tokens) for trace in run.rounds]


def steps_to_the_end(runner: Engine) -> list[Running]:
    done = []
    while runner.busy:
        done += [run for run, emission in runner.step() if emission.finish_reason is not None]
    return done


# -- a conversation --------------------------------------------------------------------------------------------------


@every_drafter
@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "seeded"])
def test_in_a_conversation_drafters_read_what_is_new(
    build: Callable[[LanguageModel, LanguageModel], Drafter], seed: int | None
) -> None:
    """Drafts are token by token those of a drafter that reads everything again."""
    keeping, cold = new(build), new(build, prefix_bytes=0)
    sampling: dict[str, Any] = {"params": T1, "seed": seed} if seed else {}
    prompt = text(120)
    for turn in range(3):
        warm, fresh = serve_one(keeping, prompt, **sampling), serve_one(cold, prompt, **sampling)
        assert warm.output == fresh.output == plain(prompt, **sampling)
        assert drafts(warm) == drafts(fresh) and warm.stats.num_draft_tokens > 0
        assert read(fresh) == (len(prompt), len(prompt))
        if turn:
            target, drafter = read(warm)
            assert target == 1 + 3 and drafter <= 1 + 3 + LATE
        prompt = [*prompt, *warm.output, 3, 1, 2]
    assert not [text for text in (DraftTexts.of(warm.context).by_key, DraftTexts.of(fresh.context).by_key) if text]


def test_a_nested_drafters_model_keeps_up_too() -> None:
    """Both models keep up: the one that drafts for the target, and the one that drafts for it."""

    def build(target: LanguageModel, draft: LanguageModel) -> Drafter:
        inner = ModelDrafter(HuggingFaceModel(llama(noise=0.5, context=1024)), k=2)
        return CascadeDrafter(draft, inner, inner_rule, k=4)

    keeping, cold = new(build), new(build, prefix_bytes=0)
    first = serve_one(keeping, text(120))
    prompt = [*text(120), *first.output, 3, 1]
    warm, fresh = serve_one(keeping, prompt), serve_one(cold, prompt)
    assert warm.output == fresh.output == plain(prompt) and drafts(warm) == drafts(fresh)
    # The inner model also reads the first tokens that are drafted, before it is asked.
    assert read(fresh)[1] == 2 * len(prompt) and read(warm)[1] <= 2 * (1 + 2 + LATE)


@pytest.mark.parametrize("cut", [20, 60, 119])
def test_of_a_text_that_goes_another_way_the_beginning_is_reused(cut: int) -> None:
    keeping, cold = new(), new(prefix_bytes=0)
    serve_one(keeping, text(120))
    prompt = [*text(cut), 9, *text(40, 5)]
    warm, fresh = serve_one(keeping, prompt), serve_one(cold, prompt)
    assert read(warm) == (len(prompt) - cut, len(prompt) - cut) and read(fresh) == (len(prompt), len(prompt))
    assert warm.output == fresh.output and drafts(warm) == drafts(fresh)


def test_a_running_text_shares_what_its_drafter_has_read() -> None:
    runner, cold = new(), new(prefix_bytes=0)
    another = (plain(text(120), 1)[0] + 1) % 31
    first = Request(text(120), max_new_tokens=40)
    second = Request([*text(120), another, 1], max_new_tokens=16, explain=True)
    runner.add(first)
    runner.step()
    late = runner.add(second)
    done = {run.id: run for run in steps_to_the_end(runner)}
    assert read(done[late]) == (2, 2)
    assert done[late].output == plain(second.prompt) and drafts(done[late]) == drafts(serve_one(cold, second.prompt))
    assert done[late - 1].output == plain(first.prompt, 40)


def test_a_turn_without_drafts_does_not_lose_what_was_read_before() -> None:
    runner, cold = new(), new(prefix_bytes=0)
    first = serve_one(runner, text(120))
    prompt = [*text(120), *first.output, 3, 1]
    second = serve_one(runner, prompt, max_draft_tokens=0)
    assert read(second) == (3, 0) and len(runner.requests.prefix_cache.prefixes) == 1
    prompt = [*prompt, *second.output, 8]
    warm, fresh = serve_one(runner, prompt), serve_one(cold, prompt)
    assert read(warm)[0] == 2 and 2 + 16 < read(warm)[1] <= 2 + 16 + 3 + LATE
    assert warm.output == fresh.output and drafts(warm) == drafts(fresh)


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_what_drafters_have_read_counts_as_kept_memory_and_goes_with_the_text() -> None:
    runner, without = new(), new(lambda target, draft: NgramDrafter(n=2))
    serve_one(runner, text(120))
    serve_one(without, text(120))
    per_token = draft_of(runner).kv_bytes_per_token
    more = runner.requests.prefix_cache.prefixes.nbytes - without.requests.prefix_cache.prefixes.nbytes
    assert 119 * per_token <= more <= 136 * (per_token + 8)
    runner.requests.prefix_cache.prefixes.shrink(runner.requests.prefix_cache.prefixes.nbytes - 1)
    assert len(runner.requests.prefix_cache.prefixes) == 0 and runner.requests.prefix_cache.prefixes.nbytes == 0
    assert read(serve_one(runner, text(120))) == (120, 120)
    assert draft_of(runner).kv_bytes == 0


def test_where_both_do_not_fit_the_targets_text_is_kept() -> None:
    without = new(lambda target, draft: NgramDrafter(n=2))
    serve_one(without, text(120))
    runner = new(prefix_bytes=without.requests.prefix_cache.prefixes.nbytes + 100)
    first = serve_one(runner, text(120))
    assert len(runner.requests.prefix_cache.prefixes) == 1
    assert read(serve_one(runner, [*text(120), *first.output, 3], 1)) == (2, 0)
    assert read(serve_one(runner, text(120)))[1] == 120


def test_another_salt_finds_nothing() -> None:
    runner = new()
    serve_one(runner, text(120), cache_salt="a")
    assert read(serve_one(runner, text(120), cache_salt="b")) == (120, 120)
    assert read(serve_one(runner, text(120), cache_salt="a"))[1] <= 1


def test_a_draft_model_with_other_weights_reads_again() -> None:
    """This holds for weights that were learned while serving and for weights that were changed from outside."""
    draft, learned = (HuggingFaceModel(copy.deepcopy(llama(noise=noise, context=1024))) for noise in (0.3, 0.6))
    runner = new(lambda target, _: ModelDrafter(draft, k=K))
    other = new(lambda target, _: ModelDrafter(learned, k=K), prefix_bytes=0)

    def double() -> None:
        for model in (draft, learned):
            with torch.no_grad():
                model.model.lm_head.weight.mul_(2)

    serve_one(runner, text(120))
    for change in (lambda: draft.take_weights(learned.model), double):
        change()
        again, expected = serve_one(runner, text(120)), serve_one(other, text(120))
        assert read(again) == (1, 120) and drafts(again) == drafts(expected)
        assert read(serve_one(runner, text(120)))[1] <= 1


@pytest.mark.parametrize("length", [1, 2, SHORTEST - 1, SHORTEST, SHORTEST + 2, BESIDE + 2])
def test_short_texts_are_read_as_ever(length: int) -> None:
    runner = new()
    for _ in range(2):
        assert serve_one(runner, text(length), 30).output == plain(text(length), 30)
    run = serve_one(runner, text(length), 30)
    assert read(run)[1] == (length if length <= SHORTEST + 1 else 1)


# -- a text without drafts -------------------------------------------------------------------------------------------


class Never(ConstantController):
    """A controller that decodes plainly, as ``auto`` does where drafts do not pay."""

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(0, 0)


@every_drafter
@pytest.mark.parametrize("how", ["one token", "no drafts", "controller"])
def test_nothing_is_read_for_who_gets_no_drafts(
    build: Callable[[LanguageModel, LanguageModel], Drafter], how: str
) -> None:
    runner = new(build, controller=Never() if how == "controller" else None)
    opened: list[Any] = []
    of = DraftTexts.of

    def watched(context: Context) -> DraftTexts:
        opened.extend(of(context).by_key)
        return of(context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftTexts, "of", watched)
        run = serve_one(
            runner, text(120), 1 if how == "one token" else 12, max_draft_tokens=0 if how == "no drafts" else None
        )
    assert read(run) == (120, 0) and not opened
    assert run.output == plain(text(120), 1 if how == "one token" else 12)


def test_a_member_that_is_not_asked_reads_nothing() -> None:
    runner = new(lambda target, draft: RouterDrafter([NgramDrafter(n=1), ModelDrafter(draft, k=K)]))
    assert read(serve_one(runner, text(120), drafter="ngram")) == (120, 0)
    assert read(serve_one(runner, text(120), drafter="model")) == (1, 120)


# -- in pieces -------------------------------------------------------------------------------------------------------


def test_a_long_text_is_read_beside_the_rounds_of_others() -> None:
    """No round reads more than a piece; everybody gets a token in every round; the reading ends."""
    piece, runner = 40, new(prefill_chunk=40)
    sizes: list[int] = []
    prefill = draft_of(runner).prefill_batch

    def watched(texts: Sequence[Any], taps: Sequence[str] = ()) -> Any:
        sizes.append(sum(len(tokens) for _, tokens in texts))
        return prefill(texts, taps)

    draft_of(runner).prefill_batch = watched  # type: ignore[method-assign]
    short, long = Request(text(20, 3), max_new_tokens=60), Request(text(500), max_new_tokens=40, explain=True)
    ids = [runner.add(short), runner.add(long)]
    done: dict[int, Running] = {}
    while runner.busy:
        before = len(sizes)
        running = {run.id for run in runner.requests.running if run.started}
        emissions = runner.step()
        assert running <= {run.id for run, _ in emissions} and sum(sizes[before:]) <= piece
        done |= {run.id: run for run, emission in emissions if emission.finish_reason is not None}
    assert [done[i].output for i in ids] == [plain(short.prompt, 60), plain(long.prompt, 40)]
    waited = next(i for i, trace in enumerate(done[ids[1]].rounds) if len(trace.tokens) > 1)
    assert waited >= 500 // piece - 1 and len(sizes) >= 500 // piece
    assert 500 <= read(done[ids[1]])[1] <= 500 + waited + 1
    following = serve_one(runner, [*long.prompt, *done[ids[1]].output, 7])
    assert read(following)[1] <= 2 + LATE and len(following.rounds[0].tokens) > 1


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_texts_do_not_grow_faster_than_they_are_read(chunk: int) -> None:
    runner = new(prefill_chunk=chunk, max_batch=8)
    requests = [Request(text(100 + i, i), max_new_tokens=60) for i in range(4)]
    for run, request in zip(serve(runner, requests), requests, strict=True):
        assert run.stats.num_draft_tokens > 0 and run.output == plain(request.prompt, 60)


def test_a_controller_is_not_told_of_rounds_that_waited_for_the_reading() -> None:
    records: list[StepRecord] = []

    class Watching(ConstantController):
        def observe(self, context: Context, record: StepRecord) -> None:
            records.append(record)

    runner = new(prefill_chunk=32, controller=Watching())
    run = serve_one(runner, text(300), 40)
    plain_rounds = sum(len(trace.tokens) == 1 for trace in run.rounds)
    assert plain_rounds > 300 // 32 - 2 and records
    # The last round may have no room for a draft.
    assert len([record for record in records if not record.num_draft_tokens]) <= 1


def test_a_request_that_is_cancelled_while_its_drafter_reads_leaves_nothing_open() -> None:
    runner = new(prefill_chunk=32)
    cancelled = runner.add(Request(text(300), max_new_tokens=40))
    other = runner.add(Request(text(30, 4), max_new_tokens=30))
    runner.step()
    run = next(run for run in runner.requests.running if run.id == cancelled)
    while not DraftTexts.of(run.context).num_read:
        runner.step()
    assert 0 < DraftTexts.of(run.context).num_read < 300
    runner.cancel(cancelled)
    (left,) = steps_to_the_end(runner)
    assert left.id == other and left.output == plain(text(30, 4), 30)
    assert draft_of(runner).kv_bytes == 0
    again = serve_one(runner, text(300))
    assert again.output == plain(text(300)) and read(again)[1] < 300


def test_a_reading_that_fails_ends_its_own_request_only() -> None:
    runner = new()
    prefill = draft_of(runner).prefill_batch

    def failing(texts: Sequence[Any], taps: Sequence[str] = ()) -> Any:
        if any(len(tokens) > 100 for _, tokens in texts):
            raise RuntimeError("planted")
        return prefill(texts, taps)

    draft_of(runner).prefill_batch = failing  # type: ignore[method-assign]
    ids = [runner.add(Request(text(n), max_new_tokens=20)) for n in (120, 60)]
    done = {run.id: run for run in steps_to_the_end(runner)}
    assert "planted" in str(done[ids[0]].error) and done[ids[1]].output == plain(text(60), 20)
    assert draft_of(runner).kv_bytes == 0 and runner.target.kv_bytes == 0
