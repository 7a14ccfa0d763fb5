"""``foretoken train boost``: draft models trained one after another, each on the tokens that the earlier ones miss.

SpecInfer's boost-tuning, Miao et al. 2023 (https://arxiv.org/abs/2305.09781).  The first model learns from all text
that the target wrote, the second from the positions where the first does not match, and so on.  Together they draft as
an ensemble.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.io.files import remove_abandoned
from foretoken.training.checkpoint import latest_checkpoint, read_meta
from foretoken.training.distill import Distiller, Evaluate
from foretoken.training.loop import Progress
from foretoken.training.text_sources import written_text
from foretoken.training.workshop import Workshop, check_student, load_student


@dataclass(frozen=True)
class Stage:
    """Report after every draft model.

    Attributes:
        number: 1, 2, ...
        left: share of the written positions it was trained on.
        coverage: share of held-out positions matched by it or an earlier model (``None``: nothing held out).
        together: acceptance of the ensemble so far, if measured.
    """

    number: int
    report: Mapping[str, Any]
    left: float
    coverage: float | None
    together: Mapping[str, Any] | None


@torch.no_grad()
def best_tokens(network: Any, rows: Tensor, batch: int = 8) -> Tensor:
    """The most likely token after every position of ``rows`` int64 [n, m + 1], int64 [n, m]."""
    best = []
    for some in rows.split(batch):
        ids = some[:, :-1].to(network.device)
        best.append(network(input_ids=ids, use_cache=False).logits.argmax(-1).cpu())
    return torch.cat(best)


def matched(targets: Tensor, drafted: Tensor, length: int) -> Tensor:
    """Bool [n, m]: whether both have the same most likely tokens for ``length`` positions (or to the row's end) from
    here.  The target's and the draft model's tokens are int64 [n, m]; ``length`` is at least 1."""
    same = targets == drafted
    run = same.clone()
    for shift in range(1, min(length, same.shape[1])):
        run[:, :-shift] &= same[:, shift:]
    return run


class Boost:
    """Trains draft models one after another.

    Args:
        shop: the target and its text; ``config.text`` must be ``teacher``.
        draft: the model folder that every model starts from.
        out: output folder; the models are ``out/1``, ``out/2``, ...
        length: consecutive matched tokens that make a position covered.
        held_out: held-out prompts with the target's continuations, int64 [n, m + 1], and the column where these begin.
    """

    def __init__(
        self, shop: Workshop, draft: str | Path, out: Path, length: int, held_out: tuple[Tensor, int] | None = None
    ) -> None:
        if shop.config.text != "teacher":
            raise ValueError(
                f"boost-tuning learns from the target's output: it needs text=teacher, not {shop.config.text}"
            )
        if length < 1:
            raise ValueError(f"length must be at least 1, not {length}")
        self.shop, self.draft, self.out, self.length = shop, draft, out, length
        self._target: Any = shop.parts.network
        self._first: Any = self._student(draft)
        check_student(self._first, shop.config)  # before the target writes
        self._check_steps()
        self.rows = shop.written_rows()
        self.weights = shop.written_weights(self.rows)
        self.networks: list[Any] = []
        self._open_weights = self.weights.clone()
        self._targets: Tensor | None = None
        self._held_rows = None if held_out is None else held_out[0]
        self._start = 0 if held_out is None else held_out[1] - 1
        if self._held_rows is not None:
            self._held_targets = best_tokens(self._target, self._held_rows)
            self._covered = torch.zeros_like(self._held_targets, dtype=torch.bool)

    def run(
        self,
        count: int,
        *,
        together: Evaluate | None = None,
        on_step: Callable[[int, Progress], None] = lambda number, progress: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
        **options: Any,
    ) -> list[Stage]:
        """Train ``count`` draft models.  Finished ones are loaded, an interrupted one is resumed.

        Training ends early if the earlier models cover all positions.

        Raises ``ValueError`` for a checkpoint of other settings, and ``FloatingPointError`` as
        :meth:`foretoken.training.distill.Distiller.run` does, which takes the other options.

        Args:
            together: measures a list of networks as an ensemble.
            on_step: called with (number, progress) after every step.
        """
        stages: list[Stage] = []
        for number in range(1, count + 1):
            share = float(self._open_weights.sum() / self.weights.sum())
            if share == 0:
                break
            network, report = self._trained(number, share, {**options, "on_step": partial(on_step, number)})
            self.networks.append(network)
            if number < count:
                self._cross_off(network)
            measured = together(self.networks) if together is not None else None
            stages.append(Stage(number, report, share, self._cover(network), measured))
            on_stage(stages[-1])
        return stages

    def _check_steps(self) -> None:
        """Raise ``ValueError`` if a model that a later one builds on has another number of steps: more would change
        it, and the later one would no longer fit."""
        found = latest_checkpoint(self.out / "1" / "checkpoints")
        later = latest_checkpoint(self.out / "2" / "checkpoints")
        if found is None or later is None:
            return
        steps = int(read_meta(found)["step"])
        if steps != self.shop.config.steps:
            raise ValueError(
                f"{self.out} holds models that build on {found.parent.parent} with its {steps} steps: give --steps "
                f"{steps}, or another --out"
            )

    def _trained(self, number: int, share: float, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The network and the report of one stage."""
        config, folder = self.shop.config, self.out / str(number)
        extra = {"stage": number, "length": self.length, "left": share}
        report_file = folder / "training.json"
        remove_abandoned(folder)
        student = self._student(self.draft) if self._first is None else self._first
        self._first = None
        source = written_text(self.rows, self._open_weights, config.batch_size, config.seed)
        worker = Distiller(self.shop, student, folder, source=source, name=str(self.draft), extra=extra)
        if report_file.exists() and worker.is_done():
            report: dict[str, Any] = json.loads(report_file.read_text(encoding="utf-8"))
            return self._student(folder), report
        return student, worker.run(**options)

    def _student(self, draft: str | Path) -> Any:
        return load_student(draft, self.shop.target, self.shop.tokenizer, str(self._target.device))

    def _cross_off(self, network: Any) -> None:
        """Set the weights of positions that this network covers to zero."""
        if self._targets is None:
            self._targets = best_tokens(self._target, self.rows)
        self._open_weights = self._open_weights * ~matched(self._targets, best_tokens(network, self.rows), self.length)

    def _cover(self, network: Any) -> float | None:
        """Share of held-out positions that any network so far covers."""
        if self._held_rows is None:
            return None
        self._covered |= matched(self._held_targets, best_tokens(network, self._held_rows), self.length)
        return float(self._covered[:, self._start :].float().mean())


def ready_spec(folders: Sequence[Path]) -> str:
    """The drafter spec that combines the models."""
    members = "|".join(f"model:{folder},k=4" for folder in folders)
    return f"ensemble,drafters=({members})"
