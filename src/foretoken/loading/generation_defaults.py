"""Sampling defaults from a model's ``generation_config.json`` or GGUF header, for requests that leave options out.

Each field is taken as vLLM takes it.  Transformers' rule for ``do_sample`` applies: without it a model is greedy.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.core.io.checkpoints import LoadError, is_adapter, is_builtin, location_of, resolve
from foretoken.core.io.hub_ids import expanded
from foretoken.loading.adapters import read_adapter
from foretoken.loading.gguf import is_gguf, sampling_of
from foretoken.loading.handed import unwrapped
from foretoken.models.base import LanguageModel
from foretoken.options import FIELDS, FILTERS

FILE = "generation_config.json"
SAMPLED = ("temperature", *FILTERS)
"""Fields that only matter when sampling is on."""
NEUTRAL = {
    name: field.default if field.neutral is None else field.neutral for name, field in FIELDS.items() if field.sampling
}
NEUTRAL["min_tokens"] = 0
"""Values that change nothing and need not be listed."""
RANGES = {
    name: field.configured
    for name, field in sorted(FIELDS.items(), key=lambda row: not row[1].sampling)
    if field.configured is not None
}
"""Allowed values of the fields that are read, sampling fields first."""
THEIR_NAMES = {"min_tokens": "min_new_tokens"}
"""Transformers' names of fields that have another name here."""
NOT_APPLIED: Mapping[str, Any] = {
    "num_beams": 1, "guidance_scale": 1, "encoder_repetition_penalty": 1,
    "min_length": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None, "sequence_bias": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "force_words_ids": None, "constraints": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "watermarking_config": None, "dola_layers": None,
    "stop_strings": None, "max_time": None, "token_healing": False,
    "sequence": None, "xtc_probability": 0, "xtc_threshold": None, "penalty_last_n": -1,
    "mirostat": 0, "mirostat_tau": None, "mirostat_eta": None,
}  # fmt: skip
"""Fields that change the output of ``generate``, or of llama.cpp, and are not applied here, with their neutral values.
``None`` and empty values are neutral too."""
GGUF_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Names in a GGUF header of fields that have another name here."""
GGUF_SWITCHES = {
    "xtc_threshold": "xtc_probability", "mirostat_tau": "mirostat", "mirostat_eta": "mirostat",
    "penalty_last_n": "repetition_penalty",
}  # fmt: skip
"""Fields of a GGUF header that only matter with another one."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Default generation options of a model.

    Attributes:
        sampling: options of :meth:`foretoken.llm.Llm.generate` by name; empty if the model sets none.
        source: their origin.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.sampling.items())
        return f"{settings} from {self.source}" if settings else ""


def read_defaults(source: Any) -> GenerationDefaults:
    """The defaults of a source of :func:`foretoken.load`: a folder, a GGUF file, a hub id or a model object.

    An adapter has those of its base model.  Raises ``LoadError`` if the file is damaged, a value is impossible or the
    hub does not answer.
    """
    source = unwrapped(source)
    if isinstance(source, LanguageModel):
        return GenerationDefaults()
    if is_gguf(source):
        return _defaults(_in_header(sampling_of(source)), str(source), "the GGUF file")
    if not isinstance(source, str | Path):
        from transformers import GenerationConfig

        config: Any = getattr(source, "generation_config", None)
        stated = config.to_diff_dict() if isinstance(config, GenerationConfig) else {}
        return _defaults(stated, f"the {type(source).__name__}'s generation_config", "generation_config")
    if is_builtin(source):
        return GenerationDefaults()
    file = _file_of(str(source))
    if file is None:
        return GenerationDefaults()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, Mapping):
        raise LoadError(
            f"{file} is damaged (it is not a JSON object): copy it again, or load with generation_config=None"
        )
    return _defaults(values, str(file), FILE)


