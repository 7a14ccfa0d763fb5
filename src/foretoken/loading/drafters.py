"""Drafters and lists of drafters from spec strings, with everything that building them needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core import Limits, with_article
from foretoken.core.io import named_models
from foretoken.core.io.checkpoints import BUILTIN, ZOO, is_adapter, is_builtin, resolve
from foretoken.core.io.drafter_folders import IMPORTED, OURS
from foretoken.core.io.hub_ids import expanded
from foretoken.core.io.named_models import named_model
from foretoken.core.outside import OutsideError, fault_message, fault_of, is_outside, line_of
from foretoken.engine.errors import as_error, blamed, blaming
from foretoken.loading.draft_models import build_draft_model, build_foreign_draft_model, given_draft_model, windowed
from foretoken.loading.native_heads import has_head, read_head
from foretoken.loading.tree_files import check_target, with_limits
from foretoken.methods.controllers.outside import check_controller
from foretoken.methods.drafters.base import BuildContext, Drafter, Traits, Verify
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.known import KnownDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.nested import works_nested
from foretoken.methods.drafters.nets.store import read_stored
from foretoken.methods.drafters.outside import DrafterError
from foretoken.methods.drafters.pard import PardDrafter, mask_token
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.methods.verifiers.outside import check_verifier
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.cache.window import WHOLE_TEXT, Window
from foretoken.models.forward.parts import TargetParts
from foretoken.models.refusals import refusal
from foretoken.registry import construct, find, parse_spec, path_is_no_drafter, read_spec, rows, split_specs

Part = str | Drafter | LanguageModel | nn.Module
"""Anything that a drafter can be made from."""
FORESIGHT = "return an object that has it from the property foresight"
NOW_DATA = {
    "minimum_budget": FORESIGHT,
    "predicted_from": FORESIGHT,
    "free_for": "write traits = Traits(free_for=FUNCTION)",
    "observes": "write traits = Traits(learns=False) where observe does nothing, and nothing where it does",
}
"""Retired methods, which an external drafter may define, with their replacements."""
FORESIGHT_HOOKS = ("minimum_budget", "predicted_from")
OBJECTS = {"verifier": check_verifier, "controller": check_controller}
"""Checks of objects passed instead of names."""
DEFAULT_GROUP = "router,drafters=(model,k=8|ngram,k=10)"


class LoadingContext(BuildContext):
    """Loads the models and networks of drafters."""

    @property
    def inner_rule(self) -> Verify:
        return inner_rule

    def draft_model(
        self, name: str, path: str | None, *, packed: bool = True, quantize: str = "auto", window: Window = WHOLE_TEXT
    ) -> LanguageModel:
        draft = build_draft_model(
            path, self.target, self.source, self.tokenizer, self.device, name, packed=packed, quantize=quantize
        )
        return windowed(draft, window)

    def foreign_draft_model(
        self, name: str, path: str | None, *, quantize: str = "auto", window: Window = WHOLE_TEXT
    ) -> tuple[LanguageModel, Any]:
        shipped = None if path is not None or is_builtin(self.source) else _shipped("draft", self.source, self.target)
        path = path if shipped is None else str(shipped)
        draft, draft_tokenizer = build_foreign_draft_model(
            name, path, self.target, self.source, self.tokenizer, self.device, quantize
        )
        return windowed(draft, window), draft_tokenizer

    def drafter(self, spec: str) -> Drafter | None:
        if spec == "none":
            return None
        cls, path, options = read_spec("drafter", spec)
        tree = str(options.get("tree") or "")
        with blaming():
            options = self._as_chain(cls, with_limits(cls, options))
            built = self._built_outside(cls, path, options) if is_outside(cls) else construct(cls, path, self, options)
            check_target(tree, self.target)
            built.spec, built.target_bytes = spec, self.target.weight_bytes
        return built

    def _as_chain(self, cls: type[Drafter], options: dict[str, Any]) -> dict[str, Any]:
        """The options, with those of a chain if they leave the shape open and the target cannot score trees."""
        shape: Any = cls.shape_for(self.target)
        if shape is not None and not isinstance(shape, Mapping):
            rule = f"returned {type(shape).__name__}: it must be options by name"
            raise DrafterError(fault_message(cls, "shape_for", rule))
        if not shape or {*shape, "tree", "draw"} & set(options):
            return options
        why = self.target.capabilities.missing.get("tree_mask", "the target cannot score them")
        refusal("trees", why, f"{cls.name} drafts chains")
        return {**options, **shape}

    def _built_outside(self, cls: type[Any], path: str | None, options: dict[str, Any]) -> Drafter:
        label = f"{cls.__name__} ({line_of(cls)})"
        try:
            built = construct(cls, path, self, options)
        except BaseException as raised:
            error = as_error(raised)
            blame = blamed(error)
            if blame is error and not isinstance(error, OutsideError):
                raise DrafterError(f"{label} cannot be built: {error}") from error
            raise blame from error
        if not issubclass(type(built), Drafter):
            raise DrafterError(f"{label}.build returned {type(built).__name__}, not a drafter")
        check_outside(built)
        return built

    def members(self, specs: str | None, most: int | None = None) -> list[Drafter]:
        """The drafters of ``specs``; by default those that ``auto`` chooses from, and those that copy text."""
        chosen = default_members(self.target, self.source)[:most] if specs is None else split_specs(specs)
        return self.group(chosen)

    def part(self, spec: Part | None) -> Drafter | None:
        """The drafter for a spec, a drafter or a draft model."""
        if spec is None:
            return None
        if isinstance(spec, Drafter):
            check_outside(spec)
            return spec
        if isinstance(spec, str):
            return self.drafter(spec)
        if isinstance(spec, type) and issubclass(spec, Drafter):
            raise DrafterError(fault_of(spec, Drafter, "drafter"))
        if isinstance(spec, Path):
            raise path_is_no_drafter(spec)
        if isinstance(spec, LanguageModel) or (isinstance(spec, nn.Module) and not isinstance(spec, type)):
            draft = given_draft_model(spec, self.target, self.tokenizer)
            return (ModelDrafter if mask_token(draft) is None else PardDrafter)(draft, target=self.target)
        if hasattr(spec, "encode"):
            raise ValueError("a tokenizer is not a drafter: ft.load(model, drafter, tokenizer=TOKENIZER)")
        raise ValueError(
            f"{with_article(type(spec).__name__)} is not a drafter: "
            'give a spec string ("ngram,k=8", "model:PATH"), a drafter, a draft model, a list of these, or None'
        )

    def group(self, specs: Sequence[Part | None]) -> list[Drafter]:
        """The drafters for a list of specs, drafters and draft models."""
        drafters = [self.part(spec) for spec in specs]
        if None in drafters:
            raise ValueError("a list of drafters cannot hold 'none': leave it out")
        return [drafter for drafter in drafters if drafter is not None]

    def nested(self, outer: str, spec: str, *, for_target: bool = True) -> Drafter:
        name = parse_spec(spec).name
        context = self if for_target else LoadingContext(self.target, "", self.tokenizer, self.device)
        can = name != "none" and works_nested(find("drafter", name).load())
        built = context.drafter(spec) if can else None
        if built is None:
            able = [row.name for row in rows("drafter") if works_nested(row.load())]
            raise ValueError(f"{outer} cannot use {name!r} inside: choose one of {', '.join(able)}")
        return built

    def has_trained(self, name: str) -> bool:
        return has_drafter(name, self.source, self.target)

    def folder(self, name: str, path: str | None) -> Path:
        return drafter_folder(name, path, self.source, self.target)

    def has_native_head(self) -> bool:
        return self.target.model is not None and has_head(self.target.model)

    def native_head(self) -> Sequence[dict[str, Tensor]]:
        return read_head(self.target.model)


def check_outside(drafter: Drafter) -> None:
    """Raise ``DrafterError`` for an external drafter, or member of a group, without the required attributes."""
    if not is_outside(type(drafter)):
        for member in drafter.drafters:
            check_outside(member)
        return
    with blaming():  # attributes that the constructor did not set are missing here
        _check_facts(drafter)
        for member in drafter.drafters:
            check_outside(member)
        _check_limits(drafter)


def _check_facts(drafter: Drafter) -> None:
    cls = type(drafter)
    label = f"{cls.__name__} ({line_of(cls)})"
    if fault := fault_of(drafter, Drafter, "drafter"):
        raise DrafterError(fault)
    if isinstance(drafter.taps, str):
        raise DrafterError(f'{label} has taps = {drafter.taps!r}: write a tuple, ("{drafter.taps}",)')
    for name, kind in (("taps", str), ("drafters", Drafter)):
        sequence = getattr(drafter, name)
        if not isinstance(sequence, Collection) or not all(isinstance(part, kind) for part in sequence):
            content = "names" if kind is str else "drafters"
            raise DrafterError(f"{label} has {name} of type {type(sequence).__name__}: write a tuple of {content}")
    for name, replacement in NOW_DATA.items():
        if hasattr(cls, name) and not (replacement is FORESIGHT and drafter.foresight is not None):
            raise DrafterError(f"{label} has a method {name}, which is no longer called: {replacement}")
    if isinstance(drafter, ModelDrafter) and drafter.draws_together:
        for name in ("_expand", "_add_children", "_candidates"):  # rounds of several requests would bypass it
            if getattr(cls, name) is not getattr(ModelDrafter, name):
                raise DrafterError(f"{label} overrides {name}: write draws_together = False")
    if not isinstance(drafter.traits, Traits):
        raise DrafterError(f"{label} has traits of type {type(drafter.traits).__name__}: write Traits(...)")
    for name in ("max_depth", "max_nodes"):
        size = getattr(drafter, name)
        if not isinstance(size, int) or size < 1:
            raise DrafterError(f"{label} has {name} = {size!r}: it must be a whole number of at least 1")


def _check_limits(drafter: Drafter) -> None:
    """Check what engines and controllers need before the first round."""
    cls, limits, foresight = type(drafter), drafter.limits, drafter.foresight
    label = f"{cls.__name__} ({line_of(cls)})"
    if not isinstance(limits, Limits):
        raise DrafterError(f"{label} has limits of type {type(limits).__name__}: write Limits(...)")
    if not isinstance(limits.relative_cost, Real):
        rule = f"returned {type(limits.relative_cost).__name__}: it must be a number"
        raise DrafterError(fault_message(cls, "cost_beside", rule))
    if foresight is not None and not all(callable(getattr(foresight, name, None)) for name in FORESIGHT_HOOKS):
        hooks = " and ".join(FORESIGHT_HOOKS)
        raise DrafterError(f"{label} has foresight of type {type(foresight).__name__}, which has no {hooks}")


def check_specs(*, allow_lossy: bool, **specs: Any) -> None:
    """Check spec strings, by role, before a model is loaded for them, and verifiers and controllers that are
    objects."""
    for role, role_specs in specs.items():
        if role in OBJECTS and not (role_specs is None or isinstance(role_specs, str)):
            with blaming():
                OBJECTS[role](role_specs)
        for spec in role_specs if isinstance(role_specs, list | tuple) else [role_specs]:
            if isinstance(spec, str) and spec not in ("auto", "none"):
                kind, _, _ = read_spec(role, spec)
                if role == "verifier" and not (kind.lossless or allow_lossy):
                    raise ValueError(f"verifier {spec!r} is lossy by design and needs allow_lossy=True (--allow-lossy)")


def build_drafter(
    spec: Part | Sequence[Part] | None,
    target: LanguageModel,
    *,
    target_source: Any = BUILTIN,
    tokenizer: Any | None = None,
    device: str | torch.device | None = None,
    known: bool = False,
) -> Drafter | None:
    """The drafter for a spec string or a draft model; an ensemble for a list of spec strings, drafters and draft
    models.

    Args:
        known: first draft the tokens that a grammar forces or a caller predicts.
    """
    context = LoadingContext(target, target_source, tokenizer, device)
    with blaming():
        if isinstance(spec, list | tuple):
            built: Drafter | None = EnsembleDrafter(context.group(spec))
        else:
            built = context.part(spec)  # type: ignore[arg-type]
    return KnownDrafter(built) if known and built is not None and not isinstance(built, KnownDrafter) else built


def default_drafter(target: LanguageModel, target_source: Any) -> str | None:
    """The drafter of ``drafter="auto"``: draft model and n-grams for the built-in target, the entry's drafter for a
    named model, and the free ones (:class:`~foretoken.methods.drafters.base.Traits`) for any other target.  The
    controller picks one of several, or none.

    Plain decoding (``None``) for a target whose state cannot be rolled back.
    """
    if not target.capabilities.rollback:
        return None
    if _has_draft(target_source):
        return DEFAULT_GROUP
    entry = named_model(target_source)
    if entry is not None and entry.drafter != "auto":
        return entry.drafter
    free = free_drafters(target, target_source)
    return f"router,drafters=({'|'.join(free)})" if len(free) > 1 else next(iter(free), None)


def free_drafters(target: LanguageModel, target_source: Any, besides: Sequence[str] = ()) -> list[str]:
    """Names of the drafters that cost nothing to get for a target and are expected to pay, except ``besides``.  Those
    that run a network come first, because those that copy text only draft now and then."""
    context = LoadingContext(target, target_source)
    offers = [(row.name, row.load().traits) for row in rows("drafter") if row.name not in besides]
    free = [(name, traits) for name, traits in offers if traits.free_for is not None and traits.free_for(context)]
    return [name for name, _ in sorted(free, key=lambda offer: offer[1].copies_text)]


def default_members(target: LanguageModel, target_source: Any) -> list[str]:
    """Default members of a group of drafters: those that ``auto`` chooses from, and those that copy text."""
    first = brought_drafters(target, target_source)
    return list(dict.fromkeys((*first, "ngram", "suffix,share=false")))


def brought_drafters(target: LanguageModel, target_source: Any, besides: Sequence[str] = ()) -> list[str]:
    """Drafters that come with a target: the draft model of the built-in one, the free drafters of any other."""
    return ["model"] if _has_draft(target_source) else free_drafters(target, target_source, besides)


def _has_draft(target_source: Any) -> bool:
    """Whether the built-in draft model belongs to the target: the built-in model, or an adapter of it."""
    if not is_builtin(target_source) or not (ZOO / "draft" / "config.json").exists():
        return False
    return str(target_source) == BUILTIN or is_adapter(Path(resolve(target_source)))


def has_drafter(name: str, target_source: Any, target: LanguageModel | None = None) -> bool:
    """Whether the library ships a trained drafter of this method for a target: the built-in model, or a named model,
    recognised by its name or, once loaded, by its weights."""
    return _shipped(name, target_source, target) is not None


def _shipped(name: str, target_source: Any, target: LanguageModel | None = None) -> Path | None:
    """Folder of a trained drafter that the library ships for a target."""
    if str(target_source) == BUILTIN:
        folders = [ZOO]
    elif (entry := named_model(target_source)) is not None:
        folders = [ZOO / entry.name]
    else:
        folders = [] if target is None else [ZOO / model for model in named_models.MODELS]
        folders = [folder for folder in folders if (folder / name).is_dir() and _trained_for(folder, target)]
    return next((folder / name for folder in folders if (folder / name).is_dir()), None)


def _trained_for(folder: Path, target: Any) -> bool:
    """Whether the drafters in a folder of the zoo were trained for the target's weights."""
    try:
        parts = TargetParts(target)
    except CapabilityError:
        return False
    # One is enough: all drafters in the folder are for one model, and a fingerprint reads its weights.
    drafter = next((card.parent for card in sorted(folder.glob(f"*/{OURS}"))), None)
    return drafter is not None and parts.fits(read_stored(drafter, drafter.name)[1])


def drafter_folder(name: str, path: str | None, target_source: Any, target: LanguageModel | None = None) -> Path:
    """Folder of the trained drafter of a ``NAME[:FOLDER]`` spec; without one, the folder that the library ships.

    ``NAME:MODEL`` means the drafter shipped for a named model.
    """
    if path is None:
        shipped = _shipped(name, target_source, target)
        if shipped is None:
            models = [model for model in named_models.MODELS.values() if _shipped(name, model.name)]
            hints = [
                f"; {name}:{model.name} comes with the library for {model.title.split(',')[0]}" for model in models
            ]
            raise ValueError(
                f"drafter {name!r} needs a folder for this target: {name}:FOLDER, made by `foretoken train {name}`"
                + "".join(hints)
            )
        return shipped
    folder = expanded(path)
    if not folder.is_dir():
        shipped = _shipped(name, path)
        if shipped is not None:
            return shipped
        import_hint = f", or import another project's with `foretoken import MODEL FOLDER --out {path}`"
        raise ValueError(
            f"{folder} is not a folder with a trained drafter: make one with `foretoken train {name}`"
            f"{import_hint if name in IMPORTED else ''}"
        )
    return folder
