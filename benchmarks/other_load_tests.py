"""What aiperf and guidellm, which are others' load tests, say of a server of ours, in one table.

    python benchmarks/other_load_tests.py --aiperf PYTHON --guidellm PYTHON [--target MODEL --tokenizer FOLDER]
        [--drafters none auto] [--concurrency 1,8] [--requests 16]

Each is the Python of an environment with the program in it (``pip install aiperf``, ``pip install guidellm``).  Starts
``foretoken serve`` once for each drafter and runs the programs on it in turns, with chats of 100 tokens of random words
and answers of 32.  aiperf reads ``metrics.speculative_decoding`` of the answers and drops what does not add up;
guidellm keeps it without looking.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reliability import TARGET, served

PROMPT_TOKENS, ANSWER_TOKENS = 100, 32
Figures = dict[str, float | None]
HEAD = ("requests", "errors", "tokens/s", "TTFT ms", "p99", "ITL ms", "tokens a round", "acceptance")


def program(python: Path, *command: str) -> None:
    """Run a program of an environment.

    Raises:
        SystemExit: it failed.
    """
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    process = subprocess.run(
        [str(python.parent / command[0]), *command[1:]], env={**env, "PATH": path}, capture_output=True, text=True
    )
    if process.returncode:
        raise SystemExit(f"{command[0]} failed: {(process.stderr or process.stdout)[-800:]}")


def aiperf(url: str, clients: int, args: argparse.Namespace) -> Figures:
    """Its own figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        # fmt: off
        program(args.aiperf, "aiperf", "profile", "--model", "builtin", "--url", url, "--endpoint-type", "chat",
                "--streaming", "--tokenizer", str(args.tokenizer), "--request-count", str(args.requests),
                "--concurrency", str(clients), "--isl", str(PROMPT_TOKENS), "--osl", str(ANSWER_TOKENS),
                "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count",
                "--ui-type", "none", "--no-gpu-telemetry", "--artifact-dir", folder)
        # fmt: on
        (file,) = Path(folder).rglob("profile_export_aiperf.json")
        report = json.loads(file.read_text(encoding="utf-8"))

    def value(name: str, kind: str = "avg") -> float | None:
        return report[name][kind] if name in report else None

    return {
        "requests": value("request_count"),
        "errors": value("error_request_count") or 0,
        "tokens/s": value("output_token_throughput"),
        "TTFT ms": value("time_to_first_token", "p50"),
        "p99": value("time_to_first_token", "p99"),
        "ITL ms": value("inter_token_latency", "p50"),
        "tokens a round": value("spec_decode_token_weighted_acceptance_length"),
        "acceptance": value("spec_decode_overall_draft_acceptance_rate"),
    }


def guidellm(url: str, clients: int, args: argparse.Namespace) -> Figures:
    """Its own figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        backend = f"kind=openai_http,target={url},model=builtin,request_format=/v1/chat/completions"
        data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"
        # fmt: off
        program(args.guidellm, "guidellm", "run", "--backend", backend,
                "--profile", f"kind=concurrent,streams=[{clients}]",
                "--constraint", f"kind=max_requests,count={args.requests}",
                "--tokenizer", f"kind=hf_auto,model={args.tokenizer}", "--data", data,
                "--output", f"kind=json,path={out}", "--disable-console")
        # fmt: on
        (run,) = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    report: dict[str, Any] = run["metrics"]

    def value(name: str, kind: str = "median") -> float:
        found = report[name]["successful"]
        return float(found["percentiles"]["p99"] if kind == "p99" else found[kind])

    return {
        "requests": report["request_totals"]["successful"],
        "errors": report["request_totals"]["errored"],
        "tokens/s": value("output_tokens_per_second", "mean"),
        "TTFT ms": value("time_to_first_token_ms"),
        "p99": value("time_to_first_token_ms", "p99"),
        "ITL ms": value("inter_token_latency_ms"),
        "tokens a round": None,
        "acceptance": None,
    }


PROGRAMS: dict[str, Callable[[str, int, argparse.Namespace], Figures]] = {"aiperf": aiperf, "guidellm": guidellm}


def line(cells: list[Any]) -> str:
    """Of a table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def shown(value: float | None) -> str:
    """Three digits, and nothing for what was not told."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, help="a Python that has aiperf")
    parser.add_argument("--guidellm", type=Path, help="a Python that has guidellm")
    parser.add_argument("--target", default="builtin", help="a model")
    parser.add_argument("--tokenizer", type=Path, help="folder of its tokenizer; the built-in one by default")
    parser.add_argument("--drafters", nargs="*", default=["none", "auto"])
    parser.add_argument("--controller", default="auto")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--requests", type=int, default=16)
    args = parser.parse_args()
    chosen = {name: run for name, run in PROGRAMS.items() if getattr(args, name) is not None}
    if not chosen:
        parser.error("give --aiperf, --guidellm or both")
    args.tokenizer = args.tokenizer or Path(__file__).parents[1] / "src" / "foretoken" / "zoo" / "target"
    TARGET[:] = [args.target]
    lines = [line(["program", "drafter", "clients", *HEAD]), line(["---"] * (3 + len(HEAD)))]
    for drafter in args.drafters:
        with served("--drafter", drafter, "--controller", args.controller, "--max-running", "32") as (_, url):
            for clients in map(int, args.concurrency.split(",")):
                for name, run in chosen.items():
                    figures = run(url, clients, args)
                    lines.append(line([name, drafter, clients, *(shown(figures[key]) for key in HEAD)]))
                    print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
