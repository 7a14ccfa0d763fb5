"""Inflated targets: the outputs of a trained small model at the cost of a big one.

For benchmarks in the regime that users have, a target far bigger than its drafter, without a download.  How it is done
is in :mod:`foretoken.models.variants.inflation`; every table that uses it says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foretoken.models.base import LanguageModel
from foretoken.models.variants.inflated import InflatedModel
from foretoken.models.variants.inflation import SIZES as SIZES
from foretoken.models.variants.inflation import inflate as inflate


def load_inflated(
    source: Any = "builtin",
    size: str | int = "1b",
    dtype: Any = None,
    *,
    device: Any = None,
    exact: str = "distribution",
) -> LanguageModel:
    """A target of about ``size`` parameters with the outputs of ``source``, ready for every drafter of ``source``.

    Args:
        source: ``"builtin"``, a path, a hub id or a ``PreTrainedModel``.
        size: ``"300m"``, ``"1b"``, ``"3b"``, ``"7b"`` or a number of parameters.
        dtype: the checkpoint's by default.
        device: where it runs.
        exact: as for :func:`foretoken.load`.

    Raises:
        LoadError: a checkpoint is missing or damaged.
        ValueError: an architecture or a size that cannot be had, or too little memory.
    """
    from foretoken.loading import load_model

    return load_model(source, dtype=dtype, device=device, exact=exact, inflate=size)


def target_name(target: LanguageModel, source: Any) -> str:
    """How tables and JSON call a target: the source, and what it was inflated to."""
    known = getattr(getattr(source, "config", None), "_name_or_path", "") or "target"
    name = str(source) if isinstance(source, str | Path) else known
    return f"{name}, {target.note}" if isinstance(target, InflatedModel) else name


def inflation(target: LanguageModel) -> dict[str, Any] | None:
    """For JSON: what an inflated target grew to; ``None`` for another one."""
    if not isinstance(target, InflatedModel):
        return None
    shape = target.shape
    return {
        "parameters": target.num_parameters,
        "layers": shape.layers,
        "hidden_size": shape.width,
        "small_layers": target.num_layers,
        "small_hidden_size": shape.small,
    }
