"""Profiles: results of ``foretoken tune`` for a target on a machine, and checks whether they still hold."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.core.costs import RoundCosts, TargetCost
from foretoken.loading.measured.machine import hardware, threads, versions
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.call_costs import COUNTS, measure_target
from foretoken.models.forward.parts import TargetParts
from foretoken.models.machine import any_text
from foretoken.models.variants.inflated import InflatedModel

FORMAT = 1
COMPARED = ("cpu", "gpus", "torch_threads", "dtype", "weight_storage")
"""Facts that must be equal for measured times to hold."""


class ProfileWarning(UserWarning):
    """A profile was measured for another target or on another machine."""


def machine_of(target: LanguageModel) -> dict[str, Any]:
    """Facts of the machine that measured times depend on."""
    dtype = str(target.dtype or "").removeprefix("torch.")
    storage = target.stored_as.partition(",")[0] or "full"
    return {**hardware(), **threads(), "dtype": dtype, "weight_storage": storage, "versions": versions()}


def fingerprint_of(target: LanguageModel) -> str:
    """Identifies a target, whatever dtype it was loaded in."""
    try:
        marks = TargetParts(target).fingerprint()
    except CapabilityError:
        identity = getattr(target, "identity", "")  # set for a GGUF file
        return identity or f"{type(target).__name__}-{target.vocab_size}-{target.context_length}"
    grown = f"-inflated-{target.num_parameters}" if isinstance(target, InflatedModel) else ""
    return f"{marks.num_layers}x{marks.hidden_size}-{marks.vocab_size}-{marks.weights}-{marks.layers}{grown}"


def misfits(profile: Mapping[str, Any], target: LanguageModel) -> list[str]:
    """Reasons why the profile's times may not hold for this target on this machine; empty if they hold."""
    reasons = []
    profiled = profile.get("target")
    if profiled is not None and profiled["fingerprint"] != fingerprint_of(target):
        source = profiled.get("source")
        reasons.append(f"it is for another target, {source}" if source else "it is for another target")
    tuned_on, present = profile.get("machine") or {}, machine_of(target)
    moved = [key for key in COMPARED if key in tuned_on and tuned_on[key] != present[key]]
    return [*reasons, *(f"{key} was {_shown(tuned_on[key])} and is {_shown(present[key])}" for key in moved)]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def costs_for(profile: Mapping[str, Any], target: LanguageModel, name: str | Path, is_used: bool) -> RoundCosts | None:
    """A profile's costs, measured again if it is for another target or machine.

    Args:
        is_used: whether anything uses the costs; if not, nothing is measured.

    Warns:
        ProfileWarning: the profile is for another target or machine.
    """
    reasons = misfits(profile, target)
    costs: RoundCosts | None = profile.get("costs")
    if reasons:
        remedy = "its costs are measured again now" if is_used and costs is not None else "its speed-ups may not hold"
        text = f"the profile {name} does not fit ({'; '.join(reasons)}): {remedy}; run foretoken tune for a new one"
        warnings.warn(text, ProfileWarning, stacklevel=3)
    if not is_used or costs is None:
        return None
    return refresh(costs, target) if reasons else costs


def refresh(costs: RoundCosts, target: LanguageModel) -> RoundCosts:
    """Costs with v(n) measured again; drafter costs are scaled by the change in speed of one token.

    Acceptance is unchanged: it depends on the text, not on the machine.
    """
    measured = measured_target(target, COUNTS, repeats=3)
    factor = measured.of(1) / costs.target.of(1)
    drafters = {
        spec: replace(cost, call_s=cost.call_s * factor, step_s=cost.step_s * factor)
        for spec, cost in costs.drafters.items()
    }
    return RoundCosts(measured, drafters, costs.rest_s * factor)


def measured_target(target: LanguageModel, counts: tuple[int, ...], repeats: int) -> TargetCost:
    """v(n) after a prefix of 128 tokens, or of half the context if that is less."""
    return measure_target(target, any_text(target, 128), counts, repeats)
