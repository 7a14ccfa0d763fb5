"""Generate with the built-in target and draft model, and look at what speculation did."""

import foretoken as ft

llm = ft.load("builtin", drafter="model,k=4", controller="constant")  # "auto" drafts only where that is faster
out = llm.generate("def read_lines(path):\n", max_new_tokens=48)
print(out.text)
print(f"{out.stats.mean_acceptance_length:.2f} tokens per round, {out.stats.acceptance_rate:.0%} of drafts accepted")

plain = llm.plain.generate("def read_lines(path):\n", max_new_tokens=48)
print("same tokens as plain decoding:", plain.token_ids == out.token_ids)
