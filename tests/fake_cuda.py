"""A CUDA device for machines without one: tensors that say ``cuda:0``, are computed on the CPU, and mix as CUDA's do.

Inside :func:`fake_cuda` a tensor asked for on ``cuda`` is a :class:`FakeCuda` over a real CPU tensor.  An operation
that joins one with a CPU tensor of more than zero dimensions raises, except those that PyTorch allows: copies between
devices and CPU indices of a CUDA tensor.  ``numpy()`` raises as well, and so does drawing with a CPU generator.  There
are no gradients: PyTorch's autograd asks for the real device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from foretoken.models.cache import masks

CUDA = torch.device("cuda", 0)
KIND = "cuda"
"""What the device is called: :func:`fake_mps` makes another one of it."""
COPIES = {"copy_", "_copy_from", "_to_copy", "to", "type_as", "copy", "_has_compatible_shallow_copy_type"}
"""Operations whose tensors may be on two devices."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operations whose second argument may be CPU tensors when the first is on CUDA."""
STRICT = {"cat", "stack", "mm", "bmm", "addmm", "matmul", "linear", "gather", "index_select", "scatter", "embedding"}
"""Operations that take no CPU tensor of zero dimensions beside CUDA ones either."""
READS = {
    Tensor.tolist,
    Tensor.item,
    Tensor.data_ptr,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__bool__,
    Tensor.__index__,
}
"""Python calls that read a tensor's numbers or say where they are."""


