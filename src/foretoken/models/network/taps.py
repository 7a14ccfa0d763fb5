"""Hidden states by name, recorded with hooks in a context manager that always removes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from foretoken.models.base import CapabilityError
from foretoken.models.network.alone import only_here


def find_decoder(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The module of a Transformers causal LM that runs its decoder layers and the final norm, and those layers."""
    config: Any = model.config
    num_layers = config.get_text_config().num_hidden_layers
    if getattr(config, "is_encoder_decoder", False):  # its layers are in two lists
        names = ("num_decoder_layers", "decoder_layers")
        num_layers = next((n for n in (getattr(config, name, None) for name in names) if n), num_layers)
        model = model.get_decoder()  # type: ignore[operator]
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers and num_layers:
                return module, child
    family = config.get_text_config().model_type
    lists = (c for module in model.modules() for c in module.children() if isinstance(c, nn.ModuleList))
    count = next((len(layers) for layers in lists if len(layers)), 0)
    advice = f": it has {count}, so set config.num_hidden_layers to {count}" if count else ""
    raise CapabilityError(f"{family}: cannot find the {num_layers} decoder layers of {type(model).__name__}{advice}")


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    return find_decoder(model)[1]


def check_taps(taps: Sequence[str], num_layers: int) -> None:
    """Raise ``ValueError`` for unknown tap names, before anything runs."""
    for name in taps:
        kind, _, number = name.partition(":")
        if name != "last" and not (kind == "layer" and number.isdecimal() and int(number) <= num_layers):
            raise ValueError(f"unknown tap {name!r}: use 'last' or 'layer:i' with i from 0 to {num_layers}")


@contextmanager
def recording(model: nn.Module, taps: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Record hidden states during the forwards inside the block.

    ``"layer:i"`` is the output of the first i layers (0: the embedding), ``"last"`` the final norm's output, both
    [b, n, D].
    """
    states: dict[str, Tensor] = {}
    handles: list[Any] = []
    try:
        if taps:
            decoder, layers = find_decoder(model)
            check_taps(taps, len(layers))
            handles.extend(_hook(decoder, layers, name, states) for name in taps)
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _hook(decoder: nn.Module, layers: nn.ModuleList, name: str, states: dict[str, Tensor]) -> Any:
    if name == "last":

        def decoder_after(_: nn.Module, __: Any, output: Any) -> None:
            states[name] = output[0] if isinstance(output, tuple) else output.last_hidden_state

        return decoder.register_forward_hook(only_here(decoder_after))
    index = int(name.partition(":")[2])
    if index == 0:

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            states[name] = args[0] if args else kwargs["hidden_states"]

        return layers[0].register_forward_pre_hook(only_here(before), with_kwargs=True)

    def layer_after(_: nn.Module, __: Any, output: Any) -> None:
        states[name] = output[0] if isinstance(output, tuple) else output

    return layers[index - 1].register_forward_hook(only_here(layer_after))
