"""One loop for every trained drafter: a frozen target's features in, a recipe's loss, checkpoints, curves, acceptance.

The data order is a pure function of (seed, step), so that a killed run continues as if it had not been.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretoken.drafters.base import Drafter
from foretoken.drafters.nets.store import save_drafter
from foretoken.training.checkpoint import latest_checkpoint, load_checkpoint, read_meta, save_checkpoint
from foretoken.training.corpus import BlockSampler, build_corpus, read_tokens
from foretoken.training.curves import Curve
from foretoken.training.recipes.base import Batch, Recipe

HELD_BLOCKS = 8
"""Held-out blocks that accuracies are measured on."""


@dataclass(frozen=True)
class TrainConfig:
    """The run; stored in every checkpoint and compared on resume (only ``steps`` may change).

    Attributes:
        steps: optimizer steps.
        batch_size: blocks per step.
        context: tokens per block.
        lr: peak learning rate.
        warmup: share of the steps in which it rises.
        decay: share of the steps in which it falls to zero.
        seed: of the data order and of everything drawn.
    """

    steps: int = 500
    batch_size: int = 4
    context: int = 512
    lr: float = 1e-3
    warmup: float = 0.05
    decay: float = 0.4
    seed: int = 0


@dataclass
class Progress:
    """What a caller is told after every step; ``lengths`` are the accepted tokens per position when just measured."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    acceptance: Mapping[str, Any] | None = None


Evaluate = Callable[[Drafter], Mapping[str, Any]]
"""Runs a drafter on held-out text: ``mean_acceptance_length``, ``acceptance_rate``, ``per_position``."""


