"""Speculation inside Hugging Face code: one extra argument to ``generate``."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import foretoken as ft

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=2, num_key_value_heads=2))  # fmt: skip
inputs = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
plain = model.generate(inputs, max_new_tokens=24, do_sample=False, eos_token_id=None)
fast = model.generate(
    inputs, max_new_tokens=24, do_sample=False, eos_token_id=None, custom_generate=ft.custom_generate, drafter="ngram"
)
print("identical:", torch.equal(plain, fast))
