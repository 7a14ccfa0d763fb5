"""Error messages and freed memory when a device is full during loading."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from foretoken.core.io.checkpoints import LoadError

P = ParamSpec("P")
T = TypeVar("T")
ADVICE = "choose dtype=bfloat16, a smaller model, another device, or device=cpu"


def moved(network: Any, device: torch.device | str | None, name: str) -> Any:
    """``network`` on ``device``; unchanged if that is ``None``.  If the device is full, everything already moved there
    is freed and ``LoadError`` is raised."""
    if device is None:
        return network
    needed = sum(weight.nbytes for weight in (*network.parameters(), *network.buffers()))
    try:
        return network.to(device)
    except torch.OutOfMemoryError:
        pass  # not raised here: the error's traceback would keep the memory that is freed below
    network.to("meta")
    raise LoadError(f"{name} needs {_size(needed)} on {device}, and {_free(device)} are free there: {ADVICE}")


def explains_full_memory(load: Callable[P, T]) -> Callable[P, T]:
    """``load`` with a one-line error that names the full device instead of PyTorch's report."""

    @functools.wraps(load)
    def loading(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return load(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            report = str(error)
        allocation = re.search(r"Tried to allocate ([\d.]+ \w+)", report)
        match = re.search(r"GPU (\d+)", report)
        device = f"cuda:{match[1] if match else torch.cuda.current_device()}"
        more = allocation[1] if allocation else "more"
        raise LoadError(f"loading needs another {more} on {device}, and {_free(device)} are free there: {ADVICE}")

    return loading


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _free(device: torch.device | str) -> str:
    if torch.device(device).type != "cuda":
        return "fewer"
    torch.cuda.empty_cache()
    return _size(torch.cuda.mem_get_info(device)[0])
