"""Every drafter of the catalogue on the built-in target: length, acceptance, speed, and where the time goes.

20 code prompts, 20 prose prompts and, when the data folder is there, the chat transcripts of coding agents (long and
repetitive).  Arms take turns on every prompt; the ratio is the median over prompts of tokens per second over plain
decoding with the same token count.

    python benchmarks/drafter_table.py [--data ../shared/data] [--new-tokens 64] [--only NAME ...] [--target PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

import foretoken as ft
from foretoken.engine.stats import SpecStats
from foretoken.llm import Llm, Output, assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer
from foretoken.registry import rows

NOT_MEASURED = ("scripted", "prediction")
"""One proposes fixed tokens, the other needs the caller's expectation (replayed in ngram_family.py)."""


@dataclass
class Arm:
    """One drafter and what it did, by kind of prompt."""

    name: str
    llm: Llm
    stats: dict[str, SpecStats] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    same: dict[str, int] = field(default_factory=dict)


def transcripts(folder: Path, tokenizer: object, longest: int) -> list[list[int]]:
    """The text of every recorded chat, cut so that an answer fits behind it."""
    found = []
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        messages = content if isinstance(content, list) else content.get("messages", content.get("prompt", []))
        text = messages if isinstance(messages, str) else "\n\n".join(_text(m) for m in messages)
        ids = tokenizer(text)["input_ids"]  # type: ignore[operator]
        found += (
            [ids[:longest], ids[len(ids) // 2 : len(ids) // 2 + longest]] if len(ids) > 2 * longest else [ids[:longest]]
        )
    return [ids for ids in found if ids]


def _text(message: object) -> str:
    if isinstance(message, dict):
        content = message.get("content", "")
        return content if isinstance(content, str) else json.dumps(content)
    return str(message)


def measure(
    arms: list[Arm], plain: Llm, kind: str, prompts: list[list[int]], options: dict[str, float], repeat: int
) -> None:
    """Arms take turns on every prompt; the fastest of ``repeat`` runs counts, and its counts with it."""
    for index, prompt in enumerate(prompts):
        request = {**options, "seed": index, "ignore_eos": True}
        base, base_s = fastest(plain, prompt, request, repeat)
        for arm in arms:
            out, seconds = fastest(arm.llm, prompt, request, repeat)
            arm.ratios.setdefault(kind, []).append(base_s / len(base.token_ids) * len(out.token_ids) / seconds)
            arm.stats.setdefault(kind, SpecStats()).merge(out.stats)
            arm.same[kind] = arm.same.get(kind, 0) + (out.token_ids == base.token_ids)
        print(f"\r{kind}: {index + 1} of {len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def fastest(llm: Llm, prompt: list[int], options: dict[str, float], repeat: int) -> tuple[Output, float]:
    """The fastest of some runs."""
    best: tuple[Output, float] | None = None
    for _ in range(repeat):
        start_s = time.perf_counter()
        out = llm.generate(prompt, **options)
        seconds = time.perf_counter() - start_s - out.stats.prefill_s
        if best is None or seconds < best[1]:
            best = out, seconds
    if best is None:
        raise RuntimeError("nothing ran")
    return best


def table(arms: list[Arm], kinds: list[str], greedy: bool) -> None:
    """Markdown, one row per drafter."""
    head = ["drafter", *(f"{kind}: length / accepted / speed" for kind in kinds), "draft", "target", "overhead"]
    if greedy:
        head.append("same text")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for arm in arms:
        cells = ["`" + arm.name.replace("|", r"\|") + "`"]
        total = SpecStats()
        for kind in kinds:
            stats = arm.stats[kind]
            total.merge(stats)
            speed = statistics.median(arm.ratios[kind])
            cells.append(f"{stats.mean_acceptance_length:.2f} / {stats.acceptance_rate:.2f} / **{speed:.2f}**")
        rest = total.total_s - total.prefill_s
        cells += [f"{100 * part / rest:.0f} %" for part in (total.draft_s, total.target_s, total.overhead_s)]
        if greedy:
            cells.append(f"{sum(arm.same.values())}/{sum(map(len, arm.ratios.values()))}")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Run the table for greedy and sampled requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[], help="names or specs; the whole catalogue by default")
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--prompts", type=int, default=20, help="how many of each kind")
    parser.add_argument("--repeat", type=int, default=2, help="runs per arm and prompt")
    options = parser.parse_args()
    print(environment(), f"foretoken {ft.__version__}", f"{options.new_tokens} new tokens", sep=", ")
    tokenizer = load_tokenizer(options.target)
    target = load_model(options.target, dtype=options.dtype)
    specs = options.only or [row.example for row in rows("drafter") if row.name not in NOT_MEASURED]
    longest = target.context_length - options.new_tokens - 40
    prompts = {
        "code": [tokenizer(p)["input_ids"] for p in (*CODE, *MORE_CODE)][: options.prompts],
        "prose": [tokenizer(p)["input_ids"] for p in (*PROSE, *MORE_PROSE)][: options.prompts],
    }
    agentic = transcripts(options.data / "prompts/agentic", tokenizer, longest)[: options.prompts]
    if agentic:
        prompts["agentic"] = agentic
    plain = assemble(target, None, "auto", "constant", tokenizer)
    for temperature in (0.0, 0.8):
        arms = [
            Arm(spec, assemble(target, build_drafter(spec, target, tokenizer=tokenizer), "auto", "constant", tokenizer))
            for spec in specs
        ]
        request = {"max_new_tokens": options.new_tokens, "temperature": temperature}
        for kind, texts in prompts.items():
            measure(arms, plain, kind, texts, request, options.repeat)
        print(f"\n{'Greedy' if temperature == 0 else f'T={temperature}'}:\n")
        table(arms, list(prompts), temperature == 0)


if __name__ == "__main__":
    main()
