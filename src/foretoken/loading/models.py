"""Runnable language models from a path, a hub id or a network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretoken.core.io.checkpoints import (
    LoadError,
    check_folder,
    header_of,
    is_adapter,
    local_folder,
    location_of,
    resolve,
)
from foretoken.core.io.hub_ids import expanded
from foretoken.core.values import check_counts
from foretoken.loading.adapters import merge_adapter, read_adapter
from foretoken.loading.gguf import check_backend, is_gguf, load_gguf
from foretoken.loading.handed import check_dtype_and_device, check_handed_in, unwrapped
from foretoken.loading.networks import from_pretrained, parse_device, parse_dtype
from foretoken.loading.tokenizers import ordinary_text
from foretoken.models import wrap
from foretoken.models.base import LanguageModel
from foretoken.models.checks.fast_paths import Probe, probe_ids
from foretoken.models.checks.finite import REMEDY, first_not_finite, weights_of
from foretoken.models.linear.packing import check_packable
from foretoken.models.linear.quantised_linear import check_kind, quantise_linears
from foretoken.models.refusals import check_exact, lost_bits
from foretoken.models.variants.draft_bits import fastest_kind
from foretoken.models.variants.inflated import InflatedModel
from foretoken.models.variants.inflation import inflate as inflate_network
from foretoken.models.variants.inflation import shape_for


def load_model(
    source: Any,
    *,
    role: str = "target",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    exact: str = "distribution",
    lean: bool = True,
    inflate: str | int | None = None,
    pack: bool | str = "auto",
    quantize: str | None = None,
    tensor_parallel: int = 1,
    backend: str = "auto",
) -> LanguageModel:
    """A target or draft model from a path, a hub id, ``"builtin"``, a ``PreTrainedModel`` or a :class:`LanguageModel`.

    Options are those of :func:`foretoken.load`, and these.  ``role`` is ``"target"`` or ``"draft"``; a draft model's
    ``quantize`` may be ``"auto"`` (:mod:`foretoken.models.variants.draft_bits`).  ``exact="approximate"`` is for models
    to be trained or saved: their layers stay unchanged unless ``pack`` is ``True``.  ``lean`` allows our own forwards.

    Raises:
        LoadError: the checkpoint is missing, damaged, incomplete or pickled.
        ValueError: unknown dtype or backend, missing device, a device other than that of a model object, a model that
            cannot be inflated or split as requested, or ``pack=True`` or ``quantize`` for one that cannot be packed or
            quantised.
    """
    source = unwrapped(source)
    check_handed_in(source)
    if sys.flags.optimize > 1:
        raise LoadError("Transformers cannot be imported without docstrings: run Python without -OO (PYTHONOPTIMIZE=2)")
    if pack != "auto" and not isinstance(pack, bool):
        raise ValueError(f"pack must be 'auto', True or False, not {pack!r}")
    check_exact(exact)
    check_counts({"tensor_parallel": tensor_parallel}, 1)
    check_backend(backend, source)
    if tensor_parallel != 1:
        from foretoken.loading.parallel import load_parallel

        others = {"inflate": inflate, "quantize": quantize, "pack": pack}
        return load_parallel(source, tensor_parallel, dtype=dtype, device=device, exact=exact, **others)
    auto = quantize == "auto" and role == "draft"
    quantize = None if auto else quantize
    packs = pack is True or (pack == "auto" and exact != "approximate")
    probe = partial(ordinary_text, source)
    if is_gguf(source):
        options = {"device": device, "exact": exact, "inflate": inflate, "pack": pack, "quantize": quantize}
        loaded = load_gguf(source, backend, dtype=parse_dtype(dtype), **options)
        if isinstance(loaded, LanguageModel):
            return loaded
        if role == "draft":
            _check_finite(loaded, source, role)
        return wrap(loaded, exact=exact, lean=lean, in_place=packs, probe=probe)
    is_object = not isinstance(source, str | Path)
    if quantize is not None:
        check_kind(quantize)
        if is_object and inflate is None:
            raise ValueError(
                "quantize=... changes weights, and a model passed as an object is not changed: give its path"
            )
    if is_object:
        check_dtype_and_device(source, dtype, device)
    if isinstance(source, LanguageModel):
        if inflate is not None:
            kind = type(source).__name__
            raise ValueError(f"only a checkpoint or a Transformers model can be inflated, not {kind}")
        if pack is True:
            raise ValueError(f"pack=True is for checkpoints and Transformers models, not {type(source).__name__}")
        if all(refused.path != "bitwise" for refused in source.refused):
            source.refused += lost_bits(exact, source.exactness, source.exactness_why)
        return source
    network = source if is_object else _load_network(source, role, dtype, device)
    if not is_object and (role == "draft" or quantize is not None):
        _check_finite(network, source, role)
    if inflate is not None:
        shape = shape_for(network.config.get_text_config(), inflate)
        big = inflate_network(network, shape)
        if quantize is not None:
            quantise_linears(big, quantize, exact != "bitwise", partial(_text_of, big, probe))
        return InflatedModel(big, network, shape, exact=exact, lean=lean, in_place=packs)
    if pack is True:
        check_packable(network)
    quantize = fastest_kind(network) if auto else quantize
    if quantize is not None:
        quantise_linears(network, quantize, exact != "bitwise", partial(_text_of, network, probe))
    in_place = packs and (not is_object or pack is True)
    return wrap(network, exact=exact, lean=lean, in_place=in_place, probe=probe)


def _text_of(network: Any, probe: Probe) -> list[int]:
    return probe_ids(probe, network.config.get_text_config().vocab_size)


@contextmanager
def closed_on_error(model: LanguageModel, source: Any) -> Iterator[None]:
    """End the processes of a split model if what uses it cannot be built; the error would keep them, and only one model
    can be split at a time.  A model that was the caller's ``source`` stays open."""
    try:
        yield
    except BaseException:
        if model is not source and hasattr(model, "close"):
            model.close()
        raise


def _check_finite(network: Any, source: str | Path, role: str) -> None:
    """Refuse weights that are not finite where the fault would stay hidden: with a broken draft model merely no draft
    token is accepted, and quantised weights do not show their origin."""
    name = first_not_finite(weights_of(network))
    if name is not None:
        folder = expanded(resolve(source, role))
        file = next((shard for shard in sorted(folder.glob("*.safetensors")) if name in header_of(shard)), folder)
        raise LoadError(f"{name} in {file} holds NaN or inf: {REMEDY}")


def _load_network(
    source: str | Path, role: str, dtype: str | torch.dtype | None, device: str | torch.device | None
) -> Any:
    """The ``PreTrainedModel`` of a path, a hub id or ``"builtin"``, checked before it is read."""
    torch_dtype, device = parse_dtype(dtype), parse_device(device)
    local = local_folder(source, role)
    if local is None:
        return from_pretrained(location_of(resolve(source, role)), torch_dtype, device)
    if is_adapter(local):
        return _load_updated(local, dtype, device)
    check_folder(local)
    return from_pretrained(str(local), torch_dtype, device)


def _load_updated(folder: Path, dtype: str | torch.dtype | None, device: str | torch.device | None) -> Any:
    """The base model of an adapter, with the adapter merged into it."""
    config = read_adapter(folder)
    try:
        network = _load_network(config.base, "target", dtype, device)
    except LoadError as error:
        raise LoadError(f"{folder} updates {config.base}, which cannot be loaded: {error}") from error
    merge_adapter(network, folder, config)
    network.config._name_or_path = str(folder)
    return network
