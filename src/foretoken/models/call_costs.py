"""What a call of the target costs by the number of nodes in it, v(n): measured at length, or quickly and remembered.

How many nodes a draft should have depends on the machine: where reading weights is what a call takes, 60 nodes cost
what one does, and elsewhere every row costs something.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from foretoken.core.costs import TargetCost
from foretoken.models.base import Feed, LanguageModel, SequenceState, opened
from foretoken.models.checks.fast_paths import fingerprint
from foretoken.models.clock import now
from foretoken.models.machine import WORTH_KEEPING_S, KeptResults, any_text, is_busy

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Node counts that a target is measured at by default."""
QUICK_TEXT, QUICK_TURNS = 64, 3
"""Tokens before the call that is timed quickly, and how often it is after one that warms up."""

KEPT = KeptResults("calls", lambda: "quiet")  # earlier versions kept what a busy machine had told
_KNOWN: WeakKeyDictionary[LanguageModel, TargetCost] = WeakKeyDictionary()


def quick_costs(target: LanguageModel) -> TargetCost:
    """v(n) of a target on this machine, by the quickest of a few calls at each count; remembered with the model's
    fingerprint, the number of threads and the machine; a busy one, where threads wait for each other at 1 row and at 64
    alike, is measured for this process only.

    A model whose drafts cannot be taken back is measured at one node only.
    """
    if target not in _KNOWN:
        module: Any = getattr(target, "model", None)
        key = fingerprint(module) if isinstance(module, torch.nn.Module) else None
        name = f"calls {key} {torch.get_num_threads()} threads"
        stored = None if key is None else KEPT.read(name)
        if not isinstance(stored, dict):
            start_s = perf_counter()
            costs = _measure_quickly(target)
            if key is not None:
                result = {str(count): seconds for count, seconds in costs.items()}
                worth = perf_counter() - start_s >= WORTH_KEEPING_S
                KEPT.keep(name, result, worth and not is_busy())
        else:
            costs = {int(count): float(seconds) for count, seconds in stored.items()}
        _KNOWN[target] = TargetCost(costs)
    return _KNOWN[target]


def _measure_quickly(target: LanguageModel) -> dict[int, float]:
    """The quickest of a few calls at each count, which take turns: other work on the machine meets all of them."""
    text = any_text(target, QUICK_TEXT)
    quickest = measure_target(
        target, text, repeats=QUICK_TURNS, typical=min, longest=6.0
    ).seconds  # beyond, no draft pays
    costs, least = {}, 0.0
    for count in sorted(quickest):  # more nodes never take less: what says so is noise
        costs[count] = least = max(least, quickest[count])
    return costs


@torch.inference_mode()
def measure_target(
    target: LanguageModel,
    text_ids: Sequence[int],
    counts: Sequence[int] = COUNTS,
    repeats: int = 5,
    batch: int = 1,
    shapes: Iterable[Sequence[int]] = (),
    typical: Callable[[Sequence[float]], float] = statistics.median,
    longest: float = math.inf,
) -> TargetCost:
    """Typical seconds of target calls by node count, behind ``text_ids``; the counts take turns.

    Measured is what :class:`~foretoken.engine.stats.SpecStats` calls ``target_s``: the network alone.

    Args:
        target: the model; one that cannot be rolled back is measured with one node per request only.
        text_ids: committed text, cut to half of the context where it is longer.
        counts: node counts, summed over the batch; those below ``batch`` or past the context are left out.
        repeats: calls per count after one that warms up.
        batch: requests that share the nodes.
        shapes: parents of the trees that are scored, the root's -1 first; chains where there is none of a size.
        typical: of several calls.
        longest: larger counts than one that takes so many times as long as the least are left out of the turn, and
            altogether if that happens in nearly all.
    """
    if not text_ids or repeats < 1 or batch < 1:
        raise ValueError("measuring a target needs a text, and repeats and batch of at least 1")
    text = list(text_ids[: max(1, target.context_length // 2)])
    rollback = target.capabilities.rollback
    most = batch * (target.context_length - len(text)) if rollback else batch
    usable = sorted({n for n in (batch, *counts) if batch <= n <= most})
    if not usable:
        raise ValueError(f"no room to measure {batch} node(s) behind {len(text)} tokens of text")
    times: dict[int, list[float]] = {count: [] for count in usable}
    trees = {len(shape): shape for shape in shapes}
    with opened(target, *[text] * batch) as sequences:
        for _ in range(repeats + 1):
            if not rollback and len(sequences[0].tokens) >= target.context_length:
                break
            for count in usable:
                spent = _call_s(target, sequences, text, count, trees.get(count))
                for sequence in sequences:  # without rollback the one token stays
                    target.commit(sequence, [] if rollback else [0])
                times[count].append(spent)
                if spent > longest * min(times[usable[0]]):
                    break  # in this turn only: it may have been a pause of the machine
    measured = {count: max(typical(spent[1:]), 1e-9) for count, spent in times.items() if len(spent) > 1}
    return TargetCost(measured)


def _call_s(
    target: LanguageModel,
    sequences: Sequence[SequenceState],
    text: Sequence[int],
    count: int,
    parents: Sequence[int] | None = None,
) -> float:
    """Seconds of one call with ``count`` nodes, spread evenly over the sequences as chains; or a tree in each."""
    feeds = []
    for i, sequence in enumerate(sequences):
        share = count // len(sequences) + (i < count % len(sequences))
        feeds.append(Feed(sequence, [text[j % len(text)] for j in range(share)], parents))
    device = getattr(target, "device", None)
    before, start_s = target.run_s, now(device)
    target.forward(feeds)
    return (target.run_s - before) or (now(device) - start_s)
