"""The set of sublayers to skip for the fastest drafting, measured on a few hundred tokens of the target's text.

A sublayer's sensitivity is the divergence (Kullback-Leibler, nats per token) between the distributions with and without
it.  The least sensitive ones are skipped together, in growing numbers, while the expected speed rises.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foretoken.core.costs import TargetCost
from foretoken.methods.drafters.own_layers import num_layers_of
from foretoken.methods.drafters.skip_sets import SkipSet
from foretoken.models.base import Feed, LanguageModel, SequenceState
from foretoken.models.call_costs import quick_costs, way_of
from foretoken.models.checks.fast_paths import code_version, fingerprint
from foretoken.models.checks.judging import ordinary_ids
from foretoken.models.clock import now
from foretoken.models.machine import WORTH_KEEPING_S, KeptResults, is_busy

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text.",
    "What should I see in Lisbon in two days?",
    "Summarise how a vaccine works.",
    "Give me a recipe for tomato soup.",
    "Why do we have seasons?",
    "Write a short letter to a friend about a new job.",
    "How do I sort a list of names in JavaScript?",
)
"""Prompts for the answers that are measured."""
KEPT = KeptResults("skips", lambda: f"quiet {code_version()}")  # results without this stamp may be of a busy machine


class NothingToSkipWarning(UserWarning):
    """No set of sublayers pays for a target."""


class SkipsNotMeasuredWarning(UserWarning):
    """The set of sublayers could not be measured, so that nothing is drafted."""


@dataclass(frozen=True)
class Choice:
    """A set and its expected performance.

    Attributes:
        acceptance: share of the target's tokens that are likeliest without these sublayers.
        speed: tokens per second relative to plain decoding, by acceptance, size and the costs of the target's calls.
    """

    skips: SkipSet
    acceptance: float
    speed: float


def default_set(target: LanguageModel, tokenizer: Any | None) -> Choice:
    """The set with the highest expected speed, cached by the model's fingerprint and its forward: what a set saves
    depends on it.

    Args:
        target: a model of more than two layers.
        tokenizer: the target's; without one the prompts are ids spread over its vocabulary.

    Warns:
        NothingToSkipWarning: the set is expected to be slower than plain decoding.
    """
    owner: Any = target
    key = fingerprint(owner.model)
    name = f"skips {key} {way_of(target)} {'text' if tokenizer is not None else 'ids'}"
    choice = None if key is None else _choice_of(KEPT.read(name), num_layers_of(target))
    if choice is None:
        start_s = perf_counter()
        choice = measured_set(target, _prompt_ids(target, tokenizer))
        if key is not None:
            entry = {**choice.skips.options, "acceptance": choice.acceptance, "speed": choice.speed}
            worth = perf_counter() - start_s >= WORTH_KEEPING_S
            KEPT.keep(name, entry, worth and not is_busy())
    if choice.speed < 1.0:
        warnings.warn(
            f"layer_skip: no set of skipped sublayers is faster for this model: the best one reaches an estimated "
            f"{choice.speed:.2f} of plain decoding's speed ({choice.acceptance:.0%} of its drafts are accepted); use "
            "another drafter, or `foretoken tune layer-skip`",
            NothingToSkipWarning,
            stacklevel=3,
        )
    return choice


def _choice_of(stored: Any, layers: int) -> Choice | None:
    """The choice of a stored entry; ``None`` if there is none or it is damaged."""
    with suppress(KeyError, TypeError, ValueError):
        skips = SkipSet.parse(str(stored["attention"]), str(stored["mlp"]), layers)
        return Choice(skips, float(stored["acceptance"]), float(stored["speed"]))
    return None


@torch.inference_mode()
def measured_set(target: LanguageModel, prompts: Sequence[Sequence[int]], tokens: int = 32) -> Choice:
    """The set with the highest expected speed on the target's greedy continuations of the prompts.

    Args:
        target: a model of more than two layers.
        prompts: ids, none of them empty.
        tokens: length of every continuation.
    """
    sample = _OwnText(target, prompts, tokens)
    try:
        middle = range(1, num_layers_of(target) - 1)  # every sublayer of every layer but the first and the last
        singles = [SkipSet(attention=frozenset({i})) for i in middle] + [SkipSet(mlp=frozenset({i})) for i in middle]
        order = sorted(singles, key=sample.sensitivity)
        attention = [single for single in order if single.attention]
        best = _longest_that_pays(sample, SkipSet(), attention)
        return _longest_that_pays(sample, best.skips, [single for single in order if single.mlp], best)
    finally:
        sample.close()


def _longest_that_pays(sample: _OwnText, base: SkipSet, more: Sequence[SkipSet], best: Choice | None = None) -> Choice:
    """``base`` plus the best number of first items of ``more``, in steps of an eighth of the layers."""
    step = max(1, len(more) // 8)
    worse = 0
    for count in range(step, len(more) + 1, step):
        skips = base
        for single in more[:count]:
            skips = SkipSet(skips.attention | single.attention, skips.mlp | single.mlp)
        choice = sample.judged(skips)
        if best is None or choice.speed > best.speed:
            best, worse = choice, 0
        else:
            worse += 1
        if worse == 2:  # enough larger sets after the best one
            break
    return best or sample.judged(more[0])


class _OwnText:
    """Texts that the target has written, and its logits for them with sublayers left out."""

    def __init__(self, target: LanguageModel, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self.target = target
        room = max(2, target.context_length - tokens - 1)
        prompts = [prompt[-room:] for prompt in prompts]
        self.sequences: list[SequenceState] = []
        self.starts = [len(prompt) - 1 for prompt in prompts]
        self.sensed = min(4, tokens)  # last tokens that sensitivity is measured on
        try:
            self._write(prompts, tokens)
        except BaseException:  # nobody else can release the sequences
            self.close()
            raise

    def _write(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        for prompt in prompts:
            self.sequences.append(self.target.open())
            self.target.prefill(self.sequences[-1], prompt[:-1])
        self.texts = self._continued([list(prompt) for prompt in prompts], tokens)
        self.costs = quick_costs(self.target)
        self.saved = self._saved()
        self.log_p = self._logits(self.target.forward, self.sensed).log_softmax(-1)

    def _continued(self, texts: list[list[int]], tokens: int) -> list[list[int]]:
        """The texts, each with ``tokens`` greedy tokens appended."""
        for _ in range(tokens):
            rows = self.target.forward([Feed(s, [text[-1]]) for s, text in zip(self.sequences, texts, strict=True)])
            for sequence, text, row in zip(self.sequences, texts, rows, strict=True):
                self.target.commit(sequence, [0])
                text.append(int(row.logits[-1].argmax()))
        return texts

    def _logits(self, forward: Callable[[Sequence[Feed]], Any], count: int) -> Tensor:
        """[b * count, V] for the last ``count`` tokens of every text; earlier positions keep the whole model's KV
        cache."""
        feeds = []
        for sequence, text in zip(self.sequences, self.texts, strict=True):
            first = len(text) - 1 - count
            self.target.rewind(sequence, min(first, len(sequence.tokens)))
            if len(sequence.tokens) < first:
                self.target.prefill(sequence, text[len(sequence.tokens) : first])
            feeds.append(Feed(sequence, text[first:-1]))
        rows = forward(feeds)
        for sequence in self.sequences:
            self.target.commit(sequence, ())
        return torch.cat([row.logits for row in rows]).float()

    def sensitivity(self, skips: SkipSet) -> float:
        """Mean divergence (nats) of the whole model's distribution from the one without these sublayers."""
        log_q = self._logits(lambda feeds: self.target.forward_part(feeds, skips.plan), self.sensed).log_softmax(-1)
        return float((self.log_p.exp() * (self.log_p - log_q)).sum(-1).mean())

    def judged(self, skips: SkipSet) -> Choice:
        """A set's acceptance over all tokens, and its expected speed."""
        count = len(self.texts[0]) - 1 - self.starts[0]
        logits = self._logits(lambda feeds: self.target.forward_part(feeds, skips.plan), count)
        tokens = torch.tensor([token for text in self.texts for token in text[-count:]], device=logits.device)
        acceptance = float((logits.argmax(-1) == tokens).float().mean())
        step = 1.0 - self.saved[0] * len(skips.attention) - self.saved[1] * len(skips.mlp)
        return Choice(skips, acceptance, promised_speed(acceptance, step, self.costs))

    def _saved(self, steps: int = 8) -> tuple[float, float]:
        """Share of a step saved by leaving out an attention and an MLP, by the fastest of interleaved steps."""
        layers = num_layers_of(self.target)
        middle = frozenset(range(1, layers - 1))
        sets = (SkipSet(), SkipSet(attention=middle), SkipSet(mlp=middle))
        quickest = [math.inf] * len(sets)
        for _ in range(steps):
            for number, skips in enumerate(sets):
                quickest[number] = min(quickest[number], self._step_s(skips))
        attention, mlp = (max(1.0 - quickest[number] / quickest[0], 0.0) / len(middle) for number in (1, 2))
        most = 1.0 / layers  # a larger saving than a layer's share is noise
        scale = min(1.0, most / max(attention + mlp, 1e-9))
        return attention * scale, mlp * scale

    def _step_s(self, skips: SkipSet) -> float:
        target, sequence = self.target, self.sequences[0]
        before, start_s = target.run_s, now(target.device)
        target.forward_part([Feed(sequence, self.texts[0][-1:])], skips.plan)
        spent = (target.run_s - before) or (now(target.device) - start_s)
        target.commit(sequence, ())
        return spent

    def close(self) -> None:
        for sequence in self.sequences:
            with suppress(ValueError):
                self.target.release(sequence)


