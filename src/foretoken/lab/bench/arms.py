"""Ways to generate that a benchmark compares: foretoken's own, Transformers' and llama.cpp's, on the same weights.

Every arm tells the time of its prefill apart.  The prefill ends with the first round of an engine that makes its
first token in the prefill (Transformers, llama.cpp), and before the first round in foretoken, which does not; the
rate counts only the tokens that came after it, so that both are tokens per second of decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretoken.lab.bench.arm_context import Arm as Arm
from foretoken.lab.bench.arm_context import ArmContext as ArmContext
from foretoken.lab.bench.arm_context import ArmRun as ArmRun
from foretoken.registry import convert_options, parse_spec

if TYPE_CHECKING:
    from foretoken.llm import Llm

FOREIGN = ("transformers", "llama.cpp")
"""Engines that are not ours; every other arm is a drafter's spec."""


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
