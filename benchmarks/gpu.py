"""The graph path on a CUDA device: plain and speculative decoding, eager and graphed, beside Transformers' compiled.

One target per size, the built-in one inflated (docs/inflate.md), greedy, one request.  All arms run the same weights
and take turns on every prompt; medians of ``--repeat`` runs.  Everything that is captured or compiled is so before the
first run that counts.  JSON lines: one about the machine, one per size and arm.

    python benchmarks/gpu.py [--inflate 300m 1b 7b] [--dtype bfloat16] [--drafter model,k=6] [--out gpu.jsonl]
    python benchmarks/gpu.py --device cpu --inflate 20m     # tries the script, not the speed: nothing is captured
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prompts import CODE, PROSE
from torch import Tensor

import foretoken as ft
from foretoken.lab.bench.arms import Arm, ArmSetup, Unit
from foretoken.lab.bench.results import UnitResult, acceptance_length, rate
from foretoken.lab.bench.serving import make_arm
from foretoken.lab.bench.transformers_arms import TransformersArm
from foretoken.lab.timing import Stopwatch, median_run, runs_of
from foretoken.lab.workload import inflation
from foretoken.loading import load_model, load_tokenizer, parse_device
from foretoken.models.forward.capture import Recorder, Run
from foretoken.models.forward.graphed import with_graphs

PLAIN = "plain, eager"
GREEDY = (0.0, 1)
PROMPT_TOKENS = 48
"""Every prompt is cut to this length, so that no static cache has to be compiled for again."""


class Eager(Recorder):
    """Runs a step's program itself, where there is no CUDA."""

    def host(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def record(self, program: Run) -> Run:
        return program


class CompiledArm(TransformersArm):
    """Plain decoding with a static cache, which Transformers compiles for (CUDA only)."""

    def options(self) -> dict[str, Any]:
        """What turns it on."""
        return {"cache_implementation": "static"}


def arms_of(size: str, options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Arm], Any]:
    """The arms of one size, the baseline first, and its target.

    Raises:
        ValueError: graphs cannot be had here.
    """
    eager: Any = load_model("builtin", inflate=size, dtype=options.dtype, device=device)
    graphed = eager.sibling()  # the same weights
    with_graphs(graphed, True, None if device.type == "cuda" else Eager())
    same: dict[str, Any] = {"tokenizer": load_tokenizer("builtin"), "controller": "constant", "device": device}
    targets = {name: ArmSetup(model, **same) for name, model in (("eager", eager), ("graphed", graphed))}
    arms: dict[str, Arm] = {f"plain, {name}": make_arm("none", shared) for name, shared in targets.items()}
    arms["Transformers, eager"] = make_arm("transformers:plain", targets["eager"])
    arms["Transformers, static cache and compile"] = CompiledArm("compiled", targets["eager"])
    for name, shared in targets.items():
        arms[f"{options.drafter}, {name}"] = make_arm(options.drafter, shared)
    return arms, graphed


def timed(arms: dict[str, Arm], prompts: Sequence[list[int]], tokens: int, repeat: int) -> dict[str, list[UnitResult]]:
    """Of every arm the median run on every prompt, arms taking turns."""
    found: dict[str, list[UnitResult]] = {name: [] for name in arms}
    for prompt in prompts:
        unit = Unit.of(prompt, tokens)
        runs = runs_of({name: partial(arm.run, unit, GREEDY) for name, arm in arms.items()}, repeat)
        for name, each in runs.items():
            found[name].append(median_run(each, tokens_per_s))
    return found


def tokens_per_s(run: UnitResult) -> float:
    """Tokens per second of one run."""
    return rate([run])


def warmed(arms: dict[str, Arm], prompts: Sequence[list[int]], tokens: int) -> dict[str, float]:
    """Run everything once; seconds that it took, captures and compilation included."""
    found = {}
    for name, arm in arms.items():
        watch = Stopwatch()
        for prompt in prompts:
            arm.run(Unit.of(prompt, tokens), GREEDY)
        found[name] = watch.seconds
    return found


