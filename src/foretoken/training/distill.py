"""``foretoken train distill``: a draft model learns the distribution of its target.

DistillSpec, Zhou et al. 2023 (https://arxiv.org/abs/2310.08461): one divergence per token, on fixed text, on the
target's writing, on the student's own, or on a mix.  Nothing flows back through the drawing of tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.drafters.learning.divergences import divergence
from foretoken.loading import BUILTIN
from foretoken.training.alignment import AlignmentCurve
from foretoken.training.checkpoint import latest_checkpoint, load_checkpoint, read_meta, save_checkpoint
from foretoken.training.folders import save_model, write_report
from foretoken.training.text_sources import TextSource
from foretoken.training.updates import Progress as Progress
from foretoken.training.updates import descend, learning_rate_factor, set_learning_rate
from foretoken.training.workshop import Workshop

CHUNK, CPU_CHUNK = 1024, 64
"""Positions whose distributions are made at once; on a CPU so few that they stay in its cache (a third of the time)."""


Evaluate = Callable[[Any], Mapping[str, Any]]
"""Measures a network as a draft model on held-out text (:class:`foretoken.bench.alignment.Alignment`)."""


class Distiller:
    """Aligns one student.

    Args:
        shop: the target and its text.
        student: a causal LM in float32, trained in place.
        out: folder for the model, its checkpoints and curves.
        source: text to learn from; what the run's ``text`` names by default.
        name: where the student comes from, for the report and to tell runs apart.
        extra: more that tells this run from others.
    """

    def __init__(
        self, shop: Workshop, student: Any, out: Path, *, source: TextSource | None = None, name: str = BUILTIN,
        extra: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        config = shop.config
        longest = int(getattr(student.config.get_text_config(), "max_position_embeddings", 0) or 2**20)
        if config.context > longest:
            raise ValueError(f"--context {config.context} is longer than the draft model's {longest}")
        self.shop, self.student, self.out, self.config, self.name = shop, student.eval(), out, config, name
        self.extra = dict(extra or {})
        self.source = source if source is not None else shop.source(student)
        self.width = min(shop.target.vocab_size, int(student.config.get_text_config().vocab_size))
        self.optimizers = make_optimizers(student, config.lr)
        self.before: Mapping[str, Any] | None = None

    def run(
        self,
        *,
        save_every: int = 100,
        eval_every: int = 100,
        evaluate: Evaluate | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> dict[str, Any]:
        """Train to the end, resuming from ``out/checkpoints``; write the model; return the report.

        Raises:
            ValueError: a checkpoint of other settings in ``out``.
            FloatingPointError: the loss or its gradient is NaN or infinite; the last checkpoint is intact.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        start, spent_s = self._resume()
        curve = AlignmentCurve(self.out / "losses.csv", start)
        if self.before is None and evaluate is not None:
            self.before = dict(evaluate(self.student))
            curve.add(0, None, self.before)
        began = time.perf_counter()
        for step in range(start, self.config.steps):
            tick = time.perf_counter()
            loss = self._step(step)
            done = step + 1
            rate = self.config.batch_size * self.config.context / (time.perf_counter() - tick)
            last = done == self.config.steps
            measured = evaluate(self.student) if evaluate and done % eval_every == 0 and not last else None
            curve.add(done, loss, measured)
            if done % save_every == 0 or last:
                curve.write()
                self._save(done, spent_s + time.perf_counter() - began)
            if on_step is not None:
                on_step(Progress(done, self.config.steps, loss, rate, measured))
        return self._finish(curve, evaluate, spent_s + time.perf_counter() - began)

    def is_done(self) -> bool:
        """Whether ``out`` holds the model that this run would give.

        Raises:
            ValueError: it holds one of other settings.
        """
        found = latest_checkpoint(self.out / "checkpoints")
        if found is None or not (self.out / "training.json").exists():
            return False
        self._check(found)
        return int(read_meta(found)["step"]) == self.config.steps

    def _check(self, found: Path) -> None:
        if read_meta(found).get("identity") != json.loads(json.dumps(self._identity())):
            raise ValueError(f"{found} was trained with other settings: give the same ones to resume, or another --out")

    def _identity(self) -> dict[str, Any]:
        free = ("steps", "warmup", "decay")
        return {
            "draft": self.name,
            "run": {k: v for k, v in asdict(self.config).items() if k not in free},
            **self.extra,
        }

    def _resume(self) -> tuple[int, float]:
        found = latest_checkpoint(self.out / "checkpoints")
        if found is None:
            return 0, 0.0
        self._check(found)
        meta = load_checkpoint(found, self.student, self.optimizers)
        self.source.restore(meta["text"])
        self.before = meta["before"]
        return int(meta["step"]), float(meta["spent_s"])

    def _save(self, step: int, spent_s: float) -> None:
        meta = {
            "identity": self._identity(), "spent_s": spent_s, "before": self.before, "text": self.source.state(step)
        }  # fmt: skip
        save_checkpoint(self.out / "checkpoints", step, self.student, self.optimizers, meta)

    def _step(self, step: int) -> float:
        config = self.config
        factor = learning_rate_factor(step, config.steps, config.warmup, config.decay)
        set_learning_rate(self.optimizers, config.lr, factor)
        text = self.source(step)
        loss = self.loss(text.tokens, text.weights)
        return descend(loss, self.student.parameters(), self.optimizers, step)

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean divergence per position of rows ``tokens`` int64 [b, n + 1], ``weights`` [b, n]."""
        device = self.student.device
        ids, weights = tokens[:, :-1].to(device), weights.to(device).flatten()
        chosen = weights.nonzero()[:, 0]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            drafted = self.student(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        with torch.no_grad():
            wanted = self.shop.parts.network(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        total = drafted.new_zeros((), dtype=torch.float32)
        for some in chosen.split(CPU_CHUNK if device.type == "cpu" else CHUNK):
            p, q = wanted[some, : self.width], drafted[some, : self.width]
            total = total + (divergence(self.config.loss, p, q, self.config.beta) * weights[some]).sum()
        return total / weights.sum()

    def _finish(self, curve: AlignmentCurve, evaluate: Evaluate | None, spent_s: float) -> dict[str, Any]:
        network = self.student
        _cast_parameters(network, torch.bfloat16)
        save_model(network, self.shop.tokenizer, self.out)
        _cast_parameters(network, torch.float32)
        after = dict(evaluate(network)) if evaluate is not None else None  # of what was stored
        curve.add(self.config.steps, None, after)
        curve.write()
        curve.plot(self.out / "losses.png")
        report = {
            "method": "distill",
            "draft": self.name,
            "parameters": sum(p.numel() for p in network.parameters()),
            "run": asdict(replace(self.config, prompt=self.config.prompt_tokens)),
            **self.extra,
            "tokens": self.config.steps * self.config.batch_size * self.config.context,
            "corpus": {split: self.shop.corpus[split] for split in ("train", "held")},
            "before": self.before,
            "after": after,
            "hours": spent_s / 3600,
        }
        write_report(report, self.out)
        return report


def _cast_parameters(network: Any, dtype: torch.dtype) -> None:
    """Round in place, parameters only: buffers such as rotary frequencies are not stored, and stay as they are."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)


def make_optimizers(student: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices (update size matched to AdamW's), AdamW for embeddings, norms and biases."""
    ends = [m for m in student.modules() if isinstance(m, torch.nn.Embedding)]
    ends += [m for m in (student.get_output_embeddings(),) if m is not None]
    outer = {id(p) for module in ends for p in module.parameters()}
    matrices = [p for p in student.parameters() if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in student.parameters() if p.ndim != 2 or id(p) in outer]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
    if matrices:
        found.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return found
