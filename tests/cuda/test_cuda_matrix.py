"""The exactness matrix on a GPU: every drafter and verifier gives plain decoding's tokens, with graphs and without."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from cases import Case
from matrix import GREEDY_MODES, PENALTIES, rows

from fake_cuda import FakeCuda
from foretoken import registry
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.verifiers.compatibility import verifiers_for
from foretoken.models.base import LanguageModel
from foretoken.models.forward.graphed import follow, with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, outputs

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3], [0, 0, 31, 0], [9, 1, 2, 3, 4, 9, 1, 2, 30, 17]]
SAMPLED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=1.0, logit_bias={3: 2.0}, **PENALTIES),  # type: ignore[arg-type]
    SamplingParams(temperature=0.5),
]
TOKENS = 12


def models(device: str = "cuda", graphs: bool = False, online: bool = False) -> tuple[HuggingFaceModel, ...]:
    """The toy target and the draft model near it, in float64."""
    target, draft = (HuggingFaceModel(copy.deepcopy(llama(noise=noise)).to(device)) for noise in (0.0, 0.3))
    if graphs:
        with_graphs(target, True)
        if not online:
            follow(draft, target)
    return target, draft


def greedy() -> list[Request]:
    return [Request(prompt, mode, TOKENS) for mode in GREEDY_MODES.values() for prompt in PROMPTS]


def sampled() -> list[Request]:
    return [
        Request(prompt, mode, TOKENS, seed=i) for i, (prompt, mode) in enumerate(zip(PROMPTS, SAMPLED, strict=True))
    ]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])
def test_plain_decoding_is_that_of_the_cpu(graphs: bool) -> None:
    expected = [outputs(engine(models("cpu")[0], max_batch=3), requests()) for requests in (greedy, sampled)]
    target, _ = models(graphs=graphs)
    assert [outputs(engine(target, max_batch=3), requests()) for requests in (greedy, sampled)] == expected


CASES = [(name, case) for name, case in rows() if case.label != "trained"]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}.{case.label}" for name, case in CASES])
def test_every_drafter(name: str, case: Case, graphs: bool) -> None:
    if name == "online" and isinstance(torch.zeros((), device="cuda"), FakeCuda):
        pytest.skip("gradients are beyond the stand-in")
    expected = [outputs(engine(models()[0], max_batch=3), requests()) for requests in (greedy, sampled)]
    target, draft = models(graphs=graphs, online=name == "online")
    serving = engine(target, case.build(target, draft), max_batch=3)
    assert [outputs(serving, requests()) for requests in (greedy, sampled)] == expected
    assert target.graphs_off == ("" if graphs else "not asked for")


BUILDS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "drawn-chain": lambda draft: ModelDrafter(draft, k=3),
    "point-chain": lambda draft: ModelDrafter(draft, k=3, draw="greedy"),
    "iid-tree": lambda draft: ModelDrafter(draft, tree="3x2x1", draw="iid"),
    "wor-tree": lambda draft: ModelDrafter(draft, tree="2x2x1", draw="without_replacement"),
}
PAIRS = [
    (proposal, verifier)
    for proposal, build in BUILDS.items()
    for verifier in (*verifiers_for(build(HuggingFaceModel(llama())).traits.proposals, greedy=False), "greedy")
]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize(("proposal", "verifier"), PAIRS)
def test_every_verifier(proposal: str, verifier: str, graphs: bool) -> None:
    """Greedy text is plain decoding's; sampled text is the CPU's with the same draws."""
    rule = registry.make("verifier", verifier)
    target, draft = models(graphs=graphs)
    serving = engine(target, BUILDS[proposal](draft), rule, max_batch=3)
    assert outputs(serving, greedy()) == outputs(engine(models()[0], max_batch=3), greedy())
    if verifier != "greedy":
        results = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            target, draft = models(device, graphs and device == "cuda")
            results.append(outputs(engine(target, BUILDS[proposal](draft), rule, max_batch=3), sampled()))
        assert results[0] == results[1]
