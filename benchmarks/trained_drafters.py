"""Trained drafters on the built-in target: how often each position of a draft is accepted, greedy and at T=1.

Every drafter first guesses chains, so that positions are comparable, and then drafts as it does by default.  Prompts:
the 20 code and 20 prose ones of the other scripts, written for them (short idioms of code may stand in the training
text; the acceptance on held-out documents is in every drafter's card).  Calls per token counts every call of the
target, the prompt's included: blockwise parallel decoding promises m / k + 1 calls for m tokens.

    python benchmarks/trained_drafters.py [--only NAME ...] [--temperature 0 1] [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

from foretoken.core.io.checkpoints import is_adapter
from foretoken.engine.stats import SpecStats
from foretoken.llm import assemble
from foretoken.loading import BUILTIN, ZOO, build_drafter, load_model, load_tokenizer
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.models.base import LanguageModel
from foretoken.registry import rows

DEPTH = 4
CHAINS = {
    "eagle": f"width=1,nodes={DEPTH},depth={DEPTH}",
    "eagle3": f"width=1,nodes={DEPTH},depth={DEPTH}",
    "mtp": f"width=1,nodes={DEPTH},depth={DEPTH}",
    "kangaroo": f"k={DEPTH}",
    "early_exit": f"k={DEPTH}",
    "model": f"k={DEPTH}",
}
"""Options that make a drafter guess one chain of ``DEPTH`` tokens; heads are reshaped instead."""


@dataclass
class Measured:
    """One drafter at one temperature."""

    drafter: str
    temperature: float
    positions: list[float]
    chain_length: float
    tree_length: float
    calls_per_token: float


def chain(name: str, spec: str, target: LanguageModel) -> Drafter:
    """The drafter of ``spec`` as one that guesses chains."""
    options = CHAINS.get(name)
    found = build_drafter(spec if options is None else f"{spec},{options}", target)
    if isinstance(found, HeadsDrafter):
        return found.reshaped([(0,) * depth for depth in range(1, min(DEPTH, len(found.heads.blocks)) + 1)])
    if found is None:
        raise ValueError(f"{spec} drafts nothing")
    return found


def run(
    target: LanguageModel, drafter: Drafter, prompts: list[list[int]], new_tokens: int, temperature: float
) -> SpecStats:
    """Counts over all prompts."""
    llm = assemble(target, drafter, "auto", "constant", None)
    total = SpecStats()
    for seed, prompt in enumerate(prompts):
        asked = {"max_new_tokens": new_tokens, "temperature": temperature, "seed": seed, "ignore_eos": True}
        total.merge(llm.generate(prompt, **asked).stats)
    return total


def measure(
    target: LanguageModel, name: str, spec: str, prompts: list[list[int]], new_tokens: int, temperature: float
) -> Measured:
    """A drafter's chains and its own drafts."""
    chains = run(target, chain(name, spec, target), prompts, new_tokens, temperature)
    own = build_drafter(spec, target)
    if own is None:
        raise ValueError(f"{spec} drafts nothing")
    default = run(target, own, prompts, new_tokens, temperature)
    tokens = new_tokens * len(prompts)
    return Measured(
        spec,
        temperature,
        [count / chains.num_drafts for count in chains.num_accepted_tokens_per_pos[:DEPTH]],
        chains.mean_acceptance_length,
        default.mean_acceptance_length,
        (tokens / chains.mean_acceptance_length + len(prompts)) / tokens,
    )


@dataclass(frozen=True)
class Arm:
    """A drafter, and what it drafts for."""

    label: str
    name: str
    spec: str
    target: LanguageModel


def chosen_arms(names: Sequence[str], target: LanguageModel, options: argparse.Namespace) -> Iterator[Arm]:
    """Drafters for one target; training for early exits makes another one, which follows the first."""
    for name in names:
        folder = (options.folder or ZOO) / name
        own_target = is_adapter(folder)
        spec = f"{name}:{folder}" if options.folder and folder.is_dir() and not own_target else name
        yield Arm(spec, name, spec, target)
        if own_target and options.target == BUILTIN:
            yield Arm(f"{spec}, target trained for it", name, spec, load_model(folder))


def table(found: list[Measured]) -> None:
    """Markdown."""
    places = " | ".join(f"position {i + 1}" for i in range(DEPTH))
    print(f"| drafter | {places} | tokens a round, chain | as by default | calls per token, chain |")
    print("|---" * (DEPTH + 4) + "|")
    for row in found:
        shares = [f"{share:.2f}" for share in row.positions] + [""] * (DEPTH - len(row.positions))
        print(
            f"| `{row.drafter}` | {' | '.join(shares)} | **{row.chain_length:.2f}** | {row.tree_length:.2f} "
            f"| {row.calls_per_token:.2f} |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="drafters; all that are trained by default")
    parser.add_argument("--folder", type=Path, help="folder with one trained drafter per method; the zoo by default")
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=20, help="how many of each kind")
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--json", type=Path, dest="out", help="write the numbers here as well")
    options = parser.parse_args()
    print(environment(), f"{options.new_tokens} new tokens", sep=", ")
    target, tokenizer = load_model(options.target), load_tokenizer(options.target)
    texts = [*(*CODE, *MORE_CODE)[: options.prompts], *(*PROSE, *MORE_PROSE)[: options.prompts]]
    prompts = [tokenizer(text)["input_ids"] for text in texts]  # type: ignore[misc]
    names = options.only or [row.name for row in rows("drafter") if row.needs_training] + ["early_exit", "model"]
    arms = list(chosen_arms(names, target, options))
    found = []
    for temperature in options.temperature:
        for arm in arms:
            print(f"{arm.label} at T={temperature}", file=sys.stderr)
            measured = measure(arm.target, arm.name, arm.spec, prompts, options.new_tokens, temperature)
            found.append(replace(measured, drafter=arm.label))
        print(f"\n{'Greedy' if temperature == 0 else f'T={temperature:g}'}:\n")
        table([row for row in found if row.temperature == temperature])
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
