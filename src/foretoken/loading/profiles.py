"""Reads profiles that ``foretoken tune`` has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.core.costs import RoundCosts
from foretoken.core.io.hub_ids import expanded
from foretoken.core.outside import refuse_code


def read_profile(file: str | Path, *, runs_code: bool = False) -> dict[str, Any]:
    """The contents of a profile: specs for ``drafter``, ``verifier`` and ``controller``, and measurements.

    A profile is a JSON object; a drafter of ``null`` is plain decoding.  ``costs`` become :class:`RoundCosts`;
    ``target`` and ``machine`` describe where they were measured (:mod:`foretoken.loading.measured.profile` compares
    them with the present ones).  Other keys are ignored.  Raises ``ValueError`` for anything else.

    Args:
        runs_code: accept a drafter in a Python file, for callers that do not use the profile's drafter.
    """
    if not isinstance(file, str | Path):
        raise ValueError(f"profile must be the path of a JSON file, not {' '.join(repr(file).split())[:60]}")
    try:
        profile = json.loads(expanded(file).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"the profile {file} is not UTF-8 text") from None
    except (OSError, json.JSONDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read the profile {file}: {reason}") from None
    if not isinstance(profile, dict):
        raise ValueError(f"the profile {file} must be a JSON object with drafter, verifier and controller")
    if profile.get("format", 1) != 1:
        raise ValueError(
            f"the profile {file} has format {profile['format']}, and only 1 is supported: run foretoken tune again"
        )
    specs = {key: profile[key] for key in ("drafter", "verifier", "controller") if key in profile}
    for key, spec in specs.items():
        if not isinstance(spec, str) and not (key == "drafter" and spec is None):
            raise ValueError(f"{key} in the profile {file} must be a spec string, not {json.dumps(spec)}")
        if not runs_code:
            refuse_code(spec, f"the profile {file}")
    if not specs and "costs" not in profile:
        raise ValueError(f"the profile {file} has no drafter, verifier, controller or costs: run foretoken tune")
    return {**specs, **_measured_parts(profile, file)}


def _measured_parts(profile: dict[str, Any], file: str | Path) -> dict[str, Any]:
    parts = {key: profile[key] for key in ("target", "machine", "costs") if profile.get(key) is not None}
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
