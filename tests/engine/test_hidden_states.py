"""A trained drafter's text costs next to nothing while nothing is drafted: the target's states are not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.core import Budget, Context, HiddenStates, Scores, TokenTree, Verdict
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.methods.controllers.auto import AutoController
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.eagle3 import Eagle3Drafter
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llamas, serve

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 8, 9], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0]]
SEEDED = SamplingParams(temperature=1.0)


def filled(net: torch.nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return net.eval()


def eagle3(target: HuggingFaceModel) -> Eagle3Drafter:
    net = filled(Eagle3Net(Eagle3Config(**asdict(LayerConfig.of_target(target.config)), vocab_size=32, layers="0,1,2")))
    return Eagle3Drafter.of(net, TargetParts(target), target, nodes=6, depth=3, width=2)


def medusa(target: HuggingFaceModel) -> MedusaDrafter:
    parts = TargetParts(target)
    return MedusaDrafter(filled(MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3))), parts, 6)


HEADS: dict[str, Callable[[HuggingFaceModel], Drafter]] = {"eagle3": eagle3, "medusa": medusa}


class Sometimes(Controller):
    """Drafts in some rounds of every request: ``plain`` without, then ``drafted`` with; never where that is 0."""

    name = "sometimes"

    def __init__(self, plain: int = 1, drafted: int = 0) -> None:
        self.plain, self.drafted, self.rounds = plain, drafted, Counter[int]()

    def budget(self, context: Context, batch_size: int) -> Budget:
        place = self.rounds[context.request_id] % (self.plain + self.drafted)
        self.rounds[context.request_id] += 1
        return Budget(0, 0) if place < self.plain else Budget(3, 8)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every tap that is taken out of a forward's tensors."""
    taps: list[str] = []
    original = HiddenStates.__getitem__

    def counted(self: HiddenStates, tap: str) -> Tensor:
        taps.append(tap)
        return original(self, tap)

    monkeypatch.setattr(HiddenStates, "__getitem__", counted)
    yield taps


