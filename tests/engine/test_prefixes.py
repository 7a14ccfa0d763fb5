"""Kept texts: a next turn reads only what is new, writes the same tokens, and finds nothing of other tenants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import load
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.prefixes import SHORTEST, CachedPrefix, Prefixes, common
from foretoken.engine.request import Request, Running
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.base import LanguageModel, Snapshot
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.stateful import StatefulModel
from toys import engine, llama, llamas, serve

ROOM = 2**22
LONG = [(7 * i) % 31 for i in range(60)]
T1 = SamplingParams(temperature=1.0)


def models() -> tuple[HuggingFaceModel, HuggingFaceModel]:
    return HuggingFaceModel(llama(context=1024)), HuggingFaceModel(llama(noise=0.3, context=1024))


def serve_one(runner: Engine, request: Request) -> Running:
    (run,) = serve(runner, [request])
    return run


def computed(run: Running) -> tuple[int, int]:
    return run.stats.num_prompt_tokens_computed, run.stats.num_prompt_tokens


# -- a chat ----------------------------------------------------------------------------------------------------------


def chat(make: Callable[[], Engine], first: list[int], more: list[int], turns: int = 3) -> None:
    """Every turn's prompt is all that was said so far: it is read in part, and the answers are those of an engine that
    keeps nothing.
    """
    keeping, cold = make(), make()
    cold.serve(64, None, None, 0)
    prompt = first
    for turn in range(turns):
        for seed in (None, 5):
            request = Request([*prompt, *more], T1 if seed else SamplingParams(), 24, seed=seed)
            warm, fresh = serve_one(keeping, request), serve_one(cold, request)
            assert warm.output == fresh.output
            assert computed(fresh) == (len(request.prompt), len(request.prompt))
            read, length = computed(warm)
            if turn or seed:
                assert read <= max(length / 10, len(more) + 1), f"turn {turn}: {read} of {length} were read again"
            else:
                assert read == length
        prompt = [*request.prompt, *warm.output]
    assert keeping.target.kv_bytes == 0


NETS: dict[str, Callable[[LanguageModel, LanguageModel], Drafter | None]] = {
    "none": lambda target, draft: None,
    "ngram": lambda target, draft: NgramDrafter(n=2, k=3),
    "model": lambda target, draft: ModelDrafter(draft, tree="2x2x1"),
}


@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.parametrize("chunk", [None, 16], ids=["whole", "chunks"])
def test_a_chat_reads_only_what_is_new(name: str, chunk: int | None) -> None:
    def make() -> Engine:
        target, draft = models()
        return engine(target, NETS[name](target, draft), prefix_bytes=ROOM, prefill_chunk=chunk)

    chat(make, LONG * 2, [3, 1, 2, 9, 4])


def test_llm_keeps_texts_by_default_and_says_what_it_read() -> None:
    llm = load("builtin", drafter="ngram", graphs=False)
    text = "import os\n\n\ndef walk(folder):\n" * 8
    llm.generate(text, max_new_tokens=16)
    again = llm.generate(text + "    for name in", max_new_tokens=4)
    assert again.stats.num_prompt_tokens_computed <= again.stats.num_prompt_tokens / 10
    off = load("builtin", drafter="ngram", graphs=False, prefix_cache=False)
    off.generate(text, max_new_tokens=16)
    cold = off.generate(text + "    for name in", max_new_tokens=4)
    assert cold.stats.num_prompt_tokens_computed == cold.stats.num_prompt_tokens
    assert cold.token_ids == again.token_ids and off.memory()["prefix_bytes"] == 0


@pytest.mark.parametrize("length", [1, 2, 20])
def test_a_drafter_over_hidden_states_takes_any_prompt(length: int) -> None:
    """Nothing of a prompt of one token is read before the first round."""
    target, _ = models()
    parts = TargetParts(target)
    net = MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))
    runner = engine(target, MedusaDrafter(net, parts, 6), prefix_bytes=ROOM)
    request = Request(LONG[:length], max_new_tokens=30)
    first, again = serve_one(runner, request), serve_one(runner, request)
    (expected,) = serve(engine(models()[0]), [request])
    assert first.output == again.output == expected.output
    following = serve_one(runner, Request([*LONG[:length], *first.output, 3], max_new_tokens=5))
    assert following.stats.num_prompt_tokens_computed <= 3


# -- who finds what --------------------------------------------------------------------------------------------------


def keeping(**more: Any) -> Engine:
    target, _ = models()
    return engine(target, prefix_bytes=ROOM, **more)


def test_texts_are_found_with_the_same_salt_only() -> None:
    runner = keeping()
    serve_one(runner, Request(LONG, max_new_tokens=8, cache_salt="a"))
    for salt in ("", "b", "A", "a "):
        assert computed(serve_one(runner, Request(LONG, max_new_tokens=2, cache_salt=salt))) == (60, 60)
    assert computed(serve_one(runner, Request(LONG, max_new_tokens=2, cache_salt="a"))) == (1, 60)


def test_a_salt_does_not_name_the_way_of_computing() -> None:
    """A model that reads long texts differently keeps them apart, whatever a client writes into its salt."""
    runner = keeping()
    opened, regimes = runner.target.open, iter((5, 0, 5))

    def open_one() -> Any:
        sequence = opened()
        sequence.regime = next(regimes)
        return sequence

    runner.target.open = open_one  # type: ignore[method-assign]
    serve_one(runner, Request(LONG, max_new_tokens=8, cache_salt="a"))
    assert computed(serve_one(runner, Request(LONG, max_new_tokens=2, cache_salt="a\0" + "5"))) == (60, 60)
    assert computed(serve_one(runner, Request(LONG, max_new_tokens=2, cache_salt="a"))) == (1, 60)


@pytest.mark.parametrize("salt", [3, None, b"a"])
def test_a_salt_is_text(salt: Any) -> None:
    with pytest.raises(ValueError, match="cache_salt must be text, not "):
        serve_one(keeping(), Request(LONG, max_new_tokens=2, cache_salt=salt))


def test_a_running_text_of_another_salt_is_not_copied() -> None:
    for salt, read in (("a", 1), ("b", 60)):
        runner = keeping()
        runner.add(Request(LONG, max_new_tokens=30, cache_salt="a"))
        runner.step()
        late = runner.add(Request(LONG, max_new_tokens=3, cache_salt=salt))
        runner.step()
        (run,) = (run for run in runner.requests.running if run.id == late)
        assert computed(run) == (read, 60)


def test_a_text_that_is_still_written_or_read_is_copied_as_far_as_it_is() -> None:
    target, _ = models()
    runner, cold = keeping(prefill_chunk=32), engine(target)
    long = LONG * 4
    runner.add(Request(long, max_new_tokens=40))
    runner.step()
    (reading,) = runner.requests.running
    assert not reading.started and len(reading.open_sequence.tokens) == 32
    request = Request([*long[:50], 1, 2], max_new_tokens=10)
    late = runner.add(request)
    runner.step()
    (run,) = (run for run in runner.requests.running if run.id == late)
    assert computed(run) == (52 - 32, 52)
    while runner.busy:
        runner.step()
    assert run.output == serve_one(cold, request).output
    runner.add(Request(LONG, max_new_tokens=30))
    for _ in range(9):
        runner.step()
    (writing,) = runner.requests.running
    follow = [*LONG, *writing.output[:6], 9]
    late_run = next(run for run in serve(runner, [Request(follow, max_new_tokens=5)]))
    assert (
        computed(late_run) == (1, len(follow))
        and late_run.output == serve_one(cold, Request(follow, max_new_tokens=5)).output
    )


@pytest.mark.parametrize("chunk", [None, 16], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", list(NETS))
def test_choices_of_one_prompt_read_it_once(name: str, chunk: int | None) -> None:
    """The first reads it and the others copy it; one that goes another way reads what is left, one that shares less
    than half waits for nobody.  The texts are those of requests that share nothing."""
    target, draft = models()
    runner = engine(target, NETS[name](target, draft), prefix_bytes=ROOM, prefill_chunk=chunk)
    cold = engine(target, NETS[name](target, draft), prefill_chunk=chunk)
    prompts = [LONG, LONG, [*LONG[:40], 5, 2, 3], LONG, [*LONG[:20], *reversed(LONG[:30])]]
    requests = [Request(prompt, T1, 12, seed=i) for i, prompt in enumerate(prompts)]
    runs = sorted(serve(runner, requests), key=lambda run: run.id)
    assert [run.output for run in runs] == [serve_one(cold, request).output for request in requests]
    assert [computed(run)[0] for run in runs] == [60, 1, 3, 1, 50]
    assert runner.target.kv_bytes == 0


def test_choices_copy_hidden_states_too() -> None:
    """A drafter over hidden states drafts for a copied prompt what it drafts for one that was read."""
    outputs = []
    for room in (ROOM, 0):
        target, _ = models()
        parts = TargetParts(target)
        torch.manual_seed(0)
        net = MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))
        runner = engine(target, MedusaDrafter(net, parts, 6), prefix_bytes=room)
        runs = sorted(serve(runner, [Request(LONG, max_new_tokens=20)] * 3), key=lambda run: run.id)
        assert [computed(run)[0] for run in runs] == ([60, 1, 1] if room else [60, 60, 60])
        outputs.append([(run.output, run.stats.num_accepted_tokens) for run in runs])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("fate", ["cancelled", "failed"])
def test_who_waits_for_a_request_that_leaves_reads_the_prompt(fate: str) -> None:
    runner = keeping(prefill_chunk=16)
    first, second, third = (runner.add(Request(LONG, max_new_tokens=4)) for _ in range(3))
    runner.step()
    reading = next(run for run in runner.requests.running if run.id == first)
    assert reading.num_read == 16 and [run.num_read for run in runner.requests.running if run.id != first] == [0, 0]
    if fate == "cancelled":
        runner.cancel(first)
    else:
        runner.requests.end(reading, "error", RuntimeError("planted"))
    runs = {run.id: run for run in runner.requests.running}
    while runner.busy:
        runner.step()
    expected = serve_one(keeping(), Request(LONG, max_new_tokens=4)).output
    assert [runs[i].output for i in (second, third)] == [expected, expected]
    assert sorted(computed(runs[i])[0] for i in (second, third)) == [1, 60]


def test_a_short_beginning_is_read_again() -> None:
    runner = keeping()
    serve_one(runner, Request(LONG, max_new_tokens=4))
    for length, read in ((SHORTEST - 1, 31), (SHORTEST, 30 - SHORTEST + 1)):
        prompt = [*LONG[:length], *([30] * (31 - length))]
        assert computed(serve_one(runner, Request(prompt, max_new_tokens=1)))[0] == read


def test_prompts_whose_probabilities_are_asked_for_are_read_as_a_whole() -> None:
    runner = keeping()
    first = serve_one(runner, Request(LONG, max_new_tokens=4, prompt_logprobs=0))
    again = serve_one(runner, Request(LONG, max_new_tokens=4, prompt_logprobs=0))
    assert computed(again) == (60, 60) and again.prompt_logprobs == first.prompt_logprobs
    assert len(runner.requests.prefix_cache.prefixes) == 0


def test_an_ended_or_cancelled_text_can_be_found() -> None:
    runner = keeping()
    cancelled = runner.add(Request(LONG, max_new_tokens=40))
    runner.step()
    runner.cancel(cancelled)
    assert computed(serve_one(runner, Request(LONG, max_new_tokens=2))) == (1, 60)


def test_a_text_that_was_damaged_by_an_error_is_not_kept() -> None:
    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planted")

    runner = keeping()
    runner.add(Request(LONG, SamplingParams(processors=(processor,)), 4))
    ((run, emission),) = runner.step()
    assert emission.finish_reason == run.finish_reason == "error" and isinstance(emission.error, RuntimeError)
    assert not runner.busy and len(runner.requests.prefix_cache.prefixes) == 0


def test_hybrid_targets_read_everything_and_write_the_same() -> None:
    """A recurrent state knows the whole text only, and no copies of it are kept."""
    llm = load("builtin:hybrid", drafter=None, graphs=False)
    assert isinstance(llm.target, StatefulModel)
    runner, cold = (engine(llm.target, NgramDrafter(), prefix_bytes=room) for room in (ROOM, 0))
    prompt = llm.encode("def area(width, height):\n    return")
    for _ in range(2):
        warm, fresh = (
            serve_one(runner, Request(prompt, max_new_tokens=10)),
            serve_one(cold, Request(prompt, max_new_tokens=10)),
        )
        assert warm.output == fresh.output and computed(warm) == (len(prompt), len(prompt))
        prompt = [*prompt, *warm.output]


# -- what is kept, and for how long ----------------------------------------------------------------------------------


def kept(tokens: list[int], salt: str = "", divisible: bool = True, size: int = 0) -> CachedPrefix:
    layers = [(torch.zeros(1, len(tokens), 1), torch.zeros(1, len(tokens) + size, 1))]
    return CachedPrefix(salt, np.asarray(tokens), Snapshot(tokens, layers, divisible), {})


def text(seed: int, length: int = 40) -> list[int]:
    return torch.randint(1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_least_recently_used_text_goes_first() -> None:
    size = kept(text(0)).nbytes
    prefixes = Prefixes(3 * size)
    for seed in range(3):
        prefixes.keep(kept(text(seed)))
    assert prefixes.find("", text(0))[1] == 40
    prefixes.keep(kept(text(3)))
    assert [prefixes.find("", text(seed))[1] for seed in range(4)] == [40, 0, 40, 40]
    assert len(prefixes) == 3 and prefixes.nbytes == 3 * size
    prefixes.shrink(size)
    assert len(prefixes) == 1 and prefixes.find("", text(3))[1] == 40
    prefixes.shrink(10 * size)
    assert prefixes.limit == 3 * size
    prefixes.clear()
    assert prefixes.nbytes == len(prefixes) == 0


def test_a_longer_text_takes_the_place_of_its_beginning() -> None:
    prefixes = Prefixes(2**20)
    prefixes.keep(kept(text(0, 30)))
    prefixes.keep(kept(text(0, 30), "other"))
    prefixes.keep(kept([*text(0, 30), 1, 2]))
    assert (
        len(prefixes) == 2 and prefixes.find("", text(0, 30))[1] == 30 and prefixes.find("other", text(0, 30))[1] == 30
    )


def test_what_is_too_large_or_too_short_is_not_kept() -> None:
    prefixes = Prefixes(kept(text(0)).nbytes)
    prefixes.keep(kept(text(0)))
    prefixes.keep(kept(text(1), size=8))
    prefixes.keep(kept(text(2, SHORTEST - 1)))
    assert len(prefixes) == 1 and prefixes.find("", text(0))[1] == 40


def test_a_state_that_cannot_be_divided_is_found_by_its_whole_text_only() -> None:
    prefixes = Prefixes(2**20)
    prefixes.keep(kept(text(0), divisible=False))
    assert prefixes.find("", text(0)[:-1])[1] == 0
    assert prefixes.find("", [*text(0)[:-1], 7, 7])[1] == 0
    assert prefixes.find("", [*text(0), 7])[1] == 40


def test_common_beginnings() -> None:
    def length(left: list[int], right: list[int]) -> int:
        return common(np.asarray(left, dtype=np.int64), np.asarray(right, dtype=np.int64))

    assert [length([1, 2, 3], [1, 2, 3, 4]), length([1, 2], [1, 3]), length([5], [6]), length([], [1])] == [
        2 + 1,
        1,
        0,
        0,
    ]


def test_the_cache_holds_no_more_than_it_may() -> None:
    target, _ = models()
    room = 3 * 70 * target.kv_bytes_per_token
    runner = engine(target, prefix_bytes=room)
    for seed in range(8):
        serve_one(runner, Request([seed, *LONG], max_new_tokens=8))
        assert runner.requests.prefix_cache.prefixes.nbytes <= room
    assert len(runner.requests.prefix_cache.prefixes) == 2
    assert computed(serve_one(runner, Request([7, *LONG], max_new_tokens=1)))[0] == 1
    assert computed(serve_one(runner, Request([0, *LONG], max_new_tokens=1)))[0] == 61


@pytest.mark.parametrize(("room", "copies"), [(0.9, []), (1.05, ["target"]), (2.5, ["target", "draft"])])
def test_what_cannot_fit_is_not_copied(room: float, copies: list[str]) -> None:
    """Keys and values alone are too large, these and the hidden states are, or everything fits."""
    target, draft = models()
    copied: list[str] = []

    class Tapped(ModelDrafter):
        taps = ("last",)

    def noted(name: str, model: HuggingFaceModel) -> None:
        snapshot = model.snapshot

        def snapshot_of(*arguments: Any) -> Snapshot | None:
            copied.append(name)
            return snapshot(*arguments)

        model.snapshot = snapshot_of  # type: ignore[method-assign]

    noted("target", target)
    noted("draft", draft)
    runner = engine(target, Tapped(draft, k=3), prefix_bytes=int(room * (60 + 7) * target.kv_bytes_per_token))
    serve_one(runner, Request(LONG, max_new_tokens=8))
    assert copied == copies
    assert len(runner.requests.prefix_cache.prefixes) == (room > 2)


def test_llamas_are_float64() -> None:
    """The comparisons above rest on this: sums in another order do not change a token."""
    assert llamas()[0].dtype == torch.float64
