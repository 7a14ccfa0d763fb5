"""Options that make an engine use an exported drafter."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.methods.drafters.pard import TRAINED
from foretoken.training.formats.values import whole

DEPTH, WIDTH, NODES = 5, 4, 16
"""Levels, children and nodes of a tree, as in our own drafters."""
VLLM_METHODS = {"model": "draft_model", "pard": "draft_model", "peagle": "eagle3", "dflash2": "dflash"}
SGLANG_METHODS = {"model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}
DRAFTED = "num_speculative_tokens"
"""Draft length: vLLM's key, and ours if a layout has none."""


def ready_line(engine: str, method: str, out: Path, folder: Path) -> str:
    """Options of an engine, quoted for a shell, for a drafter at ``out`` whose files are still in ``folder``."""
    return {"vllm": _vllm, "sglang": _sglang, "huggingface": _huggingface}[engine](method, out, folder)


def drafted(config: Mapping[str, Any], default: int) -> int:
    """A checkpoint's draft length for serving: from speculators' key, from ours, or ``default``.  Raises ``ValueError``
    unless it is a whole number above 0."""
    speculators = config.get("speculators_config")
    methods = speculators.get("proposal_methods") if isinstance(speculators, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    default_count = whole(config, DRAFTED, default=default)
    return whole(first, "speculative_tokens", default=default_count) if isinstance(first, Mapping) else default_count


def _vllm(method: str, out: Path, folder: Path) -> str:
    """A chain, because vLLM verifies no trees.  A block is drafted whole."""
    config = {} if method == "model" else json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_heads") if method == "medusa" else None
    if "block_size" in config:
        inner = {**config, **config.get("dflash_config", {})}
        heads = inner["block_size"] - (not inner.get("sample_from_anchor"))
    chosen: dict[str, Any] = {"method": VLLM_METHODS.get(method, method), "model": str(out), DRAFTED: heads or DEPTH}
    if method in ("pard", "peagle"):
        chosen |= {DRAFTED: drafted(config, TRAINED), "parallel_drafting": True}
    return f"--speculative-config {shlex.quote(json.dumps(chosen))}"


def _sglang(method: str, out: Path, folder: Path) -> str:
    """A tree for heads; a chain for a draft model, for which SGLang counts the root too."""
    width, nodes = (1, DEPTH + 1) if method == "model" else (WIDTH, NODES)
    return (
        f"--speculative-algorithm {SGLANG_METHODS[method]} --speculative-draft-model-path {shlex.quote(str(out))} "
        f"--speculative-num-steps {DEPTH} --speculative-eagle-topk {width} --speculative-num-draft-tokens {nodes}"
    )


def _huggingface(method: str, out: Path, folder: Path) -> str:
    path = json.dumps(str(out), ensure_ascii=False)  # also Python's form
    if method == "early_exit":
        return f"model.generate(**inputs, generation_config=GenerationConfig.from_pretrained({path}))"
    return f"model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained({path}))"
