"""Whether a network is still what it was: its weights, its layers and the hooks on them.

What is kept beside a network (fused copies of its weights, keys and values of texts) is worth nothing once it has
changed: a training step, ``load_state_dict``, an adapter that is switched or merged, ``model.to``, a hook, a forward
that is replaced, a scale that is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.network.own_code import constants_by_module, forwards_of, numbers_by_module

SAMPLES = 64
"""Numbers per weight that are compared: writes through ``weight.data``, which PyTorch does not count, show in them."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what a module reads or gives."""
    return any(True for _ in _hooks(getattr(module, name) for name in HOOKS))


def _hooks(tables: Iterable[Mapping[int, Any]]) -> Iterator[Any]:
    """All but those that stay on a model once it was asked for its hidden states: they hand out copies, when asked."""
    harmless = "transformers.utils.output_capturing"
    return (hook for table in tables for hook in table.values() if getattr(hook, "__module__", "") != harmless)


def has_hooks(network: nn.Module) -> bool:
    """Whether any module of a network is hooked, or all modules of the process are."""
    return any(GLOBAL_HOOKS) or any(is_hooked(module) for module in network.modules())


class Watch:
    """What a network was when it was looked at.

    Changes are found by the identity of modules, weights, buffers and hooks, by PyTorch's count of writes to a weight
    or buffer, by where it lies, and by a sample of its numbers, whose memory is held; by the classes of modules, the
    forwards of those classes and the modules' own, by plain numbers (``scaling``, ``variance_epsilon``), and by the
    adapters that PEFT's layers have switched on, with their factors.  What the network's own forward does to itself is
    no change: numbers and unsaved buffers that a class writes in its own methods, or that rotary embeddings turn by
    which change with the length of the text, are not looked at, accelerate replaces weights that it keeps elsewhere by
    others without numbers, and PEFT sets updates of single parameters on and off, which counts as a write.

    Nothing tells of other attributes (tensors and flags that are no buffers, the configuration), of functions that a
    forward calls (``modeling_llama.apply_rotary_pos_emb``) and methods other than ``forward``, of numbers beside the
    sample that are written through ``.data``, or of a buffer that is added.
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
        """Whether the network is another one now; takes some ten microseconds per layer."""
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
        """What the modules compute with besides tensors; the objects themselves, so that no other takes their place."""
        numbers = (owner.get(name) for owner, names in self._numbers for name in names)
        return [*forwards_of(self._modules), *numbers, *map(_switched_on, self._adapted)]

    def _counts(self) -> list[int]:
        counts = [tensor.data_ptr() for tensor in self._tensors]
        counts.extend(num_writes(tensor) for tensor in self._tensors if id(tensor) not in self._uncounted)
        return counts


def _identity(member: Any) -> int:
    """Which module or weight it is; all weights without numbers are one."""
    return 0 if isinstance(member, Tensor) and member.is_meta else id(member)


def _updates_in_forward(module: Any) -> bool:
    """Whether it is PEFT's wrapper of a single parameter, which it replaces by the sum of itself and its update."""
    return hasattr(module, "get_param") and hasattr(module, "parameter_name")


def _switched_on(module: Any) -> tuple[str, bool, dict[str, float]]:
    """Which adapters a layer of PEFT adds and whether at all, and their factors: copied, as PEFT writes into them.

    It keeps them under these names in all its layers; switching writes no weight and calls no other forward.
    """
    factors = getattr(module, "scaling", None)
    disabled = bool(getattr(module, "_disable_adapters", False))
    return str(module._active_adapter), disabled, dict(factors) if isinstance(factors, dict) else {}


def num_writes(tensor: Tensor) -> int:
    """How often it was written to; 0 for tensors of inference mode, which do not count."""
    try:
        return tensor._version
    except RuntimeError:  # also where is_inference() is false: a parameter that was given such data later
        return 0


def _saved(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, list[str]]]:
    """Modules with buffers that are saved with a model, and the names of those."""
    for module in modules:
        names = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        if names:
            yield module, names


def _sampled(tensor: Tensor) -> Tensor:
    """A view [n] of the bits of some numbers of a tensor, spread over all of it; none where it cannot be viewed so."""
    try:
        step = max(1, tensor.numel() // SAMPLES)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return tensor.view(-1).view(integers)[step - 1 :: step]
    except (RuntimeError, KeyError):  # not dense, complex, or a parameter with data of inference mode
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
