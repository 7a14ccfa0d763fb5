"""R1 to R15 of ``docs/reliability.md``, one command for each, and one table of what they found.

    python benchmarks/reliability_table.py [R4 R8 ...] [--target MODEL] [--minutes 20] [--environments FOLDER]

Every command is printed before it runs, so that a line of the table can be made again by itself.  Those that measure
run on the target; those that are tests run on the built-in models.  R11 needs the extra ``ray`` and R12 a folder for
the clients' environments: without them the line says that it was not run.  Ends with 1 where a command failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        what: is done to the server.
        command: arguments of Python.
        figure: what the last line of JSON says in words; a test's last line is taken as it is.
        why_not: why it is not run, where it is not.
    """

    what: str
    command: tuple[str, ...]
    figure: Callable[[Found], str] | None = None
    why_not: str = ""


def measured(name: str, title: str, target: str, figure: Callable[[Found], str]) -> Row:
    """One of ``reliability.py``."""
    return Row(title, (str(HERE / "reliability.py"), name, "--target", target), figure)


def tests(title: str, *names: str) -> Row:
    """Tests of the repository."""
    return Row(title, (*TESTS, *names))


def rows(args: argparse.Namespace) -> dict[str, Row]:
    """All lines."""
    target, folder = args.target, args.environments
    has_ray = importlib.util.find_spec("ray") is not None
    hostile = (str(HERE / "hostile.py"), "--requests", str(args.requests), "--minutes", str(args.minutes))
    soak = (str(HERE / "soak.py"), "--minutes", str(args.minutes), "--target", target)
    lossless = (str(HERE / "http_lossless.py"), "--prompts", str(args.prompts), "--samples", str(args.samples))
    lossless += ("--target", target, "--dtype", "auto", "--drafters", args.drafters) if target != "builtin" else ()
    clients = (str(HERE / "clients.py"), "--environments", str(folder), "--target", target)
    clients += () if target == "builtin" else ("--drafter", "auto")
    return {
        "R1": Row("hostile requests", (*hostile, "--target", target), _hostile),
        "R2": tests("one of eight is poisoned", "tests/engine/test_isolation.py", "-k", "not memory"),
        "R3": measured("R3", "120 at once, 2 run and 4 wait", target, _overload),
        "R4": measured("R4", "20 clients leave a stream", target, _disconnect),
        "R5": measured("R5", "SIGTERM with a stream open", target, _drain),
        "R6": tests("the engine dies", "tests/server/test_lifecycle.py", "-k", "engine_that_dies"),
        "R7": tests(
            "out of memory", "tests/engine/test_isolation.py", "tests/server/test_lifecycle.py", "-k", "memory"
        ),
        "R8": Row(f"mixed load for {args.minutes:g} minutes", soak, _soak),
        "R9": measured("R9", "/health beside 16 requests", target, _health),
        "R10": Row("through HTTP and plainly", lossless, _lossless),
        "R11": Row("a replica is killed", (str(HERE / "scale.py"),), _replicas, "" if has_ray else "no Ray here"),
        "R12": Row("clients", clients, json.dumps, "" if folder else "give --environments"),
        "R13": tests("no unpickling, no asserts", "tests/test_supply_chain.py", "tests/server/test_without_asserts.py"),
        "R14": measured("R14", "starts that must fail", target, _starts),
        "R15": measured("R15", "limits and one beyond", target, _limits),
    }


def _hostile(found: Found) -> str:
    return f"{found['requests']} requests, {found['server_errors']} five-hundreds, {len(found['failures'])} failures"


def _overload(found: Found) -> str:
    statuses = ", ".join(f"{count} × {status}" for status, count in found["statuses"].items())
    return f"{statuses}; refused within {found['refused_ms_p50']} ms (median), {found['refused_ms_p99']} (p99)"


def _disconnect(found: Found) -> str:
    times = f"{found['freed_ms_p50']} ms (median), {found['freed_ms_max']} (most)"
    return f"free after {times}; a round takes {found['round_ms']} ms"


def _drain(found: Found) -> str:
    whole = "whole" if found["stream_finished"] else "broken"
    children = len(found["children_left"])
    return (
        f"not ready after {found['unready_ms']} ms, stream {whole}, exit code {found['exit_code']}, {children} children"
    )


