"""Training says what it needs before it begins."""

from __future__ import annotations

import pytest

from foretoken.cli.train_drafter import needs
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.training.config import TrainConfig
from foretoken.training.recipes import find_recipe
from toys import llama


@pytest.mark.parametrize("quantised", [False, True])
def test_the_weights_of_the_target_count_whatever_they_are_stored_in(quantised: bool) -> None:
    """Packed and quantised weights are no PyTorch parameters: a GGUF file of 134M was reported as 35 thousand."""
    network = llama(64)
    num_parameters = sum(p.numel() for p in network.parameters())
    if quantised:
        assert quantise_linears(network, "int8")
    target = HuggingFaceModel(network)
    line = needs(find_recipe("medusa")(target, TargetParts(target), {}), TrainConfig())
    assert f"the target has {num_parameters:,} (frozen)" in line
