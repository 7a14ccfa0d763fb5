"""How a program of fixed shapes becomes a CUDA graph, and what no graph can hold."""

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
    """How a step's program becomes something that is run once a round."""

    def host(self, size: int) -> Tensor:
        """int32 memory [size] on the host."""

    def record(self, program: Run) -> Run:
        """What does the same as ``program``; the tensors that it returns may be the same ones every time."""


class Eager:
    """Runs the program itself: for tests, and to see what a graph would compute where there is no CUDA."""

    def host(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def record(self, program: Run) -> Run:
        return program


class CudaGraphs:
    """Captures programs on a device, all in one memory pool.

    A pool is shared by graphs of one thread only, since a replay may overwrite what another graph of the pool has
    left: results are copied out at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()

    def host(self, size: int) -> Tensor:
        """Pinned int32 memory [size], from which a copy does not wait for the device."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def record(self, program: Run) -> Run:
        """Run the program once, so that libraries allocate what they need, then capture it.

        PyTorch ends a capture that failed with another error, and leaves its stream the current one: whatever ran
        after that would be unordered with what had run before.  So the stream is put back here.
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
    """Nested, an operation whose result the host must know, or that crosses devices, raises: no graph could hold it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_flatten((args, kwargs or {}))[0] if isinstance(x, Tensor)]
        name = str(func._schema.name).removeprefix("aten::")
        dynamic = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # dynamic for masks of booleans only
            dynamic &= {tag for x in tensors[1:] if x.dtype == torch.bool for tag in dynamic}
        if dynamic:
            raise CapabilityError(f"its forward waits for the device ({name}), which cannot be captured")
        result = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_") and len({x.device for x in (*tensors, result) if x.dim()}) > 1:
            raise CapabilityError(f"its forward copies between devices ({name}), which cannot be captured")
        return result
