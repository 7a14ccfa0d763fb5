"""Stream text; accepted draft tokens arrive several at a time."""

import foretoken as ft

llm = ft.load("builtin", drafter="ngram")
for piece in llm.stream("It was a cold evening in November, and ", max_new_tokens=48, temperature=0.8, seed=7):
    print(piece.text, end="", flush=True)
    if piece.stats is not None:
        print(f"\n[{piece.stats.num_accepted_tokens} of {piece.stats.num_draft_tokens} draft tokens accepted]")
