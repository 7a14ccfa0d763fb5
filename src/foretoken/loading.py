"""Names and paths -> models, tokenizers, drafters: everything that can be wrong is found here, before any work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.controllers.costs import RoundCosts
from foretoken.drafters.base import Drafter
from foretoken.drafters.ensemble import EnsembleDrafter
from foretoken.drafters.inside import works_inside
from foretoken.models import wrap
from foretoken.models.base import LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.inflated import InflatedModel
from foretoken.models.inflation import inflate as inflate_network
from foretoken.models.inflation import parse_size, shape_for
from foretoken.models.lean import MAX_PARAMETERS
from foretoken.models.packing import pack_linears
from foretoken.registry import convert_options, find, make, parse_spec, rows, split_specs
from foretoken.trees.base import Shape
from foretoken.verifiers.pairing import inner_rule as inner_rule

BUILTIN = "builtin"
DEFAULT_GROUP = "router,drafters=(model,k=8|ngram,k=10)"
ZOO = Path(__file__).parent / "zoo"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class LoadError(ValueError):
    """A model or tokenizer could not be loaded; the message says what to do."""


def resolve(name: str | Path, role: str = "target") -> str:
    """``builtin`` -> the zoo's folder, a local folder -> itself, anything else -> a hub id, unchanged."""
    if str(name) == BUILTIN:
        return str(ZOO / role)
    return str(name)


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by name.

    Raises:
        ValueError: unknown name.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """A device by name, tried out.

    Raises:
        ValueError: there is no such device on this machine.
    """
    if device is None:
        return None
    try:
        wanted = torch.device(device)
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"device {str(device)!r} cannot be used here: {reason}") from None
    return wanted


def check_folder(folder: Path) -> None:
    """Look at a local checkpoint before Transformers does.

    Raises:
        LoadError: no config, only pickled weights, missing or half-written safetensors files.
    """
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder with a model (config.json and *.safetensors)")
    if not (folder / "config.json").exists():
        raise LoadError(f"{folder} has no config.json: point to a Hugging Face model folder")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        pickles = [p.name for p in folder.iterdir() if p.suffix in PICKLES]
        if pickles:
            raise LoadError(
                f"{folder} holds pickled weights only ({pickles[0]}), which can run code when loaded: "
                "convert them with save_pretrained(safe_serialization=True)"
            )
        raise LoadError(f"{folder} holds no *.safetensors weights: the checkpoint is incomplete")
    missing = _indexed_shards(folder / "model.safetensors.index.json") - {p.name for p in shards}
    if missing:
        raise LoadError(f"{folder} lacks {sorted(missing)[0]}: copy the missing shards and try again")
    for shard in shards:
        _check_shard(shard)


def _indexed_shards(index: Path) -> set[str]:
    """File names that a shard index lists; none when there is no index."""
    if not index.exists():
        return set()
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LoadError(f"{index} is damaged or half-written: copy it again") from None


def _check_shard(shard: Path) -> None:
    """A safetensors file says in its header how long it must be."""
    size = shard.stat().st_size
    try:
        with shard.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
        end = 8 + header_size + max(v["data_offsets"][1] for k, v in header.items() if k != "__metadata__")
    except (ValueError, KeyError, TypeError, MemoryError, OverflowError):
        raise LoadError(f"{shard} is no safetensors file: it is damaged or half-written, copy it again") from None
    if size < end:
        raise LoadError(f"{shard} has {size} of {end} bytes: it was half-written, copy it again")


def load_model(
    source: Any,
    *,
    role: str = "target",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    exact: str = "distribution",
    lean: bool = True,
    inflate: str | int | None = None,
) -> LanguageModel:
    """A target or draft model from a path, a hub id, ``"builtin"``, a ``PreTrainedModel`` or a :class:`LanguageModel`.

    ``inflate`` (``"1b"``, ``"300m"``, a number of parameters) makes a model of that size with the same outputs, see
    :mod:`foretoken.models.inflation`.

    Raises:
        LoadError: the checkpoint is missing, damaged, incomplete or pickled.
        ValueError: unknown dtype, or a model that cannot be inflated to that size.
    """
    if inflate is not None:
        return _load_inflated(source, inflate, role, dtype, device, exact, lean)
    if isinstance(source, LanguageModel):
        return source
    if not isinstance(source, str | Path):
        return wrap(source, exact=exact, lean=lean)
    model = wrap(_load_network(source, role, dtype, device), exact=exact, lean=lean)
    return _packed(model)


