"""Milliseconds of a draft of k tokens: by one forward of a block, and by k forwards of a head.

The networks are random: what a draft costs does not depend on what it learned.  All drafters take turns on one text;
every round drafts exactly k tokens as a chain, and the medians over rounds are printed.

    python benchmarks/draft_forwards.py MODEL [--lengths 4,8,16] [--vocabulary 0,8192,16384,32768] [--repeat 5]

``--vocabulary`` are sizes of the draft vocabulary (0: all of the target's tokens).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import environment
from quantized import instructions

from foretoken.lab.timing import interleave
from foretoken.llm import Llm, assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.training.recipes import find_recipe

PROMPT_TOKENS, TOKENS = 200, 24


def saved(method: str, target: LanguageModel, folder: Path, **settings: str) -> Path:
    """A random drafter of a recipe's shape."""
    recipe = find_recipe(method)(target, TargetParts(target), settings)
    save_drafter(folder, method, recipe.stored_config(), recipe.net, recipe.parts.fingerprint(), {})
    return folder


def arms(length: int, vocabulary: int, target: LanguageModel, folder: Path) -> dict[str, str]:
    """Spec by name: chains of ``length`` tokens."""
    chosen = f",vocab={vocabulary}" if vocabulary else ""
    head = saved(
        "eagle3", target, folder / f"eagle3-{length}-{vocabulary}", draft_vocab=str(vocabulary or target.vocab_size)
    )
    specs = {f"eagle3, {length} forwards": f"eagle3:{head},depth={length},nodes={length},width=1"}
    for method in ("dflash", "dflash2"):
        path = saved(method, target, folder / f"{method}-{length}-{vocabulary}", block=str(length + 1))
        specs[f"{method}, a block of {length}"] = f"{method}:{path},width=1,nodes={length}{chosen}"
    return specs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="4,8,16")
    parser.add_argument("--vocabulary", default="0")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    print(instructions(), environment(), sep="; ")
    target, tokenizer = load_model(args.model), load_tokenizer(args.model)
    prompt = torch.randint(100, 1000, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = assemble(target, None, "auto", "auto", tokenizer)
    with tempfile.TemporaryDirectory() as name:
        for vocabulary in map(int, args.vocabulary.split(",")):
            for length in map(int, args.lengths.split(",")):
                specs = arms(length, vocabulary, target, Path(name))
                llms = {arm: drafting(target, spec, args.model, tokenizer) for arm, spec in specs.items()}
                times: dict[str, list[float]] = {arm: [] for arm in llms}
                steps = []
                for _, arm in interleave(list(llms), args.repeat):
                    stats = llms[arm].generate(prompt, max_new_tokens=TOKENS, ignore_eos=True).stats
                    times[arm].append(1000 * stats.draft_s / stats.num_drafts)
                    stats = plain.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True).stats
                    steps.append(1000 * stats.target_s / stats.num_drafts)
                step = statistics.median(steps)
                print(f"k = {length}, {vocabulary or target.vocab_size} draft tokens, a plain step {step:.1f} ms")
                for arm, values in times.items():
                    ms = statistics.median(values)
                    print(f"  {arm:24} {ms:6.2f} ms, {ms / step:.2f} steps", flush=True)


def drafting(target: LanguageModel, spec: str, source: str, tokenizer: Any) -> Llm:
    """An engine whose every round drafts a whole chain."""
    drafter = build_drafter(spec, target, target_source=source, tokenizer=tokenizer)
    return assemble(target, drafter, "auto", "constant", tokenizer)


if __name__ == "__main__":
    main()
