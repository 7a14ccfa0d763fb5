"""A seed gives the same sampled text with every drafter, and without one."""

import foretoken as ft

options = {"max_new_tokens": 40, "temperature": 0.9, "top_p": 0.95, "seed": 7}
plain = ft.load("builtin", drafter=None, dtype="float32").generate("def read(", **options)
for drafter in ("model,k=4", "model,tree=4x2x1", "eagle", "ngram"):
    out = ft.load("builtin", drafter=drafter, dtype="float32").generate("def read(", **options)
    print(f"{drafter:18} identical: {out.token_ids == plain.token_ids}, "
          f"{out.stats.mean_acceptance_length:.2f} tokens a round")  # fmt: skip
print(plain.text)
