"""Several prediction modules draft what Transformers' own ``MtpModel`` drafts from the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import foretoken as ft
from native_checkpoints import save_family

PROMPT, COUNT = [3, 1, 4, 1, 5, 9, 2, 6], 3


@torch.no_grad()
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_every_draft_is_the_stock_models(family: str, tmp_path: Path) -> None:
    save_family(tmp_path, family, COUNT)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": COUNT}))
    network: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    layers = network.config.num_hidden_layers
    # The stock class knows the module's place in published sizes only.
    network._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers + number}\..*" for number in range(COUNT)]
    stock: Any = MtpModel.from_pretrained(network)
    llm = ft.load(tmp_path, f"mtp,depth={COUNT}", controller="constant", dtype="float32")
    drafts: list[Any] = []
    llm.engine.on_round = lambda runs, trees, verdicts, times: drafts.append(trees[0].tokens)
    text, length = [*PROMPT, *llm.generate(PROMPT, max_new_tokens=24).token_ids], len(PROMPT)
    compared = 0
    for root, *draft in drafts:
        assert text[length - 1] == root
        states = network.model(torch.tensor([text[: length - 1]])).last_hidden_state
        tokens, _, _ = stock(
            input_ids=torch.tensor([text[1:length]]),
            last_hidden_states=states,
            attention_mask=None,
            position_ids=torch.arange(1, length)[None],
            mtp_cache=MtpCache(config=network.config.get_mtp_config()),
        )
        assert draft == tokens[0, : len(draft)].tolist()
        compared += len(draft)
        accepted = 0
        while accepted < len(draft) and text[length + accepted :][:1] == [draft[accepted]]:
            accepted += 1
        length += 1 + accepted
    assert compared > 30
