"""Online learning: a draft model is corrected where the target rejected its tokens.

Online speculative decoding, Liu et al. 2023 (arXiv 2310.07177).
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.io.files import save_model
from foretoken.core.io.hub_ids import expanded
from foretoken.methods.drafters.learning.divergences import divergence
from foretoken.methods.drafters.learning.lessons import Lesson, Mistake, stored_distribution
from foretoken.methods.drafters.learning.losses import check_loss
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.packing import PackedLinear
from foretoken.models.linear.product import QuantisedLinear


@dataclass(frozen=True)
class LearnConfig:
    """Settings for learning a draft model online.

    Attributes:
        every: finished requests between two updates.
        lr: constant learning rate of AdamW; 3e-4 suits models of a few million parameters.
        loss: divergence between the target's and the draft model's distributions: ``fkl``, ``rkl``, ``jsd`` or ``tvd``.
        beta: the target's share of the mixture of ``jsd``.
        budget: largest share of the serving time that learning may take; 1 sets no limit.
        keep: maximum number of requests that wait for an update; older ones are dropped.
        window: tokens that the draft model reads before the first rejection of a request when it learns from it.
        top: number of most likely tokens stored per distribution, whose rest is spread evenly; 0 stores all.
        thread: learn in a separate thread on one processor while requests are served; an update takes effect at the
            next draft after it is done.  Otherwise learn between two rounds, which wait, so that a run can be repeated
            to the token.
    """

    every: int = 8
    lr: float = 1e-4
    loss: str = "fkl"
    beta: float = 0.5
    budget: float = 0.1
    keep: int = 64
    window: int = 128
    top: int = 256
    thread: bool = True

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("keep", 1), ("window", 1), ("top", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"online needs {name} >= {least}, not {getattr(self, name)}")
        if not self.lr > 0:
            raise ValueError(f"online needs lr > 0, not {self.lr}")
        if not 0 < self.budget <= 1:
            raise ValueError(f"online needs a budget in (0, 1], not {self.budget}")
        check_loss(self.loss, self.beta)


@dataclass
class LearningReport:
    """Counters of the learning so far.

    Attributes:
        requests: finished requests.
        mistakes: rejected positions that were stored.
        dropped: updates that were discarded because they failed or were not finite.
        postponed: times that an update was due but would have exceeded the budget.
        positions: rejected positions that the updates learnt from.
        loss: mean divergence at the positions of the last update, before it.
        learning_s: seconds spent on storing, updating and saving.
        serving_s: seconds with at least one active request, learning included.
    """

    requests: int = 0
    mistakes: int = 0
    updates: int = 0
    dropped: int = 0
    postponed: int = 0
    positions: int = 0
    loss: float = float("nan")
    learning_s: float = 0.0
    serving_s: float = 0.0


@dataclass(frozen=True)
class WeightUpdate:
    """Result of an update.

    Attributes:
        model: the served model with the new weights; ``None`` if they are not finite.
        loss: mean divergence before the update.
        positions: positions that it learnt from.
        spent_s: duration in seconds.
    """

    model: HuggingFaceModel | None
    loss: float
    positions: int
    spent_s: float


class Learner:
    """A trainable copy of a draft model, and the served model that takes over its weights.

    In a separate thread, the new weights are written to a spare network, to which :meth:`take` switches the served
    model between two rounds.

    Args:
        model: the draft model; it is not changed.
        save: folder that every update is written to; empty for none.
        tokenizer: saved beside the weights.
        clock: returns seconds, for the budget.

    Attributes:
        served: the model to draft with; each update swaps its network with the spare one.
        student: the trained copy, in float32.
        lessons: training data of the next update.

    Raises:
        CapabilityError: the model has no trainable weights.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: LearnConfig,
        save: str | Path = "",
        tokenizer: Any | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        fixed = PackedLinear, QuantisedLinear
        if not isinstance(model, HuggingFaceModel) or any(isinstance(m, fixed) for m in model.model.modules()):
            raise CapabilityError(
                "online learns the weights of a decoder-only Transformers model, neither packed nor quantised; this "
                f"draft model is run as {type(model).__name__}"
            )
        self.config, self.folder, self.tokenizer, self.clock = config, save, tokenizer, clock
        served = copy.deepcopy(model.model).requires_grad_(False)
        self.served = HuggingFaceModel(served, exact=model.exact, lean=model.is_lean)
        self._spare = copy.deepcopy(served)
        self.student = copy.deepcopy(model.model).float().requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=config.lr, weight_decay=0.0)
        self.lessons: deque[Lesson] = deque(maxlen=config.keep)
        self._report = LearningReport()
        self._since = 0  # requests since the last update
        self._last_s = 0.0  # cost of the last update
        self._thread: ThreadPoolExecutor | None = None
        self._coming: Future[WeightUpdate] | None = None  # an update in progress
        self._active = 0  # active requests
        self._joined_s = 0.0

    # -- the clock ---------------------------------------------------------------------------------------------------

    def joined(self) -> None:
        """Count a new request; serving time passes while any request is active."""
        if self._active == 0:
            self._joined_s = self.clock()
        self._active += 1

    def left(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._report.serving_s += self.clock() - self._joined_s

    @property
    def serving_s(self) -> float:
        return self._report.serving_s + (self.clock() - self._joined_s if self._active else 0.0)

    def report(self) -> dict[str, Any]:
        """The fields of :class:`LearningReport`."""
        return {**asdict(self._report), "serving_s": self.serving_s}

    # -- collecting --------------------------------------------------------------------------------------------------

    def mistake(self, position: int, logits: Tensor) -> Mistake:
        """The target's distribution from its logits [V] at temperature 1 without filters, whatever the request's
        sampling."""
        start_s = self.clock()
        distribution = torch.softmax(logits[: self.served.vocab_size].float(), -1)
        best = distribution.topk(min(self.config.top or len(distribution), len(distribution)))
        mistake = Mistake(position, len(distribution), best.indices.int(), best.values.half())
        self._report.mistakes += 1
        self._report.learning_s += self.clock() - start_s
        return mistake

    def finished(self, tokens: Sequence[int], mistakes: Sequence[Mistake]) -> None:
        """Store the mistakes of a finished request; start an update if one is due and affordable."""
        self._report.requests += 1
        self._since += 1
        if mistakes:
            self.lessons.append(Lesson(tokens[: mistakes[-1].position], mistakes))
        self.take()
        if self._since < self.config.every or not self.lessons or self._coming is not None:
            return
        if not self._affordable():
            self._report.postponed += 1
        elif self.config.thread:
            self._coming = self._own_thread().submit(self._learned, self._taken_lessons())
        else:
            start_s = self.clock()
            self.update()
            self._last_s = self.clock() - start_s
            self._report.learning_s += self._last_s

    def take(self, wait: bool = False) -> None:
        """Serve the finished update, if any; called between two rounds.

        Args:
            wait: block until an update in progress is done.
        """
        if self._coming is not None and (wait or self._coming.done()):
            coming, self._coming = self._coming, None
            try:
                learned = coming.result()
            except Exception as error:  # out of memory, for example: the served model stays as it is
                self._report.dropped += 1
                warnings.warn(f"the draft model could not be updated: {error}", stacklevel=2)
                return
            self._serve(learned)
            self._last_s = learned.spent_s
            self._report.learning_s += learned.spent_s

    def _own_thread(self) -> ThreadPoolExecutor:
        """A single thread on one processor, to take no more from the concurrent rounds."""
        if self._thread is None:
            threads = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(1, "foretoken-online", _use_one_processor)
            self._thread.submit(int).result()
            torch.set_num_threads(threads)  # the default for threads created later
        return self._thread

    def _affordable(self) -> bool:
        expected_s = self._report.learning_s + self._last_s
        return self.config.budget == 1 or expected_s <= self.config.budget * self.serving_s

    # -- learning ----------------------------------------------------------------------------------------------------

    def update(self) -> bool:
        """One step on all lessons, which are then discarded; returns whether its result is served.

        The served model changes only after the whole update is known to be finite.
        """
        return self._serve(self._learned(self._taken_lessons()))

    def _taken_lessons(self) -> list[Lesson]:
        lessons, self._since = list(self.lessons), 0
        self.lessons.clear()
        return lessons

    def _learned(self, lessons: Sequence[Lesson]) -> WeightUpdate:
        """Compute an update, in the learning thread if there is one."""
        start_s = self.clock()
        # The engine runs in inference mode, which does not allow gradients.
        with torch.inference_mode(False), torch.enable_grad():
            self.optimizer.zero_grad(set_to_none=True)  # a failed update may have left some
            loss = self._backward(lessons)
            norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
            good = bool(torch.isfinite(norm)) and loss < float("inf")
            if good:
                self.optimizer.step()
                good = all(bool(torch.isfinite(weight).all()) for weight in self.student.parameters())
                if not good:
                    self._restore()
            self.optimizer.zero_grad(set_to_none=True)
        if not good:
            return WeightUpdate(None, loss, 0, self.clock() - start_s)
        with torch.no_grad():
            for spare, new in zip(self._spare.parameters(), self.student.parameters(), strict=True):
                spare.copy_(new)
        model = self.served.over(self._spare)
        if self.folder:
            self._save(model)
        return WeightUpdate(model, loss, sum(len(lesson.mistakes) for lesson in lessons), self.clock() - start_s)

    def _serve(self, learned: WeightUpdate) -> bool:
        """Switch to the weights of an update; return whether there are any."""
        if learned.model is None:
            self._report.dropped += 1
            return False
        before = self.served.model
        self.served.go_on_with(learned.model)
        self._spare = learned.model.model if self.served.model is before else before
        self._report.updates += 1
        self._report.positions += learned.positions
        self._report.loss = learned.loss
        return True

    def _backward(self, lessons: Sequence[Lesson]) -> float:
        """Accumulate gradients of the mean divergence over all positions; return that mean."""
        count = sum(len(lesson.mistakes) for lesson in lessons)
        total = 0.0
        for lesson in lessons:
            loss = self.losses(lesson).sum() / count
            loss.backward()
            total += float(loss.detach())
        return total

    def losses(self, lesson: Lesson) -> Tensor:
        """The divergence at every mistake of a request, [n].

        The token at index t is predicted by the position before it, so the student's logits there are compared with the
        target's distribution.
        """
        rows = [mistake.position - 1 for mistake in lesson.mistakes]
        first = max(0, rows[0] - self.config.window)
        tokens = lesson.tokens[first : rows[-1] + 1]
        vocab_size = self.served.vocab_size
        device = self.served.device
        ids = torch.tensor([[token if token < vocab_size else 0 for token in tokens]], device=device)
        logits = self.student(
            input_ids=ids,
            position_ids=torch.arange(first, first + len(tokens), device=device)[None],
            logits_to_keep=torch.tensor([row - first for row in rows], device=device),
            use_cache=False,
        ).logits[0]
        targets = torch.stack([stored_distribution(mistake).log() for mistake in lesson.mistakes])
        return divergence(self.config.loss, targets, logits[:, : targets.shape[-1]], self.config.beta)

    def _restore(self) -> None:
        """Reset the student to the served weights, with a fresh optimizer."""
        with torch.no_grad():
            for weight, served in zip(self.student.parameters(), self.served.model.parameters(), strict=True):
                weight.copy_(served)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=self.config.lr, weight_decay=0.0)

    # -- saving ------------------------------------------------------------------------------------------------------

    def _save(self, model: HuggingFaceModel) -> None:
        try:
            save_model(model.model, self.tokenizer, expanded(self.folder))
        except OSError as error:  # a full disk must not stop the serving
            warnings.warn(f"the learnt draft model was not saved: {error}", stacklevel=2)

    def save(self, folder: str | Path) -> None:
        """Write the served draft model as a model folder in which each file appears complete or not at all.

        Raises:
            OSError: the folder cannot be written.
        """
        save_model(self.served.model, self.tokenizer, expanded(folder))


def _use_one_processor() -> None:
    """Limit the calling thread to one processor.

    PyTorch sets a thread's number of processors to the process's at the thread's first query, so query before setting
    it.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)
