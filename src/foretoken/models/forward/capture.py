"""Capture of fixed-shape programs as CUDA graphs, and a check for operations that no graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from foretoken.models.base import CapabilityError

Run = Callable[[], tuple[Tensor, dict[str, Tensor]]]


class Recorder(Protocol):
    """Turns a step's program into a callable that runs once per round."""

    def host(self, size: int) -> Tensor:
        """int32 memory [size] on the host."""

    def record(self, program: Run) -> Run:
        """A callable equivalent to ``program``; it may return the same tensors every time."""


class CudaGraphs:
    """Captures programs on a device in one memory pool.

    Only graphs of one thread share a pool, since a replay may overwrite the results of another graph of the pool:
    results are copied out immediately.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()

    def host(self, size: int) -> Tensor:
        """Pinned int32 memory [size], so that a copy does not wait for the device."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def record(self, program: Run) -> Run:
        """Run the program once, so that libraries allocate what they need, then capture it.

        PyTorch ends a failed capture with another error and leaves its stream as the current one, where later work
        would not be ordered after earlier work.  So the stream is restored here.
        """
        with torch.cuda.device(self.device):
            before = torch.cuda.current_stream()
            try:
                self.stream.wait_stream(before)
                with torch.cuda.stream(self.stream):
                    program()
                before.wait_stream(self.stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    result = program()
            finally:
                torch.cuda.set_stream(before)

        def replay() -> tuple[Tensor, dict[str, Tensor]]:
            graph.replay()
            return result

        return replay


class HostFree(TorchDispatchMode):
    """Raise inside the block for operations that no graph can hold: the host needs their result, or they cross
    devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_flatten((args, kwargs or {}))[0] if isinstance(x, Tensor)]
        name = str(func._schema.name).removeprefix("aten::")
        dynamic = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # dynamic only for boolean masks
            dynamic &= {tag for x in tensors[1:] if x.dtype == torch.bool for tag in dynamic}
        if dynamic:
            raise CapabilityError(f"its forward waits for the device ({name}), which cannot be captured")
        result = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_") and len({x.device for x in (*tensors, result) if x.dim()}) > 1:
            raise CapabilityError(f"its forward copies between devices ({name}), which cannot be captured")
        return result
