"""Makes the README's generated parts: pictures, the demo's output, the tables.

    python docs/make_readme.py                                  # pictures and demo; figures as they were kept
    python docs/make_readme.py --only real drafters             # some parts
    python docs/make_readme.py --real a.json b.json             # figures of new runs of benchmarks/real_models.py
    python docs/make_readme.py --runs run-a.jsonl run-b.jsonl   # figures of new runs of foretoken bench

The picture and the demo show ``smollm2`` where it has been fetched (``foretoken models``), else the built-in model.
A part stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``; the README decides which it has.  The figures
of runs are kept in ``docs/figures/speeds.json`` and ``docs/figures/real_models.json``, so that the tables can be
written again without the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.cli.demo import NAME, PROMPT
from foretoken.io.named_models import MODELS

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
SPEEDS = FIGURES / "speeds.json"
REAL = FIGURES / "real_models.json"
BUILTIN = ("show", "def read_lines(path):", "--drafter", "model,tree=3x2x1", "--verifier", "without_replacement",
           "--temperature", "1", "--seed", "3", "--max-new-tokens", "40")  # fmt: skip
SHOWN = ("show", NAME, PROMPT, "--drafter", "suffix", "--max-new-tokens", "48")
REAL_KEYS = ("machine", "environment", "model", "prompts", "new_tokens", "speed")
COLUMNS = 104
"""Width of the recorded terminal, in letters."""
ALT = "tokens appear round by round, green where a draft was accepted; then the trees of the first rounds"


# -- parts -----------------------------------------------------------------------------------------------------------


def picture() -> str:
    """A real round: tree, accepted path, ribbon."""
    shown = SHOWN if MODELS[NAME].is_cached else BUILTIN
    foretoken(*shown, "--out", str(FIGURES / "readme.svg"))
    return "![A real round: what was guessed, accepted, and why the rest was rejected](docs/figures/readme.svg)"


def demo() -> str:
    """What the demo printed, shortened to the question, the first answer and the figures."""
    printed = re.sub(r"\n{3,}", "\n\n", foretoken("demo").strip())
    return f"```console\n$ make demo\n{printed}\n```"


def recording() -> str:
    """``--explain`` recorded in a terminal, as an animated picture."""
    import terminal

    arguments = ("generate", *BUILTIN[1:2], "--drafter", "model,k=4", "--max-new-tokens", "64", "--explain")
    words = " ".join(f'"{word}"' if " " in word else word for word in ("foretoken", *arguments))
    command = (sys.executable, "-m", "foretoken", *arguments)
    terminal.recording(command, words, FIGURES / "terminal.svg", COLUMNS, "foretoken generate --explain", os.environ)
    return f"![A terminal: {ALT}](docs/figures/terminal.svg)"


def drafters() -> str:
    """The table "which drafter", which is the site's."""
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    found = re.search(r"^## Which drafter\?\n\n(\|.*?)\n\n", page, re.M | re.S)
    if found is None:
        raise ValueError("docs/index.md has no table under '## Which drafter?'")
    return found[1]


def speeds() -> str:
    """Speed-ups over plain decoding, a column per run and category; below it what was run.

    Raises:
        ValueError: no figures are kept yet.
    """
    if not SPEEDS.is_file():
        raise ValueError("no figures yet: give runs of foretoken bench with --runs")
    return table(json.loads(SPEEDS.read_text(encoding="utf-8")))


def real() -> str:
    """Tokens per second of real models, a column per model and temperature.

    Raises:
        ValueError: no figures are kept yet.
    """
    if not REAL.is_file():
        raise ValueError("no figures yet: give runs of benchmarks/real_models.py with --real")
    return real_table(json.loads(REAL.read_text(encoding="utf-8")))


PARTS: dict[str, Callable[[], str]] = {
    "picture": picture,
    "demo": demo,
    "recording": recording,
    "drafters": drafters,
    "speeds": speeds,
    "real": real,
}


