"""GGUF files: ours against llama.cpp's plain decoding and its own speculative modes, on the same files.

The built-in target is inflated, written as bfloat16 and quantised by llama.cpp; the draft model is the built-in one.
In the first part all arms take turns on every prompt (llama.cpp through its Python binding).  In the second part, with
``--binary`` (``llama-speculative-simple``, built from llama.cpp's sources), ours and that program take turns; it tells
its decoding rate itself.

    python benchmarks/gguf_targets.py [--size 1b] [--kinds BF16 Q8_0 Q4_K_M] [--prompts 5] [--new-tokens 96]
                                       [--repeat 3] [--drafters SPEC ...] [--folder DIR] [--binary FILE] [--out DIR]

``{draft}`` in a spec stands for the draft model's file.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import environment
from inflated import table, tell
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

import foretoken as ft
from foretoken.lab.bench.arms import ArmSetup
from foretoken.lab.bench.gguf_export import KINDS, quantize_gguf, write_gguf
from foretoken.lab.bench.run import BenchSettings, run_bench
from foretoken.lab.prompts import BenchPrompt
from foretoken.llm import Llm
from foretoken.loading import load_model, load_tokenizer
from foretoken.models.other.llama_cpp_model import LlamaCppModel

ARMS = (
    "ngram",
    "suffix",
    "model:{draft},k=4",
    "model:{draft},k=6",
    "model:{draft},tree=3x2x1x1",
    "llama.cpp",
    "llama.cpp:prompt_lookup,k=10",
    "llama.cpp:draft,draft={draft},k=4",
    "llama.cpp:draft,draft={draft},k=6",
)
MODES = {
    "plain (ngram-simple that finds nothing)": ["ngram-simple", "--spec-ngram-simple-size-n", "64"],
    "ngram-simple": ["ngram-simple"],
    "ngram-mod": ["ngram-mod"],
    "draft-simple, 4": ["draft-simple", "--spec-draft-n-max", "4", "-md", "{draft}"],
    "draft-simple, 6": ["draft-simple", "--spec-draft-n-max", "6", "-md", "{draft}"],
}
"""llama-speculative-simple: name -> ``--spec-type`` and its options."""
TRIES = 5
"""The program writes its log from a thread, and sometimes ends before the last lines are out."""
RATE = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")


def files(folder: Path, size: str, kinds: Sequence[str]) -> tuple[dict[str, Path], Path]:
    """The target's file of every kind and the draft model's, made where they are missing."""
    tokenizer = load_tokenizer("builtin")
    draft = folder / "draft-F32.gguf"
    if not draft.exists():
        write_gguf(_network(load_model("builtin", role="draft", dtype="float32")), draft, tokenizer)
    base = folder / f"{size}-BF16.gguf"
    if not base.exists():
        print("inflating", file=sys.stderr)
        write_gguf(_network(load_model("builtin", inflate=size, dtype="bfloat16")), base, tokenizer)
    found = {}
    for kind in kinds:
        found[kind] = folder / f"{size}-{kind}.gguf"
        if not found[kind].exists():
            print(f"quantising to {kind}", file=sys.stderr)
            quantize_gguf(base, found[kind], kind, torch.get_num_threads())
    return found, draft


def _network(model: Any) -> Any:
    return model.model


def first_part(file: Path, draft: Path, prompts: dict[str, list[BenchPrompt]], options: argparse.Namespace) -> None:
    """Every arm of a file in one process."""
    shared = ArmSetup(
        LlamaCppModel(file),
        source=str(file),
        tokenizer=load_tokenizer(file),
        controller="constant",
        max_new_tokens=options.new_tokens,
    )
    arms = [spec.format(draft=draft) for spec in options.drafters]
    out = None if options.out is None else options.out / f"{file.stem}.jsonl"
    start_s = time.perf_counter()
    settings = BenchSettings(arms, repeat=options.repeat)
    result = run_bench(
        shared, prompts, settings, out, False, lambda done, total, text: tell(start_s, done, total, text)
    )
    print(file=sys.stderr)
    for category in prompts:
        table([{**cell, "arm": cell["arm"].replace(str(draft), "DRAFT")} for cell in result.cells], category)


def second_part(file: Path, draft: Path, prompts: dict[str, list[BenchPrompt]], options: argparse.Namespace) -> None:
    """Ours and llama.cpp's program in turns, tokens per second of decoding, medians over prompts."""
    target, tokenizer = LlamaCppModel(file), load_tokenizer(file)
    specs = [None, "ngram", f"model:{draft},k=4", f"model:{draft},k=6"]
    own_models = {
        str(spec).replace(str(draft), "DRAFT"): ft.load(target, spec, controller="constant", tokenizer=tokenizer)
        for spec in specs
    }
    for category, group in prompts.items():
        rates: dict[str, list[float]] = {name: [] for name in [*own_models, *MODES]}
        for prompt in group:
            times: dict[str, list[float]] = {name: [] for name in rates}
            for _ in range(options.repeat):
                for name, llm in own_models.items():
                    times[name].append(own_rate(llm, prompt.text, options.new_tokens))
                for name, mode in MODES.items():
                    times[name].append(their_rate(options.binary, file, draft, mode, prompt.text, options.new_tokens))
            for name, found in times.items():
                rates[name].append(statistics.median(found))
        print(f"\n### {category}, beside {options.binary.name}\n\n| arm | tokens/s | over ours plain |\n|---|---|---|")
        for name, found in rates.items():
            ratio = statistics.median(a / b for a, b in zip(found, rates["None"], strict=True))
            owner = "foretoken" if name in own_models else "llama.cpp"
            print(f"| {owner} `{name}` | {statistics.median(found):.2f} | {ratio:.2f} |", flush=True)


