"""Forwards as CUDA graphs, captured per shape on first use and then replayed.

An eager forward of a model below some 30 billion parameters waits for Python to launch its kernels; a graph launches
all of them at once.  A step (:mod:`foretoken.models.forward.fixed_step`) is a function of one integer tensor, so one
graph serves every round of its shape: rows of new nodes are padded to 1, 2, 4, ... 64, requests and visible slots to
powers of two.  Everything else (prompts, parts of the network, very large trees) runs eagerly, on the same cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.core import HiddenStates
from foretoken.models.base import CapabilityError, Feed, LanguageModel, Rows, opened
from foretoken.models.cache.fixed import FixedCache
from foretoken.models.cache.masks import RowPlan
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.checks.judging import APART, MOST, ROUNDING, WIDER, ordinary_ids, widened
from foretoken.models.clock import now
from foretoken.models.forward.capture import CudaGraphs, HostFree, Recorder
from foretoken.models.forward.fixed_step import TREE, Bucket, FixedStep, OutputMemory, size_of
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.placement import is_split
from foretoken.models.refusals import refusal
from foretoken.models.runner import TreeRunner

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Allowed numbers of new nodes per request in a step."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Allowed numbers of requests in a step."""
MOST_ROWS = 1024
"""Maximum rows per step; above it, arithmetic dominates and padding is no longer free."""


class Graphs:
    """The graphs of one model, whose cache must be a :class:`FixedCache`.

    Attributes:
        recorder: shared by a target and its draft model, which run in turn.
        stopped: reason why graphs were disabled; empty while they run.
        followers: graphs of draft models that run in turn with these.
    """

    def __init__(self, owner: HuggingFaceModel, recorder: Recorder) -> None:
        self.owner, self.recorder = owner, recorder
        self.stopped = ""
        self.followers: list[Graphs] = []
        self._steps: OrderedDict[Bucket, FixedStep] = OrderedDict()
        self._outputs = OutputMemory()
        self._stamp: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def buckets(self) -> list[Bucket]:
        """Captured shapes, least recently used first."""
        return list(self._steps)

    @property
    def _cache(self) -> FixedCache:
        cache: Any = self.owner.cache
        return cache

    def score(self, feeds: Sequence[Feed], plans: Sequence[RowPlan], taps: Sequence[str]) -> list[Rows] | None:
        """Result of :meth:`HuggingFaceModel.forward` for nodes already appended; ``None`` if no step fits."""
        bucket = self._bucket(feeds, plans, tuple(taps))
        if bucket is None or (step := self._step(bucket)) is None:
            return None
        owner, rows = self.owner, [feed.sequence.row for feed in feeds]
        start_s = now(owner.device)  # the device has also finished reading the last numbers: they can be overwritten
        step.numbers.fill(
            dict(zip(rows, plans, strict=True)),
            {row: feed.tokens for row, feed in zip(rows, feeds, strict=True)},
            self._cache.take_moves(bucket.batch),
        )
        result, hidden = step.run()
        logits = result.clone()  # the next replay of any graph overwrites the result
        hidden = {name: states.clone() for name, states in hidden.items()}
        owner.run_s += now(owner.device) - start_s
        owner.run_rows += bucket.batch * bucket.width
        results = []
        for row, feed, plan in zip(rows, feeds, plans, strict=True):
            start = row * bucket.width
            row_states = HiddenStates(hidden, range(start, start + plan.new)) if hidden else {}
            results.append(Rows(logits[row, plan.new - feed.num_wanted : plan.new], row_states))
        return results

    @torch.inference_mode()
    def warm_up(self, batches: Sequence[int] = (1,), rows: Sequence[int] = ROWS, taps: Sequence[str] = ()) -> None:
        """Capture the steps of these sizes for sequences up to the cache's present room, largest first."""
        self._cache.reserve(max(batches), 1)
        slots = self._cache.view_of(self._cache.num_slots)
        buckets = [Bucket(b, w, slots, tuple(taps)) for b in batches for w in rows if b * w <= MOST_ROWS]
        for bucket in sorted(buckets, key=lambda candidate: candidate.batch * candidate.width, reverse=True):
            if not self.stopped:
                self._step(bucket)

    def capture_ladder(self, batch: int, nodes: int, fed: int, taps: Sequence[str] = ()) -> int:
        """Capture every step that rounds up to this size may need, those of draft models included, so that no request
        waits for a capture; return the number of captured steps.

        Args:
            batch: maximum number of running requests.
            nodes: maximum nodes of a request's tree, the root included.
            fed: maximum tokens per request fed to a draft model at once.
            taps: hidden states that the drafter needs.
        """
        batches = _up_to(batch, BATCHES)
        self.warm_up(batches, _up_to(nodes, ROWS), taps)
        for follower in self.followers:
            follower.warm_up(batches, _up_to(fed, ROWS))
        return sum(len(graphs) for graphs in (self, *self.followers))

    def _bucket(self, feeds: Sequence[Feed], plans: Sequence[RowPlan], taps: tuple[str, ...]) -> Bucket | None:
        """The smallest shape that holds these nodes; ``None`` if there is none."""
        width = _rounded_up(max(plan.new for plan in plans), ROWS)
        batch = _rounded_up(max(feed.sequence.row for feed in feeds) + 1, BATCHES)
        if self.stopped or width is None or batch is None or batch * width > MOST_ROWS:
            return None
        needs_logits = any(feed.wanted != 0 for feed in feeds)  # a prompt needs no logits
        fits = needs_logits and all(plan.new > 0 and len(plan.parents) <= TREE for plan in plans)
        if not fits or not self._cache.is_initialized:
            return None
        used = max(plan.committed + len(plan.parents) for plan in plans)
        self._cache.reserve(batch, used)
        return Bucket(batch, width, self._cache.view_of(used), taps)

    def _step(self, bucket: Bucket) -> FixedStep | None:
        """The step of a shape, captured if missing; ``None`` if that fails, after which graphs stay off."""
        self._drop_void()
        step = self._steps.get(bucket)
        if step is None:
            try:
                step = FixedStep(
                    self.owner.forwards, self._cache, bucket, self.recorder.host(size_of(bucket)), self._outputs
                )
                with HostFree():
                    step.program()
                step.run = self.recorder.record(step.program)
            except (CapabilityError, RuntimeError) as error:  # also out of memory
                self.stop(_first_line(error))
                return None
            self._steps[bucket] = step
            if len(self._steps) > 64:  # evict the least recently used step
                self._steps.popitem(last=False)
        self._steps.move_to_end(bucket)
        return step

    def _drop_void(self) -> None:
        """Drop graphs with stale addresses of the cache's buffers, the weights or the rows after the vocabulary."""
        network = self.owner.forwards
        stamp = (
            self._cache.generation,
            network.fast,
            *((extra.rows.data_ptr(), len(extra.rows)) for extra in network.extra),
        )
        if stamp != self._stamp:
            self._steps.clear()
            self._stamp = stamp

    def stop(self, reason: str) -> None:
        """Run everything without graphs from now on, and log the reason."""
        self.stopped = reason
        self._steps.clear()
        _note_off(self.owner, reason)


