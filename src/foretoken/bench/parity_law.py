"""The sampled check of parity: do drafted and verified tokens follow the target's own law?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from foretoken.bench.difference import next_logits
from foretoken.bench.law import chi_square, smallest_seen, uniform_place, uniformity, upper_tail
from foretoken.bench.parity_checks import Reference, Subject
from foretoken.bench.parity_report import Check
from foretoken.llm import Llm
from foretoken.models.base import Feed, LanguageModel, SequenceState
from foretoken.sampling import Sampler, SamplingParams
from foretoken.types import Rng

LAW_TOKENS = 4
"""Tokens of every sampled output: enough for drafts of several tokens, few enough to sample often."""
BATCH = 32
TESTS = 2
"""Tests of one check: the first token's counts, and every token's place in its law."""


def check_sampled(subject: Subject, limit: float) -> Check | None:
    """Two tests of sampled outputs of all prompts; ``None`` for a rule that is right at temperature 0 only.

    Args:
        subject: the drafter under test.
        limit: p-value below which the check fails.
    """
    verifier = subject.steady.engine.verifier
    samples = subject.reference.settings.samples
    if not samples or (verifier is not None and verifier.greedy_only):
        return None
    check = subject.check("sampled")
    outputs = _sample(subject, check)
    first, first_freedom, draws = _first_tokens(subject.reference, outputs)
    places = list(_places(subject.reference, outputs))
    spread, freedom = uniformity(places)
    check.p_value = min(1.0, TESTS * min(upper_tail(first, first_freedom), upper_tail(spread, freedom)))
    level = limit / TESTS
    check.sees = min(smallest_seen(draws, first_freedom, level), smallest_seen(len(places), freedom, level))
    if check.p_value < limit:
        check.differences = 1
        check.notes.append(f"the sampled law differs: p = {check.p_value:.2g} (limit {limit:.2g})")
    return check


def _sample(subject: Subject, check: Check) -> list[list[list[int]]]:
    """Sampled outputs of every prompt.

    A half with drafts in every round; of the other, with the controller that was asked for, a half without seeds.
    """
    r = subject.reference
    count = len(r.prompts)
    outputs: list[list[list[int]]] = [[] for _ in r.prompts]
    jobs = [(i % count, (i // count) % 4, r.settings.seed + i) for i in range(r.settings.samples)]
    for group in range(4):
        llm = subject.steady if group < 2 else subject.chosen
        mine = [(prompt, None if group == 3 else seed) for prompt, part, seed in jobs if part == group]
        for start in range(0, len(mine), BATCH):
            _serve(llm, r, mine[start : start + BATCH], outputs, check)
    return outputs


def _serve(
    llm: Llm, r: Reference, batch: Sequence[tuple[int, int | None]], outputs: list[list[list[int]]], check: Check
) -> None:
    """One batch of (prompt, seed); what comes out is added to its prompt's ``outputs``."""
    room = min(r.target.context_length - len(prompt) for prompt in r.prompts)
    prompts = [r.prompts[prompt] for prompt, _ in batch]
    made = llm.generate(
        prompts,
        seed=[seed for _, seed in batch],
        prediction=[r.predictions[prompt] for prompt, _ in batch],
        max_new_tokens=min(LAW_TOKENS, room),
        **r.settings.sampling,
    )
    for (prompt, _), output in zip(batch, made, strict=True):
        outputs[prompt].append(output.token_ids)
        check.drafted += output.stats.num_draft_tokens


def _makers(r: Reference) -> list[Sampler]:
    return [Sampler(SamplingParams(**r.settings.sampling), len(prompt)) for prompt in r.prompts]


def _first_tokens(r: Reference, outputs: Sequence[Sequence[Sequence[int]]]) -> tuple[float, int, int]:
    """Chi-square statistic and degrees of freedom of the first tokens, added up over the prompts, and their number."""
    statistic, freedom, draws = 0.0, 0, 0
    for prompt, maker, made in zip(r.prompts, _makers(r), outputs, strict=True):
        if not made:
            continue
        law = maker.law(next_logits(r.target, prompt), prompt).double().cpu()
        counts = torch.bincount(torch.tensor([output[0] for output in made]), minlength=len(law))
        part = chi_square(counts, law * len(made))
        statistic, freedom, draws = statistic + part[0], freedom + part[1], draws + len(made)
    return statistic, freedom, draws


@torch.inference_mode()
def _places(r: Reference, outputs: Sequence[Sequence[list[int]]]) -> Iterator[float]:
    """Every token's place in the target's own law after what came before it (see :func:`uniform_place`)."""
    coins = Rng(r.settings.seed + 1_000_003)  # not the stream of any sample
    makers = _makers(r)
    sequences = [r.target.open() for _ in r.prompts]
    try:
        for sequence, prompt in zip(sequences, r.prompts, strict=True):
            r.target.prefill(sequence, prompt[:-1])
        for row in zip_longest(*outputs):
            jobs = [(i, output) for i, output in enumerate(row) if output is not None]
            scored = _scored(r.target, sequences, r.prompts, jobs)
            for (i, output), logits in zip(jobs, scored, strict=True):
                prefixes = [[*r.prompts[i], *output[:n]] for n in range(len(output))]
                laws = makers[i].laws(logits, prefixes).double().cpu()
                yield from (uniform_place(law, t, coins.uniform()) for law, t in zip(laws, output, strict=True))
    finally:
        for sequence in sequences:
            r.target.release(sequence)


def _scored(
    target: LanguageModel,
    sequences: Sequence[SequenceState],
    prompts: Sequence[list[int]],
    jobs: Sequence[tuple[int, list[int]]],
) -> list[Tensor]:
    """Per (prompt, output) the logits [T, V] of its tokens: a chain behind the prompt, which is then dropped."""
    feeds = [Feed(sequences[i], [prompts[i][-1], *output[:-1]]) for i, output in jobs]
    rows = target.forward(feeds)
    for i, _ in jobs:
        target.commit(sequences[i], ())
    return [row.logits for row in rows]
