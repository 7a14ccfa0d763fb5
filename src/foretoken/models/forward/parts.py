"""Parts of the target that trained drafters use: token embedding, vocabulary projection, hidden states.

All of them are frozen and stay the target's.  The fingerprint ties a trained drafter to its target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.linear.packing import PackedLinear, Projection, draft_projection
from foretoken.models.linear.product import QuantisedLinear
from foretoken.models.network.placement import is_offloaded
from foretoken.models.network.taps import decoder_layers, find_decoder, recording

GGUF = "GGUF"
"""Prefix of ``storage`` for weights from a GGUF file."""
SAMPLED_ROWS = 64
"""Number of embedding rows in a fingerprint."""
LAYER_ROWS = 4
"""Number of rows of each decoder weight in a fingerprint."""

MOST_OFF = 0.1
"""Deviation of a target's logits from those of its parts, in units of their spread: rounding to 8 bits stays below."""


class QuantisedTargetWarning(UserWarning):
    """The target's weights are stored differently than when the drafter was trained."""


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a drafter's target: facts of the model, not of its weight storage.

    Attributes:
        hidden_size: D.
        vocab_size: V.
        weights: hash over rows of the token embedding, rounded to bfloat16 (so that the dtype does not matter).
        layers: the same over rows of every decoder weight, to recognise a target finetuned with a frozen embedding;
            empty in older files.
        kept: the same over weights that quantisation leaves alone, besides the embedding (norms); empty in older files
            or if there are none.
        storage: quantisation of the weights (``"int8"``, or the name of a package); empty for full precision.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    weights: str
    layers: str = ""
    kept: str = ""
    storage: str = ""

    def difference(self, other: Fingerprint) -> str:
        """Description of the difference; empty if there is none."""
        for name in ("hidden_size", "vocab_size", "num_layers"):
            trained, present = getattr(self, name), getattr(other, name)
            if trained != present:
                return f"{name} was {trained} in training and is {present} here"
        same = self._has_weights_of(other) or self._is_stored_otherwise(other)
        return "" if same else "the shapes agree, but the weights differ"

    def doubt(self, other: Fingerprint) -> str:
        """Description of a difference in storage of the same model's weights; empty if there is none."""
        if self._has_weights_of(other):
            return ""
        trained, present = self.storage or "not quantised", other.storage or "not quantised"
        return f"its weights were {trained} in training and are {present} now"

    def _has_weights_of(self, other: Fingerprint) -> bool:
        both_known = bool(self.layers and other.layers)
        return self.weights == other.weights and (self.layers == other.layers or not both_known)

    def _is_stored_otherwise(self, other: Fingerprint) -> bool:
        """Whether quantisation explains different weights: those that it leaves alone must be equal."""
        both_known = bool(self.kept and other.kept)
        if GGUF in (self.storage.split(" ")[0], other.storage.split(" ")[0]):  # GGUF quantises embeddings as well
            return both_known and self.kept == other.kept and self.storage != other.storage
        same = self.weights == other.weights and (self.kept == other.kept or not both_known)
        return same and self.storage != other.storage


