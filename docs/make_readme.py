"""Makes the README's generated parts: pictures, the demo's output, the tables.

    python docs/make_readme.py                                  # pictures and demo; figures as they were kept
    python docs/make_readme.py --only chinese                   # the Chinese page alone, with what the README has
    python docs/make_readme.py --only real drafters             # some parts
    python docs/make_readme.py --real a.json b.json             # figures of new runs of benchmarks/real_models.py

The picture and the demo show ``smollm2`` where it has been fetched (``foretoken models``), else the built-in model.
A part stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``; the README decides which it has.  The figures
of runs are kept in ``docs/figures/real_models.json``, so that the table can be written again without the runs.  The
recording of a terminal is the site's.  The Chinese page has the README's picture, demo and figures: never others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.cli.demo import NAME, PROMPT
from foretoken.core.io.named_models import MODELS

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
REAL = FIGURES / "real_models.json"
README, CHINESE = ROOT / "README.md", ROOT / "docs" / "zh" / "README.md"
BUILTIN = ("show", "def read_lines(path):", "--drafter", "model,tree=3x2x1", "--verifier", "without_replacement",
           "--temperature", "1", "--seed", "3", "--max-new-tokens", "40")  # fmt: skip
SHOWN = ("show", NAME, PROMPT, "--drafter", "suffix", "--max-new-tokens", "48", "--round", "2")
REAL_KEYS = ("machine", "environment", "model", "prompts", "new_tokens", "speed")
WORDS = {
    "head": "tokens/s", "greedy": "greedy", "heat": "T={:g}", "plain": "plain decoding", "best": "its best",
    "with": "{1} ({0})", "over": "best over theirs", "comma": ", ", "prompts": "{} conversations of {} tokens",
    "said": "Two threads; {}; all ways in turns in one run, prompt included, medians. Transformers and llama.cpp: "
            "plain decoding or prompt lookup, whichever is faster; llama.cpp reads the same file. Rounding is undone "
            "in the bfloat16 weights, which come from the 4-bit file: a copy in 4 bits would be almost the model "
            "([`quantized`](docs/methods/quantized.md)). Code of {}.",
}  # fmt: skip
"""Of the table of real models."""
CHINESE_WORDS = {
    "head": "每秒 token 数", "greedy": "贪心", "heat": "T={:g}", "plain": "普通解码", "best": "最快的方法",
    "with": "{1}（{0}）", "over": "与对方最快之比", "comma": "，", "prompts": "{} 段对话、每段 {} 个 token",
    "said": "2 个线程；{}；各方在同一次运行中轮流进行，含提示，取中位数。"
            "Transformers 和 llama.cpp 取普通解码与 prompt lookup 中较快者；llama.cpp 读同一个文件。"
            "bfloat16 权重来自 4 位文件，并加回了舍入噪声，否则 4 位副本几乎就是模型自身"
            "（[`quantized`](../methods/quantized.md)）。代码版本：{}。",
}  # fmt: skip
COLUMNS = 104
"""Width of the recorded terminal, in letters."""
ALT = "tokens appear round by round, green where a draft was accepted; then the trees of the first rounds"


# -- parts -----------------------------------------------------------------------------------------------------------


def picture() -> str:
    """A real round: tree, accepted path, ribbon."""
    shown = SHOWN if MODELS[NAME].is_cached else BUILTIN
    foretoken(*shown, "--out", str(FIGURES / "readme.svg"))
    return "![A real round: what was guessed and accepted, and why](docs/figures/readme.svg)"


def demo() -> str:
    """What the demo printed, shortened to the question, the first answer and the figures."""
    return f"```console\n$ make demo\n{shortened(foretoken('demo'))}\n```"


def shortened(printed: str) -> str:
    """What was printed without rules and empty lines, and without a long line that comes again and its heading."""
    lines: list[str] = []
    for line in printed.splitlines():
        said = line.rstrip("─ ")
        if len(said) > COLUMNS and said in lines:
            lines.pop()
        elif said:
            lines.append(said)
    return "\n".join(lines)


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


def real() -> str:
    """Tokens per second of real models, a row per machine, model and temperature.

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
    "real": real,
}


