"""Forward of a decoder with an encoder: trees over its own cache and the cross-attention cache.

This runs the public forward.  Such decoders (the T5 family) have no position ids: they add a bias to attention scores
by the distance of two cache slots.  That distance is wrong for nodes of a tree, and the rows of a batch start at
different slots.  So the mask carries the bias by true distance, and our attention function drops the bias of the
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import Capabilities, CapabilityError
from foretoken.models.cache.cross import Crossed, Encoded, crossed, encoded, placeholder, reading_cache, with_crossed
from foretoken.models.cache.masks import LayerMask
from foretoken.models.forward.attention import attention_for
from foretoken.models.network.alone import alone, switched_attention
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.layers import LayerPlan
from foretoken.models.network.placement import decoding, device_of
from foretoken.models.network.rotary import ChangingRotary
from foretoken.models.network.taps import decoder_layers, recording
from foretoken.models.network.traits import attention_configs, cache_argument, context_length_of, eos_ids

WHOLE_LAYERS = "the decoder of an encoder-decoder model is run as a whole"


class DecoderForward:
    """Runs the calls of a :class:`~foretoken.models.encoder_decoder.EncoderDecoderModel`.

    Attributes:
        answer_start: start tokens of every answer.
    """

    name, context_why = "public", ""
    rotary: ChangingRotary | None = None
    spared: int | None = None
    skips_masked = False

    def __init__(self, model: Any, exact: str) -> None:
        self.model, self.exact = model.eval(), exact
        self.config = model.config
        self.answer_start = _answer_start(model)
        self.bias = _biased_layer(model)
        if hasattr(self.config, "expert_capacity"):
            raise CapabilityError(
                f"{self.config.model_type}: its experts drop tokens beyond a capacity, so drafts would change the text"
            )
        self.capabilities = Capabilities(
            layer_windows=False,
            missing={"layer_windows": WHOLE_LAYERS, "prompt_logits": "an encoder reads the prompt, and has no logits"},
            prompt_logits=False,
        )
        self.vocab_size = int(model.config.vocab_size)
        self.context_length = context_length_of(model.config)
        self.eos_token_ids = eos_ids(model)
        self.num_layers = len(decoder_layers(model))
        self.layer_masks: Mapping[str, LayerMask] = {"": LayerMask()}
        self.cache_argument = cache_argument(model)
        self.renew()

    def renew(self) -> None:
        """Inspect the network again after a change."""
        self.device = device_of(self.model)
        self.dtype = self.run_dtype = self.model.dtype
        self.attention = attention_for(self.exact, self.device)
        self.configs = attention_configs(self.model.get_decoder())
        self._by_distance: Tensor | None = None
        self._last: Crossed | None = None

    def check(self, plan: LayerPlan) -> None:
        if not plan.is_whole:
            raise CapabilityError(f"this model cannot run a part of its layers: {WHOLE_LAYERS}")

    @torch.inference_mode()
    def encode(self, tokens: Sequence[int]) -> Encoded:
        """Read an encoder's input and compute its cross-attention keys and values, through a decoder row that is
        dropped."""
        ids = torch.tensor([list(tokens), [self.answer_start[0]] * len(tokens)], device=self.device)
        cache = reading_cache()
        with alone(self.model):
            decoding(self.model)
            states = self.model.get_encoder()(input_ids=ids[:1])[0]
            inputs = {self.cache_argument: cache, "encoder_outputs": (states,), "use_cache": True}
            self.model(decoder_input_ids=ids[1:, :1], **inputs)
        return encoded(states[0], cache)

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        return [self._run(call) for call in calls]

    def _run(self, call: NetworkCall) -> Outputs:
        ids, (width, first) = call.ids, (call.ids.shape[1], call.first)
        low = call.cache.low
        sequences = call.cache.sequences[low : low + len(ids)]
        crossed_inputs = self._side_by_side([sequence.encoded for sequence in sequences])
        with switched_attention(self), recording(self.model, call.taps) as hidden:
            decoding(self.model)
            out = self.model(
                encoder_outputs=(placeholder(crossed_inputs, self.config.hidden_size),),
                attention_mask=crossed_inputs.mask,
                decoder_input_ids=ids,
                decoder_attention_mask=self._mask(call, low),
                use_cache=True,
                **{self.cache_argument: with_crossed(call.cache, crossed_inputs)},
            )
        return call.feed_logits(out.logits[:, -(width - first) :] if width > first else out.logits[:, :0]), hidden

    def _side_by_side(self, inputs: Sequence[Encoded | None]) -> Crossed:
        """The batch of the last round if the inputs are the same."""
        if self._last is None or not self._last.is_of(inputs):
            self._last = crossed(inputs)
        return self._last

    def forget(self, encoded: Encoded | None) -> None:
        """Drop the batch that contains the input of an ended sequence."""
        if self._last is not None and any(encoded is present for present in self._last.inputs):
            self._last = None

    def _mask(self, call: NetworkCall, low: int) -> Tensor:
        """[b, H, width, used] addend of attention scores: the bias by distance, and the tree mask."""
        keys = torch.arange(call.cache.num_read).repeat(len(call.ids), 1)
        for row, sequence in enumerate(call.cache.sequences[low : low + len(call.ids)]):
            depths, slot = sequence.scratch_depths, sequence.num_slots - len(sequence.scratch_depths)
            if depths != list(range(len(depths))):
                keys[row, slot : slot + len(depths)] = slot + torch.tensor(depths)
        distance = (call.positions[:, :, None] - keys.to(self.device)[:, None]).clamp_(min=0)
        bias = self._biases(int(call.positions.max()) + 1)[distance].permute(0, 3, 1, 2)
        mask = call.masks[""]
        return bias if mask is None else bias + mask

    def _biases(self, distances: int) -> Tensor:
        """[d, H] bias of a key by its distance, for ``d`` distances or more."""
        biases = self._by_distance
        if biases is None or len(biases) < distances:
            size = max(256, 1 << (distances - 1).bit_length())
            with alone(self.model):
                row = self.bias.compute_bias(1, size, device=self.device, past_seen_tokens=size - 1)  # [1, H, 1, size]
            self._by_distance = biases = row[0, :, 0].flip(-1).T.contiguous().to(self.dtype)
        return biases


def _answer_start(model: Any) -> tuple[int, ...]:
    """The decoder's start token, and the one forced after it, if any."""
    configs = getattr(model, "generation_config", None), model.config  # the former takes precedence

    def token(name: str) -> list[int]:
        values = [getattr(config, name, None) for config in configs]
        return [value for value in values if isinstance(value, int)][:1]

    start, forced = token("decoder_start_token_id"), token("forced_bos_token_id")
    if not start:
        raise CapabilityError(
            f"{model.config.model_type}: config.json has no decoder_start_token_id, with which an answer begins"
        )
    return *start, *forced


def _biased_layer(model: Any) -> Any:
    """The decoder's only attention module with a bias by distance, which all layers share."""
    biased = [module for module in model.get_decoder().modules() if hasattr(module, "relative_attention_bias")]
    if len(biased) != 1 or not hasattr(biased[0], "compute_bias"):
        raise CapabilityError(
            f"{model.config.model_type} is an encoder-decoder model without a relative position bias shared by all "
            "layers: only T5 and its variants are supported"
        )
    return biased[0]
