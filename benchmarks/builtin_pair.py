"""Built-in pair against our own plain loop and Transformers' loops, both arms interleaved in one run.

    python benchmarks/builtin_pair.py [--k 4] [--new-tokens 256] [--repeat 3] [--prompts 10] [--pair-only]

Prints tokens per second (medians over prompts), ratios (medians of per-prompt ratios), whether greedy outputs are the
same tokens, and where a round's time goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from common import Arm, environment, interleaved, median_ratio
from prompts import CODE, PROSE

import foretoken as ft
from foretoken.loading import resolve

HUGGING_FACE = ("transformers:plain", "transformers:assisted")


def transformers_arm(model: Any, tokenizer: Any, name: str, temperature: float, new_tokens: int, **more: Any) -> Arm:
    """``model.generate`` with the same sampling parameters."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}

    def run(ids: list[int]) -> list[int]:
        torch.manual_seed(0)
        inputs = torch.tensor([ids])
        out = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            pad_token_id=tokenizer.eos_token_id, **sampling, **more,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()

    return Arm(name, run)


def our_arm(llm: Any, name: str, temperature: float, new_tokens: int, last: dict[str, Any]) -> Arm:
    """foretoken's loop; keeps merged statistics in ``last``."""

    def run(ids: list[int]) -> list[int]:
        out = llm.generate(ids, max_new_tokens=new_tokens, temperature=temperature, seed=0, ignore_eos=True)
        last.setdefault(name, ft.SpecStats()).merge(out.stats)
        return out.token_ids

    return Arm(name, run)


def draft_for_transformers(k: int) -> Any:
    """The same draft model, set to draft exactly k tokens without a confidence stop."""
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(resolve("builtin", "draft"), dtype="auto").eval()
    draft.generation_config.num_assistant_tokens = k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def cell(kind: str, texts: tuple[str, ...], temperature: float, args: argparse.Namespace) -> dict[str, list[float]]:
    """One row group: one kind of prompt at one temperature; returns every arm's ratios to our plain loop."""
    from transformers import AutoModelForCausalLM

    spec = ft.load("builtin", f"model,k={args.k}")
    tree = ft.load(spec.target, f"model:{resolve('builtin', 'draft')},tree={args.tree}", tokenizer=spec.tokenizer)
    ngram = ft.load(spec.target, "ngram,k=8", tokenizer=spec.tokenizer)
    reference = AutoModelForCausalLM.from_pretrained(resolve("builtin"), dtype="auto").eval()
    stats: dict[str, Any] = {}
    n, t = args.new_tokens, temperature
    arms = [
        our_arm(spec.plain, "plain", t, n, stats),
        our_arm(spec, f"model,k={args.k}", t, n, stats),
        our_arm(tree, f"model,tree={args.tree}", t, n, stats),
        our_arm(ngram, "ngram,k=8", t, n, stats),
        transformers_arm(reference, spec.tokenizer, "transformers:plain", t, n),
        transformers_arm(
            reference, spec.tokenizer, "transformers:assisted", t, n, assistant_model=draft_for_transformers(args.k)
        ),
        transformers_arm(reference, spec.tokenizer, "transformers:prompt_lookup", t, n, prompt_lookup_num_tokens=8),
    ]
    if args.pair_only:
        arms = arms[:2]
    prompts = [spec.encode(text) for text in texts[: args.prompts]]
    interleaved(arms, prompts, args.repeat)
    plain = arms[0]
    others = {arm.name.replace(":", "_"): arm for arm in arms if arm.name in HUGGING_FACE}
    for arm in arms:
        same = sum(a == b for a, b in zip(arm.outputs, plain.outputs, strict=True))
        row: dict[str, Any] = {
            "kind": kind, "temperature": t, "arm": arm.name, "tokens_per_s": round(arm.median_rate, 1),
            "over_plain": round(median_ratio(arm, plain), 3),
            **{f"over_{name}": round(median_ratio(arm, other), 3) for name, other in others.items()},
            "identical_to_plain": f"{same}/{len(prompts)}" if t == 0 else None,
        }  # fmt: skip
        if arm.name in stats:
            s = stats[arm.name]
            rounds_s = s.total_s - s.prefill_s
            row |= {
                "mean_acceptance_length": round(s.mean_acceptance_length, 2),
                "acceptance_rate": round(s.acceptance_rate, 3),
                "draft_share": round(s.draft_s / rounds_s, 3), "target_share": round(s.target_s / rounds_s, 3),
                "verify_share": round(s.verify_s / rounds_s, 3), "overhead_share": round(s.overhead_s / rounds_s, 3),
            }  # fmt: skip
        print(json.dumps(row), flush=True)
    return {arm.name: [arm.rate(i) / plain.rate(i) for i in range(len(prompts))] for arm in arms}


def main() -> None:
    """Run all four cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--tree", default="2x2x1x1")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=10, help="of each kind")
    parser.add_argument("--pair-only", action="store_true", help="only plain and the draft model")
    args = parser.parse_args()
    print(environment())
    for temperature in (0.0, 1.0):
        code, prose = cell("code", CODE, temperature, args), cell("prose", PROSE, temperature, args)
        together = {name: round(statistics.median(code[name] + prose[name]), 3) for name in code}
        print(json.dumps({"kind": "all", "temperature": temperature, "over_plain": together}), flush=True)


if __name__ == "__main__":
    main()
