"""Looped networks, whose layers run several times for a token, as Nanbeige4.2's: chains, or a clear refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

import foretoken as ft
from foretoken.core.io.checkpoints import LoadError
from foretoken.models.base import CapabilityError

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8]]


class LoopedLlama(LlamaModel):
    """Two passes over the layers, with a norm after each; every pass has places of its own in the cache."""

    def forward(self, input_ids: Any, cache: Any = None, position_ids: Any = None, **options: Any) -> Any:
        x = self.embed_tokens(input_ids)
        if options.pop("use_cache", None) and cache is None:
            cache = DynamicCache()
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(start, start + x.shape[1])[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=options.pop("attention_mask", None),
            cache=cache,
            position_ids=position_ids,
        )
        turned = self.rotary_emb(x, position_ids=position_ids)
        for loop in range(2):
            for index, layer in enumerate(self.layers):
                layer.self_attn.layer_idx = loop * len(self.layers) + index
                x = layer(x, attention_mask=mask, position_embeddings=turned, position_ids=position_ids, cache=cache)
            x = self.norm(x)
        return BaseModelOutputWithPast(last_hidden_state=x, cache=cache)


class LoopedLlamaForCausalLM(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = LoopedLlama(config)
        self.post_init()


def looped(**config: Any) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return LoopedLlamaForCausalLM(LlamaConfig(**shape, **heads, **tokens, initializer_range=0.3, **config)).eval()


@torch.no_grad()
def alone(network: Any, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(network(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("drafter", [None, "ngram,n=1,k=4", "jacobi,m=4"])
def test_chains_write_what_the_network_writes(drafter: str | None) -> None:
    network = looped(num_loops=2)
    llm = ft.load(network, drafter=drafter, controller="constant" if drafter else "auto", dtype="float32")
    outs = llm.generate(PROMPTS, max_new_tokens=24)
    assert [out.token_ids for out in outs] == [alone(network, prompt, 24) for prompt in PROMPTS]
    if drafter is not None:
        assert sum(out.stats.num_accepted_tokens for out in outs) > 0


@pytest.mark.parametrize("drafter", ["ngram,n=1,k=4", "jacobi,m=4"])
def test_a_seed_gives_the_same_texts_with_and_without_drafts(drafter: str) -> None:
    network, options = looped(num_loops=2), {"max_new_tokens": 24, "temperature": 1.0, "seed": 5}
    expected = ft.load(network, drafter=None, dtype="float32").generate(PROMPTS, **options)
    outs = ft.load(network, drafter=drafter, controller="constant", dtype="float32").generate(PROMPTS, **options)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert len({tuple(out.token_ids) for out in outs}) == len(PROMPTS)
    assert sum(out.stats.num_accepted_tokens for out in outs) > 0


def test_trees_are_refused_by_name() -> None:
    reason = "llama runs its layers 2 times, each with keys and values of its own"
    for options in ({}, {"known": True}):  # and not the group that a server puts around it
        with pytest.raises(CapabilityError, match=f"drafter 'recycling' needs a target with tree_mask: {reason}"):
            ft.load(looped(num_loops=2), drafter="recycling", dtype="float32", **options)


def test_a_loop_that_the_configuration_does_not_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"its layers run more than once for a token \(a looped network\)"):
        ft.load(looped(), drafter=None, dtype="float32")


@pytest.mark.parametrize("auto_map", [True, False])
def test_nanbeige_is_refused_by_name(auto_map: bool, tmp_path: Path) -> None:
    """Transformers has no such class, and a repository's own code is not run."""
    config = {
        "architectures": ["NanbeigeForCausalLM"],
        "model_type": "nanbeige",
        "num_hidden_layers": 22,
        "num_loops": 2,
    }
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_nanbeige.NanbeigeForCausalLM"}} if auto_map else {}
    (tmp_path / "config.json").write_text(json.dumps({**config, **code}))
    (tmp_path / "modeling_nanbeige.py").write_text("raise SystemExit('this was run')")
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors", {"format": "pt"})
    words = (
        r"NanbeigeForCausalLM \(model_type nanbeige\) is no architecture of Transformers .* is not run: load it yours"
    )
    with pytest.raises(LoadError, match=words if auto_map else "model type `nanbeige` but Transformers does not recog"):
        ft.load(tmp_path)
