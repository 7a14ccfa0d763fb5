"""Does drafting during verification pay here?  A target, a draft model, three arms in turns, and what a plan says.

    OMP_NUM_THREADS=1 python benchmarks/ahead.py TARGET DRAFT [--k 4] [--fanout 2] [--prompts 4] [--tokens 64]

Measures v(n), c, the contention factor of a target's call beside a draft call, and how often the target's token is the
drafter's first, second, ... candidate: greedy, in the race on the request's noise, and after a rejection.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any

import numpy as np
import torch

import foretoken as ft
from foretoken.core.costs import TargetCost
from foretoken.lab.plan.ahead import ahead_row
from foretoken.lab.plan.assumptions import Assumptions, Measured
from foretoken.lab.plan.speedup import SUM_TOLERANCE
from foretoken.models.base import Feed, LanguageModel

TEXTS = [
    "Write a function that returns the n-th Fibonacci number, and explain it.",
    "Explain in a few sentences why the sky is blue.",
    "def read_lines(path):\n",
    "Give three tips for learning a new language.",
]
RANKS = 6


def race_positions(
    p: Sequence[float], q: Sequence[float], count: int, trials: int = 4000, seed: int = 0
) -> list[float]:
    """Chances that the target's token is the first, second, ... of the drafter's race on the same noise.

    The noise belongs to the request (:mod:`foretoken.core.noise`), so that the drafter can run the target's own race
    with its q: what it ranks second is what follows if the first is rejected.

    Args:
        p: the target's distribution [V].
        q: the drafter's.
        count: candidates.
        trials: races that are run.
        seed: of their noise.

    Raises:
        ValueError: no distributions of one vocabulary.
    """
    target, drafter = _distributions(p, q)
    noise = np.random.default_rng(seed).exponential(size=(trials, len(target)))
    with np.errstate(divide="ignore", invalid="ignore"):
        right = np.where(target > 0, noise / target, np.inf).argmin(1)
        ranked = np.where(drafter > 0, noise / drafter, np.inf)
    better = (ranked < np.take_along_axis(ranked, right[:, None], 1)).sum(1)
    guessed = np.isfinite(np.take_along_axis(ranked, right[:, None], 1)[:, 0])
    return [float(((better == place) & guessed).mean()) for place in range(count)]


def residual_positions(p: Sequence[float], q: Sequence[float], count: int) -> list[float]:
    """The same under the rule of rejection: the chance that a token drawn from q is accepted, and then, for a token
    that comes from the rest max(p - q, 0), the chances of the drafter's best other tokens.

    Args:
        p: the target's distribution [V].
        q: the drafter's.
        count: candidates, the drawn token among them.

    Raises:
        ValueError: no distributions of one vocabulary.
    """
    target, drafter = _distributions(p, q)
    rest = np.maximum(target - drafter, 0.0)
    lost = np.maximum(drafter - target, 0.0)  # drawn and rejected, by token
    total = float(rest.sum())
    found = [1.0 - total] + [0.0] * (count - 1)
    order = np.argsort(-drafter, kind="stable")
    for x in np.flatnonzero(lost):
        others = order[order != x][: count - 1]
        for place, y in enumerate(others, 1):
            found[place] += float(lost[x]) * float(rest[y]) / total
    return found[:count]


def _distributions(p: Sequence[float], q: Sequence[float]) -> tuple[Any, Any]:
    target, drafter = np.asarray(p, float), np.asarray(q, float)
    for values in (target, drafter):
        if values.ndim != 1 or values.shape != target.shape or (values < 0).any():
            raise ValueError("p and q must be distributions over the same tokens")
        if abs(float(values.sum()) - 1.0) > SUM_TOLERANCE:
            raise ValueError(f"a distribution sums to 1, not to {float(values.sum()):g}")
    return target, drafter


def seconds(call: Callable[[], Any], turns: int = 12) -> float:
    """The median of a call."""
    found = []
    for _ in range(turns + 2):
        start_s = perf_counter()
        call()
        found.append(perf_counter() - start_s)
    return median(found[2:])


def calls(model: LanguageModel, text: list[int]) -> Callable[[int], Callable[[], None]]:
    """Forwards of n rows behind a text, nothing of which is kept."""
    sequence = model.open()
    model.prefill(sequence, text)

    def of(rows: int) -> Callable[[], None]:
        def call() -> None:
            model.forward([Feed(sequence, [5] * rows)])
            model.commit(sequence, ())

        return call

    return of


def contention(target: Callable[[], None], draft: Callable[[], None]) -> tuple[float, float]:
    """How much slower a target's call is while draft calls run in a second thread, and those beside it."""
    alone, draft_alone, stop, count = seconds(target), seconds(draft), Event(), [0]

    def beside() -> None:
        while not stop.is_set():
            draft()
            count[0] += 1

    thread = Thread(target=beside)
    thread.start()
    start_s = perf_counter()
    together = seconds(target)
    spent = perf_counter() - start_s
    stop.set()
    thread.join()
    return together / alone, spent / max(count[0], 1) / draft_alone


