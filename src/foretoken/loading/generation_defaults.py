"""What a model's ``generation_config.json`` says of sampling: the defaults of requests that say nothing.

Field by field as vLLM takes it, and with Transformers' rule that ``do_sample`` decides: without it a model is greedy.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.loading.checkpoints import BUILTIN, LoadError, resolve
from foretoken.loading.gguf import is_gguf
from foretoken.models.base import LanguageModel

FILE = "generation_config.json"
SAMPLED = ("temperature", "top_k", "top_p", "min_p")
"""Fields that mean something only where sampling is on."""
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values that change nothing, which need not be named."""
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, math.inf),
    "max_new_tokens": (1, math.inf),
}
POSITIVE = ("top_p", "repetition_penalty")
WHOLE = ("top_k", "max_new_tokens")


@dataclass(frozen=True)
class GenerationDefaults:
    """Options of a generation that a model comes with.

    Attributes:
        sampling: options of :meth:`foretoken.llm.Llm.generate` by name; empty where the model says nothing.
        source: where they are from.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        """One line: what they are, and where they are from."""
        said = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
        return f"{said} from {self.source}" if said else ""


def read_defaults(source: Any) -> GenerationDefaults:
    """The defaults of what :func:`foretoken.load` is given: a folder's, or a handed-in model's.

    Raises:
        LoadError: the file is no JSON object, or a value is impossible; names the file and the field.
    """
    if isinstance(source, LanguageModel) or is_gguf(source):
        return GenerationDefaults()
    if not isinstance(source, str | Path):
        config: Any = getattr(source, "generation_config", None)
        return GenerationDefaults() if config is None else _defaults(config.to_diff_dict(), "generation_config")
    if str(source).startswith(BUILTIN):
        return GenerationDefaults()
    file = Path(resolve(source)).expanduser() / FILE
    if not file.is_file():
        return GenerationDefaults()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, Mapping):
        raise LoadError(f"{file} is damaged (it is no JSON object): copy it again, or load with generation_config=None")
    return _defaults(values, FILE)


def _defaults(values: Mapping[str, Any], source: str) -> GenerationDefaults:
    given = {name: values[name] for name in RANGES if values.get(name) is not None}
    for name, value in given.items():
        _check(name, value, source)
    sampled = bool(values.get("do_sample", False))
    named = {name: value for name, value in given.items() if name in SAMPLED and value != NEUTRAL[name]}
    if not sampled and named:
        fields = ", ".join(f"{name} {value:g}" for name, value in named.items())
        why = "do_sample is false" if "do_sample" in values else "do_sample is not set"
        logging.getLogger("foretoken").warning("%s has %s, but %s: greedy, as generate does it", source, fields, why)
    if not sampled:
        given = {name: value for name, value in given.items() if name not in SAMPLED}
    elif "temperature" not in given:
        given = {"temperature": 1.0, **given}
    kept = {n: v for n, v in given.items() if n == "temperature" or v != NEUTRAL.get(n)}
    return GenerationDefaults(kept, source if kept else "")


def _check(name: str, value: Any, source: str) -> None:
    low, high = RANGES[name]
    kind = int if name in WHOLE else (int, float)
    right = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high and math.isfinite(value)
    if not right or (name in POSITIVE and value == 0):
        raise LoadError(
            f"{source}: {name} is {value!r}, which no sampling can have: correct the file, or load with "
            "generation_config=None"
        )
