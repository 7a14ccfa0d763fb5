"""Random networks with the statistics of real ones: deep, and with massive activations in special tokens.

In real chat models a few tokens that carry no text (beginning of text, ends of turn) have activations hundreds of times
as large as all others, in a direction that the vocabulary projection does not read: in 16 bits their logits are mostly
rounding, of any forward.
"""

from __future__ import annotations

from typing import Any

import torch
from checkpoints import new_model

from foretoken.models.forward.lean_families import family_of, part

SPECIAL = 8
"""Ids below are special tokens."""
DEPTH = 24


def realistic_model(name: str, dtype: torch.dtype = torch.bfloat16, massive: float = 300.0, **changes: Any) -> Any:
    """A family's random model of 24 layers, in which special tokens have massive activations."""
    model = new_model(name, **{"num_hidden_layers": DEPTH, "tie_word_embeddings": False, **changes}).float()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    draws = torch.Generator().manual_seed(5)
    direction = torch.randn(embedding.shape[1], generator=draws)
    direction /= direction.norm()
    family = family_of(model.config)
    assert family is not None
    norm = part(part(model, family.decoder), family.final_norm)
    with torch.no_grad():
        for name, value in norm.named_parameters():  # so that the projection below is of what the vocabulary reads
            value.fill_(1.0 - family.norm_offset if name == "weight" else 0.0)
        embedding[:SPECIAL] += massive * embedding.norm(dim=-1).mean() * direction
        head -= torch.outer(head @ direction, direction)
    return model.to(dtype)
