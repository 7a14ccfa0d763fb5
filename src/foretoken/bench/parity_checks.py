"""The greedy checks of parity, and the one of seeds: outputs that must be the same token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from foretoken.bench.difference import first_difference, next_logits
from foretoken.bench.parity_report import Check, Settings
from foretoken.llm import Llm, Output
from foretoken.models.base import LanguageModel
from foretoken.sampling import SamplingParams
from foretoken.types import Kind
from foretoken.verifiers.pairing import auto_verifier

SEEDED_TOKENS = 16
"""Tokens of every output whose seed is checked."""
MOVED = {torch.float64: 1e-3, torch.float32: 0.05}
MOVED_IN_HALF = 0.25
"""Share of sampled tokens that rounding may move when other requests are beside them, by the logits' dtype.

Logits of bfloat16 near 16 are 0.06 apart, which moves every border between two tokens' shares of a law: on the
built-in target one token in five to ten is another one.  A draft model may be coarser than its target.
"""
RARE = 1e-4
"""More than that share is a difference when chance would do it less often than this."""


@dataclass(frozen=True)
class StopCase:
    """An output that must end early: by a stop string, or by an end-of-text token that a bias brings about.

    Attributes:
        prompt: which one.
        options: of ``generate``.
        plain: what plain decoding gives.
    """

    prompt: int
    options: dict[str, Any]
    plain: Output


@dataclass(frozen=True)
class Reference:
    """What every drafter is compared with.

    Attributes:
        target: the model under test.
        prompts: token ids.
        settings: of the run.
        plain: greedy outputs of plain decoding.
        outside: greedy outputs of ``model.generate``; ``None`` when the target is no Transformers model.
        stops: outputs that end early.
    """

    target: LanguageModel
    prompts: list[list[int]]
    settings: Settings
    plain: list[list[int]]
    outside: list[list[int]] | None
    stops: list[StopCase]

    @property
    def predictions(self) -> list[list[int]]:
        """Per prompt what a caller would expect, for drafters that use it: plain decoding's output with a gap."""
        return [output[: len(output) // 3] + output[len(output) // 3 + 1 :] for output in self.plain]


@dataclass(frozen=True)
class Subject:
    """A drafter under test.

    Attributes:
        spec: how it is named in the report.
        steady: with a controller that always drafts.
        chosen: with the controller that was asked for (both are the same unless that is ``auto``).
        reference: what it is compared with.
    """

    spec: str
    steady: Llm
    chosen: Llm
    reference: Reference

    @cached_property
    def alone(self) -> list[Output]:
        """Greedy outputs of every prompt alone."""
        r = self.reference
        options = {"max_new_tokens": r.settings.max_new_tokens, **r.settings.greedy}
        pairs = zip(r.prompts, r.predictions, strict=True)
        return [self.steady.generate(prompt, prediction=guess, **options) for prompt, guess in pairs]

    def check(self, mode: str) -> Check:
        """An empty check of a mode."""
        greedy = mode not in ("sampled", "seed")
        return Check(self.spec, verifier_name(self.steady, greedy), mode, len(self.reference.prompts))


def verifier_name(llm: Llm, greedy: bool) -> str:
    """The rule that follows the drafter."""
    if llm.engine.verifier is not None:
        return llm.engine.verifier.name
    drafter = llm.drafter
    if drafter is None:
        return "none"
    return auto_verifier(drafter.kind, drafter.draws_trees, greedy, drafter.shares_state).name


# -- what everything is compared with --------------------------------------------------------------------------------


def transformers_output(target: LanguageModel, prompt: list[int], settings: Settings) -> list[int] | None:
    """Greedy output of ``model.generate``; ``None`` when the target is no Transformers model."""
    model = getattr(target, "model", None)
    if model is None or not hasattr(model, "generate"):
        return None
    from transformers import GenerationConfig

    eos = sorted(target.eos_token_ids)
    # A fresh configuration: the checkpoint's own may ask for sampling or penalties.
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=settings.greedy.get("repetition_penalty", 1.0),
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return list(out[0, len(prompt) :].tolist())


def stop_cases(plain: Llm, prompts: Sequence[list[int]], expected: Sequence[list[int]], s: Settings) -> list[StopCase]:
    """Per prompt an output that a stop string ends and one that an end-of-text token ends, after a quarter of it."""
    cases = []
    for i, (prompt, output) in enumerate(zip(prompts, expected, strict=True)):
        place = len(output) // 4
        for options in (_stop_string(plain, output, place), _eos_bias(plain.target, prompt, output, place)):
            if options:
                options |= {"max_new_tokens": s.max_new_tokens, **s.greedy}
                cases.append(StopCase(i, options, plain.generate(prompt, **options)))
    return cases


def _stop_string(plain: Llm, output: list[int], place: int) -> dict[str, Any]:
    """Text of the two tokens from ``place`` on, so that it spans a border."""
    if plain.tokenizer is None:
        return {}
    before, upto = (plain.tokenizer.decode(output[:n], skip_special_tokens=True) for n in (place, place + 2))
    text = upto[len(before) :]
    return {"stop": text} if text and "\ufffd" not in text else {}


def _eos_bias(target: LanguageModel, prompt: list[int], output: list[int], place: int) -> dict[str, Any]:
    """A bias that puts an end-of-text token in front at ``place``, if none did so before."""
    if not target.eos_token_ids:
        return {}
    eos = min(target.eos_token_ids)
    logits = next_logits(target, [*prompt, *output[:place]]).double()
    gap = float(logits.max() - logits[eos])
    return {"logit_bias": {eos: gap + 0.5}} if math.isfinite(gap) else {}


# -- checks ----------------------------------------------------------------------------------------------------------


def check_greedy(subject: Subject) -> Check:
    """Every prompt alone against plain decoding, with drafts in every round."""
    reference = subject.reference
    return _compared(subject, "greedy", reference.plain, subject.alone)


def check_transformers(subject: Subject) -> Check | None:
    """Every prompt alone against ``model.generate``."""
    outside = subject.reference.outside
    return None if outside is None else _compared(subject, "transformers", outside, subject.alone)


def check_batch(subject: Subject) -> Check:
    """All prompts together against plain decoding of each alone, with the controller that was asked for."""
    r = subject.reference
    options = {"max_new_tokens": r.settings.max_new_tokens, **r.settings.greedy}
    # Each prompt twice: the batch is ragged, and twins must not disturb each other.
    outputs = subject.chosen.generate(2 * r.prompts, prediction=2 * r.predictions, **options)
    return _compared(subject, "batch", 2 * r.plain, outputs)


def check_stop(subject: Subject) -> Check | None:
    """Outputs that end early: the same tokens, text and reason as plain decoding's."""
    r = subject.reference
    if not r.stops:
        return None
    check = subject.check("stop")
    check.prompts = len(r.stops)
    for case in r.stops:
        guess = r.predictions[case.prompt]
        output = subject.steady.generate(r.prompts[case.prompt], prediction=guess, **case.options)
        _compare(check, r, case.prompt, case.plain.token_ids, output, case.options)
        wanted, got = ((o.text, o.finish_reason) for o in (case.plain, output))
        if output.token_ids == case.plain.token_ids and wanted != got:
            check.identical, check.differences = check.identical - 1, check.differences + 1
            check.notes.append(f"prompt {case.prompt} ends otherwise: {got!r}, plain decoding {wanted!r}")
    return check


def _compared(subject: Subject, mode: str, expected: Sequence[list[int]], outputs: Sequence[Output]) -> Check:
    check = subject.check(mode)
    check.prompts = len(expected)
    r = subject.reference
    for i, (want, output) in enumerate(zip(expected, outputs, strict=True)):
        _compare(check, r, i % len(r.prompts), want, output, r.settings.greedy)
    return check


def _compare(check: Check, r: Reference, prompt: int, want: list[int], output: Output, options: dict[str, Any]) -> None:
    """Count one greedy output as the same, a tie or different."""
    check.drafted += output.stats.num_draft_tokens
    params = SamplingParams(**{k: v for k, v in options.items() if k == "logit_bias" or k.endswith("_penalty")})
    found = first_difference(r.target, r.prompts[prompt], want, output.token_ids, params)
    if found is None:
        check.identical += 1
        return
    check.ties += found.is_tie
    check.differences += not found.is_tie
    gap = "one output ends there" if found.logit_gap is None else f"logit gap {found.logit_gap:.3g}"
    kind = "a tie" if found.is_tie else f"a real difference (a tie is at most {found.tolerance:.3g})"
    check.notes.append(f"prompt {prompt} differs from token {found.position} on: {gap}, {kind}")


# -- seeds -----------------------------------------------------------------------------------------------------------


def check_seed(subject: Subject) -> Check | None:
    """Seeded sampled outputs of a batch, of the same batch again, and alone; ``None`` where a seed is not to fix them.

    The same batch computes the same numbers, so its outputs must be the same (unless the drafter learnt meanwhile).
    """
    r = subject.reference
    if not keeps_seeds(subject.chosen):
        return None
    check = subject.check("seed")
    prompts, guesses = 2 * r.prompts, 2 * r.predictions
    seeds = [r.settings.seed + i for i in range(len(prompts))]
    room = min(r.target.context_length - len(prompt) for prompt in prompts)
    options = {**r.settings.sampling, "max_new_tokens": min(SEEDED_TOKENS, room)}
    twice = [subject.chosen.generate(prompts, seed=seeds, prediction=guesses, **options) for _ in range(2)]
    alone = [
        subject.chosen.generate(prompt, seed=seed, prediction=guess, **options)
        for prompt, seed, guess in zip(prompts, seeds, guesses, strict=True)
    ]
    check.prompts = 2 * len(prompts)
    check.drafted = sum(output.stats.num_draft_tokens for output in twice[0])
    drafter = subject.chosen.drafter
    learns = drafter is not None and drafter.shares_state
    first, again, single = ([output.token_ids for output in outputs] for outputs in (*twice, alone))
    rate = MOVED.get(_dtype(r), MOVED_IN_HALF)
    _judge_seeds(check, "the same batch again", first, again, rate if learns else 0.0)
    _judge_seeds(check, "alone and in a batch", first, single, rate)
    return check


def _dtype(r: Reference) -> torch.dtype:
    return next_logits(r.target, r.prompts[0]).dtype


def keeps_seeds(llm: Llm) -> bool:
    """Whether a seed is meant to fix sampled output whatever else is served (see ``shares_state``, ``keeps_seeds``)."""
    drafter, controller, verifier = llm.drafter, llm.engine.controller, llm.engine.verifier
    if drafter is None or controller is None or not controller.keeps_seeds:
        return False
    points = all(kind is Kind.POINT for kind, _ in drafter.proposals)
    return not drafter.shares_state or (points and (verifier is None or verifier.name == "match"))


def _judge_seeds(check: Check, what: str, ones: list[list[int]], others: list[list[int]], rate: float) -> None:
    """Outputs may part where rounding moved a draw over a border: far more than ``rate`` a token is a difference."""
    parted, compared = [], 0
    for i, (one, other) in enumerate(zip(ones, others, strict=True)):
        shorter = min(len(one), len(other))
        place = next((k for k in range(shorter) if one[k] != other[k]), shorter)
        compared += min(place + 1, shorter)
        if one == other:
            check.identical += 1
        else:
            parted.append(f"seeded output {i} parts at token {place}")
    real = binomial_tail(len(parted), compared, rate) < RARE
    check.differences += len(parted) if real else 0
    check.ties += 0 if real else len(parted)
    kind = "a real difference: rounding does not do that" if real else "a tie: rounding can move a draw"
    check.notes += [f"{what}: {text}, {kind}" for text in parted]


def binomial_tail(least: int, trials: int, chance: float) -> float:
    """Chance of at least ``least`` successes in ``trials`` of ``chance`` each."""
    return sum(math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(least, trials + 1))
