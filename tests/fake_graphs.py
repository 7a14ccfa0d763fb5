"""CUDA graphs for machines without CUDA: what is captured is replayed operation by operation on the same tensors.

Like a graph, a recording knows nothing of Python: whatever was decided on the host while it was made stays as it was,
and only what tensors hold can differ between replays.  On the stand-in for CUDA (``fake_cuda``), reading a tensor or
sending one to the device during a capture raises, as it does there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fake_cuda import READS, FakeCuda, _is_cuda, fake_cuda
from foretoken.models.forward.capture import Recorder, Run


class Eager(Recorder):
    """Runs a step's program itself: what a graph computes, without a graph."""

    def host(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def record(self, program: Run) -> Run:
        return program


class Recording(TorchDispatchMode):
    """Notes every operation inside the block; ``replay`` does them again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and note."""
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        self.calls.append((func, args, kwargs or {}, tensors))
        return result

    def replay(self) -> None:
        """Do everything again, with what the tensors hold now, into the tensors that were made then."""
        self.replays += 1
        for func, args, kwargs, outputs in self.calls:
            inputs = {id(x) for x in tree_flatten((args, kwargs))[0]}
            again = [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, Tensor)]
            for old, new in zip(outputs, again, strict=True):
                if id(old) not in inputs and not _same_memory(old, new):
                    old.copy_(new)


def _same_memory(first: Tensor, second: Tensor) -> bool:
    first, second = (x.on_cpu if isinstance(x, FakeCuda) else x for x in (first, second))
    return first.data_ptr() == second.data_ptr() and first.stride() == second.stride()


class Recordings:
    """A :class:`foretoken.models.forward.capture.Recorder` that works on any device.

    Attributes:
        recordings: all that were made.
    """

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def host(self, size: int) -> Tensor:
        """int32 memory [size]."""
        return torch.zeros(size, dtype=torch.int32)

    def record(self, program: Run) -> Run:
        """What the program did, frozen."""
        with Recording() as recording:
            outputs = program()
        self.recordings.append(recording)

        def replay() -> tuple[Tensor, dict[str, Tensor]]:
            recording.replay()
            return outputs

        return replay


class Capturing(TorchFunctionMode):
    """Python calls that no stream can do while it is captured."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_device = bool(args) and isinstance(args[0], FakeCuda)
        reads = (READS - {Tensor.data_ptr}) | {Tensor.cpu, Tensor.numpy}
        sends = func in (torch.tensor, torch.as_tensor) and _is_cuda(kwargs.get("device"))
        moves = func is Tensor.to and any(map(_is_cuda, (*args[1:], kwargs.get("device")))) and not on_device
        if (func in reads and on_device) or sends or moves:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({func})")
        return func(*args, **kwargs)


class FakeGraph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    graphs: list[FakeGraph] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.recording = Recording()
        self.graphs.append(self)

    def replay(self) -> None:
        """Do what was captured."""
        if not self.recording.calls:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.recording.replay()


class FakeStream:
    """Stands in for ``torch.cuda.Stream``."""

    current: FakeStream

    def wait_stream(self, other: FakeStream) -> None:
        """Work is done at once: there is nothing to wait for."""


@contextmanager
def _stream(stream: FakeStream) -> Iterator[None]:
    before, FakeStream.current = FakeStream.current, stream
    yield
    FakeStream.current = before


@contextmanager
def _capture(graph: FakeGraph, pool: Any, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
    """As in PyTorch, a capture that fails raises its own error before its stream is restored."""
    assert pool == "pool" and capture_error_mode == "thread_local"
    with _stream(stream):
        try:
            with graph.recording, Capturing():
                yield
        except RuntimeError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904


@contextmanager
def fake_cuda_graphs() -> Iterator[list[FakeGraph]]:
    """Nested, ``cuda`` is there (:func:`fake_cuda.fake_cuda`) and can capture graphs; yields those that are made."""
    FakeGraph.graphs = graphs = []
    FakeStream.current = FakeStream()
    zeros = torch.zeros

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return zeros(*args, **kwargs)

    fakes: dict[str, Any] = {
        "CUDAGraph": FakeGraph,
        "graph": _capture,
        "graph_pool_handle": lambda: "pool",
        "Stream": FakeStream,
        "stream": _stream,
        "current_stream": lambda: FakeStream.current,
        "set_stream": lambda stream: setattr(FakeStream, "current", stream),
        "device": lambda _: nullcontext(),
    }
    with ExitStack() as stack:
        stack.enter_context(fake_cuda())
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(torch, "zeros", unpinned))
        yield graphs
