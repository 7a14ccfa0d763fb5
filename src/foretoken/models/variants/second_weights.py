"""A model's own network with quantised weights beside the full ones, for drafting.

Norms, embeddings, rotary tables, masks and the cache are the model's own; only the weights of linear layers differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.forward.lean import LeanForward
from foretoken.models.forward.network import Network
from foretoken.models.linear.input_power import input_powers
from foretoken.models.linear.packing import PackedLinear, Packing, dtype_of, is_plain, joined_bias, joined_weight
from foretoken.models.linear.product import Product, QuantisedLinear, is_stored
from foretoken.models.linear.quantised import (
    WITHOUT_BYTES,
    available,
    fastest_draft_product,
    make_product,
    multiplies_bytes,
)
from foretoken.models.linear.quantised_linear import is_ready_made
from foretoken.models.linear.quantised_products import QuantisedProduct
from foretoken.models.linear.quantised_weights import GROUPS, fits_int4
from foretoken.models.machine import free_bytes
from foretoken.models.network.alone import alone
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.layers import replace_forward
from foretoken.models.network.taps import decoder_layers
from foretoken.models.variants.own_sequences import OwnSequencesModel


@dataclass(frozen=True)
class Scheme:
    """Quantisation of a second set of weights.

    Attributes:
        bits: ``"4"``, ``"8"``, or ``"auto"``: the faster one for each layer, by measurement.
        group: weights of a row per int4 scale.
        activations: bits of the inputs: ``"8"``, ``"15"`` or more, or ``"auto"``: 8 if that is faster.
        head: whether the vocabulary projection is quantised, too; false if another replaces it.

    Raises:
        ValueError: an option has an invalid value.
    """

    bits: str = "auto"
    group: int = 32
    activations: str = "auto"
    head: bool = True

    def __post_init__(self) -> None:
        allowed = {"bits": ("4", "8", "auto"), "group": GROUPS, "activations": ("8", "15", "auto")}
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {getattr(self, name)}")

    @property
    def name(self) -> str:
        """Key that distinguishes the sets of one model."""
        return f"{self.bits}-{self.group}-{self.activations}{'' if self.head else '-layers'}"

    def product(self, shape: Sequence[int]) -> type[QuantisedProduct] | None:
        """The product for a weight [out, in]; ``None`` leaves the layer unquantised."""
        return fastest_draft_product(shape[0], shape[1], self.group, self.bits, self.activations)

    def head_product(self, shape: Sequence[int]) -> type[QuantisedProduct] | None:
        """The same for the vocabulary projection: always int8, because its errors are errors of logits."""
        return fastest_draft_product(shape[0], shape[1], self.group, "8", self.activations) if self.head else None


class QuantisedWeights:
    """Every linear layer of a model's decoder layers and its vocabulary projection, quantised.

    A model on the lean forward gets a second lean forward with quantised projections; on the public forward, linear
    layers are replaced during a call.

    Args:
        owner: the network, on a CPU; it is not modified.

    Raises:
        CapabilityError: no layer can be quantised; the message states the reason.
        ValueError: not enough memory.
    """

    def __init__(self, owner: Network, scheme: Scheme) -> None:
        check_quantisable(owner, scheme)
        self.products: dict[nn.Module, QuantisedProduct] = {}
        self.all_products: list[QuantisedProduct] = []
        self.fast: LeanForward | None = None
        head = owner.model.get_output_embeddings()
        powers = {} if scheme.bits == "8" else input_powers(owner.model, linears(owner.model), owner.text)
        if owner.fast is not None:
            shadow = copy.copy(owner)
            base = owner.packing
            shadow.packing = _QuantisedPacking(base.layout, base.blocks, None, scheme, head, powers, self.all_products)
            self.fast = owner.fast.again(shadow)
        else:
            for linear in linears(owner.model):
                choose = scheme.head_product if linear is head else scheme.product
                product = choose((linear.out_features, linear.in_features))
                if product is not None:
                    weight, power = joined_weight([linear]), powers.get(linear)
                    quantised = make_product(product, weight, linear.bias, scheme.group, power)
                    self.products[linear] = quantised
                    self.all_products.append(quantised)

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in self.all_products)

    def run(self, network: Network, call: NetworkCall) -> Outputs:
        """Logits [n, V] per feed, and taps; keys and values go to the call's cache."""
        if self.fast is not None:
            return self.fast.run(call)
        with alone(network.model), ExitStack() as swapped:
            for linear, product in self.products.items():
                swapped.callback(replace_forward(linear, _forward(product)))
            return network.run_public(call)


