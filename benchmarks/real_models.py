"""A real chat model from a folder: our plain decoding and drafters against Transformers, and whether texts are equal.

Twelve conversations (half of them about code; --conversations 20 for all) in the model's own template.  Speed: all arms
take turns on every conversation, or with --batch 4 on four at a time; a figure is the median over them of tokens per
second, prompt included.  Transformers' arms take several times as long: with --transformers-every 3 they take part in
every third conversation, with 0 (and beside a GGUF file, and in batches) in none.  With --llama FILE (a GGUF file of
the same weights) llama.cpp takes part: plain, with its prompt lookup, with --llama-draft FILE with a draft model.
Equality: text with drafts against plain decoding's, token by token, alone and in batches of eight, greedy and with a
seed.

    python benchmarks/real_models.py FOLDER [--drafters SPEC ...] [--assistant FOLDER] [--new-tokens 128]
                                     [--conversations 12] [--transformers-every 1] [--batch 1]
                                     [--llama FILE] [--llama-draft FILE]
                                     [--parts equality speed] [--dtype bfloat16] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import environment
from quantized import instructions

import foretoken as ft
from foretoken.lab.bench.arms import ArmSetup
from foretoken.lab.bench.llama_cpp_arms import DraftArm, LlamaCppArm, LlamaCppPromptLookupArm
from foretoken.loading.measured.machine import hardware

CHAT = (
    "Why is the sky blue? Explain it to a child.",
    "Write a short letter to my landlord: the heating has been broken for two weeks.",
    "What should I cook tonight with eggs, spinach and rice?",
    "List five differences between cats and dogs, one line each.",
    "Summarise in one sentence: a town closed its bridge for repairs, shops lost customers, a ferry was opened.",
    "Give me a plan for learning to play the guitar in three months.",
    "Tell me a story about a lighthouse keeper who finds a letter.",
    "Is it better to rent or to buy a flat? Name two reasons for each.",
    "Translate into French: the train to Lyon leaves at nine and arrives at noon.",
    "A farmer has 17 sheep and buys 5 more, then sells 9. How many are left? Show the steps.",
)
CODE = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Rename the variable x to count: def f(x):\n    x = x + 1\n    print(x)\n    return x * 2",
    "Write a Python class Stack with push, pop and is_empty, and a test for each method.",
    "Explain what this does: [w for w in text.split() if len(w) > 3]",
    "Write a SQL query that lists customers with more than three orders, with their number of orders.",
    "Write a Python script that reads a CSV file and prints the mean of every numeric column.",
    "Fix the error: for i in range(10) print(i)",
    "Write a function in JavaScript that removes duplicates from an array.",
    "Write a regular expression for dates like 2024-01-31 and explain each part.",
    "Turn this loop into a list comprehension: out = []\nfor x in xs:\n    if x > 0:\n        out.append(x * x)",
)
SEED = 7
THEIRS = "transformers"
WARM_UP = 16
Run = Callable[[list[list[int]], int], tuple[int, float]]
"""Prompts that run together and most new tokens of each, to the number of tokens and the seconds they took."""


def main() -> None:
    """Print figures as they come, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--drafters", nargs="+", default=["ngram", "quantized,bits=4,k=4", "auto"])
    parser.add_argument("--assistant")
    parser.add_argument("--llama")
    parser.add_argument("--llama-draft")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--transformers-every", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=("equality", "speed"), default=["equality", "speed"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dtype = {} if args.folder.endswith(".gguf") else {"dtype": args.dtype}  # a file's is its own
    plain = ft.load(args.folder, drafter=None, generation_config=None, prefix_cache=False, **dtype)
    arms = {"plain": plain}
    for spec in args.drafters:
        if spec == "auto":  # as a user has it: for a model that is handed in it makes no second weights
            arms[spec] = ft.load(args.folder, generation_config=None, prefix_cache=False, **dtype)
        else:  # one target for all: its weights are read once
            arms[spec] = ft.load(plain.target, drafter=spec, tokenizer=plain.tokenizer, prefix_cache=False)
    half = args.conversations // 2
    prompts = [_ids(plain.tokenizer, text) for text in (*CHAT[:half], *CODE[:half])]
    report: dict[str, Any] = {
        "machine": f"{hardware()['cpu']}, {instructions()}",
        "environment": environment(),
        "source": Path(args.folder).name,
        "model": plain.describe(),
        "prompts": len(prompts),
        "new_tokens": args.new_tokens,
    }
    print(json.dumps(report["model"]))
    if "equality" in args.parts:
        report["equality"] = equality(arms, prompts, args.new_tokens)
    if "speed" in args.parts:
        report["speed"] = {str(t): speed(args, arms, prompts, t) for t in args.temperatures}
    line = json.dumps(report)
    print(line)
    if args.out is not None:
        args.out.write_text(line + "\n", encoding="utf-8")


