"""The training loop: steps under a learning rate that rises and falls, checkpoints, curves, news of it.

A front end gives the loss of a step and what is measured between steps.  Data must be a pure function of (seed, step):
then a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.io.files import write_json
from foretoken.training.checkpoint import check_same, latest_checkpoint, load_checkpoint, read_meta, save_checkpoint
from foretoken.training.config import RunConfig
from foretoken.training.curves import Curve

SCHEDULE = ("steps", "warmup", "decay")
"""Settings that may change between a run and its continuation."""


@dataclass(frozen=True)
class Progress:
    """What a caller is told after every step; ``measured`` when something just was."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    measured: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Saving:
    """When checkpoints are written beside every so many steps: at most ``minutes`` after the last one.  ``stop`` is
    asked after every step; true ends the run with a checkpoint."""

    minutes: float = math.inf
    stop: Callable[[], bool] = lambda: False


class Stopped(Exception):
    """A run ended before its last step, as it was asked to; ``step`` of its ``steps`` are done, all of them in the
    checkpoint."""

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}")
        self.step, self.steps = step, steps


class Loop:
    """One run, resumed from ``out/checkpoints`` if there is something to resume.  Raises ``ValueError`` where ``out``
    holds a checkpoint of other settings or of more steps, or a damaged one.

    Args:
        out: folder for checkpoints, ``losses.csv``, ``losses.png`` and ``training.json``; made if it is missing.
        identity: what else tells this run from others, as JSON can hold it.

    Attributes:
        meta: the meta data of the checkpoint that it goes on from; empty for a new run.
    """

    def __init__(
        self,
        out: Path,
        config: RunConfig,
        trained: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        curve: type[Curve],
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.out, self.config, self.trained, self.optimizers = out, config, trained, optimizers
        self.identity = identity_of(config, identity)
        out.mkdir(parents=True, exist_ok=True)
        latest = latest_checkpoint(out / "checkpoints")
        self.meta: dict[str, Any] = {}
        if latest is not None:
            check_same(latest, self.identity)
            step = int(read_meta(latest)["step"])
            if step > config.steps:
                raise ValueError(
                    f"{latest} is trained further than --steps {config.steps}: give at least {step}, or another --out"
                )
            self.meta = load_checkpoint(latest, trained, optimizers)
        self.start = int(self.meta.get("step", 0))
        self.curve = curve(out / "losses.csv", self.start)
        self._start_s = time.perf_counter() - float(self.meta.get("spent_s", 0.0))

    @property
    def spent_s(self) -> float:
        """Seconds of the whole run so far, earlier parts included."""
        return time.perf_counter() - self._start_s

    def run(
        self,
        loss_of: Callable[[int], Tensor],
        *,
        save_every: int,
        eval_every: int,
        measure: Callable[[], Mapping[str, Any] | None] | None = None,
        keep: Callable[[int], Mapping[str, Any]] | None = None,
        on_step: Callable[[Progress], None] | None = None,
        saving: Saving | None = None,
    ) -> None:
        """All steps that are left; what is measured behind the last one is the front end's.

        Raises ``FloatingPointError`` when the loss or its gradient is NaN or infinite (the last checkpoint is then
        intact), and :class:`Stopped` when ``saving.stop`` was true (everything up to then is in a checkpoint).

        Args:
            save_every: steps between two checkpoints; there is one at the end, too.
            measure: what the curve shows beside the loss.
            keep: what a checkpoint before a step must hold beside weights, as JSON can.
        """
        config, saving = self.config, saving or Saving()
        saved = time.perf_counter()
        for step in range(self.start, config.steps):
            tick = time.perf_counter()
            loss = self._step(step, loss_of)
            rate = config.batch_size * config.context / (time.perf_counter() - tick)
            num_steps, last = step + 1, step + 1 == config.steps
            measured = measure() if measure is not None and num_steps % eval_every == 0 and not last else None
            self.curve.add(num_steps, loss, measured)
            stopped = not last and saving.stop()
            due = time.perf_counter() - saved >= 60 * saving.minutes
            if num_steps % save_every == 0 or last or stopped or due:
                self.curve.write()
                meta = {"identity": self.identity, "spent_s": self.spent_s, **(keep(num_steps) if keep else {})}
                save_checkpoint(self.out / "checkpoints", num_steps, self.trained, self.optimizers, meta)
                saved = time.perf_counter()
            if on_step is not None:
                on_step(Progress(num_steps, config.steps, loss, rate, measured))
            if stopped:
                raise Stopped(num_steps, config.steps)

    def _step(self, step: int, loss_of: Callable[[int], Tensor]) -> float:
        """One update against the gradient, which is clipped to norm 1; returns the loss."""
        lr = self.config.lr * self.config.learning_rate_factor(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["scale"]
        loss = loss_of(step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.trained.parameters(), 1.0)
        # A NaN gradient would spoil the weights, and the checkpoint after them, before the loss shows it.
        if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
            raise FloatingPointError(
                f"the loss is {loss.item()} and its gradient {float(norm)} at step {step}; the last checkpoint is "
                "intact: lower --lr and use another --out, or look at the data"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def finish(self, report: dict[str, Any]) -> dict[str, Any]:
        """Write the curves and the report, which is the last file of a whole run; returns the report."""
        self.curve.write()
        self.curve.plot(self.out / "losses.png")
        write_json(self.out / "training.json", report)
        return report


def identity_of(config: RunConfig, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What must be the same in a run and its continuation."""
    return {"run": {key: value for key, value in asdict(config).items() if key not in SCHEDULE}, **(more or {})}