def _note_off(model: HuggingFaceModel, reason: str) -> None:
    model.graphs_off = reason
    costs = "every forward launches its kernels one by one"
    model.refused = (*model.refused, refusal("CUDA graphs", reason, costs))


def _first_line(error: BaseException) -> str:
    """First line of the original error: the end of a failed capture raises another error on top of it."""
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _rounded_up(count: int, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= count), None)


def _up_to(count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """All sizes up to the first that holds ``count``."""
    last = _rounded_up(count, sizes) or sizes[-1]
    return tuple(size for size in sizes if size <= last)


# -- whether a model gets them -----------------------------------------------------------------------------------------


def with_graphs(model: LanguageModel, choice: bool | str, recorder: Recorder | None = None) -> LanguageModel:
    """``model``, with graphs if requested and working.

    Args:
        choice: ``True``, ``False``, or ``"auto"``: on a CUDA device, for a model whose fixed steps can be captured and
            equal its ordinary forward.  ``model.graphs_off`` holds the reason if there are none.
        recorder: the recorder that captures; the one of the model's device by default.
    """
    if choice is not True and choice is not False and choice != "auto":
        raise ValueError(f"graphs must be True, False or 'auto', not {choice!r}")
    device = model.device
    reason = ""
    if choice is False:
        reason = "not asked for"
    elif not isinstance(model, HuggingFaceModel):
        reason = f"{type(model).__name__} does not support fixed shapes"
    elif recorder is None and (device is None or device.type != "cuda"):
        reason = f"they need a CUDA device, and the model is on {device}"
    elif model.graphs is None:
        reason = _attach(model, recorder)
        if reason and choice is not True:
            _note_off(model, reason)
    if isinstance(model, HuggingFaceModel) and model.graphs is None:
        model.graphs_off = reason
    if reason and choice is True:
        kind = CapabilityError if device is not None and device.type == "cuda" else ValueError
        raise kind(f"graphs=True is not possible: {reason}; leave graphs at 'auto'")
    return model


def _attach(model: HuggingFaceModel, recorder: Recorder | None) -> str:
    """Attach graphs to a model and compare them with its ordinary forward; return the reason if that fails, else ""."""
    if model._sequences:
        return "sequences are open already"
    if is_split(model.model):
        return "its layers are on several devices, and a graph runs on one"
    if model.rotary is not None:
        return "its rotary embeddings change with the length of the sequence"
    if model.context_length < 32:  # maximum tokens of the check
        return f"a context of {model.context_length} tokens is too short to check them"
    before = model.cache
    model.separate(type(before)(before.num_layers, before.max_slots))
    try:
        ordinary, truth = _sample(model), _truth(model)
        model.separate(FixedCache(before.num_layers, before.max_slots))
        model.graphs = graphs = Graphs(model, recorder or CudaGraphs(model.device))
        logits = _sample(model)
        reason = graphs.stopped or _difference(ordinary, logits, truth, model.dtype)
    except RuntimeError as error:
        reason = _first_line(error)
    if reason:
        model.separate(type(before)(before.num_layers, before.max_slots))
    else:
        model.run_s, model.run_rows = 0.0, 0
        model.graphs_off = ""
    return reason


@torch.inference_mode()
def _sample(model: TreeRunner) -> Tensor:
    """Logits [n, V] of two sequences in four rounds of trees, of which one branch is kept each time."""
    ids = ordinary_ids(model.vocab_size)
    logits: list[Tensor] = []
    with opened(model, ids[:5], ids[5:6]) as sequences:
        for indices, parents, path in (
            ((7, 8, 9, 8, 5), (-1, 0, 0, 2, 3), (0, 2, 3)),
            ((4, 3, 6), (-1, -1, 1), (1, 2)),
            ((2,), (-1,), (0,)),
            ((5, 5, 3, 4, 1), (-1, -1, 1, 1, 2), (1, 2)),  # an already captured shape, with other numbers
        ):
            rows = model.forward([Feed(sequence, [ids[i] for i in indices], parents) for sequence in sequences])
            logits += [row.logits for row in rows]
            for sequence in sequences:
                model.commit(sequence, path)
    return torch.cat(logits).cpu().double()


def _truth(model: HuggingFaceModel) -> Tensor | None:
    """The same from the public forward in the next wider precision; ``None`` if the network has none."""
    wide = WIDER.get(model.dtype)
    if wide is None:
        return None
    public = TreeRunner(model.forwards.public(wide), TreeCache(model.cache.num_layers, model.cache.max_slots))
    try:
        with widened(model.model, wide):
            return _sample(public)
    except RuntimeError:  # a kernel for one dtype only
        return None


def _difference(ordinary: Tensor, fixed: Tensor, truth: Tensor | None, dtype: torch.dtype) -> str:
    """Description of what is wrong with the logits of fixed steps; empty if nothing is."""
    if not bool(torch.isfinite(fixed).all()):
        return "fixed steps gave logits that are not finite"
    limit, judge = (APART, ordinary) if truth is None else (ROUNDING, truth)
    ordinary_error, fixed_error = (
        float(((logits - judge).square().mean(-1).sqrt() / judge.std(-1)).mean()) for logits in (ordinary, fixed)
    )
    if fixed_error <= MOST * ordinary_error + limit[dtype]:
        return ""
    return f"fixed steps gave different logits (off by {fixed_error:.1e}, the ordinary forward by {ordinary_error:.1e})"


def follow(draft: LanguageModel, target: LanguageModel) -> LanguageModel:
    """Attach graphs to a draft model if its target has them, in the same memory pool."""
    graphs: Graphs | None = target.graphs
    if graphs is None or not isinstance(draft, HuggingFaceModel) or draft.device != graphs.owner.device:
        return draft
    with_graphs(draft, "auto", graphs.recorder)
    if draft.graphs is not None and draft.graphs not in graphs.followers:
        graphs.followers.append(draft.graphs)
    return draft