class Trainer:
    """Trains a recipe's network.

    Args:
        recipe: what is trained.
        data: text folders or JSONL files.
        out: folder for the drafter, its checkpoints and curves.
        config: the run.
        tokenizer: the target's.
        corpus: where the encoded text is kept (``out/corpus`` by default; share it between runs).

    Raises:
        ValueError: empty or too short data.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Sequence[str | Path],
        out: Path,
        config: TrainConfig,
        tokenizer: Any,
        corpus: Path | None = None,
    ) -> None:
        self.recipe, self.out, self.config = recipe, out, config
        folder = corpus or out / "corpus"
        self.corpus = build_corpus(data, tokenizer, folder)
        if self.corpus["train"]["tokens"] == 0:
            raise ValueError(f"no text found below {', '.join(map(str, data))}: give .py, .txt, .md or .jsonl")
        dtype = self.corpus["dtype"]
        self.sampler = BlockSampler(folder / "train.bin", dtype, config.context, config.batch_size, config.seed)
        self.held = self._held_blocks(folder / "held.bin", dtype)
        recipe.net.to(recipe.parts.device)
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for matrices, AdamW for the rest; the update of both has one size."""
        lr, decay = self.config.lr, self.recipe.weight_decay
        chosen = [p for p in self.recipe.net.parameters() if p.requires_grad]
        matrices = [p for p in chosen if p.ndim == 2]
        rest = [p for p in chosen if p.ndim != 2]
        found: list[torch.optim.Optimizer] = []
        if matrices:
            found.append(torch.optim.Muon(matrices, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
        if rest:
            found.append(torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
        return found

    def _held_blocks(self, file: Path, dtype: str) -> list[Batch]:
        tokens = read_tokens(file, dtype)
        length = min(self.config.context, max(len(tokens) - 1, 0))
        if length < 2:
            return []
        starts = np.unique(np.linspace(0, len(tokens) - length - 1, HELD_BLOCKS).astype(int))
        return [self._batch(torch.from_numpy(tokens[s : s + length + 1].astype(np.int64))[None]) for s in starts]

    def _batch(self, tokens: torch.Tensor) -> Batch:
        tokens = tokens.to(self.recipe.parts.device)
        return Batch(tokens, self.recipe.parts.features(tokens[:, :-1], self.recipe.taps), self.recipe.parts)

    def run(
        self,
        *,
        save_every: int = 100,
        eval_every: int = 100,
        evaluate: Evaluate | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> dict[str, Any]:
        """Train to the end, resuming from ``out/checkpoints``; write the drafter; return the report.

        Raises:
            ValueError: a checkpoint of other settings in ``out``.
            FloatingPointError: the loss or its gradient is NaN or infinite; the last checkpoint is intact.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        start, spent_s = self._resume()
        curve = Curve(self.out / "losses.csv", start)
        began = time.perf_counter()
        measured: Mapping[str, Any] | None = None
        for step in range(start, self.config.steps):
            tick = time.perf_counter()
            loss = self._step(step)
            done = step + 1
            measured = None
            last = done == self.config.steps
            if evaluate is not None and (done % eval_every == 0 or last):
                measured = evaluate(self.recipe.drafter(self.recipe.measure(self.held)))
            curve.add(done, loss, measured)
            if done % save_every == 0 or last:
                curve.write()
                now = spent_s + time.perf_counter() - began
                self._save(done, now)
            if on_step is not None:
                rate = self.config.batch_size * self.config.context / (time.perf_counter() - tick)
                on_step(Progress(done, self.config.steps, loss, rate, measured))
        return self._finish(curve, evaluate, spent_s + time.perf_counter() - began)

    def _identity(self) -> dict[str, Any]:
        run = {k: v for k, v in asdict(self.config).items() if k not in ("steps", "warmup", "decay")}
        return {"method": self.recipe.method, "run": run, "net": asdict(self.recipe.config)}

    def _resume(self) -> tuple[int, float]:
        found = latest_checkpoint(self.out / "checkpoints")
        if found is None:
            return 0, 0.0
        meta = read_meta(found)
        if meta.get("identity") != json.loads(json.dumps(self._identity())):
            raise ValueError(f"{found} was trained with other settings: give the same ones to resume, or another --out")
        load_checkpoint(found, self.recipe.net, self.optimizers)
        return int(meta["step"]), float(meta["spent_s"])

    def _save(self, step: int, spent_s: float) -> None:
        meta = {"identity": self._identity(), "spent_s": spent_s}
        save_checkpoint(self.out / "checkpoints", step, self.recipe.net, self.optimizers, meta)

    def _step(self, step: int) -> float:
        config, net = self.config, self.recipe.net
        warm, fall = max(1, round(config.warmup * config.steps)), max(1, round(config.decay * config.steps))
        factor = min((step + 1) / warm, (config.steps - step) / fall, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.lr * factor
        batch = self._batch(torch.from_numpy(self.sampler(step)))
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        net.train()
        with torch.autocast(self.recipe.parts.device.type, dtype=torch.bfloat16):
            loss = self.recipe.loss(batch, generator)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
            raise FloatingPointError(
                f"the loss is {loss.item()} and its gradient {float(norm)} at step {step}; the last checkpoint is "
                "intact: lower --lr and use another --out, or look at the data"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _finish(self, curve: Curve, evaluate: Evaluate | None, spent_s: float) -> dict[str, Any]:
        recipe = self.recipe
        recipe.net.eval()
        measured = recipe.measure(self.held)
        acceptance = dict(evaluate(recipe.drafter(measured))) if evaluate is not None else {}
        report = {
            "method": recipe.method,
            "parameters": sum(p.numel() for p in recipe.net.parameters()),
            "run": asdict(self.config),
            "net": asdict(recipe.config),
            "settings": {k: v for k, v in asdict(recipe.config).items() if k not in recipe.fixed},
            "tokens": self.config.steps * self.config.batch_size * self.config.context,
            "corpus": {split: self.corpus[split] for split in ("train", "held")},
            "acceptance": acceptance,
            "hours": spent_s / 3600,
        }
        fingerprint = recipe.parts.fingerprint()
        save_drafter(self.out, recipe.method, recipe.stored_config(), recipe.net, fingerprint, measured)
        curve.write()
        curve.plot(self.out / "losses.png")
        tmp = self.out / ".tmp-training.json"
        tmp.write_text(json.dumps(report, indent=1), encoding="utf-8")
        tmp.replace(self.out / "training.json")
        return report
