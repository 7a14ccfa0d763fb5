"""Networks loaded by Transformers, whole or split over processes; dtypes and devices by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from foretoken.core.io import hub_ids
from foretoken.core.io.checkpoints import LoadError, cause_of, check_no_drafter
from foretoken.core.io.quiet import ERRORS_ONLY, NO_BARS
from foretoken.core.values import one_line, with_article
from foretoken.loading.memory import moved
from foretoken.loading.stored import check_method, check_storage, check_unread, quantisation_of
from foretoken.models.network.alone import BUILDING

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_network(path: str, dtype: torch.dtype | None, processes: int) -> Any:
    """This process's part of a ``PreTrainedModel`` split over several processes that have joined."""
    from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

    return from_pretrained(path, dtype, None, DistributedConfig(tp_plan="auto", tp_size=processes))


def from_pretrained(
    path: str, dtype: torch.dtype | None, device: str | torch.device | None, split: Any | None = None
) -> Any:
    """The ``PreTrainedModel`` of a folder or a hub id, with all its weights.  Raises ``LoadError`` if it cannot be
    loaded.

    Args:
        dtype: dtype of the weights; ``None`` for the checkpoint's.
        split: configuration of a split over processes.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    quantisation = quantisation_of(path)
    check_method(quantisation, path)
    label = f"{path} (quantised with {quantisation['quant_method']})" if quantisation.get("quant_method") else path
    has_encoder = _has_encoder(path)
    if has_encoder and split is not None:
        raise LoadError(f"{path} is an encoder-decoder model, which cannot be split: leave tensor_parallel out")
    # Some encoder-decoder models have a causal class too, which would load half of them.
    auto: Any = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM

    with BUILDING, ERRORS_ONLY.changed(), NO_BARS.changed():
        try:
            loaded: Any = auto.from_pretrained(
                path,
                dtype=dtype or "auto",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, in one line
                **({} if split is None else {"distributed_config": split}),
            )
        except Exception as error:  # damaged checkpoints fail in many ways, some with custom exceptions
            _check_fetched(path)
            raise LoadError(f"cannot load a model from {label}: {_own_code(path) or cause_of(error)}") from error
    model, info = loaded
    if not quantisation:  # quantised ones were read with the package that wrote them
        check_storage(model, path, info.get("unexpected_keys", ()))
    for key, stored, expected in sorted(info.get("mismatched_keys", ())):
        raise LoadError(
            f"{label} has a config.json that does not fit its weights: {key} is {list(stored)} in the "
            f"file and {list(expected)} in the configuration; copy both from the same checkpoint"
        )
    missing = [k for k in info.get("missing_keys", ()) if "rotary" not in k]
    if missing:
        _check_fetched(path)
        raise LoadError(
            f"{label} lacks {len(missing)} weights (first: {sorted(missing)[0]}): the checkpoint is incomplete"
        )
    unread = info.get("unexpected_keys", ())
    check_unread(model, label, [name for name in unread if not quantisation or name.endswith(".weight")])
    return moved(model, device, path)


def _check_fetched(path: str) -> None:
    """Check whether a hub id is a drafter's, once its files are cached."""
    folder = path if Path(path).is_dir() else hub_ids.cached_folder(path)
    if folder is not None:
        check_no_drafter(Path(folder))


def _own_code(path: str) -> str:
    """Why a model of an architecture that only its own repository knows is not loaded; empty for all others."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__

    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except Exception:  # a missing or damaged file, which the caller's error is about
        return ""
    kind = config.get("model_type")
    if not config.get("auto_map") or kind in CONFIG_MAPPING:
        return ""
    name = next(iter(config.get("architectures") or ()), kind)
    return (
        f"{name} (model_type {kind}) is no architecture of Transformers {__version__}, and Python code from a "
        "model's repository is not run: load it yourself if you trust it, and hand in the network"
    )


def _has_encoder(path: str) -> bool:
    """Whether the configuration describes an encoder with a decoder."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception:  # loading the model reports the error
        return False
    return bool(getattr(config, "is_encoder_decoder", False))


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of a name.  Raises ``ValueError`` for an unknown name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """The device of a name, tried out; ``"auto"`` is the first available of cuda, mps and cpu.  Raises ``ValueError``
    if the device is not available."""
    if device is None:
        return None
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise ValueError(f"device must be a name such as cpu or cuda:0, not {with_article(type(device).__name__)}")
    available = devices()
    if device == "auto":
        return torch.device(available[0])
    try:
        chosen = torch.device(device)
        if chosen.type == "cuda" and f"cuda:{chosen.index or 0}" not in available:
            raise ValueError(
                f"device {str(device)!r} is not on this machine: choose one of auto, {', '.join(available)}"
            )
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = one_line(error).rstrip(".")
        raise ValueError(f"device {str(device)!r} cannot be used here: {reason}") from None
    return chosen


def devices() -> list[str]:
    """Devices of this machine that can run models, fastest first: ``cuda:0`` and so on, ``mps``, ``cpu``."""
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*cuda, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]