@torch.inference_mode()
def ranks(target: LanguageModel, draft: LanguageModel, texts: list[list[int]]) -> dict[str, list[float]]:
    """Chances of candidates at every place of texts that the target wrote, by the way in which requests sample."""
    found: dict[str, list[list[float]]] = {"greedy": [], "race": [], "residual": []}
    for text in texts:
        rows = []
        for model in (target, draft):
            sequence = model.open()
            rows.append(model.forward([Feed(sequence, text)])[0].logits[len(text) // 2 :: 4].double())
            model.release(sequence)
        size = min(row.shape[-1] for row in rows)
        for target_row, draft_row in zip(rows[0][:, :size], rows[1][:, :size], strict=True):
            order = draft_row.argsort(descending=True)[:RANKS].tolist()
            found["greedy"].append([float(int(target_row.argmax()) == token) for token in order])
            # Nearly all of both is on few tokens: the others are left out of the race.
            few = torch.unique(torch.cat([target_row.topk(200).indices, draft_row.topk(200).indices]))
            p, q = (torch.softmax(row[few], -1).tolist() for row in (target_row, draft_row))
            found["race"].append(race_positions(p, q, RANKS, trials=200))
            found["residual"].append(residual_positions(p, q, RANKS))
    return {name: torch.tensor(each).mean(0).tolist() for name, each in found.items()}


def race_arms(llms: dict[str, Any], tokens: int, prompts: int, temperature: float) -> dict[str, Any]:
    """Arms in turns over the same prompts; whether all texts are equal."""
    spent, texts = dict.fromkeys(llms, 0.0), {name: [] for name in llms}
    for i, prompt in enumerate(TEXTS[:prompts]):
        for name in [*llms, *reversed(llms)]:
            start_s = perf_counter()
            out = llms[name].generate(prompt, max_new_tokens=tokens, temperature=temperature, seed=i, ignore_eos=True)
            spent[name] += perf_counter() - start_s
            texts[name].append(out.token_ids)
    first = next(iter(texts.values()))
    speed = {name: 2 * tokens * min(prompts, len(TEXTS)) / seconds for name, seconds in spent.items()}
    return {"tokens_per_s": speed, "identical": all(each == first for each in texts.values())}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    for name, value in (("k", 4), ("fanout", 2), ("prompts", 4), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    options = f"{arguments.draft},k={arguments.k}"
    llms = {
        "plain": ft.load(arguments.target, drafter=None),
        "between": ft.load(arguments.target, drafter=f"model:{options}", controller="constant"),
        "ahead": ft.load(arguments.target, drafter=f"ahead:{options},fanout={arguments.fanout}", controller="constant"),
    }
    target, drafter = llms["plain"].target, llms["ahead"].drafter
    text = llms["plain"].generate(TEXTS[0], max_new_tokens=96, ignore_eos=True).token_ids
    of_target, of_draft = calls(target, text), calls(drafter.model, text)
    cost = {n: seconds(of_target(n)) for n in (1, arguments.k + 1, (arguments.k + 1) * arguments.fanout)}
    step = seconds(of_draft(1))
    slower = contention(of_target(arguments.k + 1), of_draft((arguments.k + 1) * arguments.fanout))
    texts = [
        llms["plain"].generate(p, max_new_tokens=96, ignore_eos=True).token_ids for p in TEXTS[: arguments.prompts]
    ]
    chances = ranks(target, drafter.model, texts)
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(), "v_ms": {n: s * 1e3 for n, s in cost.items()}, "c": step / cost[1],
        "contention": {"target": slower[0], "draft": slower[1]}, "chances": chances, "plan": {}, "runs": {},
    }  # fmt: skip
    for name, each in chances.items():
        assumed = Assumptions(
            each[0], c=step / cost[1], v=Measured(TargetCost({n: s / cost[1] for n, s in cost.items()}))
        )
        found["plan"][name] = {
            s: ahead_row(assumed, arguments.k, arguments.fanout, s, each).public()
            for s in (1.0, max(1.0, sum(slower) / 2))
        }
    for temperature in (0.0, 1.0):
        drafter.rounds = drafter.hits = 0
        run = race_arms(llms, arguments.tokens, arguments.prompts, temperature)
        found["runs"][temperature] = {**run, "hits": drafter.hits / max(drafter.rounds, 1)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
