"""The training loop: steps with a learning rate schedule, checkpoints, curves and progress reports.

A front end supplies the loss of a step and the measurements between steps.  Data must be a pure function of (seed,
step), so that a killed run resumes as if it had not been interrupted.
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


@dataclass(frozen=True)
class Progress:
    """Report after every step; ``measured`` only after a measurement."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    measured: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Saving:
    """Additional times for checkpoints: at most ``minutes`` after the last one, and when ``stop``, called after every
    step, returns true, which ends the run."""

    minutes: float = math.inf
    stop: Callable[[], bool] = lambda: False


class Stopped(Exception):
    """A run ended early on request; ``step`` of its ``steps`` are done and in the checkpoint."""

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}")
        self.step, self.steps = step, steps


class Loop:
    """One run, resumed from ``out/checkpoints`` if possible.  Raises ``ValueError`` if ``out`` holds a checkpoint of
    other settings or of more steps, or a damaged one.

    Args:
        out: folder for checkpoints, ``losses.csv``, ``losses.png`` and ``training.json``; created if missing.
        columns: of ``losses.csv``, see :class:`foretoken.training.curves.Curve`.
        identity: further data that identifies this run, as JSON data.

    Attributes:
        meta: metadata of the checkpoint that was loaded; empty for a new run.
    """

    def __init__(
        self,
        out: Path,
        config: RunConfig,
        trained: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        columns: Sequence[str],
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
                    f"{latest} was trained for more than --steps {config.steps}: give at least {step}, or another --out"
                )
            self.meta = load_checkpoint(latest, trained, optimizers)
        self.start = int(self.meta.get("step", 0))
        self.curve = Curve(out / "losses.csv", self.start, columns)
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
        """Run the remaining steps.  The front end measures after the last one.

        Raises ``FloatingPointError`` if the loss or its gradient is NaN or infinite (the last checkpoint is then
        intact), and :class:`Stopped` if ``saving.stop`` returned true (all finished steps are in a checkpoint).

        Args:
            save_every: steps between two checkpoints; the last step always writes one.
            measure: the measurements shown beside the loss.
            keep: further state of a checkpoint before a step, as JSON data.
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
        """Update once, with the gradient clipped to norm 1; returns the loss."""
        lr = self.config.lr * self.config.learning_rate_factor(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["scale"]
        loss = loss_of(step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.trained.parameters(), 1.0)
        # A NaN gradient would spoil the weights and the next checkpoint before the loss shows it.
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
        """Write the curves and the report, which is the last file of a finished run; returns the report."""
        self.curve.write()
        self.curve.plot(self.out / "losses.png")
        write_json(self.out / "training.json", report)
        return report


def identity_of(config: RunConfig, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The data that must be equal when a run is resumed: all but the schedule."""
    schedule = ("steps", "warmup", "decay")
    return {"run": {key: value for key, value in asdict(config).items() if key not in schedule}, **(more or {})}
