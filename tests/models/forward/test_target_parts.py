"""The parts of a target for trained drafters: their logits are the target's own, or training is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import new_model
from hybrids import HYBRIDS

from foretoken.models import wrap
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.training.recipes.medusa import MedusaRecipe

SCALED: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.3},
    "falcon_h1": {**HYBRIDS["falcon_h1"], "lm_head_multiplier": 0.2},
    "gemma2": {"final_logit_softcapping": 0.5},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 48, "head_dim": 12, "logits_soft_cap": 0.5},
}


@pytest.mark.parametrize("family", SCALED)
@torch.no_grad()
def test_logits_of_the_last_states_are_the_targets_own(family: str) -> None:
    model = wrap(new_model(family, **SCALED[family]))
    sequence = model.open()
    model.prefill(sequence, list(range(3, 12)))
    [rows] = model.forward([Feed(sequence, [5])], ["last"])
    parts = TargetParts(model)
    parts.check_head()
    assert torch.allclose(parts.logits(rows.taps["last"]), rows.logits, atol=1e-4)
    assert not torch.allclose(parts.transform_logits(rows.logits), rows.logits), "this family transforms nothing"


@pytest.mark.parametrize("family", ["modernbert-decoder", "roberta"])
def test_training_is_refused_where_the_head_is_more_than_a_projection(family: str) -> None:
    model = wrap(new_model(family, is_decoder=True, pad_token_id=0))
    with pytest.raises(CapabilityError, match="has a vocabulary head that trained drafters cannot copy"):
        MedusaRecipe(model, TargetParts(model), {})
