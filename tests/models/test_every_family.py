"""Every causal family that the installed Transformers has, tiny and random: exact, or refused in one line.

Nothing here is written for a family: what cannot be built from common values is left out, with the reason.  The plain
text is compared with the forward without a cache, drafted texts with the plain one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from checkpoints import enliven
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import foretoken as ft
from foretoken.models.base import CapabilityError

LARGEST = 20_000_000
NEW_TOKENS = 16
TIE = 1e-3
"""Standard deviations of the logits: where the two best are closer, rounding may choose."""
PROMPT = [5, 9, 3, 7, 11, 9, 3, 7, 20, 9, 3]
VALUES: dict[tuple[str, ...], int] = {
    ("vocab_size", "vocab_size_per_layer_input"): 97,
    ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "rnn_width", "lru_width"): 32,
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"): 4,
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"): 4,
    ("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "num_experts_per_tok"): 2,
    ("head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_d_state", "state_size"): 8,
    ("mamba_n_heads", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "v_head_dim"): 8,
    ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"): 48,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "linear_num_value_heads"): 4,
    ("rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim"): 4,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "sliding_window"): 16,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"): 256,
    ("pad_token_id",): 0,
    ("bos_token_id", "n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"): 1,
    ("eos_token_id",): 2,
}
SMALL = {name: value for names, value in VALUES.items() for name in names}


def random_model(family: str) -> Any:
    """A tiny random model, or a skip that says why there is none."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    try:
        fields = {*CONFIG_MAPPING[family]().to_dict(), *inspect.signature(CONFIG_MAPPING[family]).parameters}
        options = {key: value for key, value in SMALL.items() if key in fields}
        if "qk_rope_head_dim" in options:
            options.pop("head_dim", None)
        config = CONFIG_MAPPING[family](**options)
        if getattr(config, "is_decoder", None) is False:
            config.is_decoder = True
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
        if size > LARGEST:
            pytest.skip(f"common values make a {family} of {size} parameters")
        torch.manual_seed(0)
        model = kind(config).eval()
    except Exception as error:
        pytest.skip(f"common values make no {family}: {str(error)[:100]}")
    enliven(model)
    return model


def without_cache(model: Any) -> Iterator[tuple[int, float]]:
    """Greedy tokens by the model's own forward on the whole text, and by how much the best was ahead."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    text = list(PROMPT)
    for _ in range(NEW_TOKENS):
        places = {"position_ids": torch.arange(len(text))[None]} if "position_ids" in parameters else {}
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text]), use_cache=False, **places).logits[0, -1].double()
        first, second = logits.topk(2).values
        yield int(logits.argmax()), float((first - second) / logits.std())
        text.append(int(logits.argmax()))


@pytest.mark.parametrize("family", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)))
def test_a_family_is_exact_or_refused(family: str) -> None:
    model = random_model(family)
    try:
        reference = list(without_cache(model))
    except Exception as error:
        pytest.skip(f"Transformers itself cannot run this {family}: {str(error)[:100]}")
    try:
        llm = ft.load(model, None)
    except CapabilityError as error:
        assert family in str(error) or model.config.get_text_config().model_type in str(error)
        assert "\n" not in str(error)
        return
    plain = llm.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True).token_ids
    if llm.target.capabilities.rollback:  # the text of others may depend on how it was cut
        for written, (token, ahead) in zip(plain, reference, strict=True):
            if written != token:
                assert ahead < TIE, f"{plain} instead of {[token for token, _ in reference]}"
                break
    for drafter in ("ngram", "lookahead"):
        try:
            drafting = ft.load(model, drafter)
        except CapabilityError as error:
            assert "\n" not in str(error)
            continue
        drafted = drafting.generate([PROMPT, PROMPT[:4]], max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert drafted[0].token_ids == plain
        assert drafted[1].token_ids == llm.generate(PROMPT[:4], max_new_tokens=NEW_TOKENS, ignore_eos=True).token_ids