def _digest(weights: Iterable[Tensor], count: int) -> str:
    """Hash over ``count`` evenly spaced rows of every weight."""
    digest = hashlib.blake2b(digest_size=8)
    for weight in weights:
        matrix = weight.detach().flatten(0, -2) if weight.ndim > 1 else weight.detach()[:, None]
        rows = matrix[:: max(1, len(matrix) // count)][:count].to(torch.bfloat16).contiguous()
        digest.update(rows.cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def weights_digest(network: torch.nn.Module) -> str:
    """Hash over some rows of every weight of a network."""
    return _digest(network.parameters(), SAMPLED_ROWS)


def _sampled(module: Any, count: int) -> Any:
    """The weight of a module, or only the sampled rows if the weight is computed on demand."""
    sampled = getattr(module, "sampled", None)
    return getattr(module, "weight", None) if sampled is None else sampled(count)


def quantised_bits(network: Any) -> int | None:
    """Bits of weights that our layers hold quantised; ``None`` for full precision, a GGUF file and other packages."""
    bits = {module.product.bits for module in network.modules() if isinstance(module, QuantisedLinear)}
    return None if getattr(network, "stored_as", "") or not bits else min(bits)


def storage_of(network: Any) -> str:
    """Quantisation of a network's weights: ``"int8"`` or the name of the package; empty for full precision."""
    stored_as = getattr(network, "stored_as", "")
    if stored_as:
        return f"{GGUF} {stored_as.removeprefix(GGUF).split(',')[0].strip()}"
    bits = quantised_bits(network)
    if bits is not None:
        return f"int{bits}"
    config = getattr(network.config, "quantization_config", None)
    if config is None:
        return ""
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method) or "quantised")


class TargetParts:
    """The parts of a target that a trained drafter uses."""

    def __init__(self, model: LanguageModel) -> None:
        # A drafter of an inflated target was trained for the small model in it, and keeps using that.
        network: Any = getattr(model, "small", model.model)
        if network is None or not model.capabilities.taps or network.get_output_embeddings() is None:
            raise CapabilityError(f"a trained drafter needs a target with hidden states, not {type(model).__name__}")
        if is_offloaded(network):
            raise CapabilityError("a trained drafter needs all of the target's weights in memory: load it unoffloaded")
        self.network = network
        config = network.config.get_text_config()
        self.config = config
        self.embed: Any = network.get_input_embeddings()
        self.head: Any = network.get_output_embeddings()
        self.hidden_size = int(getattr(self.head, "in_features", 0) or self.head.weight.shape[1])
        self.vocab_size = model.vocab_size
        self.num_layers = len(decoder_layers(network))
        self.device: torch.device = network.device
        # Some families scale or cap their logits after the projection.
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
        if getattr(config, "scale_decoder_outputs", False):
            self._scale *= self.hidden_size**-0.5
        self._cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        self.answer_start = model.answer_start
        self._packed: Projection | None = None

    def fingerprint(self) -> Fingerprint:
        sampled = (_sampled(module, LAYER_ROWS) for module in decoder_layers(self.network).modules())
        layers = [weight for weight in sampled if isinstance(weight, Tensor)]
        norms = [weight for weight in layers if weight.ndim == 1]
        return Fingerprint(
            self.hidden_size,
            self.vocab_size,
            self.num_layers,
            _digest([_sampled(self.embed, SAMPLED_ROWS)], SAMPLED_ROWS),
            _digest(layers, LAYER_ROWS),
            _digest(norms, SAMPLED_ROWS) if norms else "",
            storage_of(self.network),
        )

    def fits(self, trained_for: Fingerprint) -> bool:
        """Whether a drafter with this fingerprint was trained for the target; weights are read only if the shapes
        agree."""
        shape = self.hidden_size, self.vocab_size, self.num_layers
        same = shape == (trained_for.hidden_size, trained_for.vocab_size, trained_for.num_layers)
        return same and not trained_for.difference(self.fingerprint())

    def embedding(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """[n, D] embeddings of token ids, without gradient."""
        ids = tokens if isinstance(tokens, Tensor) else torch.tensor(list(tokens), device=self.device)
        with torch.no_grad():
            rows: Tensor = self.embed(ids)
        return rows

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Target logits [..., V] of states after the final norm [..., D], or only those of ``ids``; gradients flow
        through."""
        weight, bias = self.head.weight, self.head.bias
        if ids is not None:
            weight, bias = weight.detach()[ids], None if bias is None else bias.detach()[ids]
        if not torch.is_autocast_enabled(hidden.device.type):  # autocast casts only what is necessary
            weight = weight.to(hidden.dtype)
        return self.transform_logits(torch.nn.functional.linear(hidden, weight, bias))

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, V] of [n, D] for drafting, in packed bfloat16 if that is fastest."""
        if self._packed is None and isinstance(self.head, PackedLinear) and self.head.is_whole:
            self._packed = self.head.projection
        if self._packed is None:
            self._packed = draft_projection(self.head.weight, self.head.bias)
        return self.transform_logits(self._packed(hidden).float())

    @property
    def scale(self) -> float | None:
        """Factor of :meth:`transform_logits`; ``None`` if there are other operations."""
        return self._scale if self._cap is None else None

    def transform_logits(self, logits: Tensor) -> Tensor:
        """The family's transformation of the projected logits: a scale, a soft cap."""
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise ``CapabilityError`` if the logits of short texts are not :meth:`logits` of their last states."""
        ids = torch.arange(1, 33, device=self.device).view(4, 8) * 7919 % self.vocab_size
        states, out = self._states(ids, ("last",))
        last, logits = states["last"][:, -1], out.logits[:, -1].double()
        if last.shape[-1] == self.hidden_size and logits.shape[-1] == len(self.head.weight):
            # Medians, as some families set the logits of some ids to -inf.
            off, size = (self.logits(last).double() - logits).abs().median(), (logits - logits.median()).abs().median()
            if off <= MOST_OFF * size:
                return
        raise CapabilityError(f"{type(self.network).__name__} has a vocabulary head that trained drafters cannot copy")

    def features(self, tokens: Tensor, taps: Sequence[str], grad: bool = False) -> dict[str, Tensor]:
        """Hidden states [b, n, D] by tap name for whole texts [b, n], without a cache; no forward without taps.

        For a target with an encoder, the first half of the text is the input, and the whole text the answer.
        """
        if not taps:
            return {}
        with torch.set_grad_enabled(grad):
            return self._states(tokens, taps)[0]

    def _states(self, tokens: Tensor, taps: Sequence[str]) -> tuple[dict[str, Tensor], Any]:
        """:meth:`features`, and the network's own output with the logits after the last token."""
        start = len(self.answer_start)
        with recording(self.network, taps) as states:
            if start:
                prompt = tokens[:, : max(1, tokens.shape[1] // 2)]
                answer = torch.cat([tokens.new_tensor(self.answer_start).expand(len(tokens), -1), tokens], 1)
                out = self.network(input_ids=prompt, decoder_input_ids=answer, use_cache=False)
            else:
                out = self.network(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return {name: state[:, start:] for name, state in states.items()}, out

    @property
    def final_norm(self) -> torch.nn.Module:
        """The norm after the last layer, whose output the vocabulary projection reads."""
        decoder = find_decoder(self.network)[0]
        norms = {name: child for name, child in decoder.named_children() if "norm" in type(child).__name__.lower()}
        for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm"):
            if name in norms:
                return norms[name]
        if len(norms) == 1:  # LFM2 calls it embedding_norm
            return next(iter(norms.values()))
        raise CapabilityError(f"{type(decoder).__name__} has no final norm with a known name")

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of a layer's output [..., D]."""
        return self.final_norm(hidden)
