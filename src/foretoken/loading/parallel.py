"""A target split over several processes of this machine: starting them, and refusing models that cannot be split."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from torch import distributed

from foretoken.core.io.checkpoints import BUILTIN, LoadError, cause_of, check_folder, is_adapter, location_of, resolve
from foretoken.core.io.hub_ids import expanded
from foretoken.loading.gguf import is_gguf
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.parallel import ParallelModel

END_S = 3.0
"""Seconds within which a process must exit after its pipe was closed."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that select the network interface between processes."""


@dataclass
class PartProcess:
    """A process that holds a part of the model (:class:`foretoken.models.other.parallel.Follower`).

    Attributes:
        rank: rank of the process; 0 is the leader.
        process: the process that runs :mod:`foretoken.loading.follower`.
        errors: its standard error.
    """

    rank: int
    process: subprocess.Popen[str]
    errors: IO[bytes]
    _ending: str | None = field(default=None, init=False)

    def ended(self) -> str | None:
        """Message about its end; ``None`` while it runs."""
        if self._ending is None and self.process.poll() is not None:
            code = self.process.returncode
            ending = f"signal {-code}" if code < 0 else f"exit code {code}: {self._last_words()}"
            self._ending = f"process {self.rank} of the split model has ended ({ending})"
        return self._ending

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it printed nothing"

    def send(self, line: str) -> None:
        if self.process.stdin is None:
            raise ValueError("the process has no standard input")
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        """Its next message during start-up.  Raises ``LoadError`` if it has exited or could not load its part."""
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            self.process.wait(END_S)
            raise LoadError(self.ended() or f"process {self.rank} of the split model does not respond")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise LoadError(str(message["error"]))
        return message

    def end(self) -> None:
        """Close its pipe, which ends it, and wait."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with suppress(OSError):  # it has exited with unread input
                self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def load_parallel(source: Any, count: int, *, dtype: Any, device: Any, exact: str, **others: Any) -> LanguageModel:
    """A target over ``count`` processes.  Raises ``ValueError`` if it cannot be split, and ``LoadError`` if a process
    could not load its part.

    Args:
        count: number of processes; on CUDA each has its own device.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` (and ``None``) for the available one.
        others: options that a split model does not support; they must be unset.
    """
    from foretoken.loading.networks import load_network, parse_dtype

    kind = _kind(device, count)
    path = _check_source(source, count, others)
    torch_dtype = parse_dtype(dtype)
    parts: list[PartProcess] = []
    give_back = _own_settings()
    with tempfile.TemporaryDirectory(prefix="foretoken-") as folder:
        settings = {"world": count, "store": str(Path(folder, "store")), "path": path, "exact": exact, "kind": kind}
        settings["threads"] = max(
            1, torch.get_num_threads() // (count if kind == "cpu" else 1)
        )  # as many as one would have
        settings["dtype"] = None if torch_dtype is None else str(torch_dtype).removeprefix("torch.")
        try:
            parts.extend(_started(rank, settings) for rank in range(1, count))
            for part in parts:
                part.heard()  # it has imported what it needs
            join(0, settings)
            network = load_network(path, torch_dtype, count)
            for part in parts:
                part.heard()  # it has loaded its part
            return ParallelModel(HuggingFaceModel(network, exact=exact, lean=False), parts, give_back)
        except BaseException:
            for part in parts:
                part.end()
            if distributed.is_initialized():
                distributed.destroy_process_group()
            give_back()
            raise


def _own_settings() -> Callable[[], None]:
    """A function that restores the changes of :func:`join` in the caller's process: its thread count, which the next
    split model would divide again, the exception hook, which names ranks, and variables."""
    threads, hook = torch.get_num_threads(), sys.excepthook
    variables = {name: os.environ.get(name) for name in INTERFACES}

    def give_back() -> None:
        torch.set_num_threads(threads)
        sys.excepthook = hook
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)

    return give_back


def _kind(device: Any, count: int) -> str:
    if distributed.is_initialized():
        raise ValueError("this process has a split model already: close it first (llm.target.close())")
    name, cuda = str(device or "auto"), torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"tensor_parallel takes the devices 0 to {count - 1}: device must be cuda, cpu or auto")
    kind = "cuda" if cuda else "cpu"
    if name not in ("auto", kind):
        hint = "hide the GPUs with CUDA_VISIBLE_DEVICES=''" if cuda else "there is no GPU"
        raise ValueError(f"a model cannot be split over {name} here: {hint}")
    if cuda and torch.cuda.device_count() < count:
        raise ValueError(f"tensor_parallel={count} needs {count} GPUs, and there are {torch.cuda.device_count()}")
    return kind


def _check_source(source: Any, count: int, others: dict[str, Any]) -> str:
    """Path of the checkpoint.  Raises ``ValueError`` if it cannot be split."""
    if not isinstance(source, str | Path):
        raise ValueError("tensor_parallel needs the path or name of a model: every process loads its own part")
    for name, value in others.items():
        if value not in (None, False, "auto"):
            raise ValueError(f"tensor_parallel and {name} cannot be combined: leave one of them out")
    if is_gguf(source):
        raise ValueError("a GGUF file cannot be split: give a Transformers checkpoint for tensor_parallel")
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError("tensor_parallel needs accelerate: pip install accelerate")
    path = resolve(source, "target")
    local = expanded(path)
    if is_adapter(local):
        raise ValueError(f"{source} is an adapter of another model: merge it before splitting")
    if local.exists() or str(source) == BUILTIN or path.startswith((".", "/", "~")):
        check_folder(local)
        path = str(local)
    from transformers import AutoConfig

    path = location_of(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise LoadError(f"cannot read the configuration of {path}: {cause_of(error)}") from None
    check_split(config.get_text_config(), count)
    return path


def check_split(config: Any, count: int) -> None:
    """Raise ``ValueError`` if the model has no plan for splitting or its heads cannot be divided."""
    if not getattr(config, "base_model_tp_plan", None):
        raise CapabilityError(f"Transformers has no plan for splitting {config.model_type}: leave tensor_parallel out")
    heads = config.num_attention_heads
    for name, noun in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key-value heads")):
        number = getattr(config, name, None) or heads
        if number % count:
            fitting = [n for n in range(2, number + 1) if number % n == 0 and heads % n == 0]
            hint = f"choose {' or '.join(map(str, fitting))}" if fitting else "this model cannot be split"
            raise ValueError(f"tensor_parallel={count} does not divide the {number} {noun} of this model: {hint}")


def _started(rank: int, settings: dict[str, Any]) -> PartProcess:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
    process = subprocess.Popen(
        [sys.executable, "-m", "foretoken.loading.follower", json.dumps({**settings, "rank": rank})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, "LOCAL_RANK": str(rank), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        start_new_session=True,  # Ctrl-C is the leader's business
    )
    return PartProcess(rank, process, errors)


def join(rank: int, settings: dict[str, Any]) -> None:
    """Join the other processes, over the loopback interface."""
    if sys.platform == "linux":
        for name in INTERFACES:
            os.environ.setdefault(name, "lo")
    torch.set_num_threads(settings["threads"])
    cuda = settings["kind"] == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if cuda else "gloo",
        store=distributed.FileStore(settings["store"], settings["world"]),  # type: ignore[attr-defined]
        rank=rank,
        world_size=settings["world"],
        timeout=timedelta(minutes=2),  # within which all processes must have joined
        device_id=torch.device("cuda", rank) if cuda else None,
    )
