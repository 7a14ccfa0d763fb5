"""Parity: speculative against plain decoding on a given target, greedy and sampled.

Greedy outputs are compared token by token with plain decoding through the same loop and with
``transformers.generate``; the first difference is a numerical tie or a real one.  Sampled outputs are tested against
the target's exact law.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretoken.bench.difference import first_difference, next_logits
from foretoken.bench.law import chi_square_p, uniform_place, uniformity_p
from foretoken.drafters.base import Drafter
from foretoken.llm import Llm, load
from foretoken.loading import LoadError, build_drafter
from foretoken.models.base import CapabilityError, Feed, LanguageModel
from foretoken.registry import rows
from foretoken.sampling import Sampler, SamplingParams
from foretoken.types import Rng
from foretoken.verifiers.pairing import auto_verifier

PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\n\nfor name in os.listdir('.'):\n    if name.endswith('.py'):\n        print(name)\n\nfor name in os.",
    "It was a dark night, and the rain had not stopped since the morning. ",
    "one two three four one two three four one two three",
)
FALSE_ALARM = 1e-3
"""Chance that a whole report fails although every law is right (shared by its sampled checks)."""
LAW_TOKENS = 4
"""Tokens of every sampled output: enough for drafts of several tokens, few enough to sample often."""


@dataclass(frozen=True)
class Settings:
    """What a parity run does.

    Attributes:
        target_source: what the target was loaded from (decides what a drafter without a path means).
        verifier, controller, profile, device, allow_lossy: as in :func:`foretoken.llm.load`.
        max_new_tokens: length of greedy outputs.
        sampling: temperature, top_k, top_p, min_p of the law test.
        samples: sampled outputs per drafter; 0 leaves the test out.
        seed: of the first sample; the others count up.
    """

    target_source: Any = "builtin"
    verifier: str = "auto"
    controller: str = "auto"
    profile: Path | None = None
    device: str | None = None
    allow_lossy: bool = False
    max_new_tokens: int = 64
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    samples: int = 256
    seed: int = 0


@dataclass
class Check:
    """One drafter in one mode.

    Attributes:
        drafter: its spec.
        verifier: the rule's name.
        mode: ``greedy`` (against plain decoding), ``transformers`` (against ``model.generate``) or ``sampled``.
        prompts: outputs compared.
        identical: of them, how many are the same token by token.
        ties: first differences that rounding explains.
        differences: first differences that it does not, or a failed law test.
        p_value: of the law test.
        notes: the first differences in words.
    """

    drafter: str
    verifier: str
    mode: str
    prompts: int
    identical: int = 0
    ties: int = 0
    differences: int = 0
    p_value: float | None = None
    notes: list[str] = field(default_factory=list)

    def public(self) -> dict[str, Any]:
        """As the CLI's JSON prints it."""
        return {key: value for key, value in vars(self).items() if key != "notes"}


@dataclass
class Report:
    """All checks, and the drafters that could not be checked with the reason."""

    checks: list[Check]
    skipped: list[str]

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing differs but ties."""
        return bool(self.checks) and not any(check.differences for check in self.checks)

    def public(self) -> dict[str, Any]:
        """As the CLI's JSON prints it."""
        return {"passed": self.passed, "checks": [check.public() for check in self.checks]}


