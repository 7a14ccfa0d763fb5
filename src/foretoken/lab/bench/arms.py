"""Ways to generate that a benchmark compares: foretoken's own, Transformers' and llama.cpp's, on the same weights.

Every arm tells the time of its prefill apart.  The prefill ends with the first round of an engine that makes its
first token in the prefill (Transformers, llama.cpp), and before the first round in foretoken, which does not; the
rate counts only the tokens that came after it, so that both are tokens per second of decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, ref

from foretoken.registry import convert_options, parse_spec

if TYPE_CHECKING:
    from foretoken.engine.stats import SpecStats
    from foretoken.llm import Llm
    from foretoken.models.base import LanguageModel

FOREIGN = ("transformers", "llama.cpp")
"""Engines that are not ours; every other arm is a drafter's spec."""


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


class ForetokenArm:
    """The library itself with one drafter (``none``: plain decoding)."""

    def __init__(self, name: str, llm: Llm, ignore_eos: bool = True) -> None:
        self.name, self.llm, self.ignore_eos = name, llm, ignore_eos

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> ArmRun:
        """One request alone; the prefill is what comes before the first round."""
        out = self.llm.generate(
            list(prompt_ids),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=self.ignore_eos,
        )
        stats = out.stats
        seconds = stats.total_s - stats.prefill_s
        return ArmRun(out.token_ids, seconds, len(out.token_ids), stats.prefill_s, stats.mean_acceptance_length, stats)


def make_arm(spec: str, context: ArmContext) -> Arm:
    """An arm from its spec.

    Args:
        spec: ``transformers:plain``, ``transformers:assisted[,k=K]``, ``transformers:prompt_lookup[,k=K]``,
            ``llama.cpp``, ``llama.cpp:prompt_lookup[,k=K]``, ``llama.cpp:draft[,k=K]``, or a drafter's spec
            (``none`` is plain decoding).
        context: the target and what belongs to it.

    Raises:
        ValueError: an unknown arm, drafter or option, a target that the arm cannot run, or a missing package.
    """
    parsed = parse_spec(spec)
    if parsed.name not in FOREIGN:
        return _foretoken(spec, context)
    classes = _classes(parsed.name)
    kind = parsed.path or "plain"
    if kind not in classes:
        known = ", ".join(f"{parsed.name}:{name}" for name in classes)
        raise ValueError(f"unknown arm {parsed.name}:{kind}: choose one of {known}")
    cls: Any = classes[kind]
    arm: Arm = cls(spec, context, **convert_options("drafter", f"{parsed.name}:{kind}", cls, parsed.options))
    return arm


def _classes(engine: str) -> Mapping[str, Any]:
    if engine == "transformers":
        from foretoken.lab.bench import transformers_arms

        return transformers_arms.ARMS
    from foretoken.lab.bench import llama_cpp_arms

    return llama_cpp_arms.ARMS


def is_foreign(spec: str) -> bool:
    """Whether a spec names another engine."""
    return spec.partition(",")[0].partition(":")[0].strip() in FOREIGN


def _foretoken(spec: str, context: ArmContext) -> ForetokenArm:
    from foretoken.llm import assemble
    from foretoken.loading import build_drafter, default_drafter

    chosen = default_drafter(context.target, context.target_source) if spec == "auto" else spec
    drafter = build_drafter(
        chosen,
        context.target,
        target_source=context.target_source,
        tokenizer=context.tokenizer,
        device=context.device,
    )
    llm = assemble(
        context.target,
        drafter,
        context.verifier,
        context.controller,
        context.tokenizer,
        allow_lossy=context.allow_lossy,
    )
    return ForetokenArm(spec, llm, context.ignore_eos)
