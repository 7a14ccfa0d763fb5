"""Transformers' own ``generate`` on the target's weights: plain, assisted and prompt lookup."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from foretoken.lab.bench.arm_context import ArmContext, ArmRun, unpacked

NO_TOKEN = -1
"""An end-of-text id that never comes (``None`` would be filled in from the model's own settings)."""
SCHEDULES = ("constant", "heuristic", "heuristic_transient")


class RoundClock:
    """A streamer that notes when every round's tokens come; Transformers shows it the prompt first."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.rounds: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Tokens of one round."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.rounds.append((perf_counter() - self.began, value.numel()))

    def end(self) -> None:
        """Nothing is held back."""


class TransformersArm:
    """Plain greedy or sampled decoding."""

    def __init__(self, name: str, context: ArmContext) -> None:
        self.name = name
        self.network = context.network
        self.ignore_eos = context.ignore_eos

    def options(self) -> dict[str, Any]:
        """What this mode adds to the arguments of ``generate``."""
        return {}

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> ArmRun:
        """One request alone; the first round counts as prefill."""
        ids = torch.tensor([list(prompt_ids)], device=self.network.device)
        clock = RoundClock()
        with torch.random.fork_rng(), torch.inference_mode(), without_advice():
            torch.manual_seed(seed)
            clock.began = perf_counter()
            out = self.network.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._config(max_new_tokens, temperature),
                streamer=clock,
                **self.options(),
            )
        return run_of(out[0, ids.shape[1] :].tolist(), clock)

    def _config(self, max_new_tokens: int, temperature: float) -> Any:
        config = copy.deepcopy(self.network.generation_config)
        config.max_new_tokens, config.max_length = max_new_tokens, None
        if self.ignore_eos:
            config.eos_token_id = NO_TOKEN
        config.do_sample = temperature > 0
        config.temperature, config.top_k, config.top_p = (temperature or 1.0), 0, 1.0
        return config


@contextmanager
def without_advice() -> Iterator[None]:
    """Transformers comments on its own inner calls otherwise, once a run."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


class PromptLookupArm(TransformersArm):
    """Prompt lookup: ``k`` tokens that followed the latest match of at most ``n`` tokens."""

    def __init__(self, name: str, context: ArmContext, k: int = 10, n: int = 2) -> None:
        super().__init__(name, context)
        self.k, self.n = k, n

    def options(self) -> dict[str, Any]:
        """Transformers' names of the two."""
        return {"prompt_lookup_num_tokens": self.k, "max_matching_ngram_size": self.n}


class AssistedArm(TransformersArm):
    """A draft model of the same tokenizer.

    Args:
        name: its spec.
        context: the target.
        draft: folder or hub id of the draft model; the built-in one for the built-in target.
        k: draft tokens per round; Transformers' default (20, stopping below a confidence) when it is left out.
        schedule: ``constant``, ``heuristic`` or ``heuristic_transient``.
        threshold: stop a draft below this confidence; 0 with a given ``k``, else Transformers' default.
        dtype: of the draft model.

    Raises:
        ValueError: an unknown schedule, or no draft model for this target.
    """

    def __init__(
        self,
        name: str,
        context: ArmContext,
        draft: str = "",
        k: int | None = None,
        schedule: str = "constant",
        threshold: float | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(name, context)
        if schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")
        self.assistant = load_draft(draft, context, dtype)
        settings = self.assistant.generation_config
        settings.num_assistant_tokens_schedule = schedule
        if k is not None:
            settings.num_assistant_tokens = k
        if k is not None or threshold is not None:
            settings.assistant_confidence_threshold = threshold or 0.0

    def options(self) -> dict[str, Any]:
        """The draft model; its generation config holds the rest."""
        return {"assistant_model": self.assistant}


def load_draft(path: str, context: ArmContext, dtype: str = "float32") -> Any:
    """A draft model with plain layers.

    Raises:
        ValueError: no path for a target that is not built in, or a bad checkpoint.
    """
    from foretoken.loading import BUILTIN, load_model

    if not path and str(context.target_source) != BUILTIN:
        raise ValueError("this arm needs a draft model for this target: add ,draft=PATH to its spec")
    source: str | Path = path or BUILTIN
    device = getattr(context.target, "device", None) if context.device is None else context.device
    loaded: Any = load_model(source, role="draft", dtype=dtype, device=device)
    return unpacked(loaded.model)


def run_of(token_ids: list[int], clock: RoundClock) -> ArmRun:
    """Times and counts from the moments at which rounds ended."""
    first_s, _ = clock.rounds[0]
    later = [count for _, count in clock.rounds[1:]]
    seconds = clock.rounds[-1][0] - first_s
    length = statistics.mean(later) if later else None
    return ArmRun(token_ids, seconds, sum(later), first_s, length)


ARMS: dict[str, type[TransformersArm]] = {
    "plain": TransformersArm,
    "assisted": AssistedArm,
    "prompt_lookup": PromptLookupArm,
}