@dataclass(frozen=True)
class _QuantisedPacking(Packing):
    """Quantised projections; those that cannot be quantised use the model's own layout, since both read its cache.

    Attributes:
        powers: [in] mean squares of a layer's inputs.
        products: all products created so far.
    """

    scheme: Scheme = Scheme()
    head: Any = None
    powers: dict[nn.Module, Tensor] = field(default_factory=dict)
    products: list[QuantisedProduct] = field(default_factory=list)

    def projection(self, *linears: Any) -> Product:
        """One product with the concatenated outputs of all layers; the model's own if none fits."""
        shape = (sum(linear.out_features for linear in linears), linears[0].in_features)
        choose = self.scheme.head_product if linears[0] is self.head else self.scheme.product
        product = choose(shape)
        if product is None:
            projections: set[Product | None] = {getattr(linear, "projection", None) for linear in linears}
            shared = projections.pop() if len(projections) == 1 else None
            return super().projection(*linears) if shared is None else shared
        power = self.powers.get(linears[0])  # the inputs of all
        quantised = make_product(product, joined_weight(linears), joined_bias(linears), self.scheme.group, power)
        self.products.append(quantised)
        return quantised


def _forward(product: QuantisedProduct) -> Callable[[Tensor], Tensor]:
    """Replacement of ``nn.Linear.forward`` during a call: [..., in] -> [..., out]."""

    def run(x: Tensor) -> Tensor:
        return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return run


def linears(model: Any) -> Iterator[Any]:
    """The linear layers that a draft reads: those of a model's decoder layers, and its head."""
    head = model.get_output_embeddings()
    for module in [m for layer in decoder_layers(model) for m in layer.modules()] + [head]:
        if is_plain(module) or isinstance(module, PackedLinear) or is_stored(module):
            yield module


def check_quantisable(owner: Network, scheme: Scheme) -> None:
    """Raise an error for a model that cannot be quantised, before computing any weight."""
    if owner.device.type != "cpu":
        raise CapabilityError(
            f"quantised weights are multiplied on the cpu only, and the target's are on {owner.device}: "
            "use another drafter, for example ngram"
        )
    if not available():
        raise CapabilityError("this build of PyTorch has no quantised matrix products")
    if scheme.activations == "8" and not multiplies_bytes():
        raise CapabilityError(f"activations=8: {WITHOUT_BYTES}: leave it out")
    quantised = [module for module in owner.model.modules() if isinstance(module, QuantisedLinear)]
    if is_ready_made(owner.model) or not all(map(is_stored, quantised)):
        raise CapabilityError("the target's weights are quantised already: use another drafter, for example ngram")
    head = owner.model.get_output_embeddings()
    inner = [linear for linear in linears(owner.model) if linear is not head]
    kind = type(decoder_layers(owner.model)[0]).__name__
    if not inner:
        raise CapabilityError(f"the {kind} layers of this target have no nn.Linear whose weights could be quantised")
    odd = next((str(dtype_of(m)) for m in inner if not dtype_of(m).is_floating_point), None)
    if odd is not None:
        raise CapabilityError(f"the target's weights are {odd} already: only floating-point weights can be quantised")
    shapes = [(m.out_features, m.in_features) for m in inner]
    if all(scheme.product(shape) is None for shape in shapes):
        raise CapabilityError(
            f"no layer of this target fits bits={scheme.bits}: int4 needs outputs in multiples of 16 and inputs in "
            f"multiples of group={scheme.group}, and {kind} layers have {list(shapes[0])}; use bits=8"
        )
    check_room(sum(bytes_of(shape, scheme) for shape in shapes) + _size_of(head))


def _size_of(head: Any) -> int:
    """Number of weights in the vocabulary projection, which may be missing, or not one of PyTorch's layers."""
    if isinstance(head, nn.Linear | PackedLinear | QuantisedLinear):
        return head.out_features * head.in_features
    return 0 if head is None else int(head.weight.numel())


def bytes_of(shape: tuple[int, int], scheme: Scheme) -> int:
    """Maximum bytes of a quantised weight."""
    count = shape[0] * shape[1]
    if scheme.bits == "4":
        return count // 2 + 4 * count // scheme.group if fits_int4(shape, scheme.group) else 0
    return count + 8 * shape[0]


def check_room(needed: int) -> None:
    """Raise ``ValueError`` if a second set of weights exceeds the free memory."""
    free = free_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"a second set of weights takes {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB of memory are free: "
            "use bits=4, a smaller target or another drafter"
        )


class OwnWeightsModel(OwnSequencesModel):
    """A target's network with quantised weights, over the target's own sequences.

    Args:
        scheme: quantisation of its weights; ``None`` drafts with the full ones.

    Raises:
        CapabilityError: the target is not a network of layers, or cannot be quantised.
        ValueError: not enough memory.
    """

    role = "a quantised draft"

    def __init__(self, target: LanguageModel, scheme: Scheme | None) -> None:
        super().__init__(target, "" if scheme is None else scheme.name)
        if scheme is not None:
            self._added = self.target.forwards.add_weights(scheme.name, lambda owner: QuantisedWeights(owner, scheme))

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes if self.plan.weights else self.target.weight_bytes
