"""The Transformers model of a GGUF file, built without weights and then filled.

Matrices in the model's dtype are views of the mapped file.  Quantised ones become
:class:`~foretoken.models.linear.product.QuantisedLinear` with the file's numbers, one after another; the embedding
reads its rows from the file.  So there is no second copy of the weights, except of quantised experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.checks.finite import REMEDY
from foretoken.models.gguf.architectures import EXPERTS, Architecture, architecture_of, config_of, header_faults
from foretoken.models.gguf.experts import check_memory, joined, quantised_expert_bytes
from foretoken.models.gguf.file import GgufError, GgufFile, GgufTensor, UncoveredError
from foretoken.models.gguf.grouped import numbers_of, weight_of
from foretoken.models.gguf.kernel import product_of
from foretoken.models.gguf.products import StoredEmbedding
from foretoken.models.gguf.tokenizer import end_ids
from foretoken.models.gguf.types import KINDS, PLAIN
from foretoken.models.linear.product import QuantisedLinear

EMBEDDING, HEAD, FINAL_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies."""


def build_network(file: GgufFile, dtype: torch.dtype | None = None, free: int | None = None) -> Any:
    """A ``PreTrainedModel`` with the weights of a file.

    Args:
        dtype: dtype of activations, norms and all other unquantised numbers; by default the dtype of the file's
            matrices, or bfloat16 if they are quantised.
        free: bytes of free memory, which widened experts must not exceed; ``None``: not checked.
    """
    from transformers import AutoModelForCausalLM

    architecture = architecture_of(file)
    config = config_of(file, architecture)
    if dtype is None:  # that of most matrices, or bfloat16 if quantised
        dtype = PLAIN.get(stored_as(file).split(" ")[0], torch.bfloat16)
    for tensor in file.tensors.values():
        if tensor.kind not in KINDS and tensor.kind not in PLAIN:
            raise UncoveredError(
                f"{tensor.name} in {file.path} has the type {tensor.kind}, which is not supported here"
            )
    with header_faults(file), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    fill = _WeightFiller(file, architecture, model, dtype)
    fill.check()
    check_memory(file, dtype, free)
    fill.fill()
    _rotate(model, file)
    with header_faults(file):
        model.generation_config.eos_token_id = end_ids(file) or config.eos_token_id
    kinds = stored_as(file)
    if kinds != "F32":
        widened = "experts and " if quantised_expert_bytes(file, dtype)[0] else ""
        model.stored_as = f"GGUF {kinds}, with {widened}activations in"
    return model.eval()


def stored_as(file: GgufFile) -> str:
    """Types of a file's matrices, by descending total size."""
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.kind] += tensor.data.nbytes
    return " ".join(kind for kind, _ in counts.most_common())