def own_rate(llm: Llm, prompt: str, new_tokens: int) -> float:
    """Tokens per second without the prefill."""
    stats = llm.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True).stats
    return stats.num_new_tokens / (stats.total_s - stats.prefill_s)


def their_rate(binary: Path, file: Path, draft: Path, mode: Sequence[str], prompt: str, new_tokens: int) -> float:
    """The same by the program's own account (which may write some more tokens: its last draft).

    Raises:
        RuntimeError: it did not run.
    """
    threads = str(torch.get_num_threads())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write(prompt)
        text.flush()
        command = [binary, "-m", file, "-f", text.name, "-n", new_tokens, "--temp", 0, "-c", 1024, "--ignore-eos"]
        command += ["-t", threads, "--spec-draft-threads", threads, "--spec-type", *mode]
        words = [str(word).format(draft=draft) for word in command]
        for _ in range(TRIES):
            process = subprocess.run(words, capture_output=True, text=True, check=False)
            found = RATE.search(process.stdout + process.stderr)
            if found is not None:
                break
    if found is None:
        raise RuntimeError(f"{binary} gave no rate (exit code {process.returncode}): {process.stderr[-300:]}")
    return int(found[1]) / float(found[2])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b")
    parser.add_argument("--kinds", nargs="*", default=["BF16", "Q8_0", "Q4_K_M"], choices=list(KINDS))
    parser.add_argument("--prompts", type=int, default=5, help="how many of code and of prose (at most 20)")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--drafters", nargs="*", default=list(ARMS))
    parser.add_argument("--folder", type=Path, default=None, help="where the files are kept; by default they are not")
    parser.add_argument("--binary", type=Path, default=None, help="llama.cpp's llama-speculative-simple")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines, for foretoken bench report")
    options = parser.parse_args()
    texts = {"code": (*CODE, *MORE_CODE), "prose": (*PROSE, *MORE_PROSE)}
    prompts = {name: [BenchPrompt(name, text) for text in group[: options.prompts]] for name, group in texts.items()}
    with tempfile.TemporaryDirectory(prefix="foretoken-gguf-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found, draft = files(folder, options.size, options.kinds)
        print(f"the built-in target inflated to {options.size}; {environment()}, {options.new_tokens} new tokens")
        for kind, file in found.items():
            print(f"\n## {kind}, {file.stat().st_size / 1e6:.0f} MB")
            if options.drafters:
                first_part(file, draft, prompts, options)
            if options.binary is not None:
                second_part(file, draft, prompts, options)


if __name__ == "__main__":
    main()
