"""Learning while serving on a shifted domain: a draft model of prose is served with code.

The draft model is the built-in one, trained on prose for a short while (kept in ``--work``).  The stream is pieces of
held-out code, greedy, in three arms that take turns on every prompt:

* ``off``: the draft model stays as it is;
* ``on``: it learns (``online``);
* ``cost``: it learns and the result is thrown away, so the difference to ``off`` is what learning costs.

All arms write the same tokens, which is checked.

    python benchmarks/online.py --data CODE_FOLDER --prose PROSE_FOLDER --out online.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import environment

from foretoken.core.io.documents import iter_documents
from foretoken.core.io.files import checksum
from foretoken.llm import Llm, assemble
from foretoken.loading import BUILTIN, build_draft_model, load_model, load_tokenizer, resolve
from foretoken.methods.drafters.online import OnlineDrafter
from foretoken.models.base import LanguageModel
from foretoken.training.lm import next_token_loss

HELD = 0.01
"""The share of the documents that the built-in models were not trained on."""
PROSE_CHARS = 4_000_000


@dataclass
class Served:
    """What one arm did, request by request."""

    name: str
    llm: Llm
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def serve(self, prompts: list[list[int]], new_tokens: int, temperature: float, seed: int) -> None:
        """One batch."""
        start_s = time.perf_counter()
        options = {"max_new_tokens": new_tokens, "temperature": temperature, "seed": seed}
        outputs = self.llm.generate(prompts, **options)
        self.seconds.append(time.perf_counter() - start_s)
        self.accepted.append(sum(out.stats.num_accepted_tokens for out in outputs))
        self.drafted.append(sum(out.stats.num_draft_tokens for out in outputs))
        self.tokens.append(sum(len(out.token_ids) for out in outputs))
        self.outputs += [out.token_ids for out in outputs]

    def acceptance(self, part: slice) -> float:
        """Accepted draft tokens over drafted ones."""
        return sum(self.accepted[part]) / max(1, sum(self.drafted[part]))

    def rate(self, part: slice) -> float:
        """Tokens per second."""
        return sum(self.tokens[part]) / sum(self.seconds[part])


def prose_draft(folder: Path, prose: Path, tokenizer: Any, steps: int, lr: float) -> Path:
    """The built-in draft model after ``steps`` steps of 1024 tokens of prose; made once per folder."""
    if (folder / "config.json").exists():
        print(f"prose draft: {folder} is there already", file=sys.stderr)
        return folder
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(resolve(BUILTIN, "draft"), dtype=torch.float32)
    text, size = [], 0
    for document in iter_documents([prose]):
        text.append(document)
        size += len(document)
        if size > PROSE_CHARS:
            break
    tokens = torch.tensor(tokenizer("\n".join(text))["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    start_s, loss = time.perf_counter(), torch.tensor(0.0)
    for step in range(steps):
        starts = torch.randint(len(tokens) - 257, (4,), generator=generator).tolist()
        loss = next_token_loss(model, torch.stack([tokens[s : s + 257] for s in starts]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (steps - step) / (0.3 * steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"prose draft: {steps} steps, {time.perf_counter() - start_s:.0f} s, loss {loss.item():.2f}", file=sys.stderr)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pieces(data: Path, tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """Prompts of ``length`` tokens from held-out documents (from all, when none is), in random order."""
    documents = list(iter_documents([data]))
    chosen = [text for text in documents if int(checksum(text), 16) < HELD * 2**64] or documents
    found = []
    for text in chosen:
        ids = tokenizer(text)["input_ids"]
        found += [ids[start : start + length] for start in range(0, len(ids) - length, 2 * length)]
    random.Random(0).shuffle(found)
    if len(found) < count:
        raise ValueError(f"{data} gives {len(found)} prompts only: ask for fewer with --requests")
    return found[:count]


def arms(target: LanguageModel, draft: LanguageModel, tokenizer: Any, options: dict[str, Any]) -> list[Served]:
    """Three drafters from one draft model, over one target."""
    learning = OnlineDrafter(draft, target=target, **options)
    costing = OnlineDrafter(draft, target=target, **options)
    if costing.learner is not None:
        costing.learner.served.go_on_with = lambda model: None  # type: ignore[method-assign]
    still = OnlineDrafter(draft, target=target, **{**options, "every": 0})
    drafters = {"off": still, "on": learning, "cost": costing}
    return [
        Served(name, assemble(target, drafter, "auto", "constant", tokenizer)) for name, drafter in drafters.items()
    ]


def parts_of(count: int, parts: int) -> list[slice]:
    """``parts`` consecutive slices of ``count`` batches."""
    bounds = [round(i * count / parts) for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def table(served: Sequence[Served], parts: Sequence[slice]) -> list[str]:
    """Markdown: acceptance and relative throughput, part by part of the stream."""
    off, on, cost = served
    lines = [
        "| part of the stream | acceptance, off | acceptance, on | tokens/s, on : off | tokens/s, cost : off |",
        "|---|---|---|---|---|",
    ]
    count = len(off.tokens)
    for part in [*parts, slice(0, count)]:
        whole = part.stop - part.start == count and len(parts) > 1
        name = "all" if whole else f"{100 * part.start // count}-{100 * part.stop // count} %"
        lines.append(
            f"| {name} | {off.acceptance(part):.3f} | {on.acceptance(part):.3f} | "
            f"{on.rate(part) / off.rate(part):.2f} | {cost.rate(part) / off.rate(part):.2f} |"
        )
    return lines


def plot(served: Sequence[Served], parts: Sequence[slice], out: Path) -> None:
    """Acceptance over the stream."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    off, on, _ = served
    places = [100 * (part.start + part.stop) / 2 / len(off.tokens) for part in parts]
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.plot(places, [off.acceptance(part) for part in parts], "o--", color="tab:gray", label="prose draft, as it is")
    axes.plot(places, [on.acceptance(part) for part in parts], "o-", color="tab:blue", label="prose draft, learning")
    axes.set_xlabel("requests served (%)")
    axes.set_ylabel("accepted share of the draft tokens")
    axes.set_title("A draft model of prose, served with code")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> int:
    """Train the prose draft if it is missing, serve the stream, print the table."""
    parser = argparse.ArgumentParser(description="Online distillation of the draft model on a shifted domain.")
    parser.add_argument("--data", type=Path, required=True, help="folder of code")
    parser.add_argument("--prose", type=Path, required=True, help="folder of prose for the draft model")
    parser.add_argument("--work", type=Path, default=Path("runs/online"), help="where the prose draft is kept")
    parser.add_argument("--out", type=Path, default=None, help="PNG to write")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--steps", type=int, default=150, help="training steps of the prose draft")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--batch", type=int, default=1, help="requests that run together")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--parts", type=int, default=8, help="rows of the table")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--loss", default="fkl")
    parser.add_argument("--budget", type=float, default=0.1)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(BUILTIN)
    folder = prose_draft(arguments.work, arguments.prose, tokenizer, arguments.steps, 1e-3)
    target = load_model(BUILTIN, dtype="float32")
    draft = build_draft_model(str(folder), target, BUILTIN, tokenizer, None, packed=False)
    names = ("k", "every", "lr", "loss", "budget")
    served = arms(target, draft, tokenizer, {name: getattr(arguments, name) for name in names})
    prompts = pieces(arguments.data, tokenizer, arguments.prompt_tokens, arguments.requests)
    served[0].llm.generate(prompts[0], max_new_tokens=8)  # warm up
    for number, start in enumerate(range(0, len(prompts), arguments.batch)):
        turn = number % len(served)
        for arm in [*served[turn:], *served[:turn]]:
            batch = prompts[start : start + arguments.batch]
            arm.serve(batch, arguments.new_tokens, arguments.temperature, seed=number)
    parts = parts_of(len(served[0].tokens), arguments.parts)
    identical = all(arm.outputs == served[0].outputs for arm in served)
    learnt = {arm.name: arm.llm.drafter.report() for arm in served if isinstance(arm.llm.drafter, OnlineDrafter)}
    print(environment())
    print("\n".join(table(served, parts)))
    print(f"\nall arms wrote the same tokens: {'yes' if identical else 'no'}")
    print("learnt:", ", ".join(f"{key} {_short(value)}" for key, value in learnt["on"].items()))
    if arguments.out is not None:
        plot(served, parts, arguments.out)
    if arguments.json:
        whole = slice(0, len(served[0].tokens))
        row = {
            "acceptance": {arm.name: [arm.acceptance(part) for part in parts] for arm in served},
            "tokens_per_s": {arm.name: [arm.rate(part) for part in parts] for arm in served},
            "cost_ratio": served[2].rate(whole) / served[0].rate(whole),
            "throughput_ratio": served[1].rate(whole) / served[0].rate(whole),
            "identical": identical,
            "report": learnt,
        }
        print(json.dumps(row))
    return 0


def _short(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
