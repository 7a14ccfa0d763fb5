"""Rotary embeddings whose frequencies depend on the text length: longrope and dynamic NTK.

Transformers chooses the frequencies of a whole forward by its longest position.  Within one `generate` call for one
text this means that a token uses the frequencies for ``max(its position + 1, prompt length)`` tokens.  Here every token
uses the frequencies of that length, so that batches, chunks, trees and drafts change nothing.

Phi-3's kind of models go further: when a text exceeds the original length, `generate` drops the cache and reads
everything again, so that all keys have the long factors.  A sequence of such a model is read again, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.base import LanguageModel, SequenceState
from foretoken.models.network.layers import replace_forward
from foretoken.models.network.traits import source_of


def rule_of(kind: str, parameters: Mapping[str, Any]) -> str:
    """Dependence of a rotary embedding's frequencies on the text length.

    Returns:
        ``"static"`` (none), ``"two"`` (one set up to the original length, another beyond it) or ``"each"``
        (a separate set for every length beyond the original one).
    """
    if "dynamic" in kind:
        return "each"
    scaled = kind != "default" and "long_mscale" in parameters  # Phi-3.5-MoE scales by length with any type
    return "two" if kind == "longrope" or scaled else "static"


@dataclass(frozen=True)
class _Changing:
    """One rotary module of a model.

    Attributes:
        fresh: a copy of it that has not processed any text; forwards run on copies of it.
        rule: ``"two"`` or ``"each"``, see :func:`rule_of`.
        border: the original length, in tokens.
    """

    module: nn.Module
    fresh: nn.Module
    rule: str
    border: int


class ChangingRotary:
    """The length-dependent rotary embeddings of a model.

    Args:
        rereads: whether `generate` reads the whole text again when it exceeds the border.

    Attributes:
        border: longest text that uses the short frequencies throughout.
    """

    def __init__(self, modules: Sequence[_Changing], rereads: bool) -> None:
        self.modules, self.rereads = modules, rereads
        self.border = min(changing.border for changing in modules)
        self._exact = (
            any(changing.rule == "each" for changing in modules) or len({changing.border for changing in modules}) > 1
        )
        self._twins: dict[tuple[int, int], nn.Module] = {}

    @classmethod
    def of(cls, model: nn.Module) -> ChangingRotary | None:
        """The embeddings of a Transformers model; ``None`` if its frequencies are constant."""
        modules = [changing for module in model.modules() if (changing := _changing(module)) is not None]
        return cls(modules, bool(_rereading(model))) if modules else None

    # -- texts -------------------------------------------------------------------------------------------------------

    def regime(self, length: int) -> int:
        """Length for which a text of ``length`` tokens is read; 0 for any up to the border.

        Only sequences of one regime can share keys.
        """
        if length <= self.border:
            return 0
        return length if self._exact else self.border + 1

    def room(self, sequence: SequenceState) -> int | None:
        """Number of tokens that fit after the committed ones before the text must be read again; ``None``: any
        number."""
        have = len(sequence.tokens)
        return self.border - have if self.rereads and not sequence.regime and have < self.border else None

    def expect(self, model: LanguageModel, sequence: SequenceState, length: int) -> None:
        """Move a sequence to the regime of ``length`` tokens, by reading its tokens again if there are any."""
        regime = self.regime(length)
        if regime == sequence.regime:
            return
        if not sequence.tokens:
            sequence.regime = regime
        elif self.rereads:
            self._reread(model, sequence, regime)

    def grow(self, model: LanguageModel, prompts: Sequence[tuple[SequenceState, Sequence[int]]]) -> None:
        """Account for committed tokens that are about to be added, unless a longer text was already expected."""
        for sequence, tokens in prompts:
            length = len(sequence.tokens) + len(tokens)
            if length > self.border and not sequence.regime:
                model.expect(sequence, length)

    @staticmethod
    def _reread(model: LanguageModel, sequence: SequenceState, regime: int) -> None:
        tokens, before = list(sequence.tokens), sequence.regime
        try:
            model.rewind(sequence, 0)
            sequence.regime = regime
            model.prefill(sequence, tokens)
        except BaseException:  # the next attempt reads all of it again
            sequence.clear_scratch()
            sequence.tokens[:], sequence.regime = tokens, before
            raise

    # -- forwards ----------------------------------------------------------------------------------------------------

    @staticmethod
    def lengths(positions: Tensor, regimes: Sequence[int]) -> Tensor:
        """[b, width] text length of each node's frequencies, from positions [b, width] and the regimes of the rows."""
        return torch.maximum(positions + 1, torch.tensor(regimes, device=positions.device)[:, None])

    @contextmanager
    def switched(self, positions: Tensor, lengths: Tensor | None) -> Iterator[None]:
        """Forwards inside the block use, for every node, the frequencies of its own length.

        ``positions`` and ``lengths`` are [b, width]; the default lengths are the positions plus one.
        """
        text_lengths = positions + 1 if lengths is None else lengths
        restores = []
        try:
            for index, changing in enumerate(self.modules):
                restores.append(replace_forward(changing.module, partial(self.turns, index, text_lengths)))
            yield
        finally:
            for restore in reversed(restores):
                restore()

    def turns(self, index: int, lengths: Tensor, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Output of the module's forward, with each node's own length.

        Args:
            lengths: [b, width].
            x: tensor with the dtype and device of the result.
            position_ids: [..., b, width].
            layer_type: for a module with frequencies per layer type.

        Returns:
            the module's own output: tensors [..., b, width, r].
        """
        changing = self.modules[index]
        keys = lengths.clamp(max=changing.border + 1) if changing.rule == "two" else lengths
        keys = keys.masked_fill(lengths <= changing.border, 0)
        turned: Any = None
        for key in keys.unique().tolist():
            chosen = keys == key
            # The forward uses the longest position, which an extra column supplies.
            longest = lengths[chosen].max() - 1
            inside = position_ids.masked_fill(~chosen, 0)
            column = torch.full_like(inside[..., :1], int(longest))
            options = {} if layer_type is None else {"layer_type": layer_type}
            twin: Any = self._twin(index, key).to(x.device)
            new = type(twin).forward(twin, x, torch.cat([inside, column], -1), **options)
            turned = _merged(turned, new, chosen[..., None])
        return turned

    def _twin(self, index: int, key: int) -> nn.Module:
        """A copy of a module used for this length only: dynamic ones remember the longest that they saw."""
        twin = self._twins.get((index, key))
        if twin is None:
            if len(self._twins) >= 1024:  # a dynamic embedding has frequencies for every length
                self._twins.clear()
            twin = self._twins[index, key] = _copy(self.modules[index].fresh)
        return twin


class LeanTurns:
    """Cosine and signed sine [n, 1, r] for the lean layers, from the model's own rotary module.

    ``kinds`` are layer types with separate frequencies; ``("",)`` if all layers share them.
    """

    def __init__(self, rotary: ChangingRotary, kinds: Sequence[str], dtype: torch.dtype) -> None:
        self.rotary, self.kinds, self.dtype = rotary, kinds, dtype

    def __call__(self, positions: Tensor, lengths: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosines and sines by layer type, for n nodes with positions [n] and lengths [n]."""
        like = torch.empty(0, dtype=self.dtype, device=positions.device)
        turns: dict[str, tuple[Tensor, Tensor]] = {}
        for kind in self.kinds:
            cos, sin = self.rotary.turns(0, lengths[None], like, positions[None], kind or None)
            cos, sin = cos.to(self.dtype), sin.to(self.dtype)  # OLMo 2's are always float32
            first, second = sin[0].chunk(2, -1)
            turns[kind] = cos[0][:, None], torch.cat([-first, second], -1)[:, None]
        return turns


def context_of(model: nn.Module, context: int, rotary: ChangingRotary | None = None) -> tuple[int, str]:
    """Maximum tokens of a text, and the reason for a special limit (empty if there is none).

    Args:
        context: maximum in its configuration.
        rotary: its length-dependent embeddings, if the forward supports them (otherwise texts end at the border).
    """
    changing = ChangingRotary.of(model) if rotary is None else rotary
    if changing is None:
        return context, ""
    if rotary is None:
        reason = f"its rotary embeddings change beyond {changing.border} tokens, which this forward does not support"
        return min(context, changing.border), reason
    reread_at = [int(module.config.original_max_position_embeddings) for module in _rereading(model)]
    wrong = [length for length in reread_at if length != changing.border]
    if wrong or (changing.rereads and changing._exact):
        border = min([changing.border, *wrong])
        where = (
            f"generate prefills a sequence again at {reread_at[0]} tokens, and the rotary embeddings change at "
            f"{changing.border}"
        )
        return min(context, border), where
    factors = [_factor(part) for part in changing.modules if part.rule == "each"]
    return (max(context, int(changing.border * min(factors))) if factors else context), ""


def follows_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose forward rewrites its frequencies for other text lengths."""
    return "rope_type" in vars(module) and bool(_rules(module)[0])


def _rules(module: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Rules of changing frequencies by layer type (``""`` if all layers share them), and all parameters."""
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    if kinds is None or config is None:
        return {}, {}
    parameters = config.rope_parameters
    by_type = {kind: parameters[kind] for kind in kinds} if isinstance(kinds, dict) else {"": parameters}
    types = kinds if isinstance(kinds, dict) else {"": kinds}
    rules = {kind: rule_of(types[kind] or "default", by_type[kind]) for kind in types}
    return {kind: rule for kind, rule in rules.items() if rule != "static"}, by_type


def _changing(module: nn.Module) -> _Changing | None:
    config: Any = getattr(module, "config", None)
    rules, by_type = _rules(module)
    if not rules:
        return None
    borders = {
        int(config.max_position_embeddings if rules[k] == "each" else by_type[k]["original_max_position_embeddings"])
        for k in rules
    }
    rule = "two" if set(rules.values()) == {"two"} and len(borders) == 1 else "each"
    return _Changing(module, _fresh(module), rule, min(borders))


def _copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module, {id(module.config): module.config})


