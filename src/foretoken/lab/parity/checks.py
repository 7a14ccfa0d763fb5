"""Parity checks that compare outputs token by token: greedy ones, and sampled ones of the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from foretoken.core.noise import SEEDS, Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.lab.bench.transformers_arms import neutral
from foretoken.lab.parity.difference import first_difference, next_logits
from foretoken.lab.parity.report import Check, Settings
from foretoken.llm import Llm, Output
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.compatibility import auto_verifier
from foretoken.models.base import LanguageModel


@dataclass(frozen=True)
class StopCase:
    """A request that ends early, by a stop string or by a biased end-of-text token; ``plain`` is plain decoding's
    output."""

    prompt: int
    options: dict[str, Any]
    plain: Output


@dataclass(frozen=True)
class Reference:
    """Reference outputs for every drafter.

    Attributes:
        plain: greedy outputs of plain decoding.
        outside: greedy outputs of ``model.generate``; ``None`` unless the target is a Transformers model.
        seeded: sampled outputs of plain decoding, of every prompt twice, with the seeds of :attr:`seeds`.
    """

    target: LanguageModel
    prompts: list[list[int]]
    settings: Settings
    plain: list[list[int]]
    outside: list[list[int]] | None
    stops: list[StopCase]
    seeded: Sequence[list[int]] = ()

    @property
    def seeds(self) -> list[int]:
        """Seeds of two sampled outputs per prompt: of every prompt once, then again."""
        return [(self.settings.seed + i) % SEEDS for i in range(2 * len(self.prompts))]

    @property
    def predictions(self) -> list[list[int]]:
        """Per prompt an expected answer, for drafters that use one: plain decoding's output with one token missing."""
        return [output[: len(output) // 3] + output[len(output) // 3 + 1 :] for output in self.plain]


@dataclass(frozen=True)
class Tested:
    """A drafter under test.

    Attributes:
        spec: its name in the report.
        always_drafting: with a controller that always drafts.
        as_requested: with the requested controller (the same as ``always_drafting`` unless that is ``auto``).
    """

    spec: str
    always_drafting: Llm
    as_requested: Llm
    reference: Reference

    @cached_property
    def alone(self) -> list[Output]:
        """Greedy outputs of every prompt by itself."""
        r = self.reference
        pairs, options = zip(r.prompts, r.predictions, strict=True), r.settings.greedy_options
        return [self.always_drafting.generate(prompt, prediction=prediction, **options) for prompt, prediction in pairs]

    def check(self, mode: str) -> Check:
        """A new check of a mode."""
        greedy = mode not in ("sampled", "seed")
        name = verifier_name(self.always_drafting, greedy, seeded=mode == "seed")
        return Check(self.spec, name, mode, len(self.reference.prompts))


def always_drafting(llm: Llm, allow_lossy: bool) -> Llm:
    """The same model and drafter, with drafts in every round regardless of cost."""
    return Llm(
        llm.target, llm.drafter, llm.engine.verifier, ConstantController(), llm.tokenizer, allow_lossy=allow_lossy
    )


def verifier_name(llm: Llm, greedy: bool, seeded: bool) -> str:
    """Name of the verifier used with the drafter."""
    if llm.engine.verifier is not None:
        return llm.engine.verifier.name
    drafter = llm.drafter
    if drafter is None:
        return "none"
    coupled = seeded or drafter.traits.prefers_noise
    return auto_verifier(drafter.traits.kind, drafter.traits.draws_trees, greedy, coupled).name


# -- reference outputs -----------------------------------------------------------------------------------------------


def transformers_output(target: LanguageModel, prompt: list[int], settings: Settings) -> list[int] | None:
    """Greedy output of ``model.generate``; ``None`` unless the target is a Transformers model."""
    model = target.model
    if model is None or not hasattr(model, "generate"):
        return None
    from transformers import GenerationConfig

    eos = sorted(target.eos_token_ids)
    # A fresh configuration and a neutral view: the checkpoint's own may have sampling, penalties or bans, and generate
    # takes from it what a configuration leaves open.
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=settings.greedy.get("repetition_penalty", 1.0),
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        decoder_start_token_id=target.answer_start[0] if target.answer_start else None,
    )
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = neutral(model).generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    begin = len(target.answer_start) or len(prompt)  # a decoder's output excludes the encoder's input
    return list(out[0, begin:].tolist())


def stop_cases(plain: Llm, prompts: Sequence[list[int]], expected: Sequence[list[int]], s: Settings) -> list[StopCase]:
    """Two requests per prompt, ended after a quarter of the output by a stop string and by an end-of-text token."""
    cases = []
    for i, (prompt, output) in enumerate(zip(prompts, expected, strict=True)):
        index = len(output) // 4
        for options in (_stop_string(plain, output, index), _eos_bias(plain.target, prompt, output, index)):
            if options:
                options |= s.greedy_options
                cases.append(StopCase(i, options, plain.generate(prompt, **options)))
    return cases


def _stop_string(plain: Llm, output: list[int], index: int) -> dict[str, Any]:
    """A stop string over two tokens from index ``index``, across their boundary."""
    if plain.tokenizer is None:
        return {}
    before, upto = (plain.tokenizer.decode(output[:n], skip_special_tokens=True) for n in (index, index + 2))
    text = upto[len(before) :]
    return {"stop": text} if text and "\ufffd" not in text else {}


def _eos_bias(target: LanguageModel, prompt: list[int], output: list[int], index: int) -> dict[str, Any]:
    """A bias that makes an end-of-text token most likely at index ``index``, if not earlier."""
    if not target.eos_token_ids:
        return {}
    eos = min(target.eos_token_ids)
    logits = next_logits(target, [*prompt, *target.answer_start], output[:index]).cpu().double()
    gap = float(logits.max() - logits[eos])
    return {"logit_bias": {eos: gap + 0.5}} if math.isfinite(gap) else {}


# -- checks ----------------------------------------------------------------------------------------------------------


def check_greedy(subject: Tested) -> Check:
    """Compare every single prompt with plain decoding, with drafts in every round."""
    reference = subject.reference
    return _compared(subject, "greedy", reference.plain, subject.alone)


def check_transformers(subject: Tested) -> Check | None:
    """Compare every single prompt with ``model.generate``."""
    outside = subject.reference.outside
    return None if outside is None else _compared(subject, "transformers", outside, subject.alone)


def check_batch(subject: Tested) -> Check:
    """Compare a batch of all prompts, run with the requested controller, with plain decoding of each."""
    r = subject.reference
    # Each prompt twice: the batch is ragged, and duplicates must not affect each other.
    outputs = subject.as_requested.generate(2 * r.prompts, prediction=2 * r.predictions, **r.settings.greedy_options)
    return _compared(subject, "batch", 2 * r.plain, outputs)


def check_stop(subject: Tested) -> Check | None:
    """Compare tokens, text and finish reason of outputs that end early."""
    r = subject.reference
    if not r.stops:
        return None
    check = subject.check("stop")
    check.prompts = len(r.stops)
    for case in r.stops:
        prediction = r.predictions[case.prompt]
        output = subject.always_drafting.generate(r.prompts[case.prompt], prediction=prediction, **case.options)
        _compare(check, r, case.prompt, case.plain.token_ids, output, case.options)
        expected, got = ((o.text, o.finish_reason) for o in (case.plain, output))
        if output.token_ids == case.plain.token_ids and expected != got:
            check.identical, check.differences = check.identical - 1, check.differences + 1
            check.notes.append(f"prompt {case.prompt} ends otherwise: {got!r}, plain decoding {expected!r}")
    return check


def _compared(subject: Tested, mode: str, expected: Sequence[list[int]], outputs: Sequence[Output]) -> Check:
    check = subject.check(mode)
    check.prompts = len(expected)
    r = subject.reference
    for i, (want, output) in enumerate(zip(expected, outputs, strict=True)):
        _compare(check, r, i % len(r.prompts), want, output, r.settings.greedy)
    return check


def _compare(check: Check, r: Reference, prompt: int, want: list[int], output: Output, options: dict[str, Any]) -> None:
    """Count one greedy output as identical, tie or different."""
    params = SamplingParams(**{k: v for k, v in options.items() if k == "logit_bias" or k.endswith("_penalty")})
    _judge(check, r, prompt, want, output, Sampler(params, len(r.prompts[prompt])), f"prompt {prompt}")


def _judge(
    check: Check, r: Reference, prompt: int, want: list[int], output: Output, sampler: Sampler, case: str
) -> None:
    """Count one output, determined by the sampler, as identical, tie or different."""
    check.drafted += output.stats.num_draft_tokens
    difference = first_difference(r.target, r.prompts[prompt], want, output.token_ids, sampler)
    if difference is None:
        check.identical += 1
        return
    # Ties with the other kernels of ``transformers.generate`` are allowed even for a bitwise-exact target.
    broken = difference.is_tie and r.target.exactness == "bitwise" and check.mode != "transformers"
    counts_as_tie = difference.is_tie and not broken
    check.ties += counts_as_tie
    check.differences += not counts_as_tie
    check.broken += broken
    if counts_as_tie and difference.logit_gap is not None:
        check.gaps.append(difference.logit_gap)
    ended = difference.position == min(len(want), len(output.token_ids))
    no_gap = "one output ends there" if ended else "one token has probability 0 there"
    gap = no_gap if difference.logit_gap is None else f"logit gap {difference.logit_gap:.3g}"
    kind = f"a real difference (a tie is at most {difference.tolerance:.3g})"
    if difference.is_tie:
        kind = "a tie, although the target is exact to the last bit" if broken else "a tie"
    check.notes.append(f"{case} differs from token {difference.position} on: {gap}, {kind}")


# -- seeds -----------------------------------------------------------------------------------------------------------


def check_seed(subject: Tested) -> Check | None:
    """Compare seeded sampled outputs with plain decoding's by coupled sampling.

    A verifier that draws its own random numbers gives other outputs.  For it, a batch is only compared with its
    repetition; ``None`` if it supports greedy decoding only.
    """
    verifier = subject.as_requested.engine.verifier
    if verifier is None or verifier.races:
        return _check_coupled(subject)
    return None if verifier.greedy_only else _check_again(subject, verifier)


def _check_coupled(subject: Tested) -> Check:
    """Check every single prompt with drafts in every round, and all twice in a batch with the requested controller."""
    r = subject.reference
    check = subject.check("seed")
    count = len(r.prompts)
    options = r.settings.sampled_options
    jobs = list(zip(2 * r.prompts, r.seeds, 2 * r.predictions, strict=True))
    outputs = [
        subject.always_drafting.generate(ids, seed=seed, prediction=prediction, **options)
        for ids, seed, prediction in jobs[:count]
    ]
    outputs += subject.as_requested.generate(2 * r.prompts, seed=r.seeds, prediction=2 * r.predictions, **options)
    check.prompts = len(outputs)
    params = SamplingParams(**r.settings.sampling)
    for i, output in enumerate(outputs):
        index, where = (i, "alone") if i < count else (i - count, "in a batch")
        ids, seed, _ = jobs[index]
        sampler = Sampler(params, len(ids), Noise(seed))
        case = f"prompt {index % count} with seed {seed}, {where},"
        _judge(check, r, index % count, r.seeded[index], output, sampler, case)
    return check


def _check_again(subject: Tested, verifier: Verifier) -> Check | None:
    """Compare a batch with its repetition: the same computation, so even rounding must not change a token.

    ``None`` for a drafter that learns from the first run, as its drafts and so the verifier's draws change.
    """
    r = subject.reference
    drafter = subject.as_requested.drafter
    if drafter is None or drafter.traits.shares_state:
        return None
    check = subject.check("seed")
    # A controller that measures time may plan other drafts in the second run.
    llm = always_drafting(subject.as_requested, r.settings.allow_lossy)
    first, again = (
        llm.generate(2 * r.prompts, seed=r.seeds, prediction=2 * r.predictions, **r.settings.sampled_options)
        for _ in range(2)
    )
    check.prompts = len(again)
    for i, (output, repeated) in enumerate(zip(first, again, strict=True)):
        check.drafted += repeated.stats.num_draft_tokens
        if output.token_ids == repeated.token_ids:
            check.identical += 1
            continue
        check.differences += 1
        check.notes.append(
            f"prompt {i % len(r.prompts)} with seed {r.seeds[i]}: the same batch gives another text when "
            f"repeated, a real difference ({verifier.name} draws from the seed alone)"
        )
    return check
