"""What a round asks of a device does not grow with the requests that take part: reads, sends and waits are counted.

The device is a stand-in (``fake_cuda``), with captured graphs or without.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

import fake_cuda
from fake_graphs import fake_cuda_graphs
from foretoken.core import NonFiniteLogitsError
from foretoken.core.costs import TargetCost
from foretoken.core.noise import Noise, send_together
from foretoken.core.sampling import SamplingParams
from foretoken.core.transfers import read_together
from foretoken.engine.request import Request
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.verifiers.block import BlockVerifier
from foretoken.methods.verifiers.lenient import LenientVerifier
from foretoken.models.base import Feed, LanguageModel, Rows
from foretoken.models.forward.graphed import follow, with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama

Build = Callable[[LanguageModel, LanguageModel], Drafter | None]
LEVELS = 3


def at_given_costs(drafter: ModelDrafter) -> ModelDrafter:
    """Rows are free: as many levels as there may be, whatever the machine's clock says."""
    assert drafter.dynamic is not None
    drafter.dynamic.costs = TargetCost({1: 1.0, 64: 1.0})
    return drafter


DRAFTERS: dict[str, Build] = {
    "plain": lambda *_: None,
    "ngram": lambda *_: NgramDrafter(n=1, k=LEVELS),
    "chain": lambda _, draft: ModelDrafter(draft, k=LEVELS),
    "distinct": lambda _, draft: ModelDrafter(draft, tree="2x2x1"),
    "iid": lambda _, draft: ModelDrafter(draft, tree="2x2x1", draw="iid"),
    "point": lambda _, draft: ModelDrafter(draft, tree="2x2x1", draw="greedy"),
    "eagle2": lambda target, draft: at_given_costs(ModelDrafter(draft, k=LEVELS, tree="eagle2", target=target)),
}
SAMPLED = SamplingParams(temperature=1.0)
GREEDY, SEEDED, DRAWN, MIXED, PENALTIES = "greedy", "seeded", "drawn", "mixed", "penalties"


class Counts(NamedTuple):
    """The most of any round."""

    reads: int
    sends: int
    waits: int


def request(i: int, mode: str) -> Request:
    """The i-th of a batch; ``mixed`` ones are of all kinds, each with a temperature of its own."""
    params = SamplingParams() if mode == GREEDY else SAMPLED
    if mode == MIXED and i % 3:
        params = SamplingParams(temperature=0.5 + i / 10, top_p=0.9 if i % 2 else 1.0)
    if mode == PENALTIES:
        params = SamplingParams(temperature=float(i % 2), repetition_penalty=1.2, logit_bias={3: 1.0})
    seeded = mode == SEEDED or (mode == MIXED and i % 3 == 1)
    return Request([3 + i, 4, 5, 6, 4, 5], params, 50, seed=i if seeded else None)


def counted(drafter: str, mode: str, batch: int, graphs: bool = False) -> Counts:
    with fake_cuda_graphs(), torch.random.fork_rng(devices=[]):
        device = fake_cuda.COUNTED
        torch.manual_seed(0)
        target, draft = (HuggingFaceModel(copy.deepcopy(llama(noise=noise)).to("cuda")) for noise in (0.0, 0.3))
        if graphs:
            follow(draft, with_graphs(target, True))
        runner = engine(target, DRAFTERS[drafter](target, draft), max_batch=batch)
        for i in range(batch):
            runner.add(request(i, mode))
        for _ in range(3):
            runner.step()
        rounds = []
        for _ in range(4):
            before = (device.reads, device.sends, device.synchronised)
            runner.step()
            after = (device.reads, device.sends, device.synchronised)
            rounds.append([new - old for new, old in zip(after, before, strict=True)])
        assert len(runner.requests.running) == batch
        return Counts(*(max(column) for column in zip(*rounds, strict=True)))


CASES = [
    *(("plain", mode) for mode in (GREEDY, SEEDED, DRAWN)),
    *((drafter, mode) for drafter in ("chain", "distinct") for mode in (GREEDY, SEEDED, DRAWN, MIXED)),
    *(("ngram", mode) for mode in (GREEDY, DRAWN, PENALTIES)),
    ("iid", DRAWN),
    ("point", DRAWN),
    ("eagle2", GREEDY),
    ("eagle2", SEEDED),
]


@pytest.mark.parametrize(("drafter", "mode"), CASES)
def test_rounds_of_six_read_no_more_than_rounds_of_one(drafter: str, mode: str) -> None:
    """A read for every level of the draft and one for all verdicts; of requests without drafts also their draws."""
    one, two, six = (counted(drafter, mode, batch) for batch in (1, 2, 6))
    levels = LEVELS if drafter not in ("plain", "ngram") else 0
    forwards = levels + 1
    assert max(one.reads, six.reads) <= levels + (3 if drafter in ("plain", "ngram") else 1)
    assert one.waits == two.waits == six.waits
    assert six.sends <= max(two.sends + 3, 5 * forwards + 2)  # ids, rows, slots, masks, moves; noise or uniforms


