"""A drafter that Transformers wrote, imported: the same drafts and the same text as its own assisted generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_nets import SIZE, save_target
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import foretoken as ft
from foretoken.training.formats import import_drafter

VOCAB, MASK, BLOCK, LENGTH = 9, 8, 4, 90
PROMPT = [5, 2, 7, 1, 5, 2]


def stock_assistant(layer_types: list[str]) -> Any:
    torch.manual_seed(3)
    config = MuseGlimmerAssistantConfig(
        hidden_size=SIZE, intermediate_size=24, num_attention_heads=4, head_dim=8, num_key_value_heads=2,
        num_hidden_layers=len(layer_types), layer_types=layer_types, sliding_window=6, block_size=BLOCK,
        mask_token_id=MASK, target_layer_ids=[0, 1, 2], rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    stock: Any = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for name, weight in stock.named_parameters():
            weight.copy_((torch.randn(weight.shape) * 0.3 + ("norm" in name)).to(torch.bfloat16))
    return stock


@pytest.mark.parametrize("layers", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_generate_with_this_assistant_is_ours(
    layers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, theirs = save_target(tmp_path / "target", vocab_size=VOCAB), []
    stock = stock_assistant(layers)
    stock.save_pretrained(tmp_path / "stock")
    spec = import_drafter(tmp_path / "stock", tmp_path / "mine", target)["drafter"]
    propose = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Any, *rest: Any, **named: Any) -> Any:
        candidates = propose(self, input_ids, *rest, **named)
        theirs.append(candidates[0][0, input_ids.shape[1] - 1 :].tolist())
        return candidates

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    # Drafts of near-ties are theirs in their precision only; with AVX512-BF16 ours would be projected in bfloat16.
    monkeypatch.setattr("foretoken.models.linear.packing.pays_packed", lambda _: False)
    network: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    options = {"assistant_model": stock, "speculation_type": "dflash", "do_sample": False, "max_new_tokens": LENGTH}
    text = network.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()

    llm = ft.load(target, f"{spec},width=1,nodes={BLOCK - 1}", controller="constant", dtype="float32")
    ours: list[list[int]] = []
    llm.engine.on_round = lambda runs, trees, verdicts, times: ours.append(list(trees[0].tokens))
    out = llm.generate(PROMPT, max_new_tokens=LENGTH)
    assert out.token_ids == text and 3 < out.stats.num_accepted_tokens < out.stats.num_draft_tokens
    # Theirs begins with the first new token as the root, ours with the last of the prompt.
    whole = [*PROMPT, *text]
    by_place = rounds(theirs[1:], whole, len(PROMPT) + 1)
    compared = [(draft, by_place[at]) for at, draft in rounds(ours, whole, len(PROMPT)).items() if at in by_place]
    assert len(compared) > 20 and all(mine == other[: len(mine)] for mine, other in compared)


def rounds(drafts: list[list[int]], text: list[int], at: int) -> dict[int, list[int]]:
    """Every draft by the number of tokens before it, root included; ``at`` is that of the first."""
    placed = {}
    for draft in drafts:
        assert draft[0] == text[at - 1]
        placed[at] = draft
        accepted = 0
        while accepted < len(draft) - 1 and text[at + accepted :][:1] == [draft[1 + accepted]]:
            accepted += 1
        at += 1 + accepted
    return placed
