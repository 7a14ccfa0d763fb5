"""A target whose weights are quantised takes the heads that were trained for it, and says so."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.controllers.specdec_pp import SpecdecPpController
from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.nets.specdec_pp import StopHead, StopHeadConfig
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models.forward.parts import QuantisedTargetWarning, TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.quantised_linear import quantise_linears
from toys import engine, llama, outputs

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def network(seed: int = 0) -> Any:
    return copy.deepcopy(llama(dtype=torch.float32, seed=seed))


def quantised(kind: str = "int8", net: Any = None) -> HuggingFaceModel:
    net = net or network()
    assert quantise_linears(net, kind) > 0
    return HuggingFaceModel(net)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Heads that were trained for the target with full weights."""
    parts = TargetParts(HuggingFaceModel(network()))
    config = MedusaConfig(parts.hidden_size, parts.vocab_size, 2)
    save_drafter(tmp_path / "heads", "medusa", dataclasses.asdict(config), MedusaHeads(config), parts.fingerprint())
    return tmp_path / "heads"


def older(folder: Path) -> None:
    """The folder of a drafter as an older version wrote it."""
    file = folder / "drafter.json"
    content = json.loads(file.read_text())
    del content["target"]["kept"], content["target"]["storage"]
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("old", [False, True])
def test_heads_of_the_full_weights_draft_for_quantised_ones(folder: Path, old: bool) -> None:
    if old:
        older(folder)
    target = quantised()
    with pytest.warns(QuantisedTargetWarning, match="not quantised in training and are int8 now") as record:
        drafter = build_drafter(f"medusa:{folder}", target)
    assert len(record) == 1 and "\n" not in str(record[0].message)
    assert isinstance(drafter, MedusaDrafter)
    request = [Request(PROMPT, SamplingParams(), 20)]
    assert outputs(engine(target, drafter), request) == outputs(engine(target), request)


@pytest.mark.parametrize("old", [False, True])
def test_nothing_is_said_where_the_weights_are_those_of_training(folder: Path, old: bool) -> None:
    if old:
        older(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_drafter(f"medusa:{folder}", HuggingFaceModel(network()))


def test_heads_of_another_model_are_refused_quantised_or_not(folder: Path) -> None:
    other = network()
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if "norm" in name:
                weight.mul_(1.25)
    for target in (HuggingFaceModel(copy.deepcopy(other)), quantised(net=other), quantised(net=network(seed=5))):
        with pytest.raises(ValueError, match="another target: the shapes agree, but the weights differ"):
            build_drafter(f"medusa:{folder}", target)


def test_a_stop_head_is_told_of_its_draft_model_alike() -> None:
    torch.manual_seed(0)
    full, small = TargetParts(HuggingFaceModel(network())).fingerprint(), quantised()
    controller = SpecdecPpController(StopHead(StopHeadConfig(16, blocks=1)), full)
    with pytest.warns(UserWarning, match="are int8 now"):
        engine(HuggingFaceModel(network()), ModelDrafter(small), None, controller)