def _load_inflated(
    source: Any,
    size: str | int,
    role: str,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    exact: str,
    lean: bool,
) -> LanguageModel:
    """A model that is inflated in memory; what is packed is packed layer by layer."""
    if isinstance(source, LanguageModel):
        raise ValueError(f"only a checkpoint or a Transformers model can be inflated, not {type(source).__name__}")
    wanted = parse_size(size)
    small = _load_network(source, role, dtype, device) if isinstance(source, str | Path) else source
    shape = shape_for(small.config.get_text_config(), wanted)
    big = inflate_network(small, shape, packed=exact == "distribution" and wanted > MAX_PARAMETERS)
    return _packed(InflatedModel(big, small, shape, exact=exact, lean=lean))


def _packed(model: LanguageModel) -> LanguageModel:
    """Pack a model's layers where that is faster: they are ours to change, the model was just loaded."""
    if isinstance(model, HuggingFaceModel) and not model.is_lean and model.exact == "distribution":
        pack_linears(model.model)
    return model


def _load_network(
    source: str | Path, role: str, dtype: str | torch.dtype | None, device: str | torch.device | None
) -> Any:
    """The ``PreTrainedModel`` of a path, a hub id or ``"builtin"``, checked before it is read."""
    wanted, device = parse_dtype(dtype), parse_device(device)
    path = resolve(source, role)
    local = Path(path)
    if local.exists() or str(source) == BUILTIN or path.startswith((".", "/", "~")):
        check_folder(local.expanduser())
        path = str(local.expanduser())
    return _from_pretrained(path, wanted, device)


def _from_pretrained(path: str, dtype: torch.dtype | None, device: str | torch.device | None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype or "auto",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, in one line
        )
    except Exception as error:  # a damaged checkpoint fails in many ways, some of them with error classes of their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(f"cannot load a model from {path}: {reason}") from error
    finally:
        hf_logging.set_verbosity(before)
        hf_logging.enable_progress_bar()
    model, info = loaded
    for key, found, wanted in sorted(info.get("mismatched_keys", ())):
        raise LoadError(
            f"{path} has a config.json that does not fit its weights: {key} is {list(found)} in the file and "
            f"{list(wanted)} in the configuration; copy both from the same checkpoint"
        )
    missing = [k for k in info.get("missing_keys", ()) if "rotary" not in k]
    if missing:
        raise LoadError(
            f"{path} lacks {len(missing)} weights (first: {sorted(missing)[0]}): the checkpoint is incomplete"
        )
    return model.to(device) if device is not None else model


def load_tokenizer(source: Any) -> Any | None:
    """The tokenizer that belongs to a model source, or ``None`` when it has none."""
    from transformers import AutoTokenizer

    if not isinstance(source, str | Path):
        source = getattr(getattr(source, "config", None), "_name_or_path", "") or ""
        if not source or not Path(source).is_dir():
            return None
    path = resolve(source)
    if Path(path).is_dir() and not any(
        (Path(path) / f).exists() for f in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    ):
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot load a tokenizer from {path}: {str(error).strip().splitlines()[0]}") from None


def check_same_tokenizer(target: Any | None, draft: Any | None, name: str) -> None:
    """A draft model must share the target's tokenizer.

    Raises:
        ValueError: the vocabularies differ; names the first differing token.
    """
    if target is None or draft is None:
        return
    mine, theirs = target.get_vocab(), draft.get_vocab()
    if mine == theirs:
        return
    differing = sorted(set(mine.items()) ^ set(theirs.items()), key=lambda item: item[1])
    token, index = differing[0]
    raise ValueError(
        f"the draft model {name} has another tokenizer than the target ({len(differing)} entries differ, first "
        f"{token!r} = {index}): use it as 'shared_vocab:{name}' or 'retokenize:{name}', or a drafter that needs no "
        "draft model, for example 'ngram'"
    )