class _WeightFiller:
    """Mapping of a file's tensors to a network's weights."""

    def __init__(self, file: GgufFile, architecture: Architecture, model: Any, dtype: torch.dtype) -> None:
        self.file, self.architecture, self.model, self.dtype = file, architecture, model, dtype
        self.config = model.config
        self.sources = dict(self._sources())

    def _sources(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every parameter with its source tensors."""
        for name, _ in self.model.named_parameters():
            if name == "model.embed_tokens.weight":
                yield name, (EMBEDDING,)
            elif name == "model.norm.weight":
                yield name, (FINAL_NORM,)
            elif name == "lm_head.weight":
                yield name, (HEAD,)
            else:
                yield name, self._of_layer(name)

    def _of_layer(self, name: str) -> tuple[str, ...]:
        _, _, block, rest = name.split(".", 3)
        module, _, leaf = rest.rpartition(".")
        if leaf in EXPERTS:
            return tuple(f"blk.{block}.{part}.weight" for part in EXPERTS[leaf])
        if module == self.architecture.router:
            return (f"blk.{block}.ffn_gate_inp.{leaf}",)
        return (f"blk.{block}.{self.architecture.names.get(module, module)}.{leaf}",)

    def check(self) -> None:
        """Check names and shapes before reading any weight."""
        file, expected = self.file, {name for names in self.sources.values() for name in names}
        missing = sorted(expected - file.tensors.keys())
        if missing:
            raise GgufError(
                f"{file.path} lacks {len(missing)} tensors (first: {missing[0]}): it is incomplete, copy it again"
            )
        rotary = {f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")}
        if not hasattr(self.model.model.rotary_emb, "inv_freq"):  # one for each kind of layers
            rotary.discard(DIVISORS)
        unused = sorted(file.tensors.keys() - expected - rotary)
        if unused:
            raise UncoveredError(f"{file.path} has {unused[0]}, which {self.config.model_type} models do not have")
        for name, parameter in self.model.named_parameters():
            parts = [file.tensors[source].shape for source in self.sources[name]]
            if _joined_shape(parts) != tuple(parameter.shape):
                raise GgufError(
                    f"{self.sources[name][0]} in {file.path} is {list(parts[0])}, and must be "
                    f"{list(parameter.shape)}: convert the model again"
                )

    def fill(self) -> None:
        modules = dict(self.model.named_modules())
        linear: list[str] = []
        for name in self.sources:
            owner, _, leaf = name.rpartition(".")
            module, tensors = modules[owner], [self.file.tensors[source] for source in self.sources[name]]
            if isinstance(module, nn.Embedding):
                self._put(owner, self._embedding(module, tensors[0]))
            elif isinstance(module, nn.Linear):
                linear += [owner] if leaf == "weight" else []
            else:
                if leaf in EXPERTS:
                    setattr(module, leaf, _parameter(joined(tensors, self.dtype, self._check_finite)))
                    continue
                numbers = numbers_of(tensors[0])
                self._check_finite(tensors[0].name, bool(numbers.isfinite().all()))
                if owner.endswith("norm"):
                    numbers = numbers.float() - self.architecture.norm_offset
                setattr(module, leaf, _parameter(numbers.to(self.dtype)))
        tensors = [self.file.tensors[self.sources[f"{owner}.weight"][0]] for owner in linear]
        with _one_thread_each() as threads:
            for owner, module in zip(linear, threads.map(self._linear, map(modules.get, linear), tensors), strict=True):
                self._put(owner, module)
        if self.config.tie_word_embeddings:
            self._tie()

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)

    def _embedding(self, module: nn.Embedding, tensor: GgufTensor) -> nn.Embedding:
        scale = getattr(module, "scalar_embed_scale", None)
        if PLAIN.get(tensor.kind) == self.dtype:
            module.weight = _parameter(numbers_of(tensor))
            if scale is not None:
                module.embed_scale = torch.tensor(scale)
            return module
        multiplier = None if scale is None else torch.tensor(scale)
        return StoredEmbedding(tensor.data, tensor.kind, tensor.shape[1], self.dtype, multiplier)

    def _linear(self, module: nn.Linear, tensor: GgufTensor) -> nn.Module:
        data, bias = self._ordered(tensor.name, tensor.data), None
        if module.bias is not None:
            stored = self.file.tensors[tensor.name.removesuffix("weight") + "bias"]
            bias = self._ordered(stored.name, numbers_of(stored)).to(self.dtype)
        if PLAIN.get(tensor.kind) == self.dtype:
            module.weight = _parameter(data.contiguous().view(self.dtype))
            module.bias = None if bias is None else _parameter(bias)
            return module
        return self._multiplied(tensor, data, bias)

    def _multiplied(self, tensor: GgufTensor, data: Tensor, bias: Tensor | None) -> QuantisedLinear:
        """A layer with the file's numbers, from a tensor's rows [out, bytes]."""
        weight = weight_of(data, tensor.kind)
        self._check_finite(tensor.name, weight.is_finite)
        return QuantisedLinear(product_of(weight, bias, self.dtype), self.dtype)

    def _check_finite(self, name: str, is_finite: bool) -> None:
        if not is_finite:
            raise GgufError(f"{name} in {self.file.path} holds NaN or inf: {REMEDY}")

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        """Query and key rows reordered to Transformers' rotation in halves; other rows unchanged."""
        heads = {"attn_q": self.config.num_attention_heads, "attn_k": self.config.num_key_value_heads}
        count = heads.get(name.split(".")[-2]) if self.architecture.permuted else None
        if count is None:
            return rows
        return rows.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)

    def _tie(self) -> None:
        """Let the vocabulary projection multiply by the embedding."""
        tensor, embedding = self.file.tensors[EMBEDDING], self.model.model.embed_tokens
        if isinstance(embedding, StoredEmbedding):
            self.model.lm_head = self._multiplied(tensor, tensor.data, None)
        else:
            self.model.lm_head.weight = embedding.weight


def _joined_shape(parts: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Shape of a tensor, or of stacked experts that are joined along axis 1; ``None`` if they cannot be."""
    first = tuple(parts[0])
    if len(parts) == 1:
        return first
    if len(first) != 3 or any((*part[:1], *part[2:]) != (first[0], first[2]) for part in parts):
        return None
    return first[0], sum(part[1] for part in parts), first[2]


@contextmanager
def _one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """A pool with PyTorch's number of threads, each running its operations alone: operations on some rows of a matrix
    are short, and threads that share one mostly wait for each other (ten times longer on a busy machine)."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, "gguf") as threads:
            yield threads
    finally:
        torch.set_num_threads(count)


def _rotate(model: Any, file: GgufFile) -> None:
    """Recreate the rotary embedding with real tensors; the file may hold a divisor per frequency."""
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)
    factors = file.tensors.get(DIVISORS)
    if factors is not None:
        divisors = numbers_of(factors).float()
        if divisors.shape != decoder.rotary_emb.inv_freq.shape:
            raise GgufError(
                f"{DIVISORS} in {file.path} is {list(divisors.shape)}, and the heads have "
                f"{list(decoder.rotary_emb.inv_freq.shape)} frequencies: convert the model again"
            )
        for name in ("inv_freq", "original_inv_freq"):
            setattr(decoder.rotary_emb, name, nn.Buffer(getattr(decoder.rotary_emb, name) / divisors, persistent=False))


def _parameter(numbers: Tensor) -> nn.Parameter:
    return nn.Parameter(numbers, requires_grad=False)