# -- figures of runs -------------------------------------------------------------------------------------------------


def commit() -> str:
    """The commit that is checked out."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def real_table(runs: Sequence[Mapping[str, Any]], words: Mapping[str, str] = WORDS) -> str:
    """A row per machine, model and temperature, the ways of decoding side by side, and a line of conditions."""
    theirs = ("Transformers", "llama.cpp")
    heads = [words["head"], *theirs, f"foretoken {words['plain']}", "`auto`", words["best"], words["over"]]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---|' * (len(heads) - 1)}"]
    for run in runs:
        for heat, speed in run["speed"].items():
            rates = {
                name: max((rate for way, rate in speed.items() if _engine(way) == name), default=None)
                for name in theirs
            }
            ours = {way: rate for way, rate in speed.items() if _engine(way) == "foretoken"}
            best = max((way for way in ours if way != "plain"), key=lambda way: ours[way])
            rival = max((rate for rate in rates.values() if rate is not None), default=None)
            warm = words["greedy"] if float(heat) == 0 else words["heat"].format(float(heat))
            cells = [
                words["with"].format(_cpu(run["machine"]), f"{run['title']}{words['comma']}{warm}"),
                *(_rate(rates[name]) for name in theirs), _rate(ours.get("plain")), _rate(ours.get("auto")),
                f"{ours[best]:.0f} (`{best}`)", "" if rival is None else f"**{ours[best] / rival:.1f}**",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    counts = [_span([run[key] for run in runs]) for key in ("prompts", "new_tokens")]
    code = dict.fromkeys(f"{run['commit']} ({_cpu(run['machine'])})" for run in runs)
    return "\n".join([*lines, "", words["said"].format(words["prompts"].format(*counts), words["comma"].join(code))])


def _engine(way: str) -> str:
    return {"transformers": "Transformers", "llama.cpp": "llama.cpp"}.get(way.split()[0], "foretoken")


def _cpu(machine: str) -> str:
    """``Intel Xeon, AMX`` of a machine in words: its name and the widest of its instruction sets."""
    name, _, sets = machine.replace("(R)", "").replace(" Processor", "").partition(", x86_64 with ")
    return f"{name}, {sets.split(', ')[0]}" if sets else name


def _span(counts: Sequence[int]) -> str:
    return "-".join(str(count) for count in sorted({min(counts), max(counts)}))


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0f}"


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


def part_of(text: str, name: str) -> str:
    """What stands in a part of a page.

    Raises:
        ValueError: the page has no such part.
    """
    found = re.search(rf"<!-- begin: {name} -->\n(.*?)\n?<!-- end: {name} -->", text, re.S)
    if found is None:
        raise ValueError(f"there is no part {name!r}")
    return found[1]


def chinese(page: str, readme: str) -> str:
    """The Chinese page with the README's picture, demo and figures."""
    runs = json.loads(REAL.read_text(encoding="utf-8"))
    parts = {
        "picture": lambda: "![一轮真实的投机解码：猜了什么，接受了什么，为什么](../figures/readme.svg)",
        "demo": lambda: part_of(readme, "demo"),
        "real": lambda: real_table(runs, CHINESE_WORDS),
    }
    return filled(page, (), parts)


def main() -> None:
    """Write the README's parts, and after them the Chinese page's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", nargs="+", type=Path, help="reports of benchmarks/real_models.py, one a model")
    names = [*PARTS, "chinese"]
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="make these parts only")
    arguments = parser.parse_args()
    if arguments.real:
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in arguments.real]
        kept = [{"title": r["source"], **{key: r[key] for key in REAL_KEYS}, "commit": commit()} for r in reports]
        REAL.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    readme = filled(README.read_text(encoding="utf-8"), arguments.only, PARTS)
    README.write_text(readme, encoding="utf-8")
    CHINESE.write_text(chinese(CHINESE.read_text(encoding="utf-8"), readme), encoding="utf-8")


if __name__ == "__main__":
    main()