def promised_speed(acceptance: float, step: float, costs: TargetCost, longest: int = 8) -> float:
    """Tokens per second over plain decoding's at the best draft length: (1 + a + .. + a^k) / (k c + v(k + 1)).

    Args:
        acceptance: a, of one draft token.
        step: c, a draft step in target steps.
        longest: maximum k.
    """
    speeds = (
        math.fsum(acceptance**i for i in range(k + 1)) / (k * step + costs.relative(k + 1))
        for k in range(1, longest + 1)
    )
    return max(speeds)


def _prompt_ids(target: LanguageModel, tokenizer: Any | None) -> list[list[int]]:
    """The prompts' ids; without a tokenizer, or with one that spells none of them, ids spread over the vocabulary."""
    rows = [] if tokenizer is None else [_ids_of(prompt, tokenizer) for prompt in PROMPTS]
    known = [[token for token in row if token < target.vocab_size] for row in rows]  # a tokenizer may know more tokens
    return [row for row in known if len(row) > 1] or [
        ordinary_ids(target.vocab_size, 4 + 2 * i)[-8:] for i in range(len(PROMPTS))
    ]


def _ids_of(prompt: str, tokenizer: Any) -> list[int]:
    text = prompt
    if getattr(tokenizer, "chat_template", None):
        with suppress(Exception):  # a template may reject a plain question; the question alone works as a text, too
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