# -- figures of runs -------------------------------------------------------------------------------------------------


def figures_of(files: Sequence[Path]) -> list[dict[str, Any]]:
    """What the table needs of runs of ``foretoken bench``.

    Raises:
        ValueError: an unfinished run, or an output that differs from plain decoding's.
    """
    from foretoken.bench.report.read import read_run

    found = []
    for file in files:
        run = read_run(file)
        if not run.summary:
            raise ValueError(f"{file} is unfinished: go on with foretoken bench --resume")
        cells = [c for c in run.cells if (c["temperature"], c["batch"]) == run.settings[0]]
        machine, settings = run.part("machine"), run.part("settings")
        wrong = [c["arm"] for c in cells if c.get("identical") is False and ":" not in c["arm"]]
        if wrong and machine["dtype"] != "bfloat16":  # where near-ties fall differently in calls of other shapes
            raise ValueError(f"{file}: the output of {wrong[0]} differs from plain decoding's")
        found.append(
            {
                "machine": cpu_of(machine),
                "target": run.summary.get("target"),
                "dtype": machine["dtype"],
                "threads": machine["threads"]["torch_threads"],
                "versions": machine["versions"],
                "temperature": run.settings[0][0],
                "prompts": settings["prompts"]["categories"],
                "new_tokens": settings["max_new_tokens"],
                "commit": commit(),
                "speedups": {c["category"]: {} for c in cells},
            }
        )
        for cell in cells:
            interval = cell.get("speedup_ci95") or [None, None]
            found[-1]["speedups"][cell["category"]][cell["arm"]] = [cell["speedup"], *interval]
    return found


def cpu_of(machine: Mapping[str, Any]) -> str:
    """The processor with the matrix instructions that decide its speed."""
    flags = machine["hardware"].get("cpu_flags", ())
    best = next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags), "")
    return f"{machine['hardware']['cpu']}, {machine['hardware']['cores']} cores{f', {best}' if best else ''}"


def commit() -> str:
    """The commit that is checked out."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row per way of decoding, a column per run and category, and a footnote per run.

    Of arms that differ in their options only (``model,k=4`` and ``model,k=6``) a cell has the faster one.
    """
    columns = [(i, category) for i, run in enumerate(runs) for category in run["speedups"]]
    ways = dict.fromkeys(_way(arm) for i, category in columns for arm in runs[i]["speedups"][category])
    heads = [f"{category} [{i + 1}]" for i, category in columns]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| `{way}` | {' | '.join(_cell(runs, way, columns))} |" for way in ways if way != "plain"]
    notes = [f"[{i + 1}] {_note(run)}" for i, run in enumerate(runs)]
    return "\n".join([*lines, "", "  \n".join(notes)])


def _way(arm: str) -> str:
    """An arm without its options."""
    return arm.split(",")[0]


def _cell(runs: Sequence[Mapping[str, Any]], way: str, columns: Sequence[tuple[int, str]]) -> Iterator[str]:
    for i, category in columns:
        found = [one for arm, one in runs[i]["speedups"][category].items() if _way(arm) == way]
        if not found:
            yield ""
            continue
        value, low, high = max(found, key=lambda one: float(one[0]))
        yield f"{value:.2f}" if low is None or low == high else f"{value:.2f} ({low:.2f} to {high:.2f})"


def _note(run: Mapping[str, Any]) -> str:
    prompts = ", ".join(f"{count} {name}" for name, count in run["prompts"].items())
    sampling = "greedy" if not run["temperature"] else f"T = {run['temperature']:g}"
    versions = " ".join(f"{name} {run['versions'][name]}" for name in ("torch", "transformers"))
    arms = ", ".join(f"`{arm}`" for arm in next(iter(run["speedups"].values())) if "," in arm)
    ties = "; in bfloat16 near-ties fall differently in calls of other shapes" if run["dtype"] == "bfloat16" else ""
    return (
        f"{run['machine']}, {run['threads']} threads; {run['target']}, {run['dtype']}, {sampling}; prompts: {prompts}; "
        f"{run['new_tokens']} tokens each{f'; {arms}' if arms else ''}; {versions}; commit {run['commit']}{ties}. "
        "Ratio to plain decoding in the same run, 95 % interval over prompts where it was kept."
    )