class Ops(TorchDispatchMode):
    """Counts tensor operations, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def begun(runner: Engine, batch: int, new_tokens: int = 40) -> Engine:
    """An engine whose requests have had two rounds."""
    for prompt in PROMPTS[:batch]:
        runner.add(Request(prompt, max_new_tokens=new_tokens))
    for _ in range(2):
        runner.step()
    return runner


def ops_of_a_round(runner: Engine) -> int:
    with Ops() as ops:
        runner.step()
    return ops.count


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 24])
@pytest.mark.parametrize("head", list(HEADS))
def test_a_round_without_drafts_reads_no_state(head: str, prefix_bytes: int, reads: list[str]) -> None:
    """The head does not read the text either until it is asked to draft."""
    target = llamas()[0]
    drafter = HEADS[head](target)
    runner = begun(engine(target, drafter, controller=Sometimes(), prefix_bytes=prefix_bytes), 4)
    reads.clear()
    for _ in range(20):
        runner.step()
    assert reads == []
    if isinstance(drafter, Eagle3Drafter):
        assert drafter.model.run_rows == 0 and drafter.model.kv_bytes == 0


def test_a_round_that_drafts_reads_each_tap_once_a_request(reads: list[str]) -> None:
    """The states that 20 rounds put aside are read when a draft is asked for, and never again."""
    target = llamas()[0]
    runner = begun(engine(target, eagle3(target), controller=Sometimes(22, 2)), 2)
    for _ in range(20):
        runner.step()
    reads.clear()
    runner.step()
    assert runner.drafting.drafter is not None
    first = Counter(reads)
    assert first["layer:1"] >= 2 * 22  # a row a round, and the prompt
    reads.clear()
    runner.step()
    assert 0 < Counter(reads)["layer:1"] <= 2 * 2  # what the last round has accepted


@pytest.mark.parametrize("head", list(HEADS))
def test_what_a_head_costs_plain_rounds_does_not_grow_with_the_batch(head: str) -> None:
    """Tensor operations of a plain round, beyond those of an engine without a drafter."""
    more = []
    for batch in (1, 4):
        target = llamas()[0]
        plain = ops_of_a_round(begun(engine(target), batch))
        target = llamas()[0]
        drafter = HEADS[head](target)
        with_head = ops_of_a_round(begun(engine(target, drafter, controller=Sometimes()), batch))
        more.append(with_head - plain)
        assert more[-1] <= 3 * len(drafter.taps)  # the forward hands its states out
    assert more[0] == more[1]


def load(new_tokens: Sequence[int], seeded: bool) -> list[Request]:
    """Requests of several lengths, so that some leave while others join."""
    return [
        Request(PROMPTS[i % 4], SEEDED if seeded else SamplingParams(temperature=0.0), count, seed=i)
        for i, count in enumerate(new_tokens)
    ]


def controllers(name: str) -> Controller:
    return AutoController() if name == "auto" else Sometimes(5, 2)


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("prefix_bytes", [0, 1 << 24], ids=["forgets", "keeps"])
@pytest.mark.parametrize("policy", ["sometimes", "auto"])
def test_texts_are_plain_decodings_when_drafting_comes_and_goes(policy: str, prefix_bytes: int, seeded: bool) -> None:
    requests = load((12, 31, 9, 24, 17, 40), seeded)
    expected = [run.context.tokens for run in serve(engine(llamas()[0], max_batch=3), requests)]
    for head in (eagle3, medusa):
        target = llamas()[0]
        runner = engine(target, head(target), controller=controllers(policy), max_batch=3, prefix_bytes=prefix_bytes)
        for _ in range(2 if prefix_bytes else 1):  # the second time texts begin with what was kept
            runs = serve(runner, requests)
            assert [run.context.tokens for run in runs] == expected
            assert policy == "auto" or sum(run.stats.num_draft_tokens for run in runs) > 0
        assert runner.target.kv_bytes == 0 or prefix_bytes


seen: list[tuple[tuple[int, ...], Sequence[int], Sequence[int]]] = []
"""Texts that were drafted for, and tokens and parents of the trees."""


class Told(Eagle3Drafter):
    """Remembers its drafts."""

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        super().observe(context, tree, scores, verdict)
        if tree.num_drafts:
            committed = len(context.tokens) - len(verdict.path) - 1
            seen.append((tuple(context.tokens[:committed]), tree.tokens, tree.parents))


def test_drafts_after_plain_rounds_are_those_of_a_text_that_was_read_at_once() -> None:
    """States that were put aside row by row, out of batches, are the right ones: the trees are those of a request
    whose prompt is the whole text."""
    target = llamas()[0]
    head = eagle3(target)
    drafter = Told.of(head.net, TargetParts(target), target, nodes=6, depth=3, width=2)
    seen.clear()
    serve(engine(target, drafter, controller=Sometimes(7, 1), max_batch=3), load((20, 33, 26, 18), False))
    assert len(seen) > 6
    for text, tokens, parents in list(seen):
        seen.clear()
        serve(engine(target, drafter, controller=Sometimes(0, 1)), [Request(list(text), max_new_tokens=6)])
        assert seen[0][0] == text and seen[0][1:] == (tokens, parents)


def test_members_of_a_group_get_the_states_of_their_rounds() -> None:
    """Two heads that want different layers, of which one is asked in turn."""

    class InTurn(Sometimes):
        def budget(self, context: Context, batch_size: int) -> Budget:
            place = self.rounds[context.request_id] = self.rounds[context.request_id] + 1
            return Budget(3, 8, member=place // 6 % 2) if place % 3 == 0 else Budget(0, 0)

    requests = load((22, 35, 28), False)
    expected = [run.context.tokens for run in serve(engine(llamas()[0]), requests)]
    target = llamas()[0]
    group = RouterDrafter([eagle3(target), medusa(target)])
    runs = serve(engine(target, group, controller=InTurn(), max_batch=2), requests)
    assert [run.context.tokens for run in runs] == expected
    assert set().union(*(run.stats.drafters for run in runs)) == {"eagle3", "medusa"}


def test_ended_requests_hold_no_states_and_no_noise() -> None:
    """A call keeps its requests until all have ended, for their outputs."""
    target = llamas()[0]
    runs = serve(engine(target, eagle3(target), max_batch=2, prefix_bytes=1 << 24), load((9, 20, 12), True))
    for run in runs:
        assert run.context.hidden == {} and run.states.count == 0
        assert run.context.sampler.noise is not None and not run.context.sampler.noise._cached
