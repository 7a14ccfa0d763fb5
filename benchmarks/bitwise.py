"""Does bfloat16 speculation on CPU emit the very tokens of plain decoding?

    python benchmarks/bitwise.py [--new-tokens 128] [--prompts 10]

Greedy, built-in pair, k = 1..8 and two trees, ``exact="distribution"`` and ``"bitwise"``: how many outputs differ, at
which token, and how close the two candidates were there (gap of the plain run's two best logits).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from common import environment
from prompts import CODE, PROSE

import foretoken as ft
from foretoken.loading import resolve
from foretoken.models.base import Feed


def logit_gap(llm: Any, ids: list[int]) -> float:
    """Distance of the two best logits after ``ids``."""
    sequence = llm.target.open()
    llm.target.prefill(sequence, ids[:-1])
    logits = llm.target.forward([Feed(sequence, ids[-1:])])[0].logits[0].float()
    llm.target.release(sequence)
    best = logits.topk(2).values
    return float(best[0] - best[1])


def main() -> None:
    """Compare every configuration with plain decoding, prompt by prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=10, help="of each kind")
    args = parser.parse_args()
    print(environment())
    draft = resolve("builtin", "draft")
    for exact in ("distribution", "bitwise"):
        plain = ft.load("builtin", None, dtype="bfloat16", exact=exact)
        prompts = [plain.encode(t) for t in (*CODE[: args.prompts], *PROSE[: args.prompts])]
        start_s = time.perf_counter()
        references = [plain.generate(p, max_new_tokens=args.new_tokens, ignore_eos=True).token_ids for p in prompts]
        plain_s = time.perf_counter() - start_s
        for config in [f"k={k}" for k in range(1, 9)] + ["tree=3x2x1x1", "tree=2x2x2x2"]:
            llm = ft.load(plain.target, f"model:{draft},{config}", tokenizer=plain.tokenizer)
            differing_tokens, gaps = 0, []
            for prompt, reference in zip(prompts, references, strict=True):
                got = llm.generate(prompt, max_new_tokens=args.new_tokens, ignore_eos=True).token_ids
                place = next((i for i, (a, b) in enumerate(zip(got, reference, strict=True)) if a != b), None)
                if place is not None:
                    differing_tokens += sum(a != b for a, b in zip(got, reference, strict=True))
                    gaps.append(logit_gap(plain, prompt + reference[:place]))
            row = {
                "exact": exact, "config": config, "identical": f"{len(prompts) - len(gaps)}/{len(prompts)}",
                "differing_tokens": differing_tokens, "of": len(prompts) * args.new_tokens,
                "largest_gap_at_first_difference": round(max(gaps), 5) if gaps else None,
                "median_gap": round(statistics.median(gaps), 5) if gaps else None,
            }  # fmt: skip
            print(json.dumps(row), flush=True)
        print(json.dumps({"exact": exact, "plain_s": round(plain_s, 2)}))


if __name__ == "__main__":
    main()
