"""Compares two commits of foretoken on one machine: is the second slower, and does it write the same?

Each commit is checked out into a folder of its own and loaded once, in a process of its own.  Both answer the same
prompts in turns (A B, then B A, ...), plain and with the drafter, greedy or with a seed; a process that is not asked
waits and computes nothing.  A figure is the median over runs of a prompt's tokens per second; the ratio is the median
over prompts, with a bootstrapped 95 % interval.

    python benchmarks/two_commits.py BEFORE AFTER [--model builtin] [--drafter ngram] [--prompts 8] [--new-tokens 64]
                                     [--repeat 5] [--dtype float32] [--temperature 0] [--top-k 0] [--top-p 1]
                                     [--together 1] [--fail-below 0.97] [--texts-may-differ] [--out FILE]

With ``--together N`` so many requests of each prompt, with seeds of their own, are one batch.

Exit code 1: the second commit is slower than ``--fail-below`` (its whole interval is), or texts differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prompts import CODE, PROSE

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [prompt for pair in zip(CODE, PROSE, strict=True) for prompt in pair]
RESAMPLES = 2000


# -- in the process of a commit --------------------------------------------------------------------------------------


def work(model: str, drafter: str, dtype: str | None) -> None:
    """Answer requests on standard input, a line each, on what was standard output; the library may print elsewhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import foretoken as ft

    options = {"generation_config": None, "prefix_cache": False, **({"dtype": dtype} if dtype else {})}
    llm = ft.load(model, drafter=drafter, **options)  # type: ignore[arg-type]
    arms = {"plain": llm.plain, "drafter": llm}
    answers.write(json.dumps({"version": ft.__version__, "file": ft.__file__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        start_s = time.perf_counter()
        outs = arms[asked["arm"]].generate(asked["prompts"], **asked["options"])
        seconds = time.perf_counter() - start_s
        answers.write(json.dumps({"token_ids": [token for out in outs for token in out.token_ids], "seconds": seconds}))
        answers.write("\n")
        answers.flush()


# -- both of them ----------------------------------------------------------------------------------------------------


@dataclass
class Commit:
    """One commit and the process that runs it.

    Attributes:
        name: as it was given.
        sha: what that means.
        options: of a request.
        together: requests of a prompt.
        rates: tokens per second by arm and prompt, a run each.
        texts: token ids by arm and prompt; those of all runs, where they differ.
    """

    name: str
    sha: str
    process: subprocess.Popen[str]
    options: Mapping[str, float]
    together: int
    rates: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    texts: dict[tuple[str, int], set[tuple[int, ...]]] = field(default_factory=dict)

    def hello(self) -> dict[str, Any]:
        """What the process says once it has loaded the model.

        Raises:
            RuntimeError: it ended before.
        """
        return self._line()

    def ask(self, arm: str, index: int) -> None:
        """One run of a prompt."""
        if self.process.stdin is None:
            raise RuntimeError(f"{self.name} has no standard input")
        seeds = [*range(self.together)]
        asked = {"prompts": [PROMPTS[index]] * self.together, "options": {**self.options, "seed": seeds}}
        self.process.stdin.write(json.dumps({"arm": arm, **asked}) + "\n")
        self.process.stdin.flush()
        found = self._line()
        self.rates.setdefault((arm, index), []).append(len(found["token_ids"]) / found["seconds"])
        self.texts.setdefault((arm, index), set()).add(tuple(found["token_ids"]))

    def _line(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}; what it said stands above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def checked_out(name: str, folder: Path, repository: Path) -> Iterator[str]:
    """A commit in a folder; gives its full name.

    Raises:
        ValueError: git does not know it.
    """
    git = ["git", "-C", str(repository)]
    said = subprocess.run([*git, "rev-parse", "--verify", f"{name}^{{commit}}"], capture_output=True, text=True)
    if said.returncode:
        raise ValueError(f"no such commit: {name}")
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(folder), said.stdout.strip()], check=True)
    try:
        yield said.stdout.strip()
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], check=True)


@contextlib.contextmanager
def started(name: str, sha: str, folder: Path, asked: argparse.Namespace) -> Iterator[Commit]:
    """A commit's process."""
    env = {**os.environ, "PYTHONPATH": str(folder / "src"), "HF_HUB_OFFLINE": "1"}
    given = (asked.model, asked.drafter, asked.dtype or "")
    command = [sys.executable, str(Path(__file__).resolve()), "--work", *given]
    options = {name: getattr(asked, name) for name in ("temperature", "top_k", "top_p")}
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Commit(name, sha, process, {**options, "max_new_tokens": asked.new_tokens}, asked.together)
    finally:
        process.kill()
        process.wait()


