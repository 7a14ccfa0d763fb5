"""Tensor parallelism: one model over several processes on one machine, each with a part of every weight.

Transformers splits the weights (by its own plan for the model's family) and joins the parts inside the forward.  So all
processes must only run the same forwards on the same caches.  Process 0, the leader, has the engine.  Before it makes a
call that changes a cache or runs the network, it sends the call to the other processes, the followers, as one line of
JSON: token ids, parents, committed path.  Every process derives masks and positions from these, and all stay in
lockstep.

The lines go to the followers' standard input.  When the leader dies, for whatever reason, the pipe closes and they
exit.  When a follower dies, or fails where the leader did not, the model becomes unusable and reports that.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from foretoken.models.base import Feed, LanguageModel, Rows, SequenceState, Snapshot
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.runner import PREFILL_CHUNK, check_distinct


class PartLost(RuntimeError):
    """A process with a part of the model is gone, and the model unusable."""


class Follower(Protocol):
    """A process with a part of the model that runs :func:`follow`."""

    def ended(self) -> str | None:
        """Description of how it exited; ``None`` while it runs."""

    def send(self, line: str) -> None:
        """Send it a call.

        Raises:
            OSError, ValueError: it no longer reads.
        """

    def end(self) -> None:
        """Terminate it and wait for its exit."""


@dataclass(frozen=True)
class _PartSnapshot(Snapshot):
    """The leader's part of a snapshot.

    Attributes:
        key: key of the followers' parts.
    """

    key: int = 0


class ParallelModel(LanguageModel):
    """The leader's model.  It supports trees, rollback and snapshots, but no hidden states or partial forwards.

    ``inner`` is the leader's part; ``on_end`` is called after the followers have exited.
    """

    prefill_chunk = PREFILL_CHUNK

    def __init__(
        self, inner: HuggingFaceModel, followers: Sequence[Follower], on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.inner, self.followers = inner, tuple(followers)
        self.vocab_size, self.context_length = inner.vocab_size, inner.context_length
        self.context_why = inner.context_why
        self.eos_token_ids, self.device, self.dtype = inner.eos_token_ids, inner.device, inner.dtype
        reason = f"the model is split over {len(followers) + 1} processes"
        # Drafters that use these need the target's unsplit weights.
        self.capabilities = replace(
            inner.capabilities,
            taps=False,
            layer_windows=False,
            missing={**inner.capabilities.missing, **dict.fromkeys(("taps", "layer_windows"), reason)},
        )
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._forgotten: list[int] = []
        self._lost = ""
        self._end = weakref.finalize(self, _end, self.followers, on_end)

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        if not self._lost:
            for follower in self.followers:
                end = follower.ended()
                if end is not None:
                    self._lose(end)
                    break
        return self._lost or None

    def close(self) -> None:
        self._lose("the model was closed")

    def _lose(self, reason: str) -> PartLost:
        self._lost = self._lost or reason
        self._end()
        return PartLost(self._lost)

    def _tell(self, name: str, **fields: Any) -> None:
        """Send a call to all followers."""
        if self.trouble is not None:
            raise PartLost(self._lost)
        forgotten = self._forgotten[:]
        del self._forgotten[: len(forgotten)]  # in place: finalizers of dropped snapshots append their keys here
        line = json.dumps({"call": name, "forget": forgotten, **fields}) + "\n"
        for follower in self.followers:
            try:
                follower.send(line)
            except (OSError, ValueError):
                raise self._lose(follower.ended() or "a process of the split model does not respond") from None

    def _together(self, work: Callable[[], Any]) -> Any:
        """Run a call that the followers also make.  If it fails here, they wait forever, so the model is lost."""
        try:
            return work()
        except BaseException as error:
            gone = self._first_end()
            lost = self._lose(gone or f"the split model is out of step: {type(error).__name__}: {error}")
            if isinstance(error, Exception):
                raise lost from error
            raise

    def _first_end(self) -> str | None:
        """Description of a follower's exit; a broken connection is often detected before the process is gone."""
        end = time.monotonic() + 1.0
        while True:
            fault = next(filter(None, (follower.ended() for follower in self.followers)), None)
            if fault is not None or time.monotonic() > end:
                return fault
            time.sleep(0.02)

    # -- memory and time ---------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:  # type: ignore[override]
        return self.inner.threads

    @property
    def run_s(self) -> float:  # type: ignore[override]
        """Seconds spent in the leader's part, including waits for the followers."""
        return self.inner.run_s

    @property
    def run_rows(self) -> int:  # type: ignore[override]
        return self.inner.run_rows

    @property
    def kv_bytes(self) -> int:
        """Bytes of the leader's keys and values; every follower has as much."""
        return self.inner.kv_bytes

    @property
    def kv_peak_bytes(self) -> int:
        return self.inner.kv_peak_bytes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token in each process, measured with one token."""
        sequence = self.open()
        try:
            self.prefill(sequence, [0])
            return int(sequence.cache.slot_bytes)
        finally:
            self.release(sequence)

    @property
    def weight_bytes(self) -> int:
        parts = (p.to_local() if isinstance(p, DTensor) else p for p in self.inner.model.parameters())
        return sum(part.nbytes for part in parts)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self) -> SequenceState:
        self._next += 1
        self._tell("open", text=self._next)
        sequence: SequenceState = self._together(self.inner.open)
        self._numbers[id(sequence)] = self._next
        return sequence

    def _number(self, sequence: SequenceState) -> int:
        return self._numbers[id(sequence)]

    def release(self, sequence: SequenceState) -> None:
        number = self._numbers.pop(id(sequence))
        if self.trouble is None:  # parts of a lost model are released as well
            self._tell("release", text=number)
        self.inner.release(sequence)

    def _everywhere(self, name: str, sequence: SequenceState, *arguments: Any) -> None:
        """Call a method with a sequence and more arguments on every part."""
        self._tell(name, text=self._number(sequence), arguments=arguments)
        self._together(lambda: getattr(self.inner, name)(sequence, *arguments))

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        self._everywhere("commit", sequence, list(path))

    def forget(self, sequence: SequenceState) -> None:
        self._everywhere("forget", sequence)

    def rewind(self, sequence: SequenceState, length: int) -> None:
        self._everywhere("rewind", sequence, length)

    def expect(self, sequence: SequenceState, length: int) -> None:
        self._everywhere("expect", sequence, length)

    def room(self, sequence: SequenceState) -> int:
        return self.inner.room(sequence)

    def snapshot(self, sequence: SequenceState, length: int) -> Snapshot | None:
        """The leader's part of a snapshot; every follower keeps its own until this one is dropped."""
        self._next += 1
        self._tell("snapshot", text=self._number(sequence), length=length, key=self._next)
        part: Snapshot | None = self._together(lambda: self.inner.snapshot(sequence, length))
        if part is None:
            self._forgotten.append(self._next)
            return None
        snapshot = _PartSnapshot(part.tokens, part.layers, part.divisible, part.regime, self._next)
        weakref.finalize(snapshot, self._forgotten.append, snapshot.key)
        return snapshot

    def restore(self, sequence: SequenceState, snapshot: Snapshot, length: int) -> None:
        if not isinstance(snapshot, _PartSnapshot):
            raise ValueError("this prefix was kept by another model")
        self._tell("restore", text=self._number(sequence), key=snapshot.key, length=length)
        self._together(lambda: self.inner.restore(sequence, snapshot, length))

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """Append and score nodes in all processes."""
        self._check(feeds, taps)
        feed_fields = []
        for feed in feeds:
            parents = None if feed.parents is None else list(feed.parents)
            feed_fields.append((self._number(feed.sequence), list(feed.tokens), parents, feed.wanted, feed.after))
        self._tell("forward", feeds=feed_fields)
        return self._together(lambda: self.inner.forward(feeds))

    def _check(self, feeds: Sequence[Feed], taps: Sequence[str]) -> None:
        """Reject calls that would fail halfway before any process starts them."""
        if taps:
            raise ValueError(f"{self.capabilities.missing['taps']}, which returns no hidden states")
        check_distinct(feeds)
        wrong = [token for feed in feeds for token in feed.tokens if not 0 <= token < self.vocab_size]
        if wrong:
            raise ValueError(f"token {wrong[0]} is outside the vocabulary of {self.vocab_size}")

    def prefill(self, sequence: SequenceState, tokens: Sequence[int], taps: Sequence[str] = ()) -> Mapping[str, Tensor]:
        if self.inner.rotary is not None:
            self.expect(sequence, max(sequence.regime, len(sequence.tokens) + len(tokens)))
        return super().prefill(sequence, tokens, taps)


