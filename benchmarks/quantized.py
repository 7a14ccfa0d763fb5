"""The drafter ``quantized`` against plain decoding, on the built-in target as it is or inflated.

One run, arms taking turns on every prompt, medians, greedy and sampled (with a seed, so that every arm must give the
same ids), code and prose.  Also: acceptance by position, what a draft step costs beside a plain step, and which product
of quantised weights was the fastest for which shape.

    python benchmarks/quantized.py [--inflate 1b] [--dtype bfloat16] [--prompts 4] [--new-tokens 64] [--repeat 3]
                                   [--arms SPEC ...]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections import Counter
from typing import Any

import torch
from common import Arm, environment, interleaved, median_ratio
from prompts import CODE, PROSE

import foretoken as ft
from foretoken.engine.stats import SpecStats
from foretoken.loading import load_model, load_tokenizer
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.variants.second_weights import OwnWeightsModel

ARMS = (
    "quantized,bits=8,k=3",
    "quantized,bits=8,k=5",
    "quantized,bits=4,k=5",
    "quantized,bits=8,k=8,inner=ngram",
)


def instructions() -> str:
    """The CPU's matrix instructions, as far as PyTorch tells."""
    names = {"AMX": "_is_amx_tile_supported", "AVX512-BF16": "_is_avx512_bf16_supported"}
    names |= {"VNNI": "_is_vnni_supported", "AVX512": "_is_avx512_supported", "AVX2": "_is_avx2_supported"}
    found = [name for name, ask in names.items() if getattr(torch.cpu, ask, lambda: False)()]
    return f"{platform.machine()} with {', '.join(found) or 'nothing that PyTorch tells'}"


def step_s(model: LanguageModel, beside: LanguageModel, tokens: list[int], rows: int = 1) -> float:
    """Least seconds of a call with ``rows`` new tokens behind a prompt; ``beside`` owns the sequence."""
    sequence = beside.open()
    beside.prefill(sequence, tokens)
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        model.forward([Feed(sequence, [1] * rows)])
        times.append(time.perf_counter() - start_s)
        model.commit(sequence, ())
    beside.release(sequence)
    return min(times)


def arm(llm: ft.Llm, name: str, stats: list[SpecStats], **options: Any) -> Arm:
    """An arm that remembers its statistics."""

    def run(prompt: list[int]) -> list[int]:
        out = llm.generate(prompt, ignore_eos=True, **options)
        stats.append(out.stats)
        return out.token_ids

    return Arm(name, run)


def by_position(stats: list[SpecStats]) -> str:
    """Of the rounds that drafted so far: how often the i-th draft token was accepted."""
    places: Counter[int] = Counter()
    for one in stats:
        for place, count in enumerate(one.num_accepted_tokens_per_pos):
            places[place] += count
    rounds = sum(one.num_drafts for one in stats)
    return " ".join(f"{places[place] / max(rounds, 1):.2f}" for place in sorted(places))


def table(arms: list[Arm], stats: dict[str, list[SpecStats]]) -> None:
    """Markdown, plain decoding first."""
    print("| arm | tokens/s | over plain | tokens per round | accepted by position | same ids |\n" + "|---" * 6 + "|")
    for one in arms:
        mine = stats[one.name]
        rounds = sum(s.num_drafts for s in mine)
        length = 1 + sum(s.num_accepted_tokens for s in mine) / max(rounds, 1)
        same = sum(a == b for a, b in zip(one.outputs, arms[0].outputs, strict=True))
        print(
            f"| `{one.name}` | {one.median_rate:.2f} | **{median_ratio(one, arms[0]):.2f}** | {length:.2f} "
            f"| {by_position(mine)} | {same} of {len(one.outputs)} |",
            flush=True,
        )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--prompts", type=int, default=4, help="how many of code and of prose (at most 10)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    options = parser.parse_args()
    target = load_model("builtin", dtype=options.dtype, inflate=options.inflate)
    tokenizer = load_tokenizer("builtin")
    print(instructions(), environment(), f"dtype {options.dtype}, inflated to {options.inflate}", sep="; ")
    llms = {"plain": ft.load(target, drafter=None, tokenizer=tokenizer)}
    for spec in options.arms:
        start_s = time.perf_counter()
        llms[spec] = ft.load(target, drafter=spec, controller="constant", tokenizer=tokenizer)
        model = getattr(llms[spec].drafter, "model", None)
        if isinstance(model, OwnWeightsModel) and model.weights is not None:
            made = Counter(product.name for product in model.weights.all_products)
            tokens = llms[spec].encode(PROSE[0])
            ratio = step_s(model, target, tokens) / step_s(target, target, tokens)
            print(
                f"{spec}: {model.weight_bytes / 1e6:.0f} MB beside {target.weight_bytes / 1e6:.0f}, made in "
                f"{time.perf_counter() - start_s:.1f} s, {dict(made)}, a draft step costs {ratio:.2f} plain steps"
            )
    one = step_s(target, target, tokenizer(PROSE[0])["input_ids"])
    rows = {n: step_s(target, target, tokenizer(PROSE[0])["input_ids"], n) / one for n in (2, 4, 6, 9)}
    print("a call with n rows in plain steps:", ", ".join(f"{n}: {ratio:.2f}" for n, ratio in rows.items()))
    for temperature in (0.0, 1.0):
        for name, texts in (("code", CODE), ("prose", PROSE)):
            prompts = [tokenizer(text)["input_ids"] for text in texts[: options.prompts]]
            stats: dict[str, list[SpecStats]] = {spec: [] for spec in llms}
            sampling = {"temperature": temperature, "seed": 1 if temperature else None}
            arms = [
                arm(llm, spec, stats[spec], max_new_tokens=options.new_tokens, **sampling) for spec, llm in llms.items()
            ]
            interleaved(arms, prompts, options.repeat)
            print(f"\n### T={temperature:g}, {name}\n")
            table(arms, stats)


if __name__ == "__main__":
    main()
