"""Hidden states by name: hooks in a context manager that always removes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers of a Transformers causal LM.

    Raises:
        ValueError: no module list of the configured length.
    """
    config: Any = model.config
    wanted = config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted and wanted:
            return module
    raise ValueError(f"cannot find the {wanted} decoder layers of {type(model).__name__}")


@contextmanager
def recording(model: nn.Module, taps: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Record hidden states during the forwards inside the block.

    ``"layer:i"`` is the output of the first i layers (0: the embedding), ``"last"`` the final norm's output, both
    [b, n, D].
    """
    found: dict[str, Tensor] = {}
    handles = [_hook(model, name, found) for name in taps]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _hook(model: nn.Module, name: str, found: dict[str, Tensor]) -> Any:
    if name == "last":
        base: Any = model.base_model

        def after(_: nn.Module, __: Any, output: Any) -> None:
            found[name] = output[0] if isinstance(output, tuple) else output.last_hidden_state

        return base.register_forward_hook(after)
    layers = decoder_layers(model)
    kind, _, number = name.partition(":")
    if kind != "layer" or not number.isdigit() or not 0 <= int(number) <= len(layers):
        raise ValueError(f"unknown tap {name!r}: use 'last' or 'layer:i' with i from 0 to {len(layers)}")
    index = int(number)
    if index == 0:

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            found[name] = args[0] if args else kwargs["hidden_states"]

        return layers[0].register_forward_pre_hook(before, with_kwargs=True)

    def layer_after(_: nn.Module, __: Any, output: Any) -> None:
        found[name] = output[0] if isinstance(output, tuple) else output

    return layers[index - 1].register_forward_hook(layer_after)
