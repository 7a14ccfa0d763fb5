"""Detection of changes to a network: its weights, its layers and their hooks.

Any change invalidates what is stored beside a network (fused copies of its weights, keys and values): a training step,
``load_state_dict``, switching or merging an adapter, ``model.to``, a hook, a replaced forward, a changed scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.network.own_code import constants_by_module, forwards_of, numbers_by_module

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks read or change a module's input or output."""
    return any(True for _ in _hooks(getattr(module, name) for name in HOOKS))


def _hooks(tables: Iterable[Mapping[int, Any]]) -> Iterator[Any]:
    """All hooks except those that Transformers leaves on a model after hidden states were requested: they only copy."""
    harmless = "transformers.utils.output_capturing"
    return (hook for table in tables for hook in table.values() if getattr(hook, "__module__", "") != harmless)


def has_hooks(network: nn.Module) -> bool:
    """Whether any module of a network is hooked, or all modules of the process are."""
    return any(GLOBAL_HOOKS) or any(is_hooked(module) for module in network.modules())


class Watch:
    """The state of a network, for detecting later changes.

    It compares the identity of modules, weights, buffers and hooks; PyTorch's count of writes to weights and buffers,
    their addresses, and a sample of their numbers (whose memory is kept alive); the classes of modules, with the
    forwards of classes and instances; plain numbers (``scaling``, ``variance_epsilon``); and the active adapters of
    PEFT's layers, with their factors.  Changes that the network's own forward makes do not count.  So it ignores
    numbers and unsaved buffers written by methods of their class, and the frequencies of length-dependent rotary
    embeddings.  It also allows that accelerate replaces offloaded weights by others without numbers, and that PEFT sets
    updates of single parameters on and off, which counts as a write.

    It does not detect changes of other attributes (tensors and flags that are not buffers, the configuration), of
    functions called by a forward (``modeling_llama.apply_rotary_pos_emb``) or methods other than ``forward``, of
    numbers outside the sample written through ``.data``, or an added buffer.
    """

    @torch.inference_mode()
    def __init__(self, network: nn.Module) -> None:
        self.network = network
        modules = list(network.modules())
        self._parts: list[dict[str, Any]] = [part for m in modules for part in (m._modules, m._parameters)]
        self._hooks = [*GLOBAL_HOOKS, *(getattr(module, name) for module in modules for name in HOOKS)]
        self._modules = modules
        self._adapted = [m for m in modules if hasattr(m, "_active_adapter")]
        self._numbers = [(vars(m), names) for m, names in numbers_by_module(modules)]
        buffers = [(m._buffers, names) for m, names in (*_saved(modules), *constants_by_module(modules))]
        self._buffers = [(owner, name) for owner, names in buffers for name in names]
        self._before, self._code = self._members(), self._computing()
        tensors = [*network.parameters(), *(t for owner, name in self._buffers if (t := owner[name]) is not None)]
        self._tensors = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta]
        wrappers: list[Any] = [module for module in modules if _updates_in_forward(module)]
        self._uncounted = {id(wrapper.get_param()) for wrapper in wrappers}
        self._versions = self._counts()
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in self._tensors:
            numbers = _sampled(tensor.detach())
            kinds.setdefault((numbers.dtype, numbers.device), []).append(numbers)
        self._samples = [(views, torch.cat(views)) for views in kinds.values()]

    @torch.inference_mode()
    def has_changed(self) -> bool:
        """Whether the network has changed; takes about ten microseconds per layer."""
        if self._members() != self._before or self._computing() != self._code or self._counts() != self._versions:
            return True
        return any(not torch.equal(torch.cat(views), before) for views, before in self._samples)

    def _members(self) -> list[int]:
        members = [len(part) for part in self._parts]
        members.extend(_identity(member) for part in self._parts for member in part.values())
        members.extend(_identity(owner.get(name)) for owner, name in self._buffers)
        members.extend(id(hook) for hook in _hooks(self._hooks))
        return members

    def _computing(self) -> list[Any]:
        """Non-tensor inputs of the modules' computation, as the objects themselves, so that their ids are not
        reused."""
        numbers = (owner.get(name) for owner, names in self._numbers for name in names)
        return [*forwards_of(self._modules), *numbers, *map(_switched_on, self._adapted)]

    def _counts(self) -> list[int]:
        counts = [tensor.data_ptr() for tensor in self._tensors]
        counts.extend(num_writes(tensor) for tensor in self._tensors if id(tensor) not in self._uncounted)
        return counts


def _identity(member: Any) -> int:
    """Identity of a module or weight; all weights without numbers count as one."""
    return 0 if isinstance(member, Tensor) and member.is_meta else id(member)


def _updates_in_forward(module: Any) -> bool:
    """Whether a module is PEFT's wrapper of a single parameter, which it replaces by the sum of itself and its
    update."""
    return hasattr(module, "get_param") and hasattr(module, "parameter_name")


def _switched_on(module: Any) -> tuple[str, bool, dict[str, float]]:
    """Active adapters of a PEFT layer, whether they are disabled, and their factors (copied, as PEFT writes into them).

    All of PEFT's layers use these names; switching adapters writes no weight and calls no other forward.
    """
    factors = getattr(module, "scaling", None)
    disabled = bool(getattr(module, "_disable_adapters", False))
    return str(module._active_adapter), disabled, dict(factors) if isinstance(factors, dict) else {}


def num_writes(tensor: Tensor) -> int:
    """Number of writes to a tensor; 0 for inference tensors, which do not count them."""
    try:
        return tensor._version
    except RuntimeError:  # even if is_inference() is false: a parameter that got such data later
        return 0


def _saved(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, list[str]]]:
    for module in modules:
        names = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        if names:
            yield module, names


def _sampled(tensor: Tensor) -> Tensor:
    """A view [n] of the bits of some numbers spread over a tensor; empty if there is no such view."""
    try:
        # 64 numbers show writes through ``weight.data``, which PyTorch does not count
        step = max(1, tensor.numel() // 64)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return tensor.view(-1).view(integers)[step - 1 :: step]
    except (RuntimeError, KeyError):  # not dense, complex, or a parameter with inference data
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
