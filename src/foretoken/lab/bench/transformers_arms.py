"""Transformers' own ``generate`` on the target's weights: plain, assisted and prompt lookup."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from foretoken.core.io.quiet import ERRORS_ONLY
from foretoken.lab.bench.arms import ArmSetup, ForeignArm, Generation
from foretoken.lab.timing import Stopwatch
from foretoken.loading import BUILTIN, load_model
from foretoken.models.linear.packing import PackedLinear, plain_linear


class RoundClock:
    """A streamer that records the time of every round's tokens; Transformers passes the prompt first."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self.rounds: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Record the tokens of one round."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.rounds.append((self.watch.seconds, value.numel()))

    def end(self) -> None:
        """Do nothing: all tokens were recorded by :meth:`put`."""


class TransformersArm(ForeignArm):
    """Plain greedy or sampled decoding of Transformers models."""

    def __init__(self, name: str, shared: ArmSetup) -> None:
        super().__init__(name, shared)
        model = shared.target.model
        if not hasattr(model, "generate"):
            raise ValueError(f"this arm needs a Transformers target, not {type(shared.target).__name__}")
        self._twin = _twin(model)  # which the next arm finds as long as this one holds it
        self.network: Any = neutral(self._twin)

    def options(self) -> dict[str, Any]:
        """Extra keyword arguments of ``generate`` in this mode."""
        return {}

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> Generation:
        """Decode one request; the first round counts as prefill."""
        ids = torch.tensor([list(prompt_ids)], device=self.network.device)
        clock = RoundClock()
        with torch.random.fork_rng(), torch.inference_mode(), ERRORS_ONLY.changed():
            torch.manual_seed(seed)
            clock.watch = Stopwatch()
            out = self.network.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._config(max_new_tokens, temperature),
                streamer=clock,
                **self.options(),
            )
        return run_of(out[0, ids.shape[1] :].tolist(), clock)

    def _config(self, max_new_tokens: int, temperature: float) -> Any:
        from transformers import GenerationConfig

        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            # -1 never occurs; ``None`` would be replaced by the model's default.
            eos_token_id=-1 if self.shared.ignore_eos else sorted(self.shared.target.eos_token_ids) or -1,
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_k=0,
            top_p=1.0,
        )


class TransformersPromptLookupArm(TransformersArm):
    """Prompt lookup: ``k`` tokens after the latest match of at most ``n`` tokens."""

    def __init__(self, name: str, shared: ArmSetup, k: int = 10, n: int = 2) -> None:
        super().__init__(name, shared)
        self.k, self.n = k, n

    def options(self) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": self.k, "max_matching_ngram_size": self.n}


class AssistedArm(TransformersArm):
    """A draft model with the same tokenizer.

    Args:
        draft: folder or hub id of the draft model; defaults to the built-in one for the built-in target.
        k: draft tokens per round; defaults to Transformers' own (20, stopping below a confidence).
        schedule: ``constant``, ``heuristic`` or ``heuristic_transient``.
        threshold: stop a draft below this confidence; defaults to 0 with ``k``, else to Transformers' own.
    """

    def __init__(
        self,
        name: str,
        shared: ArmSetup,
        draft: str = "",
        k: int | None = None,
        schedule: str = "constant",
        threshold: float | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(name, shared)
        schedules = ("constant", "heuristic", "heuristic_transient")
        if schedule not in schedules:
            raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(schedules)}")
        self.assistant = neutral(load_draft(draft, shared, dtype))
        settings = self.assistant.generation_config
        settings.num_assistant_tokens_schedule = schedule
        if k is not None:
            settings.num_assistant_tokens = k
        if k is not None or threshold is not None:
            settings.assistant_confidence_threshold = threshold or 0.0

    def options(self) -> dict[str, Any]:
        """The draft model; its generation config holds the other settings."""
        return {"assistant_model": self.assistant}


def load_draft(path: str, shared: ArmSetup, dtype: str = "float32") -> Any:
    """A draft model with plain layers; the path is optional for the built-in target only."""
    if not path and str(shared.source) != BUILTIN:
        raise ValueError("this arm needs a draft model for this target: add ,draft=PATH to its spec")
    source: str | Path = path or BUILTIN
    device = shared.target.device if shared.device is None else shared.device
    loaded: Any = load_model(source, role="draft", dtype=dtype, device=device)
    return unpacked(loaded.model)


KEPT = (
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "cache_implementation", "cache_config"),
    *("num_assistant_tokens", "assistant_confidence_threshold"),
)
"""Fields of a checkpoint's generation config that change no distribution."""


def neutral(model: Any) -> Any:
    """The network without its checkpoint's penalties and bans, which the other arms do not apply: ``generate`` takes
    from the model's config what a request leaves open.  The weights are shared."""
    from transformers import GenerationConfig

    view = copy.copy(model)
    view.generation_config = GenerationConfig(**{name: getattr(model.generation_config, name) for name in KEPT})
    return view


_TWINS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Weak references from packed networks to their plain twins, which arms share."""


def _twin(model: Any) -> Any:
    """:func:`unpacked`, shared with other arms of the same network."""
    reference = _TWINS.get(model)
    twin = reference() if reference is not None else None
    if twin is None:
        twin = unpacked(model)
        _TWINS[model] = ref(twin)
    return twin


def unpacked(model: Any) -> Any:
    """The network with plain ``Linear`` layers, as Transformers runs it; plain parts are shared."""
    if isinstance(model, PackedLinear):
        return plain_linear(model)
    if not any(isinstance(module, PackedLinear) for module in model.modules()):
        return model
    twin = copy.copy(model)
    twin._modules = {name: None if child is None else unpacked(child) for name, child in model._modules.items()}
    return twin


def run_of(token_ids: list[int], clock: RoundClock) -> Generation:
    """Result of a run from the end times of its rounds."""
    first_s, _ = clock.rounds[0]
    later = [count for _, count in clock.rounds[1:]]
    seconds = clock.rounds[-1][0] - first_s
    length = statistics.mean(later) if later else None
    return Generation(token_ids, seconds, sum(later), first_s, length)


ARMS: dict[str, type[TransformersArm]] = {
    "plain": TransformersArm,
    "assisted": AssistedArm,
    "prompt_lookup": TransformersPromptLookupArm,
}