def _end(followers: Sequence[Follower], on_end: Callable[[], None]) -> None:
    for follower in followers:
        follower.end()
    with suppress(Exception):  # the interpreter may already be shutting down
        if distributed.is_initialized():
            distributed.destroy_process_group()
        on_end()


@torch.inference_mode()
def follow(inner: HuggingFaceModel, lines: Iterable[str]) -> None:
    """Make the leader's calls, read from ``lines``, on another part of the model, until there are no more.

    Raises:
        Exception: a call failed; the caller must exit, since the leader waits for it.
    """
    sequences: dict[int, SequenceState] = {}
    snapshots: dict[int, Snapshot | None] = {}
    for line in lines:
        message = json.loads(line)
        for key in message["forget"]:
            snapshots.pop(key, None)
        call = message["call"]
        if call == "forward":
            inner.forward([Feed(sequences[number], *rest) for number, *rest in message["feeds"]])
        elif call in ("commit", "forget", "rewind", "expect"):
            getattr(inner, call)(sequences[message["text"]], *message["arguments"])
        elif call == "open":
            sequences[message["text"]] = inner.open()
        elif call == "release":
            inner.release(sequences.pop(message["text"]))
        elif call == "snapshot":
            snapshots[message["key"]] = inner.snapshot(sequences[message["text"]], message["length"])
        elif call == "restore":
            snapshot = snapshots[message["key"]]
            if snapshot is not None:
                inner.restore(sequences[message["text"]], snapshot, message["length"])
        else:
            raise ValueError(f"unknown call {call!r}")