def _fresh(module: nn.Module) -> nn.Module:
    """A copy with the frequencies of short texts, whatever texts the module has processed."""
    fresh: Any = _copy(module)
    for name, buffer in list(fresh.named_buffers(recurse=False)):
        original = dict(fresh.named_buffers(recurse=False)).get(name.replace("inv_freq", "original_inv_freq"))
        if not name.endswith("original_inv_freq") and original is not None and original.shape == buffer.shape:
            fresh._buffers[name] = original.clone()
    for name in [name for name in vars(fresh) if name.endswith("max_seq_len_cached")]:
        setattr(fresh, name, fresh.original_max_seq_len)
    return fresh


def _merged(before: Any, new: Any, chosen: Tensor) -> Any:
    """Outputs without their last column, taken from ``new`` where ``chosen`` [b, width, 1]."""
    if isinstance(new, tuple):
        olds = before or (None,) * len(new)
        return tuple(_merged(old, value, chosen) for old, value in zip(olds, new, strict=True))
    cut = new[..., :-1, :]
    return cut if before is None else torch.where(chosen, cut, before)


def _rereading(model: nn.Module) -> list[Any]:
    """Modules whose input preparation in `generate` drops the cache at an original length."""
    original = "original_max_position_embeddings"
    able = (module for module in model.modules() if hasattr(getattr(module, "config", None), original))
    return [m for m in able if original in source_of(getattr(type(m), "prepare_inputs_for_generation", None))]


def _factor(changing: _Changing) -> float:
    """Factor by which a dynamic embedding extends the original length."""
    parameters: Any = changing.module.config.rope_parameters  # type: ignore[union-attr]
    by_type = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    factors = [float(each["factor"]) for each in by_type if "dynamic" in str(each.get("rope_type"))]
    return min(factors, default=1.0)