class FakeCuda(Tensor):
    """A tensor on ``cuda:0`` whose numbers are in ``on_cpu``."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> FakeCuda:
        """Over ``real``, whose memory it shares."""
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=torch.device(KIND, 0),
        )
        wrapper.on_cpu = real
        return wrapper

    def __repr__(self, **_: Any) -> str:
        return f"FakeCuda({self.on_cpu})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the CPU."""
        return _computed(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _name(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


def _check(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where CUDA would."""
    if name in COPIES:
        return
    checked = (args[0], *args[2:]) if name in INDEXED and isinstance(args[0], FakeCuda) else args
    leaves = tree_flatten((checked, dict(kwargs)))[0]
    if not any(isinstance(x, FakeCuda) for x in leaves):
        return
    strict = name in STRICT
    for x in leaves:
        if isinstance(x, Tensor) and not isinstance(x, FakeCuda) and x.device.type == "cpu" and (x.dim() or strict):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got cuda:0 and cpu")
        if isinstance(x, torch.Generator) and x.device.type == "cpu":
            raise RuntimeError(f"Expected a 'cuda' device type for generator but {name} found 'cpu'")


def _is_cuda(x: Any) -> bool:
    return (isinstance(x, torch.device) and x.type == KIND) or (isinstance(x, str) and x.split(":")[0] == KIND)


def _target(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> str:
    """The device's kind or ``cpu``: where the results of an operation are."""
    named = [x for x in leaves if isinstance(x, torch.device)]
    if named:
        return named[-1].type
    if name in ("to", "type_as") and len(args) > 1 and isinstance(args[1], Tensor):
        return args[1].device.type
    if name == "copy_" or name == "_copy_from":
        return str(args[0].device.type)
    return KIND if any(isinstance(x, FakeCuda) for x in leaves) else "cpu"


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation, on the device where CUDA would leave it."""
    name = _name(func)
    _check(name, args, kwargs)
    leaves = tree_flatten((args, kwargs))[0]
    fakes = {id(x.on_cpu): x for x in leaves if isinstance(x, FakeCuda)}
    where = _target(name, args, kwargs, leaves)
    if fakes:
        COUNTED.reads += (name in COPIES and where == "cpu") or name in ("_local_scalar_dense", "nonzero")
    crosses = name in COPIES and not name.startswith("copy_") and bool(fakes) != (where == KIND)

    def lowered(x: Any) -> Any:
        if isinstance(x, FakeCuda):
            return x.on_cpu
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == KIND else x

    def raised(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, FakeCuda):
            return x
        if id(x) in fakes and where == KIND:  # in place, or into out=
            return fakes[id(x)]
        real = x.clone() if crosses else x
        return on_device(real) if where == KIND else real

    real_args, real_kwargs = tree_map(lowered, (args, kwargs))
    return tree_map(raised, func(*real_args, **real_kwargs))


class _Dispatch(TorchDispatchMode):
    """Tensors that PyTorch itself makes on CUDA below the Python functions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        if any(_is_cuda(x) or isinstance(x, FakeCuda) for x in leaves):
            return _computed(func, args, kwargs)
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Python calls that would start CUDA, or read the memory of a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return _moved(args[0])
        if func is Tensor.to:
            return _to(func, args, kwargs)
        if func is Tensor.numpy and isinstance(args[0], FakeCuda):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        if func in READS and isinstance(args[0], FakeCuda):
            COUNTED.reads += func is not Tensor.data_ptr
            return func(args[0].on_cpu)
        if func in (Tensor.detach, Tensor.contiguous) and isinstance(args[0], FakeCuda):
            return FakeCuda(func(args[0].on_cpu, *args[1:], **kwargs))
        if func is Tensor.copy_ and isinstance(args[0], FakeCuda):
            COUNTED.sends += not isinstance(args[1], FakeCuda)
            args[0].on_cpu.copy_(_lowered(args[1]))
            return args[0]
        if func is Tensor.__getitem__ and isinstance(args[0], FakeCuda):
            return _item(*args)
        if func is Tensor.__setitem__ and isinstance(args[0], FakeCuda):
            return _set_item(*args)
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeCuda):
            return _deepcopy(*args)
        if _is_cuda(kwargs.get("device")):
            generator = kwargs.get("generator")
            if generator is not None and generator.device.type == "cpu":
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            del kwargs["device"]
            COUNTED.sends += func in (torch.tensor, torch.as_tensor, Tensor.new_tensor)
            result = func(*args, **kwargs)
            return tree_map(lambda x: _moved(x) if isinstance(x, Tensor) else x, result)
        return func(*args, **kwargs)


def on_device(real: Tensor) -> FakeCuda:
    """What the device has of a tensor: MPS has no numbers of 64 bits."""
    if KIND == "mps" and real.dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
    return FakeCuda(real)


def _moved(x: Tensor) -> Tensor:
    """A copy on the device; what is there already stays."""
    if isinstance(x, FakeCuda):
        return x
    return on_device(x.detach().clone())


def _note_index(index: Any) -> None:
    """An index that is not on the device is sent there; one of truth values is counted there, and read."""
    for part in index if isinstance(index, tuple) else (index,):
        COUNTED.sends += isinstance(part, list) or (isinstance(part, Tensor) and not isinstance(part, FakeCuda))
        COUNTED.reads += isinstance(part, FakeCuda) and part.dtype == torch.bool


def _to(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``x.to(...)``, of which the part about the device is ours when it says CUDA."""
    like = [a for a in args[1:] if isinstance(a, FakeCuda)]
    if like:
        return _moved(args[0]).to(like[0].dtype)
    if not any(map(_is_cuda, (*args[1:], kwargs.get("device")))):
        return func(*args, **kwargs)
    COUNTED.sends += not isinstance(args[0], FakeCuda)
    rest = [a for a in args[1:] if not _is_cuda(a) and a is not None]
    kwargs.pop("device", None)
    cast = any(isinstance(r, torch.dtype) for r in rest) or "dtype" in kwargs
    return _moved(func(args[0], *rest, **kwargs) if cast else args[0])


def _lowered(x: Any) -> Any:
    """The CPU's side of a tensor, an index or a list of them."""
    return tree_map(lambda leaf: leaf.on_cpu if isinstance(leaf, FakeCuda) else leaf, x)


def _item(x: FakeCuda, index: Any) -> Tensor:
    """``x[index]``, for which PyTorch asks for the real device."""
    _note_index(index)
    return FakeCuda(x.on_cpu[_lowered(index)])


def _set_item(x: FakeCuda, index: Any, value: Any) -> None:
    """``x[index] = value``: a plain copy, between devices too, unless the index holds tensors."""
    _note_index(index)
    COUNTED.sends += isinstance(value, Tensor) and not isinstance(value, FakeCuda) and value.dim() > 0
    if any(isinstance(i, (Tensor, list)) for i in (index if isinstance(index, tuple) else (index,))):
        _check("index_put_", (x, [], value), {})
    x.on_cpu[_lowered(index)] = _lowered(value)


def _deepcopy(x: FakeCuda, memo: dict[int, Any]) -> Any:
    if id(x) not in memo:
        copy = FakeCuda(x.on_cpu.clone())
        memo[id(x)] = torch.nn.Parameter(copy, x.requires_grad) if isinstance(x, torch.nn.Parameter) else copy
    return memo[id(x)]


@dataclass
class Device:
    """What the stand-in counts.

    Attributes:
        synchronised: calls of ``torch.cuda.synchronize``.
        reads: transfers to the host, each of which waits for the device.
        sends: transfers from the host.
    """

    synchronised: int = 0
    reads: int = 0
    sends: int = 0

    def synchronize(self, device: Any = None) -> None:
        """Nothing to wait for."""
        self.synchronised += 1


COUNTED = Device()
"""That of the block which runs."""


@contextmanager
def fake_cuda() -> Iterator[Device]:
    """Nested, ``cuda`` is there, with one device; gradients are off."""
    global COUNTED
    device = COUNTED = Device()
    swap = torch.__future__.get_swap_module_params_on_conversion()
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "get_device_name", lambda _: "a stand-in"),
        mock.patch.object(torch.cuda, "synchronize", device.synchronize),
        torch.no_grad(),
        _Dispatch(),
        _Functions(),
    ):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield device
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swap)
            masks._step.cache_clear()  # the one cache of tensors that outlives a model


@contextmanager
def fake_mps() -> Iterator[Device]:
    """Nested, ``mps`` is there, the same stand-in under another name; CUDA is not."""
    global KIND, COUNTED
    device, KIND = Device(), "mps"
    COUNTED = device
    swap = torch.__future__.get_swap_module_params_on_conversion()
    with (
        mock.patch.object(torch.backends.mps, "is_available", lambda: True),
        mock.patch.object(torch.mps, "synchronize", device.synchronize),
        torch.no_grad(),
        _Dispatch(),
        _Functions(),
    ):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield device
        finally:
            KIND = "cuda"
            torch.__future__.set_swap_module_params_on_conversion(swap)
            masks._step.cache_clear()
