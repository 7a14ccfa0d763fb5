"""The exact toy model: give the distributions yourself and check the sampled frequencies."""

from collections import Counter

import foretoken as ft
from foretoken.methods.drafters.model import ModelDrafter

target = ft.TableModel(lambda prefix: [0.45, 0.30, 0.20, 0.05], vocab_size=4)
draft = ft.TableModel(lambda prefix: [0.10, 0.50, 0.30, 0.10], vocab_size=4)
llm = ft.load(target, drafter=ModelDrafter(draft, k=2))

outputs = llm.generate([[0]] * 2000, max_new_tokens=1, temperature=1.0, seed=list(range(2000)))
counts = Counter(out.token_ids[0] for out in outputs)
print({token: counts[token] / 2000 for token in range(4)}, "should be close to 0.45, 0.30, 0.20, 0.05")
