"""Quantised targets: plain decoding and a draft model on full, int8 and int4 weights, arms taking turns in one run.

A quantised target says what its own weights say: its text is compared with its own plain decoding, not with the full
target's.

    python benchmarks/quantised_targets.py [--inflate 1b] [--dtype bfloat16] [--prompts 3] [--new-tokens 64]
                                           [--repeat 1] [--drafter model:builtin,k=4]
"""

from __future__ import annotations

import argparse

from common import Arm, environment, interleaved, median_ratio
from prompts import CODE, PROSE
from quantized import instructions

import foretoken as ft
from foretoken.loading import load_model, load_tokenizer

WEIGHTS = (None, "int8", "int4")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inflate", default="1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=3, help="how many of code and of prose (at most 10)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--drafter", default="model:builtin,k=4")
    options = parser.parse_args()
    tokenizer = load_tokenizer("builtin")
    print(instructions(), environment(), f"dtype {options.dtype}, inflated to {options.inflate}", sep="; ")
    arms: list[Arm] = []
    for weights in WEIGHTS:
        target = load_model("builtin", dtype=options.dtype, inflate=options.inflate, quantize=weights)
        print(f"{weights or 'full'}: {target.weight_bytes / 1e6:.0f} MB", flush=True)
        for spec in (None, options.drafter):
            llm = ft.load(target, spec, controller="constant", tokenizer=tokenizer)
            length = {"max_new_tokens": options.new_tokens, "ignore_eos": True}
            name = f"{weights or 'full'}, {spec or 'plain'}"
            arms.append(Arm(name, lambda ids, llm=llm, length=length: llm.generate(ids, **length).token_ids))
    texts = [*CODE[: options.prompts], *PROSE[: options.prompts]]
    interleaved(arms, [tokenizer(text)["input_ids"] for text in texts], options.repeat)
    print("| weights, drafter | tokens/s | over full, plain | over its own plain | same ids as its own plain |")
    print("|---" * 5 + "|")
    for number, arm in enumerate(arms):
        plain = arms[number - number % 2]
        same = sum(a == b for a, b in zip(arm.outputs, plain.outputs, strict=True))
        ratios = f"{median_ratio(arm, arms[0]):.2f} | {median_ratio(arm, plain):.2f}"
        print(f"| {arm.name} | {arm.median_rate:.2f} | {ratios} | {same} of {len(texts)} |")


if __name__ == "__main__":
    main()
