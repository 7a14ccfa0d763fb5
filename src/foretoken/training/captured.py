"""Hidden states of a target on disk: memory-mapped safetensors shards, computed once and shared by runs.

A run's blocks are a pure function of (seed, step), so a shard is identified by its number.  Every tap has its own
shards, so a run with one more tap adds only that tap's.  Conversations, packed into rows once, and text that the target
wrote are a fixed number of rows; their states are stored by row, so that every pass after the first reads from disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretoken.core.io.files import remove_abandoned, replacing, write_json
from foretoken.models.forward.parts import TargetParts
from foretoken.training.chat import RowBlocks
from foretoken.training.corpus import BlockSampler
from foretoken.training.optimizers import autocast

STEPS = 16
"""Steps per shard; rows, for text of a fixed number of rows."""
NAMED = {
    "target": "another target",
    "dtype": "a target of another dtype (--precision)",
    "text": "other text",
    "written": "text of another --text, --written-blocks or --written-temperature",
    "steps_per_shard": "another version",
}
"""Descriptions of differences whose values mean little to a user."""


class FeatureStore:
    """Features [b, n, D] of a sampler's blocks, by step.  Raises ``ValueError``, naming the difference, if the folder
    holds features of another target, dtype, text or order.

    Args:
        text: identifies the sampler's text, as JSON data.
        written: what else its blocks depend on if the target wrote them.
    """

    def __init__(
        self,
        folder: Path,
        parts: TargetParts,
        sampler: BlockSampler | RowBlocks,
        text: Mapping[str, Any],
        writing: Sequence[Any] = (),
    ) -> None:
        self.folder, self.parts, self.sampler = folder, parts, sampler
        dtype = parts.head.weight.dtype
        identity = {
            "target": asdict(parts.fingerprint()),
            "dtype": str(dtype),
            "text": dict(text),
            "blocks": [sampler.block, sampler.batch, sampler.seed],
            "steps_per_shard": STEPS,
            **({"written": list(writing), "by_row": True} if writing else {}),
            # Earlier versions captured within bfloat16 autocast, which leaves bfloat16 targets as they are.
            **({} if dtype == torch.bfloat16 else {"autocast": False}),
        }
        card = folder / "features.json"
        stored = json.loads(card.read_text(encoding="utf-8")) if card.exists() else identity
        others = _differences(stored, json.loads(json.dumps(identity)))
        if others:
            raise ValueError(f"{folder} contains features of {' and of '.join(others)}: use another folder")
        remove_abandoned(folder, *(place for place in folder.glob("*") if place.is_dir()))
        write_json(card, identity)

    def features(self, step: int, taps: Sequence[str]) -> dict[str, Tensor]:
        """Hidden states [b, n, D] of the blocks of ``step``, by tap.  A missing shard is computed whole.  Raises
        ``ValueError`` for a damaged one."""
        if not isinstance(self.sampler, RowBlocks):
            return self._entry(step, taps)
        rows = [self._entry(row, taps) for row in self.sampler.chosen(step)]
        return {tap: torch.cat([row[tap] for row in rows]) for tap in taps}

    def _entry(self, index: int, taps: Sequence[str]) -> dict[str, Tensor]:
        number, row = divmod(index, STEPS)
        missing = [tap for tap in taps if not self._file(tap, number).exists()]
        if missing:
            self._capture(number, missing)
        states = {}
        for tap in taps:
            file = self._file(tap, number)
            try:
                with safe_open(file, "pt") as shard:
                    states[tap] = shard.get_slice("states")[row].to(self.parts.device)
            except SafetensorError:
                raise ValueError(f"{file} is damaged: delete it to make it again") from None
        return states

    def _tokens(self, index: int) -> Tensor:
        sampler = self.sampler
        rows = sampler.rows[index][None] if isinstance(sampler, RowBlocks) else sampler(index)
        return torch.from_numpy(rows[:, :-1]).to(self.parts.device)

    def _file(self, tap: str, number: int) -> Path:
        return self.folder / tap.replace(":", "-") / f"{number:06d}.safetensors"

    def _capture(self, number: int, taps: Sequence[str]) -> None:
        end = (number + 1) * STEPS
        if isinstance(self.sampler, RowBlocks):
            end = min(end, self.sampler.num_blocks)
        with autocast(self.parts.device.type, "float32"):  # not the loss's: the states are the target's own
            steps = [self.parts.features(self._tokens(index), taps) for index in range(number * STEPS, end)]
        for tap in taps:
            file = self._file(tap, number)
            file.parent.mkdir(exist_ok=True)
            with replacing(file) as draft:
                save_file({"states": torch.stack([step[tap].cpu() for step in steps])}, draft)


def _differences(stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Descriptions of how the stored features differ from the run's; empty if they are the same."""
    differences = [words for key, words in NAMED.items() if stored.get(key) != present.get(key)]
    if stored.get("written") and stored.get("written") == present.get("written") and not stored.get("by_row"):
        differences.append(NAMED["steps_per_shard"])
    if stored.get("dtype") == present["dtype"] and stored.get("autocast") != present.get("autocast"):
        differences.append(NAMED["steps_per_shard"])
    then, blocks = stored.get("blocks", []), present["blocks"]
    pairs = zip(("--context", "--batch-size", "--seed"), then, blocks, strict=False)
    return differences + [f"{option} {old}, not {new}" for option, old, new in pairs if old != new]