def _soak(found: Found) -> str:
    counts, memory = found["counts"], found["rss_mb"]
    grown = f"{memory[1]} MB after a third, {memory[2]} at the end ({found['rss_mb_per_1000_requests']} per 1,000)"
    faults = "; ".join(found["wrong"]) or "nothing wrong"
    return f"{sum(counts.values())} requests, {grown}, /health p99 {found['health_ms']['p99']} ms, {faults}"


def _health(found: Found) -> str:
    times = found["health_ms"]
    return f"{times['p50']} ms (median), {times['p99']} (p99), {times['max']} (most), {found['tokens_per_s']} tokens/s"


def _lossless(found: Found) -> str:
    drafted = found["rows"]
    equal = {mode: sum(row[mode] for row in drafted) for mode in ("greedy", "seeded", "ties")}
    least = min(row["p_holm"] for row in drafted)
    counts = f"{equal['greedy']} greedy and {equal['seeded']} seeded texts equal, {equal['ties']} ties"
    return f"{len(drafted)} drafters, {found['prompts']} prompts: {counts}, p at least {least}"


def _starts(found: Found) -> str:
    starts = found["code_seconds_lines_traceback"]
    good = sum(code == 2 and lines == 1 and not trace for code, _, lines, trace in starts.values())
    slowest = max(seconds for _, seconds, _, _ in starts.values())
    return f"{good} of {len(starts)} end with code 2 and one line, the slowest after {slowest} s"


def _limits(found: Found) -> str:
    limits = found["status_and_rss_mb"]
    outcomes, sizes = zip(*limits.values(), strict=True)
    return f"{', '.join(map(str, outcomes))}; memory +{max(sizes)} MB"


def run(row: Row, log: Path | None) -> tuple[bool, str]:
    """Whether a command succeeded, and its figure."""
    print(f"$ python {shlex.join(row.command)}", file=sys.stderr, flush=True)
    path = os.pathsep.join(filter(None, (str(HERE.parent / "src"), os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *row.command]
    process = subprocess.run(command, env=env, capture_output=True, text=True, cwd=HERE.parent)
    if log is not None:
        with log.open("a") as file:
            file.write(f"$ {shlex.join(row.command)}\n{process.stdout}{process.stderr}\n")
    lines = [line for line in process.stdout.splitlines() if line.strip()] or ["nothing was printed"]
    if row.figure is None:
        return process.returncode == 0, lines[-1].strip(" =")
    try:
        return process.returncode == 0, row.figure(json.loads(_last_object(lines)))
    except (ValueError, KeyError, TypeError):
        return False, (process.stderr.strip().splitlines() or lines)[-1][:200]


def _last_object(lines: list[str]) -> str:
    """The last JSON object of an output, in one line or in several."""
    first = max((number for number, line in enumerate(lines) if line.startswith("{")), default=len(lines) - 1)
    return "\n".join(lines[first:])


def _replicas(found: Found) -> str:
    """What R11 found."""
    kill = found["kill"]
    return f"{kill['failed']} of {kill['calls']} calls failed, two replicas again after {kill['two_again_s']:.1f} s"


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], help="R1 to R15; all by default")
    parser.add_argument("--target", default="builtin", help="a model")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the soak, and the most of R1")
    parser.add_argument("--requests", type=int, default=5000, help="of R1")
    parser.add_argument("--prompts", type=int, default=200, help="of R10")
    parser.add_argument("--samples", type=int, default=400, help="of R10")
    parser.add_argument("--drafters", default="ngram|quantized,k=4", help="of R10, where the target is not built in")
    parser.add_argument("--environments", type=Path, help="folder for R12's clients")
    parser.add_argument("--out", type=Path, help="what all commands printed, in full")
    args = parser.parse_args()
    table = rows(args)
    unknown = [name for name in args.names if name not in table]
    if unknown:
        parser.error(f"there is no {unknown[0]}: choose from {', '.join(table)}")
    lines, failed = ["| | what | figure | seconds |", "|---|---|---|---|"], 0
    for name in args.names or table:
        row, start_s = table[name], time.monotonic()
        passed, figure = (True, f"not run: {row.why_not}") if row.why_not else run(row, args.out)
        failed += not passed
        figure = figure if passed else f"**failed**: {figure}"
        lines.append(f"| {name} | {row.what} | {figure.replace('|', '/')} | {time.monotonic() - start_s:.0f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