@pytest.mark.parametrize(("drafter", "mode"), [("chain", GREEDY), ("distinct", DRAWN), ("eagle2", SEEDED)])
def test_graphed_rounds_send_one_tensor_for_every_forward(drafter: str, mode: str) -> None:
    counts = counted(drafter, mode, 6, graphs=True)
    noise_or_uniforms = {GREEDY: 1, DRAWN: LEVELS, SEEDED: LEVELS + 1}[mode]
    assert counts.reads == LEVELS + 1 and counts.sends <= LEVELS + 1 + noise_or_uniforms


def test_what_is_read_together_keeps_its_kind() -> None:
    with fake_cuda.fake_cuda() as device:
        parts = [torch.tensor([[5, 16_777_215]]), torch.tensor([0.1, -torch.inf]), torch.tensor([True]).long()]
        read = read_together([part.to("cuda") for part in parts])
        assert device.reads == 1 and read_together([]) == []
        for part, got in zip(parts, read, strict=True):
            assert got.device.type == "cpu" and torch.equal(part, got) and part.dtype == got.dtype
        wide = read_together([torch.tensor([1 / 3], dtype=torch.float64).to("cuda"), parts[0].to("cuda")])
        assert wide[0].item() == 1 / 3 and wide[1].dtype == torch.int64


def test_noise_that_is_sent_together_is_what_each_would_send() -> None:
    with fake_cuda.fake_cuda() as device:
        like, first, second = torch.zeros(2, 9).to("cuda"), Noise(3), Noise(4)
        gumbels = first.gumbels(1, 9, like.device)
        sends = device.sends
        send_together([(first, [0, 1, 2]), (second, [1])], like)
        assert device.sends == sends + 1 and first.gumbels(1, 9, like.device) is gumbels
        for noise, seed, places in ((first, 3, (0, 1, 2)), (second, 4, (1,))):
            for at in places:
                expected = Noise(seed).gumbels(at, 9, torch.device("cpu"))
                assert torch.equal(noise.gumbels(at, 9, like.device).cpu(), expected)
        assert device.sends == sends + 1


# -- errors ------------------------------------------------------------------------------------------------------------


class Damaged(HuggingFaceModel):
    """Gives no numbers for texts that begin with token 20."""

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        rows = super().forward(feeds, taps)
        for feed, row in zip(feeds, rows, strict=True):
            if feed.sequence.tokens[:1] == [20]:
                row.logits.fill_(torch.nan)
        return rows


@pytest.mark.parametrize("drafter", ["plain", "chain", "distinct"])
@pytest.mark.parametrize("mode", [GREEDY, SEEDED, DRAWN, PENALTIES])
def test_logits_that_are_not_finite_end_their_own_request(drafter: str, mode: str) -> None:
    """The check is made for all at once, and still says whose logits they are."""
    with fake_cuda.fake_cuda():
        target, draft = (kind(copy.deepcopy(llama()).to("cuda")) for kind in (Damaged, HuggingFaceModel))
        runner = engine(target, DRAFTERS[drafter](target, draft), max_batch=3)
        params = [request(i, mode) for i in range(3)]
        requests = [
            Request([20 if i == 1 else 3, 4, 5], template.params, 6, seed=template.seed)
            for i, template in enumerate(params)
        ]
        ids = [runner.add(entry) for entry in requests]
        errors = {}
        while runner.busy:
            errors |= {run.id: run.error for run, emission in runner.step() if emission.finish_reason is not None}
        assert [type(errors[i]) for i in ids] == [type(None), NonFiniteLogitsError, type(None)]


@pytest.mark.parametrize("rule", [BlockVerifier(), LenientVerifier()], ids=lambda rule: rule.name)
def test_rules_that_ask_for_more_are_served_on_the_host(rule: BlockVerifier | LenientVerifier) -> None:
    """Lossy rules, and rules for samples at temperature 0."""
    texts = []
    for place in ("cpu", "cuda"):
        with fake_cuda.fake_cuda() as device, torch.random.fork_rng(devices=[]):
            target, draft = (HuggingFaceModel(copy.deepcopy(llama(noise=noise)).to(place)) for noise in (0.0, 0.3))
            torch.manual_seed(0)  # the networks are made once, and draw from this generator
            runner = engine(target, ModelDrafter(draft, k=LEVELS), rule, allow_lossy=True, max_batch=4)
            ids = [runner.add(Request([3 + i, 4], SamplingParams(temperature=i % 2), 12)) for i in range(4)]
            runs = {run.id: run for run in runner.requests.waiting}
            runner.step()
            before = device.reads
            runner.step()
            assert place == "cpu" or device.reads - before <= LEVELS + 2
            while runner.busy:
                runner.step()
            texts.append([runs[i].output for i in ids])
    assert texts[0] == texts[1]