def _ids(tokenizer: Any, text: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


# -- equality ----------------------------------------------------------------------------------------------------------


def equality(arms: dict[str, ft.Llm], prompts: list[list[int]], new_tokens: int) -> dict[str, str]:
    """Of how many texts each arm writes what plain decoding writes alone, by arm, mode and company."""
    counts: dict[str, str] = {}
    for mode, options in (("greedy", {"temperature": 0.0}), ("seeded", {"temperature": 1.0, "seed": SEED})):
        options = {**options, "max_new_tokens": new_tokens}
        references = [arms["plain"].generate(prompt, **options).token_ids for prompt in prompts]
        for name, llm in arms.items():
            for company in ("alone", "batch of 8"):
                if name == "plain" and company == "alone":
                    continue
                if company == "alone":
                    texts = [llm.generate(prompt, **options).token_ids for prompt in prompts]
                else:
                    groups = [prompts[i : i + 8] for i in range(0, len(prompts), 8)]
                    texts = [out.token_ids for group in groups for out in llm.generate(group, **options)]
                same = sum(text == right for text, right in zip(texts, references, strict=True))
                counts[f"{name} {mode} {company}"] = f"{same} of {len(prompts)}"
                print(f"{name:<28} {mode:<7} {company:<11} {same} of {len(prompts)} equal to plain alone", flush=True)
    return counts


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(args: Any, arms: dict[str, ft.Llm], prompts: list[list[int]], temperature: float) -> dict[str, float]:
    """Median tokens per second by arm."""
    theirs = args.transformers_every and args.batch == 1 and not args.folder.endswith(".gguf")
    runs: dict[str, Run] = dict(_transformers(args, temperature)) if theirs else {}
    for name, llm in arms.items():
        runs[name] = _ours(llm, temperature)
    if args.llama and args.batch == 1:
        runs.update(_llama_cpp(args.llama, args.llama_draft, arms["plain"], temperature))
    rates: dict[str, dict[int, float]] = {name: {} for name in runs}
    groups = [prompts[start : start + args.batch] for start in range(0, len(prompts), args.batch)]
    for run in runs.values():  # not counted
        run(groups[0], WARM_UP)
    for number, group in enumerate(groups):
        for name, run in runs.items():
            if name.startswith(THEIRS) and number % args.transformers_every:
                continue
            count, seconds = run(group, args.new_tokens)
            rates[name][number] = count / seconds
        latest = ", ".join(f"{name} {found[number]:.1f}" for name, found in rates.items() if number in found)
        print(f"T={temperature:g} conversation {number + 1}: {latest}", flush=True)
    medians = {name: statistics.median(found.values()) for name, found in rates.items()}
    for name, value in medians.items():
        ratio = statistics.median(rate / rates["plain"][number] for number, rate in rates[name].items())
        print(f"T={temperature:g} {name:<34} {value:7.1f} tokens/s, {ratio:.2f} of plain", flush=True)
    return medians


def _ours(llm: ft.Llm, temperature: float) -> Run:
    def run(prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
        start_s = time.perf_counter()
        outs = llm.generate(prompts, max_new_tokens=new_tokens, temperature=temperature, seed=SEED)
        return sum(len(out.token_ids) for out in outs), time.perf_counter() - start_s

    return run


def _llama_cpp(file: str, draft: str | None, plain: ft.Llm, temperature: float) -> dict[str, Run]:
    shared = ArmSetup(plain.target, file, plain.tokenizer, ignore_eos=False)
    arms: dict[str, LlamaCppArm] = {
        "llama.cpp plain": LlamaCppArm("plain", shared),
        "llama.cpp prompt lookup": LlamaCppPromptLookupArm("prompt lookup", shared),
    }
    if draft is not None:
        arms["llama.cpp draft"] = DraftArm("draft", shared, draft=draft, k=4)

    def runner(arm: LlamaCppArm) -> Run:
        def run(prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
            start_s = time.perf_counter()
            generated = arm.generate(prompts[0], new_tokens, temperature, SEED)
            return len(generated.token_ids), time.perf_counter() - start_s

        return run

    return {name: runner(arm) for name, arm in arms.items()}


def _transformers(args: Any, temperature: float) -> list[tuple[str, Run]]:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype)
    ways: dict[str, dict[str, Any]] = {
        "transformers plain": {},
        "transformers prompt lookup": {"prompt_lookup_num_tokens": 10},
    }
    if args.assistant is not None:
        draft = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=dtype)
        ways["transformers assisted"] = {"assistant_model": draft}

    def runner(extra: dict[str, Any]) -> Run:
        def run(prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
            (prompt,) = prompts
            torch.manual_seed(SEED)
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            )
            start_s = time.perf_counter()
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=new_tokens,
                **sampling,
                **extra,
            )
            return out.shape[1] - len(prompt), time.perf_counter() - start_s

        return run

    return [(name, runner(extra)) for name, extra in ways.items()]


if __name__ == "__main__":
    main()
