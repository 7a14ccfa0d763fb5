"""Trial on a few tokens: does a model's recurrent state survive a rollback?

A list of names cannot answer this: the same family was wrong in one release of Transformers and right in the next (a
forward of several tokens from an existing state).  The trial costs six forwards of at most 17 rows, once per model
object, and is judged like every fast path (:mod:`foretoken.models.checks.judging`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.io.quiet import ERRORS_ONLY
from foretoken.models.base import Feed, opened
from foretoken.models.cache.state import StateCache, tensors_of
from foretoken.models.checks.judging import MOST, ordinary_ids, widened, wider

if TYPE_CHECKING:
    from foretoken.models.stateful import StatefulModel


class _ErrorLimits(NamedTuple):
    """Relative differences allowed as rounding, beyond :data:`foretoken.models.checks.judging.MOST` times those of a
    fresh reading, both measured against a fresh reading in the next wider precision.

    Attributes:
        first: in the first layer that has such a tensor, where almost nothing has been rounded yet.
        mean: over all layers.
    """

    first: float
    mean: float


HALF_LIMITS, EXACT_LIMITS = _ErrorLimits(0.02, 0.05), _ErrorLimits(1e-4, 3e-4)
"""A state that a forward of several tokens ignores gives 0.07 to 1; a single-token rule that omits a clamp (nemotron_h,
zamba2) gives 1e-3 in float32."""
READ, STEP, CHAIN = 12, 13, 17
"""Probe: number of tokens read first, the token scored alone, and the end of the chain of which one token is kept."""


@torch.inference_mode()
def state_fault(model: StatefulModel) -> str | None:
    """Description of what goes wrong when drafts are rejected; ``None`` if nothing does.

    Suppresses Transformers' hints that faster kernels could be installed.
    """
    return _tried(_difference, model)


@torch.inference_mode()
def joined_fault(model: StatefulModel) -> str | None:
    """Description of what goes wrong when sequences of two lengths share a forward; ``None`` if nothing does."""
    return _tried(_joined_difference, model)


def _tried(test: Callable[[StatefulModel], str | None], model: StatefulModel) -> str | None:
    try:
        with ERRORS_ONLY.changed():
            return test(model)
    except Exception as error:  # a forward without cache support may raise anything
        return cause_of(error)


def _probe(model: StatefulModel) -> tuple[list[int], list[int]]:
    """A text, and a copy in which every token is wrong."""
    tokens = [token % model.vocab_size for token in ordinary_ids(model.vocab_size, 20)]
    return tokens, [(token + 1) % model.vocab_size for token in tokens]


def _joined_difference(model: StatefulModel) -> str | None:
    """Score, for two sequences at once, a chain of which one token is kept and one token alone (beside a draft if that
    is padded); compare with fresh readings."""
    tokens, wrong = _probe(model)
    texts, starts = (tokens[:CHAIN], tokens[2 : CHAIN + 1]), (READ, READ - 4)
    with opened(model, *(read[:start] for read, start in zip(texts, starts, strict=True))) as sequences:
        cases = list(zip(sequences, texts, starts, strict=True))
        forwards = model.num_forwards
        model.forward([Feed(sequence, [read[start], *wrong[:3]]) for sequence, read, start in cases])
        for sequence in sequences:
            model.commit(sequence, [0])
        drafts = [wrong[:1], []] if model.replay == "capture" else [[], []]
        model.forward(
            [
                Feed(sequence, [read[start + 1], *draft])
                for (sequence, read, start), draft in zip(cases, drafts, strict=True)
            ]
        )
        for sequence in sequences:
            model.commit(sequence, [0])
        last = model.forward([Feed(sequence, read[start + 2 : start + 5]) for sequence, read, start in cases])
        if model.num_forwards != forwards + 3:
            return "they did not share a forward"
        for sequence, (read, start), rows in zip(sequences, zip(texts, starts, strict=True), last, strict=True):
            model.commit(sequence, [0, 1, 2])
            joined = _ProbeReading(rows.logits, model.state(sequence))
            fault = _fault(model, joined, read[: start + 5], "in a forward with another sequence")
            if fault is not None:
                return fault
    return None


def _difference(model: StatefulModel) -> str | None:
    tokens, wrong = _probe(model)
    with opened(model, tokens[:READ]) as (sequence,):
        single = model.forward([Feed(sequence, tokens[READ:STEP])])[0].logits
        model.commit(sequence, [0])
        accepted = model.forward([Feed(sequence, [tokens[STEP], *wrong[STEP + 1 : CHAIN]])])[0].logits[:1]
        model.commit(sequence, [0])
        chain = model.forward([Feed(sequence, tokens[STEP + 1 : CHAIN])])[0].logits
        model.commit(sequence, list(range(CHAIN - STEP - 1)))
        rolled = _ProbeReading(torch.cat([single, accepted, chain]), model.state(sequence))
        return _fault(model, rolled, tokens[:CHAIN], "after a rejected draft")


class _ProbeReading(NamedTuple):
    """Logits of the scored tokens, and the cached state."""

    logits: Tensor
    state: StateCache


def _fault(model: StatefulModel, tried: _ProbeReading, tokens: list[int], when: str) -> str | None:
    """Description of what is wrong with a reading, judged by a fresh one with as many logits."""
    fresh = _fresh(model, tokens, len(tried.logits))
    fault = _worst(model, tried, fresh, _truth(model, tokens, len(tried.logits)) or fresh)
    return None if fault is None else f"{when} {fault}"


def _fresh(model: StatefulModel, tokens: list[int], count: int) -> _ProbeReading:
    state = StateCache()
    return _ProbeReading(model.read(state, tokens, count), state)


def _truth(model: StatefulModel, tokens: list[int], count: int) -> _ProbeReading | None:
    """The same in the next wider precision; ``None`` if the network has none (float64, or a kernel for one dtype
    only)."""
    wide = wider(model.dtype, model.device)
    if wide is None:
        return None
    try:
        with widened(model.model, wide):
            return _fresh(model, tokens, count)
    except RuntimeError:
        return None


def _worst(model: StatefulModel, rolled: _ProbeReading, fresh: _ProbeReading, truth: _ProbeReading) -> str | None:
    """The kind of tensor whose error exceeds that of a fresh reading, with both errors."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    states = (tensors_of(reading.state.cache) for reading in (rolled, fresh, truth))
    for (kind, path), (_, plain), (_, right) in zip(*states, strict=True):
        errors[kind].append((relative(path, right), relative(plain, right)))
    limits = HALF_LIMITS if model.dtype in (torch.bfloat16, torch.float16) else EXACT_LIMITS
    for kind, pairs in errors.items():
        mean = (sum(path for path, _ in pairs) / len(pairs), sum(plain for _, plain in pairs) / len(pairs))
        for (path, plain), limit in ((pairs[0], limits.first), (mean, limits.mean)):
            if not path <= MOST * plain + limit:
                return _fault_line(kind, path, plain)
    path, plain = (relative(reading.logits, truth.logits) for reading in (rolled, fresh))
    return None if path <= MOST * plain + limits.mean else _fault_line("logits", path, plain)


def _fault_line(kind: str, path: float, plain: float) -> str:
    name = kind.replace("_", " ")
    return (
        f"its {name} differ from a fresh prefill: they are off by {path:.2g} of their size, and "
        f"those of a fresh prefill by {plain:.2g}"
    )


def cause_of(error: Exception) -> str:
    """Class and first line of an error."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def relative(tried: Tensor, judged_by: Tensor) -> float:
    """Norm of the difference, relative to ``judged_by``."""
    if tried.shape != judged_by.shape:
        return float("inf")
    logits, judge = tried.cpu().double(), judged_by.cpu().double()
    return float((logits - judge).norm() / judge.norm().clamp_min(1e-30))
