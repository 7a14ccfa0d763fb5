"""Sets of sublayers that a drafter skips: notation, files and compatibility with a target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from foretoken.core.io.files import write_json
from foretoken.methods.drafters.own_layers import num_layers_of
from foretoken.models.base import LanguageModel
from foretoken.models.network.layers import LayerPlan, check_sublayers

FORMAT, VERSION = "foretoken layer skip", 1
NOTHING = "none"


@dataclass(frozen=True)
class SkipSet:
    """The layers whose attention and whose MLP are skipped."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def odd(cls, num_layers: int, keep: int = 1) -> SkipSet:
        """Both sublayers of every odd layer, except in the first and last ``keep`` layers."""
        layers = frozenset(layer for layer in range(keep, num_layers - keep) if layer % 2)
        return cls(layers, layers)

    @classmethod
    def middle(cls, num_layers: int) -> SkipSet:
        """The attentions of the middle fifth of layers: a guess for targets that were not measured yet."""
        count = max(1, num_layers // 5)
        first = max(1, (num_layers - count) // 2)
        return cls(attention=frozenset(range(first, first + count)))

    @classmethod
    def parse(cls, attention: str, mlp: str, num_layers: int) -> SkipSet:
        """Parse two lists such as ``1+3+6-8``; ``none`` or an empty string is no layer.

        Raises:
            ValueError: another notation, or a layer that the model does not have.
        """
        return cls(_layers(attention, "attention", num_layers), _layers(mlp, "mlp", num_layers))

    @property
    def plan(self) -> LayerPlan:
        return LayerPlan(skip_attention=self.attention, skip_mlp=self.mlp)

    @property
    def options(self) -> dict[str, str]:
        """Notation for :meth:`parse` and a spec's options: ``{"attention": "1+3", "mlp": "none"}``."""
        return {"attention": _text(self.attention), "mlp": _text(self.mlp)}

    def check(self, target: LanguageModel) -> None:
        """Check that the target can skip this set.

        Raises:
            ValueError: a layer that it does not have, or no layer left to run.
            CapabilityError: its layers have no separate attention or MLP, or cannot be run one by one.
        """
        self.plan.check(num_layers_of(target))
        model: Any = target
        check_sublayers(model.model, self.plan)


def _text(layers: Iterable[int]) -> str:
    return "+".join(map(str, sorted(layers))) or NOTHING


def _layers(text: str, name: str, num_layers: int) -> frozenset[int]:
    numbers: set[int] = set()
    for part in text.split("+") if text.strip() not in ("", NOTHING) else ():
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{name}={text!r} must be layers such as 1+3 or 2-5, or {NOTHING}")
        low, high = int(first), int(last or first)
        if high >= num_layers or low > high:
            raise ValueError(f"{name}={text!r} has a layer out of range: the target has layers 0 to {num_layers - 1}")
        numbers.update(range(low, high + 1))
    return frozenset(numbers)


# -- files -----------------------------------------------------------------------------------------------------------


def fingerprint(target: LanguageModel) -> dict[str, Any]:
    """Identification of a target, independent of the dtype that it is loaded in.

    The hash covers the architecture, the vocabulary and the signs of some embedding weights.
    """
    owner: Any = target
    layers, config = num_layers_of(target), owner.config
    embedding: Any = owner.model.get_input_embeddings()
    count = int(embedding.num_embeddings)
    ids = torch.linspace(0, count - 1, min(64, count), device=owner.device).long()
    rows: Any = embedding.rows(ids) if hasattr(embedding, "rows") else embedding.weight.detach()[ids]
    signs = torch.signbit(rows[:, :64]).cpu().numpy().tobytes()
    words = f"{config.model_type} {layers} {config.hidden_size} {config.vocab_size} ".encode()
    digest = hashlib.sha256(words + signs).hexdigest()[:16]
    return {"layers": layers, "hidden_size": int(config.hidden_size), "hash": digest}


def save_skips(file: Path, skips: SkipSet, target: LanguageModel, **measured: Any) -> None:
    """Write a set for ``layer_skip:FILE``; an interrupted write leaves the old or the new file.

    Raises:
        OSError: the file cannot be written.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "target": fingerprint(target),
        "attention": sorted(skips.attention),
        "mlp": sorted(skips.mlp),
        **measured,
    }
    write_json(file, content)


def load_skips(file: Path, target: LanguageModel) -> SkipSet:
    """Read a set that :func:`save_skips` wrote for this target.

    Raises:
        ValueError: a damaged file, one of another format or version, or one for another target.
        OSError: no such file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{file} is damaged or half-written: make it again with foretoken tune layer-skip") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{file} holds no layer-skip set: make one with foretoken tune layer-skip")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{file} has version {content.get('version')}, and only version {VERSION} is "
            "supported: make it again with foretoken tune layer-skip"
        )
    expected, stored = fingerprint(target), content.get("target")
    attention, mlp = content.get("attention"), content.get("mlp")
    if not isinstance(stored, dict) or not _is_layer_list(attention) or not _is_layer_list(mlp):
        raise ValueError(f"{file} is damaged: make it again with foretoken tune layer-skip")
    if stored != expected:
        same_shape = all(stored.get(key) == expected[key] for key in ("layers", "hidden_size"))
        made_for = f"{stored.get('layers')} layers of width {stored.get('hidden_size')}"
        raise ValueError(
            f"{file} was made for another target ({made_for}; this one has "
            f"{'other weights' if same_shape else '{layers} of {hidden_size}'.format(**expected)}): "
            "run foretoken tune layer-skip for this one"
        )
    return SkipSet(frozenset(attention), frozenset(mlp))


def _is_layer_list(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(layer) is int for layer in value)