def real_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row per way of decoding, a column per model and temperature, and a line of conditions."""
    columns = [(run, heat) for run in runs for heat in run["speed"]]
    ways = dict.fromkeys(way for run, heat in columns for way in run["speed"][heat])
    heads = [f"{run['title']}, {'greedy' if float(heat) == 0 else f'T={float(heat):g}'}" for run, heat in columns]
    lines = [f"| tokens/s | {' | '.join(heads)} |", f"|---|{'---|' * len(columns)}"]
    for way in sorted(ways, key=lambda name: (_engine(name) == "foretoken", _engine(name))):
        rates = [run["speed"][heat].get(way) for run, heat in columns]
        best = [rate is not None and rate == max(run["speed"][heat].values())
                for rate, (run, heat) in zip(rates, columns, strict=True)]  # fmt: skip
        cells = ["" if rate is None else f"{'**' if top else ''}{rate:.0f}{'**' if top else ''}"
                 for rate, top in zip(rates, best, strict=True)]  # fmt: skip
        lines.append(f"| {_engine(way)} {_named(way)} | {' | '.join(cells)} |")
    machines = "; ".join(dict.fromkeys(str(run["machine"]) for run in runs))
    prompts = " and ".join(
        dict.fromkeys(f"{run['prompts']} conversations of {run['new_tokens']} tokens" for run in runs)
    )
    return "\n".join(
        [*lines, "", f"{machines}, 2 threads; {prompts}, arms in turns, prompt included, medians; same files."]
    )


def _engine(way: str) -> str:
    first = way.split()[0]
    return {"transformers": "Transformers", "llama.cpp": "llama.cpp"}.get(first, "foretoken")


def _named(way: str) -> str:
    words = way.removeprefix("transformers ").removeprefix("llama.cpp ")
    return words if words != way or way == "plain" else f"`{way}`"


# -- the README ------------------------------------------------------------------------------------------------------


def foretoken(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """What a command printed.

    Raises:
        RuntimeError: it failed; the message is its own.
    """
    done = subprocess.run(
        [sys.executable, "-m", "foretoken", *arguments], capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "100", **(env or {})},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


def filled(text: str, names: Sequence[str], parts: Mapping[str, Callable[[], str]]) -> str:
    """The README with these parts made anew.

    Raises:
        ValueError: a mark with a name that no part has, or without its end.
    """
    marks = re.findall(r"<!-- begin: (\w+) -->", text)
    unknown = [name for name in marks if name not in parts]
    if unknown:
        raise ValueError(f"the README names a part {unknown[0]!r}: choose one of {', '.join(parts)}")
    for name in marks:
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.S)
        if not pattern.search(text):
            raise ValueError(f"the part {name!r} has no end: write <!-- end: {name} -->")
        if not names or name in names:
            made = parts[name]()
            text = pattern.sub(lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text)
    return text


def main() -> None:
    """Write the README's parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, help="files of foretoken bench, one a machine")
    parser.add_argument("--real", nargs="+", type=Path, help="reports of benchmarks/real_models.py, one a model")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], help="make these parts only")
    arguments = parser.parse_args()
    if arguments.runs:
        SPEEDS.write_text(json.dumps(figures_of(arguments.runs), indent=1) + "\n", encoding="utf-8")
    if arguments.real:
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in arguments.real]
        kept = [{"title": r["source"], **{key: r[key] for key in REAL_KEYS}, "commit": commit()} for r in reports]
        REAL.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8"), arguments.only, PARTS), encoding="utf-8")


if __name__ == "__main__":
    main()