def cells(
    size: str, options: argparse.Namespace, device: torch.device, prompts: Sequence[list[int]]
) -> list[dict[str, Any]]:
    """What one size gave, a dictionary per arm."""
    arms, graphed = arms_of(size, options, device)
    warm_s = warmed(arms, prompts, options.new_tokens)
    runs = timed(arms, prompts, options.new_tokens, options.repeat)
    if graphed.graphs_off:
        raise ValueError(f"graphs were given up on the way: {graphed.graphs_off}")
    rows = []
    for name, mine in runs.items():
        ratios = {
            other: statistics.median(rate([a]) / rate([b]) for a, b in zip(mine, runs[other], strict=True))
            for other in (PLAIN, "plain, graphed", "Transformers, static cache and compile")
        }
        same = [a.outputs == b.outputs for a, b in zip(mine, runs[PLAIN], strict=True)]
        lengths = [length for run in mine if (length := acceptance_length([run])) is not None]
        rows.append(
            {
                "kind": "cell",
                "size": size,
                "arm": name,
                "dry_run": device.type != "cuda",
                "device": device_name(device),
                "dtype": options.dtype,
                "tokens_per_s": round(statistics.median(map(tokens_per_s, mine)), 2),
                "ratios": {other: round(ratio, 3) for other, ratio in ratios.items()},
                "mean_acceptance_length": round(statistics.mean(lengths), 3) if lengths else None,
                "identical": f"{sum(same)} of {len(same)}",
                "warm_up_s": round(warm_s[name], 2),
                "captured_shapes": len(graphed.graphs) if "graphed" in name and device.type == "cuda" else 0,
                "compiled": "compile" in name and device.type == "cuda",
                "inflation": inflation(graphed),
                "prompts": len(prompts),
                "new_tokens": options.new_tokens,
                "repeat": options.repeat,
            }
        )
    return rows


def device_name(device: torch.device) -> str:
    """The GPU's name; of a CPU its architecture and what PyTorch may use of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}"


def machine(device: torch.device) -> dict[str, Any]:
    """The line about the machine."""
    found: dict[str, Any] = {"kind": "machine", "dry_run": device.type != "cuda", "device": device_name(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"memory_gib": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return {**found, "torch": torch.__version__, "foretoken": ft.__version__}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="not cuda: a dry run of one prompt and few tokens")
    parser.add_argument("--inflate", nargs="*", default=["300m", "1b", "7b"], help="sizes")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafter", default="model,k=6")
    parser.add_argument("--prompts", type=int, default=6, help="half of them code, half prose")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args(arguments)


def device_of(options: argparse.Namespace) -> torch.device:
    """Where to run; away from CUDA the numbers of prompts, tokens and runs become the smallest.

    Raises:
        ValueError: there is no such device.
    """
    try:
        device = parse_device(options.device)
    except ValueError as error:
        raise ValueError(f"{error}; to try the script without a GPU: --device cpu --inflate 20m") from None
    assert device is not None
    if device.type != "cuda":
        options.prompts, options.new_tokens, options.repeat = 1, 8, 1
    return device


def cut_prompts(count: int) -> list[list[int]]:
    """Ids of ``count`` prompts, code and prose in turn, all of one length."""
    tokenizer = load_tokenizer("builtin")
    texts = [text for pair in zip(CODE, PROSE, strict=False) for text in pair][:count]
    prompts = [tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in texts]
    return [prompt[: min(map(len, prompts))] for prompt in prompts]


def tell(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """One line each, on standard output and behind what the file has."""
    for row in rows:
        print(json.dumps(row), flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 2 when it cannot."""
    options = parsed(arguments)
    try:
        device = device_of(options)
        tell([machine(device)], options.out)
        for size in options.inflate:
            tell(cells(size, options, device, cut_prompts(options.prompts)), options.out)
    except (ValueError, torch.OutOfMemoryError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