def run_parity(
    target: LanguageModel,
    tokenizer: Any | None,
    drafters: Sequence[str] | None,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    settings: Settings,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare every drafter with plain decoding on ``target``.

    Args:
        target: the model under test.
        tokenizer: for text prompts.
        drafters: specs; ``None`` tries all that need no training and leaves out those that do not fit.
        prompts: texts, or lists of token ids.
        settings: see :class:`Settings`.
        on_progress: told what is being done.

    Raises:
        ValueError: a drafter that was asked for does not fit, a prompt that does not, or a bad setting.
    """
    plain = Llm(target, None, None, None, tokenizer)
    encoded = [plain.encode(prompt) for prompt in prompts]
    on_progress("plain decoding")
    expected = [_greedy(plain, prompt, settings) for prompt in encoded]
    on_progress("transformers.generate")
    outside = [_transformers(target, prompt, settings) for prompt in encoded]
    checks: list[Check] = []
    if outside and outside[0] is not None:
        checks.append(_compared("none", "none", "transformers", target, encoded, outside, expected))
    specs, skipped = _fitting(target, tokenizer, settings) if drafters is None else (drafters, [])
    for spec in specs:
        llm = _llm(spec, target, tokenizer, settings)
        on_progress(f"{spec}: greedy")
        outputs = [_greedy(llm, prompt, settings) for prompt in encoded]
        name = _verifier_name(llm, greedy=True)
        checks.append(_compared(spec, name, "greedy", target, encoded, expected, outputs))
        if outside and outside[0] is not None:
            checks.append(_compared(spec, name, "transformers", target, encoded, outside, outputs))
        if settings.samples and not (llm.engine.verifier is not None and llm.engine.verifier.greedy_only):
            on_progress(f"{spec}: sampled")
            checks.append(_sampled(spec, llm, encoded[0], settings))
    _judge(checks)
    return Report(checks, skipped)


def read_prompts(file: Path | None) -> list[str]:
    """Prompts of a text file (one a line) or of JSONL rows with ``prompt``, ``text`` or ``turns``; else our own.

    Raises:
        OSError: no such file.
        ValueError: no prompt in it, or a broken row.
    """
    if file is None:
        return list(PROMPTS)
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        lines = [line for line in raw.decode("utf-8").splitlines() if line.strip()]
        as_rows = ".jsonl" in file.suffixes
        found = [_prompt_of(json.loads(line)) if as_rows else line for line in lines]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no text or JSONL file: {error}") from None
    prompts = [prompt for prompt in found if prompt]
    if not prompts:
        raise ValueError(f"{file} holds no prompts: one a line, or JSONL rows with prompt, text or turns")
    return prompts


def _prompt_of(row: Any) -> str:
    if not isinstance(row, dict):
        return ""
    turns = row.get("turns")
    value = row.get("prompt") or row.get("text") or (turns[0] if turns else "")
    return value if isinstance(value, str) else ""


# -- drafters --------------------------------------------------------------------------------------------------------


def _fitting(target: LanguageModel, tokenizer: Any, settings: Settings) -> tuple[list[str], list[str]]:
    """Specs of untrained drafters that run on this target, and why the others do not."""
    fitting, skipped = [], []
    for row in rows("drafter"):
        if row.needs_training:
            continue
        try:
            _llm(row.example, target, tokenizer, settings)
        except (CapabilityError, LoadError, ValueError) as error:
            skipped.append(f"{row.example}: {error}")
        else:
            fitting.append(row.example)
    return fitting, skipped


def _llm(spec: str, target: LanguageModel, tokenizer: Any, settings: Settings) -> Llm:
    drafter = build_drafter(
        spec, target, target_source=settings.target_source, tokenizer=tokenizer, device=settings.device
    )
    if drafter is None:
        raise ValueError("parity compares a drafter with plain decoding: 'none' is plain decoding itself")
    return load(
        target,
        drafter,
        settings.verifier,
        settings.controller,
        tokenizer=tokenizer,
        allow_lossy=settings.allow_lossy,
        profile=settings.profile,
    )


def _verifier_name(llm: Llm, greedy: bool) -> str:
    if llm.engine.verifier is not None:
        return llm.engine.verifier.name
    drafter: Drafter | None = llm.drafter
    if drafter is None:
        return "none"
    return auto_verifier(drafter.kind, drafter.draws_trees, greedy).name


# -- greedy ----------------------------------------------------------------------------------------------------------


def _greedy(llm: Llm, prompt: list[int], settings: Settings) -> list[int]:
    return llm.generate(prompt, max_new_tokens=settings.max_new_tokens).token_ids


def _transformers(target: LanguageModel, prompt: list[int], settings: Settings) -> list[int] | None:
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
        repetition_penalty=1.0,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return list(out[0, len(prompt) :].tolist())


def _compared(
    drafter: str,
    verifier: str,
    mode: str,
    target: LanguageModel,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int] | None],
    outputs: Sequence[list[int]],
) -> Check:
    check = Check(drafter, verifier, mode, len(prompts))
    for i, (prompt, want, got) in enumerate(zip(prompts, expected, outputs, strict=True)):
        found = first_difference(target, prompt, want or [], got)
        if found is None:
            check.identical += 1
            continue
        check.ties += found.is_tie
        check.differences += not found.is_tie
        gap = "one output ends there" if found.logit_gap is None else f"logit gap {found.logit_gap:.3g}"
        kind = "a tie" if found.is_tie else f"a real difference (a tie is at most {found.tolerance:.3g})"
        check.notes.append(f"prompt {i} differs from token {found.position} on: {gap}, {kind}")
    return check


# -- sampled ---------------------------------------------------------------------------------------------------------


def _sampled(spec: str, llm: Llm, prompt: list[int], settings: Settings) -> Check:
    """Two tests of ``samples`` outputs of one prompt: the first token's counts, and every token's place in its law."""
    check = Check(spec, _verifier_name(llm, greedy=False), "sampled", 1)
    room = llm.target.context_length - len(prompt)
    outputs = []
    for start in range(0, settings.samples, 32):
        seeds = [settings.seed + i for i in range(start, min(start + 32, settings.samples))]
        batch = llm.generate(
            [prompt] * len(seeds), seed=seeds, max_new_tokens=min(LAW_TOKENS, room), **settings.sampling
        )
        outputs += [output.token_ids for output in batch]
    maker = Sampler(SamplingParams(**settings.sampling), len(prompt))
    first = maker.law(next_logits(llm.target, prompt), prompt).double().cpu()
    counts = torch.bincount(torch.tensor([output[0] for output in outputs]), minlength=len(first))
    coins = Rng(settings.seed + 1_000_003)  # not the stream of any sample
    places = [place for output in outputs for place in _places(llm.target, maker, prompt, output, coins)]
    p_values = (chi_square_p(counts, first * len(outputs)), uniformity_p(places))
    check.p_value = min(1.0, 2 * min(p_values))
    return check


@torch.inference_mode()
def _places(target: LanguageModel, maker: Sampler, prompt: list[int], output: list[int], coins: Rng) -> list[float]:
    """Every token's place in the target's own law after what came before it (see :func:`uniform_place`)."""
    sequence = target.open()
    try:
        target.prefill(sequence, prompt[:-1])
        fed = [prompt[-1], *output[:-1]]
        if target.capabilities.rollback:
            logits = target.forward([Feed(sequence, fed)])[0].logits
        else:  # one token at a time
            scored = []
            for token in fed:
                scored.append(target.forward([Feed(sequence, [token])])[0].logits)
                target.commit(sequence, [0])
            logits = torch.cat(scored)
    finally:
        target.release(sequence)
    laws = maker.laws(logits, None).double().cpu()
    return [uniform_place(law, token, coins.uniform()) for law, token in zip(laws, output, strict=True)]


def _judge(checks: Sequence[Check]) -> None:
    """A law test fails below the report's false-alarm rate, divided among its law tests."""
    sampled = [check for check in checks if check.p_value is not None]
    for check in sampled:
        limit = FALSE_ALARM / len(sampled)
        if check.p_value is not None and check.p_value < limit:
            check.differences = 1
            check.notes.append(f"the sampled law differs: p = {check.p_value:.2g} (limit {limit:.2g})")