def check_vocabularies(target: LanguageModel, draft: LanguageModel, name: str) -> None:
    """Padded widths of one tokenizer may differ a little; different vocabularies may not.

    Raises:
        ValueError: the logits' widths are too far apart to be one vocabulary.
    """
    wide, narrow = max(target.vocab_size, draft.vocab_size), min(target.vocab_size, draft.vocab_size)
    if wide - narrow > max(512, wide // 100):
        raise ValueError(
            f"the draft model {name} has a vocabulary of {draft.vocab_size}, the target one of {target.vocab_size}: "
            f"they do not share a tokenizer; use it as 'shared_vocab:{name}' or 'retokenize:{name}'"
        )


def build_drafter(
    spec: str | Drafter | Sequence[str | Drafter] | None,
    target: LanguageModel,
    *,
    target_source: Any = BUILTIN,
    tokenizer: Any | None = None,
    device: str | torch.device | None = None,
) -> Drafter | None:
    """A drafter from a spec string; the ensemble of a list of spec strings and drafters.

    Raises:
        ValueError: unknown name or option, an empty list, or a draft model that does not fit the target.
    """
    if spec is None or isinstance(spec, Drafter):
        return spec
    if not isinstance(spec, str):
        return EnsembleDrafter(
            build_members(spec, target, target_source=target_source, tokenizer=tokenizer, device=device)
        )
    if spec == "none":
        return None
    parsed = parse_spec(spec)
    row = find("drafter", parsed.name)
    cls = row.load()
    options = convert_options("drafter", parsed.name, cls, parsed.options)
    builder = getattr(cls, "build", None)
    if builder is None and parsed.path is not None:
        raise ValueError(f"drafter {parsed.name!r} takes no path; its options: {row.example}")
    parts = {"target": target, "target_source": target_source, "tokenizer": tokenizer, "device": device}
    built: Drafter = cls(**options) if builder is None else builder(parsed.path, **parts, **options)
    built.spec = spec
    return built


def build_members(
    specs: str | Sequence[str | Drafter],
    target: LanguageModel,
    *,
    target_source: Any = BUILTIN,
    tokenizer: Any | None = None,
    device: Any = None,
) -> list[Drafter]:
    """The drafters of a list, or of specs joined by ``|`` (``model:./a,k=4|ngram``).

    Raises:
        ValueError: as :func:`build_drafter`; an empty place in the list, or ``none`` in it.
    """
    members = []
    for spec in split_specs(specs) if isinstance(specs, str) else specs:
        built = build_drafter(spec, target, target_source=target_source, tokenizer=tokenizer, device=device)
        if built is None:
            raise ValueError("a list of drafters cannot hold 'none': leave it out")
        members.append(built)
    return members


def default_members(target: LanguageModel, target_source: Any) -> list[str | Drafter]:
    """What a group of drafters is made of when no members are given: the default drafter and two that copy."""
    first = "model" if default_drafter(target, target_source) == DEFAULT_GROUP else "ngram"
    return list(dict.fromkeys((first, "ngram", "suffix,share=false")))


def build_nested_drafter(outer: str, spec: str, target: LanguageModel, **parts: Any) -> Drafter:
    """A drafter that works inside the drafter ``outer``; ``parts`` as in :func:`build_drafter`.

    Raises:
        ValueError: an unknown name or option, no drafter at all, or one that cannot work inside another one; the
            message lists those that can.
    """
    name = parse_spec(spec).name
    able = [row.name for row in rows("drafter") if works_inside(row.load())]
    built = None if name == "none" or find("drafter", name).name not in able else build_drafter(spec, target, **parts)
    if built is None:
        raise ValueError(f"{outer} cannot use {name!r} inside: choose one of {', '.join(able)}")
    return built


def static_trees() -> list[str]:
    """Names of the trees of fixed shape."""
    return [row.name for row in rows("tree") if issubclass(row.load(), Shape)]


def build_tree(spec: str, sort: type[Any]) -> Any:
    """A tree from its spec, of the sort ``Shape`` (fixed) or ``Growth`` (by the draft's confidence).

    Raises:
        ValueError: an unknown name or option, or a tree of the other sort; the message lists the choices.
    """
    able = [row.name for row in rows("tree") if issubclass(row.load(), sort)]
    if parse_spec(spec).name not in able:
        raise ValueError(f"the tree cannot be {spec!r}: choose one of {', '.join(able)}")
    return make("tree", spec)


def build_draft_model(
    path: str | None,
    target: LanguageModel,
    target_source: Any,
    tokenizer: Any | None,
    device: Any,
    drafter: str = "model",
    packed: bool = True,
) -> LanguageModel:
    """The draft model of a ``model:PATH`` spec (or of another ``drafter`` with one), checked against the target.

    Unless it is ``packed``, its weights stay where they can be trained.

    Raises:
        ValueError: no path and no built-in draft for this target, or another tokenizer.
    """
    if path is None and str(target_source) != BUILTIN:
        raise ValueError(
            f"drafter {drafter!r} needs a path for this target: {drafter}:PATH (a draft LM of the same tokenizer)"
        )
    path = BUILTIN if path is None else path
    draft = _load_draft_model(path, device, packed)
    check_vocabularies(target, draft, path)
    if tokenizer is not None and path != BUILTIN:
        check_same_tokenizer(tokenizer, load_tokenizer(path), path)
    return draft


def build_foreign_draft_model(
    name: str, path: str | None, target_source: Any, tokenizer: Any | None, device: Any
) -> tuple[LanguageModel, Any]:
    """The draft model of a ``name:PATH`` spec and its own tokenizer, which may be another than the target's.

    Raises:
        ValueError: no path and no built-in draft for this target, or a model without a tokenizer.
    """
    if path is None and str(target_source) != BUILTIN:
        raise ValueError(f"drafter {name!r} needs a path for this target: {name}:PATH (a draft LM and its tokenizer)")
    if tokenizer is None:
        raise ValueError(f"drafter {name!r} needs the target's tokenizer: pass tokenizer=... to load")
    path = BUILTIN if path is None else path
    draft = _load_draft_model(path, device)
    own = load_tokenizer(resolve(path, "draft"))
    if own is None:
        raise ValueError(
            f"drafter {name!r} needs the draft model's tokenizer, and {path} has none: copy tokenizer.json into it"
        )
    return draft, own


def _load_draft_model(path: str, device: Any, packed: bool = True) -> LanguageModel:
    # A draft model's law may be anything: small ones are fastest in float32 on CPU (docs/log.md).
    on_cpu = device is None or str(device) == "cpu"
    small = on_cpu and _is_small(path)
    return load_model(
        path,
        role="draft",
        dtype="float32" if small else None,
        device=device,
        exact="approximate" if small or not packed else "distribution",
    )


def _is_small(path: str) -> bool:
    folder = Path(resolve(path, "draft"))
    return folder.is_dir() and sum(p.stat().st_size for p in folder.glob("*.safetensors")) < 20_000_000


def read_profile(file: str | Path) -> dict[str, Any]:
    """What a profile says: specs for ``drafter``, ``verifier`` and ``controller``, and what was measured.

    A profile is a JSON object; a drafter of ``null`` is plain decoding.  ``costs`` become :class:`RoundCosts`;
    ``target`` and ``machine`` say where they were measured (:mod:`foretoken.analysis.profile` compares them with what
    is there); other keys are left alone.

    Raises:
        ValueError: no such file, no JSON object, a newer format, or a part of the wrong shape.
    """
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read the profile {file}: {reason}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the profile {file} must be a JSON object with drafter, verifier and controller")
    if found.get("format", 1) != 1:
        raise ValueError(f"the profile {file} has format {found['format']}, and 1 is known: run foretoken tune again")
    specs = {key: found[key] for key in ("drafter", "verifier", "controller") if key in found}
    for key, spec in specs.items():
        if not isinstance(spec, str) and not (key == "drafter" and spec is None):
            raise ValueError(f"{key} in the profile {file} must be a spec string, not {json.dumps(spec)}")
    if not specs and "costs" not in found:
        raise ValueError(f"the profile {file} has no drafter, verifier, controller or costs: run foretoken tune")
    return {**specs, **_measured_parts(found, file)}


def _measured_parts(found: dict[str, Any], file: str | Path) -> dict[str, Any]:
    """A profile's ``target``, ``machine`` and ``costs``, as far as it has them."""
    parts = {key: found[key] for key in ("target", "machine", "costs") if found.get(key) is not None}
    for key, part in parts.items():
        if not isinstance(part, dict):
            raise ValueError(f"{key} in the profile {file} must be an object, not {json.dumps(part)}")
    if "target" in parts and not isinstance(parts["target"].get("fingerprint"), str):
        raise ValueError(f"target in the profile {file} lacks its fingerprint: run foretoken tune again")
    if "costs" in parts:
        try:
            parts["costs"] = RoundCosts.from_dict(parts["costs"])
        except ValueError as error:
            raise ValueError(f"costs in the profile {file} are damaged: {error}; run foretoken tune again") from None
    return parts


def drafter_folder(name: str, path: str | None, target_source: Any) -> Path:
    """Where a trained drafter of a ``NAME[:FOLDER]`` spec is: the folder, or the built-in target's own.

    Raises:
        ValueError: no such folder, or no folder given for a target that is not built in.
    """
    if path is None:
        if str(target_source) != BUILTIN or not (ZOO / name).is_dir():
            raise ValueError(
                f"drafter {name!r} needs a folder for this target: {name}:FOLDER, made by `foretoken train {name}`"
            )
        return ZOO / name
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder with a trained drafter: make one with `foretoken train {name}`")
    return folder


def default_drafter(target: LanguageModel, target_source: Any) -> str | None:
    """What ``drafter="auto"`` means: for the built-in target its draft model and n-grams, of which the controller
    picks; n-grams for any other.

    Plain decoding (``None``) for a target whose state cannot be rolled back.
    """
    if not target.capabilities.rollback:
        return None
    has_draft = (ZOO / "draft" / "config.json").exists()
    return DEFAULT_GROUP if str(target_source) == BUILTIN and has_draft else "ngram"