def _in_header(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults of a GGUF header as fields of a ``generation_config.json``."""
    values: dict[str, Any] = {
        # Headers hold float32: 0.8 is read as 0.800000011920929.
        GGUF_NAMES.get(name, name): float(f"{value:.7g}") if isinstance(value, float) else value
        for name, value in stated.items()
    }
    if values.get("penalty_last_n") == 0:  # switches the penalty off
        values.pop("repetition_penalty", None)
    if isinstance(values.get("top_k"), int):
        values["top_k"] = max(values["top_k"], 0)  # negative numbers keep all tokens, too
    for name, switch in GGUF_SWITCHES.items():
        if values.get(switch) in (None, NEUTRAL.get(switch, 0)):
            values.pop(name, None)
    return {**values, "do_sample": any(name in values for name in SAMPLED)}


def _file_of(source: str) -> Path | None:
    """The file beside a model's weights, in its folder or in the hub's cache; ``None`` if there is none."""
    folder = expanded(resolve(source))
    if is_adapter(folder):
        return _file_of(read_adapter(folder).base)
    if folder.is_dir():
        return folder / FILE if (folder / FILE).is_file() else None
    if folder.exists() or str(source).startswith((".", "/", "~")):
        return None  # not a model: loading reports it
    location = location_of(str(source))
    if Path(location).is_dir():
        return _file_of(location)
    from transformers.utils.hub import cached_file

    try:
        cached = cached_file(location, FILE, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # a missing or unreadable model: loading reports which
        return None
    return None if cached is None else Path(cached)


def _defaults(values: Mapping[str, Any], origin: str, source: str) -> GenerationDefaults:
    """Defaults from fields.  Errors name ``origin``; the result names ``source``."""
    stated = {name: values.get(THEIR_NAMES.get(name, name)) for name in RANGES}
    settings = {name: value for name, value in stated.items() if value is not None}
    if settings.get("top_k") == -1:  # all tokens, as vLLM's users write it
        settings["top_k"] = 0
    for name, value in settings.items():
        _check(name, value, origin)
    _check_ends(values.get("eos_token_id"), origin)
    if not isinstance(values.get("do_sample", False), bool | None):
        raise LoadError(_wrong("do_sample", values["do_sample"], origin))
    sampled = bool(values.get("do_sample", False))
    _tell_not_applied(values, sampled, origin)
    sampling_settings = {name: value for name, value in settings.items() if name in SAMPLED and value != NEUTRAL[name]}
    if not sampled and sampling_settings:
        fields = ", ".join(f"{name} {value:g}" for name, value in sampling_settings.items())
        reason = "do_sample is false" if values.get("do_sample") is not None else "do_sample is not set"
        logging.getLogger("foretoken").warning("%s has %s, but %s: greedy, as generate does it", origin, fields, reason)
    if not sampled:
        settings = {name: value for name, value in settings.items() if name not in SAMPLED}
        if sampling_settings:  # applies to every request that leaves it out, also in a server
            settings = {"temperature": 0.0, **settings}
    elif "temperature" not in settings:
        settings = {"temperature": 1.0, **settings}
    changed = {n: v for n, v in settings.items() if n == "temperature" or v != NEUTRAL.get(n)}
    return GenerationDefaults(changed, source if changed else "")


def _tell_not_applied(values: Mapping[str, Any], sampled: bool, origin: str) -> None:
    """Warn in one line about fields that would change the output of Transformers' ``generate``."""
    sampling_only = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
    neutral = {**NOT_APPLIED, **(sampling_only if sampled else {"penalty_alpha": 0.0})}
    stated = {name: values.get(name) for name in neutral}
    unsupported = [
        f"{name} {ascii(value)[:40]}"
        for name, value in stated.items()
        if value is not None and value != neutral[name] and value not in ([], {}, "")
    ]
    if unsupported:
        logging.getLogger("foretoken").warning(
            "%s has %s, not applied here: pass logits_processor=[...] (stop=, bad_words=, deadline_s=) with a request, "
            "or use model.generate(..., custom_generate=ft.custom_generate)",
            origin,
            ", ".join(unsupported),
        )


def _check(name: str, value: Any, origin: str) -> None:
    allowed = RANGES[name]
    kind = int if FIELDS[name].kind is int else (int, float)
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not (is_number and value in allowed and value < 2**63):  # JSON integers are unbounded, no field needs more
        raise LoadError(_wrong(THEIR_NAMES.get(name, name), value, origin))


def _check_ends(value: Any, origin: str) -> None:
    """Refuse invalid ids: they would end no sequence, or fail the load with an error that names nothing."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise LoadError(_wrong("eos_token_id", value, origin))


def _wrong(name: str, value: Any, origin: str) -> str:
    return (
        f"{origin}: {name} is {ascii(value)[:60]}, which is not valid: correct the file, or load with "
        "generation_config=None"
    )
