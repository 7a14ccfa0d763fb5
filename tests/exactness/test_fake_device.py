"""On a device that is not the CPU every drafter and every verifier gives the tokens that it gives on the CPU.

The device is a stand-in (``fake_cuda``), which refuses whatever mixes it with the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from cases import CASES, Case
from matrix import PENALTIES, rows

from fake_cuda import Device, fake_cuda
from foretoken import registry
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.online import OnlineDrafter
from foretoken.methods.drafters.quantized import QuantizedDrafter
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.compatibility import verifiers_for
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, outputs

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3], [0, 0, 31, 0], [9, 1, 2, 3, 4, 9, 1, 2, 30, 17]]
MODES = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=1.0, logit_bias={3: 2.0}, **PENALTIES),  # type: ignore[arg-type]
]
Build = Callable[[LanguageModel, LanguageModel], Drafter]


@pytest.fixture
def cuda() -> Iterator[Device]:
    with fake_cuda() as device:
        yield device


def models(device: str, **options: bool) -> tuple[LanguageModel, LanguageModel]:
    """The toy target and the draft model near it."""
    pair = [HuggingFaceModel(copy.deepcopy(llama(noise=noise)).to(device), **options) for noise in (0.0, 0.3)]
    assert all(model.device.type == device for model in pair)
    return pair[0], pair[1]


def texts(
    device: str, build: Build | None, verifier: str | None = None, seeded: bool = True, **options: bool
) -> object:
    """Tokens of four requests, one per mode, two at a time."""
    with fake_cuda() if device == "cuda" else nullcontext(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target, draft = models(device, **options)
        rule: Verifier | None = None if verifier is None else registry.make("verifier", verifier)
        modes = MODES if verifier not in ("greedy",) else MODES[:1] * 4
        requests = [
            Request(prompt, mode, 10, seed=i if seeded else None)
            for i, (prompt, mode) in enumerate(zip(PROMPTS, modes, strict=True))
        ]
        lossy = rule is not None and not rule.lossless
        drafter = None if build is None else build(target, draft)
        return outputs(engine(target, drafter, rule, max_batch=2, allow_lossy=lossy), requests)


def cases() -> list[tuple[str, Case]]:
    """All but what has been trained (which differs in its weights alone), what trains while it drafts (gradients are
    beyond the stand-in) and quantised weights, which are the CPU's."""
    chosen = [
        (name, case)
        for name, case in rows()
        if not case.label.startswith("trained") and name not in ("online", "quantized")
    ]
    assert {name for name, _ in chosen} == CASES.keys() - {"online", "quantized"}
    untaught = Case("untaught", lambda target, draft: OnlineDrafter(draft, target=target, k=3, every=10**6))
    return [*chosen, ("online", untaught)]


@pytest.fixture(autouse=True)
def full_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU may project the states of drafts in bfloat16, which changes what is drafted, and with it unseeded texts."""
    monkeypatch.setattr("foretoken.models.linear.packing.pays_packed", lambda weight: False)


each_case = pytest.mark.parametrize("case", [case for _, case in cases()], ids=[f"{n}.{c.label}" for n, c in cases()])


@each_case
@pytest.mark.parametrize("seeded", [True, False])
def test_every_drafter(case: Case, seeded: bool) -> None:
    expected = texts("cpu", case.build, seeded=seeded)
    assert texts("cuda", case.build, seeded=seeded) == expected


def test_quantised_weights_are_refused(cuda: Device) -> None:
    with pytest.raises(CapabilityError, match="on the cpu only, and the target's are on cuda"):
        QuantizedDrafter(models("cuda")[0])


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("exact", ["distribution", "bitwise"])
def test_plain_decoding(lean: bool, exact: str) -> None:
    assert texts("cuda", None, lean=lean, exact=exact) == texts("cpu", None, lean=lean, exact=exact)  # type: ignore[arg-type]


PROPOSALS: dict[str, Build] = {
    "drawn-chain": lambda _, draft: ModelDrafter(draft, k=3),
    "point-chain": lambda _, draft: ModelDrafter(draft, k=3, draw="greedy"),
    "iid-tree": lambda _, draft: ModelDrafter(draft, tree="3x2x1", draw="iid"),
    "wor-tree": lambda _, draft: ModelDrafter(draft, tree="2x2x1", draw="without_replacement"),
    "point-tree": lambda _, draft: ModelDrafter(draft, tree="2x2x1", draw="greedy"),
}


def pairs() -> list[tuple[str, str]]:
    """Every verifier, lossy ones too, with every kind of proposal that it takes."""
    combined = []
    for proposal, build in PROPOSALS.items():
        drafter = build(*models("cpu"))
        fitting = verifiers_for(drafter.traits.proposals, greedy=False)
        lossy = [row.name for row in registry.rows("verifier") if not row.lossless and _takes(row.name, drafter)]
        combined += [(proposal, verifier) for verifier in (*fitting, *lossy, "greedy")]
    assert {verifier for _, verifier in combined} == {row.name for row in registry.rows("verifier")}
    return combined


def _takes(verifier: str, drafter: Drafter) -> bool:
    rule = registry.make("verifier", verifier)
    return drafter.traits.kind in rule.kinds and not (rule.chains_only and drafter.traits.draws_trees)


@pytest.mark.parametrize(("proposal", "verifier"), pairs())
def test_every_verifier(proposal: str, verifier: str) -> None:
    expected = texts("cpu", PROPOSALS[proposal], verifier)
    assert texts("cuda", PROPOSALS[proposal], verifier) == expected