def measured(commits: Sequence[Commit], prompts: int, repeat: int) -> None:
    """Warm both up, then let them take turns; who begins changes from run to run."""
    for commit in commits:
        for arm in ("plain", "drafter"):
            commit.ask(arm, 0)
        commit.rates.clear()
    for run in range(repeat):
        for index in range(prompts):
            for arm in ("plain", "drafter"):
                for commit in commits if (run + index) % 2 == 0 else reversed(commits):
                    commit.ask(arm, index)


def verdict(before: Commit, after: Commit, prompts: int) -> dict[str, Any]:
    """Per arm the speeds, the ratio with its interval, and how many texts are the same in all runs of both."""
    found: dict[str, Any] = {}
    for arm in ("plain", "drafter"):
        old, new = ([statistics.median(one.rates[arm, i]) for i in range(prompts)] for one in (before, after))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        found[arm] = {
            "before_tokens_per_s": statistics.median(old),
            "after_tokens_per_s": statistics.median(new),
            "ratio": statistics.median(ratios),
            "ratio_ci95": interval(ratios),
            "same_texts": sum(len(before.texts[arm, i] | after.texts[arm, i]) == 1 for i in range(prompts)),
            "prompts": prompts,
        }
    return found


def interval(values: Sequence[float]) -> list[float]:
    """The 95 % interval of the median, bootstrapped with a fixed seed."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return [medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]]


def complaints(found: Mapping[str, Any], fail_below: float | None, texts_may_differ: bool) -> list[str]:
    """What makes the second commit worse, a line each."""
    lines = []
    for arm, row in found.items():
        if fail_below is not None and row["ratio_ci95"][1] < fail_below:
            lines.append(f"{arm}: {row['ratio']:.3f} of the speed before, and {fail_below:g} is asked for")
        if row["same_texts"] < row["prompts"] and not texts_may_differ:
            lines.append(f"{arm}: {row['prompts'] - row['same_texts']} of {row['prompts']} texts differ")
    return lines


def compare(options: argparse.Namespace, repository: Path) -> dict[str, Any]:
    """Check both out, load them, let them take turns."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        commits = []
        for place, name in (("before", options.before), ("after", options.after)):
            sha = stack.enter_context(checked_out(name, folder / place, repository))
            commits.append(stack.enter_context(started(name, sha, folder / place, options)))
            said = commits[-1].hello()
            if not Path(said["file"]).resolve().is_relative_to((folder / place).resolve()):
                raise RuntimeError(f"{name} ran {said['file']}, which is not its own source")
        measured(commits, options.prompts, options.repeat)
        found = verdict(commits[0], commits[1], options.prompts)
    shas = {"before": commits[0].sha, "after": commits[1].sha}
    names = (
        "model",
        "drafter",
        "dtype",
        "prompts",
        "new_tokens",
        "repeat",
        "temperature",
        "top_k",
        "top_p",
        "together",
    )
    asked = {name: getattr(options, name) for name in names}
    return {**shas, "asked": asked, "cpu": cpu(), "load": os.getloadavg()[0], "arms": found}


def cpu() -> str:
    """The processor's name and its matrix instructions."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    has = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {flag} " in text]
    return f"{names[0] if names else 'unknown'}, {has[0] if has else 'no matrix instructions known'}"


def main(arguments: Sequence[str] | None = None, repository: Path = ROOT) -> int:
    """Compare, print, and say by the exit code whether the second commit is worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", type=int, default=8, choices=range(1, len(PROMPTS) + 1), metavar="1..20")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--fail-below", type=float)
    parser.add_argument("--texts-may-differ", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    try:
        found = compare(options, repository)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for arm, row in found["arms"].items():
        low, high = row["ratio_ci95"]
        speeds = f"{row['before_tokens_per_s']:.1f} -> {row['after_tokens_per_s']:.1f} tokens/s"
        same = f"{row['same_texts']} of {row['prompts']} texts the same"
        print(f"{arm:8} {row['ratio']:.3f} ({low:.3f} to {high:.3f})  {speeds}; {same}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    worse = complaints(found["arms"], options.fail_below, options.texts_may_differ)
    print("\n".join(worse), file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], sys.argv[4] or None)
    else:
        sys.exit(main())
