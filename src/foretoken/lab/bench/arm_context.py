"""What the arms of a benchmark are given, and what they give back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    from foretoken.engine.stats import SpecStats
    from foretoken.llm import Llm
    from foretoken.models.base import LanguageModel


@dataclass(frozen=True)
class ArmRun:
    """One finished generation.

    Attributes:
        token_ids: the new tokens.
        seconds: decoding, without the prefill.
        num_decoded: how many of the tokens were made in these seconds.
        prefill_s: seconds before them.
        mean_acceptance_length: tokens per target call while decoding; ``None`` where the engine does not tell.
        stats: counts and times of a foretoken arm.
    """

    token_ids: list[int]
    seconds: float
    num_decoded: int
    prefill_s: float
    mean_acceptance_length: float | None = None
    stats: SpecStats | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding (0 when everything came with the prefill)."""
        return self.num_decoded / self.seconds if self.seconds > 0 else 0.0


class Arm(Protocol):
    """One way to generate.

    Attributes:
        name: its spec, as tables show it.
    """

    name: str

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> ArmRun:
        """Generate for one prompt; an end-of-text token does not end it unless the context says so."""


@dataclass
class ArmContext:
    """What the arms of one benchmark share.

    Attributes:
        target: the target, whose weights every arm runs.
        target_source: where it came from (``builtin``, a path, a hub id): decides which drafters it has.
        tokenizer: its tokenizer, if any.
        verifier, controller: specs for the foretoken arms.
        device: where draft models run.
        allow_lossy: permit verifiers that change the target's distribution.
        ignore_eos: go on behind an end-of-text token, so that every arm writes the same number of tokens.
    """

    target: LanguageModel
    target_source: Any = "builtin"
    tokenizer: Any | None = None
    verifier: str = "auto"
    controller: str = "auto"
    device: Any = None
    allow_lossy: bool = False
    ignore_eos: bool = True

    @classmethod
    def of(cls, llm: Llm, target_source: Any = "builtin", **more: Any) -> ArmContext:
        """The context around a loaded :class:`~foretoken.llm.Llm`."""
        return cls(llm.target, target_source, llm.tokenizer, **more)

    @cached_property
    def network(self) -> Any:
        """The target as a ``PreTrainedModel`` with plain layers.

        Raises:
            ValueError: the target is no Transformers model.
        """
        model = getattr(self.target, "model", None)
        if not hasattr(model, "generate"):
            raise ValueError(f"this arm needs a Transformers target, not {type(self.target).__name__}")
        return _twin(model)


_TWINS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Per packed network a weak reference to its plain twin: arms share one, and it goes when the last of them does."""


def _twin(model: Any) -> Any:
    """:func:`unpacked`, or the one that another arm of the same network holds."""
    known = _TWINS.get(model)
    twin = known() if known is not None else None
    if twin is None:
        twin = unpacked(model)
        _TWINS[model] = ref(twin)
    return twin


def unpacked(model: Any) -> Any:
    """The same network with plain ``Linear`` layers, as Transformers runs it; everything that is plain is shared."""
    import copy

    from foretoken.models.linear.packing import PackedLinear, plain_linear

    if isinstance(model, PackedLinear):
        return plain_linear(model)
    if not any(isinstance(module, PackedLinear) for module in model.modules()):
        return model
    twin = copy.copy(model)
    twin._modules = {name: None if child is None else unpacked(child) for name, child in model._modules.items()}
    return twin
