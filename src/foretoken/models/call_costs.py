"""Cost of a target call by number of nodes, v(n): measured thoroughly, or quickly with a stored result.

The best draft size depends on the machine: if reading weights dominates, 60 nodes cost as much as one; elsewhere every
row adds to the cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from weakref import WeakKeyDictionary

import torch

from foretoken.core.costs import TargetCost
from foretoken.models.base import Feed, LanguageModel, SequenceState, opened
from foretoken.models.checks.fast_paths import code_version, fingerprint
from foretoken.models.clock import now
from foretoken.models.machine import WORTH_KEEPING_S, KeptResults, any_text, is_busy

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Default node counts."""

KEPT = KeptResults("calls", code_version)
_KNOWN: WeakKeyDictionary[LanguageModel, tuple[str, TargetCost]] = WeakKeyDictionary()


def quick_costs(target: LanguageModel) -> TargetCost:
    """v(n) of a target on this machine: the fastest of a few calls at each count.  The result is stored by the model's
    fingerprint, its forward, the number of threads and the machine.  On a busy machine, where threads wait for each
    other at 1 row and at 64 alike, it is kept for this process only.

    A model without rollback is measured at one node only.
    """
    way = way_of(target)
    known_way, known = _KNOWN.get(target, ("", None))
    if known is None or known_way != way:
        module = target.model
        key = fingerprint(module) if isinstance(module, torch.nn.Module) else None
        name = f"calls {key} {way}"
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
        known = TargetCost(costs)
        _KNOWN[target] = way, known
    return known


def way_of(target: LanguageModel) -> str:
    """Everything but the network and the machine that a call's time depends on; part of the key of stored times."""
    forward = getattr(getattr(target, "forwards", None), "way", target.forward_name)
    place = type(getattr(target, "cache", None)).__name__
    graphs = "no graphs" if target.graphs is None else "graphs"
    return f"{type(target).__name__} {forward} {place} {graphs} {torch.get_num_threads()} threads"


def _measure_quickly(target: LanguageModel) -> dict[int, float]:
    """The fastest of a few calls at each count.  The counts are interleaved, so that other load affects all of them."""
    tokens = any_text(target, 64)
    quickest = measure_target(target, tokens, repeats=3, typical=min, longest=6.0).seconds  # beyond this, no draft pays
    costs, least = {}, 0.0
    for count in sorted(quickest):  # more nodes never take less time: a decrease is noise
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
    """Typical seconds of target calls by node count, after ``text_ids``; the counts are interleaved.

    This is the time that :class:`~foretoken.engine.stats.SpecStats` calls ``target_s``: the network alone.

    Args:
        target: the model; without rollback it is measured with one node per request only.
        text_ids: committed text, cut to half of the context length.
        counts: node counts, summed over the batch; those below ``batch`` or beyond the context are skipped.
        repeats: calls per count after one warm-up.
        batch: number of requests that share the nodes.
        shapes: parents of the trees to score, starting with the root's -1; other sizes use chains.
        typical: statistic over several calls.
        longest: a count that takes this many times as long as the smallest one ends the turn for larger counts, which
            are left out of the result if that happens in nearly all turns.
    """
    if not text_ids or repeats < 1 or batch < 1:
        raise ValueError("measuring a target needs a text, and repeats and batch of at least 1")
    tokens = list(text_ids[: max(1, target.context_length // 2)])
    rollback = target.capabilities.rollback
    most = batch * (target.context_length - len(tokens)) if rollback else batch
    usable = sorted({n for n in (batch, *counts) if batch <= n <= most})
    if not usable:
        raise ValueError(f"the context is too short to measure {batch} node(s) after {len(tokens)} tokens")
    times: dict[int, list[float]] = {count: [] for count in usable}
    trees = {len(shape): shape for shape in shapes}
    with opened(target, *[tokens] * batch) as sequences:
        for _ in range(repeats + 1):
            if not rollback and len(sequences[0].tokens) >= target.context_length:
                break
            for count in usable:
                spent = _call_s(target, sequences, tokens, count, trees.get(count))
                for sequence in sequences:  # without rollback the one token stays committed
                    target.commit(sequence, [] if rollback else [0])
                times[count].append(spent)
                if spent > longest * min(times[usable[0]]):
                    break  # in this turn only: it may have been a pause of the machine
    measured = {count: max(typical(spent[1:]), 1e-9) for count, spent in times.items() if len(spent) > 1}
    return TargetCost(measured)


def _call_s(
    target: LanguageModel,
    sequences: Sequence[SequenceState],
    tokens: Sequence[int],
    count: int,
    parents: Sequence[int] | None = None,
) -> float:
    """Seconds of one call with ``count`` nodes, spread evenly over the sequences as chains, or as a tree in each."""
    feeds = []
    for i, sequence in enumerate(sequences):
        share = count // len(sequences) + (i < count % len(sequences))
        feeds.append(Feed(sequence, [tokens[j % len(tokens)] for j in range(share)], parents))
    before, start_s = target.run_s, now(target.device)
    target.forward(feeds)
    return (target.run_s - before) or (now(target.device) - start_s)
