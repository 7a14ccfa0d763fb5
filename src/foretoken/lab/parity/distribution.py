"""The sampled check of parity: a test that tokens drawn without a seed follow the target's distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from foretoken.core import Rng
from foretoken.core.noise import SEEDS, unseeded_from
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.lab.parity.checks import Reference, Tested
from foretoken.lab.parity.report import Check
from foretoken.llm import Llm
from foretoken.models.base import Feed, LanguageModel, SequenceState

Beginning = tuple[int, tuple[int, ...]]
"""A prompt and the first tokens of an output."""
TABLE_TOKENS = 4
"""Length of sampled outputs: long enough for drafts of several tokens, short enough for many samples."""
BINS, POWER = 20, 0.9
"""Bins of the uniformity test, and the probability with which a test detects the error it claims to detect."""


@dataclass
class Evidence:
    """Statistics of sampled tokens.

    Attributes:
        values: every token's position in its distribution (see
            :func:`foretoken.lab.parity.distribution.uniform_value`).
        followers: next tokens by beginning (prompt, first tokens), for beginnings of at least 10 outputs.
        distributions: the target's distribution [V] after each of these beginnings.
    """

    values: list[float] = field(default_factory=list)
    followers: dict[Beginning, list[int]] = field(default_factory=dict)
    distributions: dict[Beginning, Tensor] = field(default_factory=dict)

    def tables(self, longest: int) -> tuple[float, int, int]:
        """Chi-square statistic, degrees of freedom and draws of next tokens after beginnings up to a length."""
        statistic, freedom, draws = 0.0, 0, 0
        for beginning, tokens in self.followers.items():
            if len(beginning[1]) <= longest:
                distribution = self.distributions[beginning]
                part = chi_square(
                    torch.bincount(torch.tensor(tokens), minlength=len(distribution)), distribution * len(tokens)
                )
                statistic, freedom, draws = statistic + part[0], freedom + part[1], draws + len(tokens)
        return statistic, freedom, draws

    def tests(self) -> list[tuple[float, int, int]]:
        """Statistic, degrees of freedom and draws for first tokens, tokens after every frequent beginning, and
        positions."""
        return [self.tables(0), self.tables(TABLE_TOKENS), (*uniformity(self.values), len(self.values))]

    def p_value(self) -> float:
        """P-value of all tests together, corrected for their number."""
        tests = self.tests()
        return min(1.0, len(tests) * min(upper_tail(statistic, freedom) for statistic, freedom, _ in tests))

    def sees(self, limit: float) -> float:
        """Total variation, between the merged cells of every table, at which an error is detected with probability
        :data:`POWER` if a p-value below ``limit`` fails.

        Excludes the uniformity test, in which errors of opposite signs cancel.
        """
        *tables, uniformity_test = self.tests()
        level = limit / len([*tables, uniformity_test])
        return min(smallest_seen(draws, freedom, level) for _, freedom, draws in tables)


def check_sampled(subject: Tested, limit: float) -> Check | None:
    """Run three tests on sampled outputs of all prompts, each failing by a p-value below ``limit``; ``None`` for a
    greedy-only verifier."""
    verifier = subject.always_drafting.engine.verifier
    samples = subject.reference.settings.samples
    if not samples or (verifier is not None and verifier.greedy_only):
        return None
    check = subject.check("sampled")
    evidence = _collect(subject.reference, _sample(subject, check))
    check.p_value, check.sees = evidence.p_value(), evidence.sees(limit)
    if check.p_value < limit:
        check.differences = 1
        check.notes.append(f"the sampled distribution differs: p = {check.p_value:.2g} (limit {limit:.2g})")
    return check


def _sample(subject: Tested, check: Check, batch: int = 32) -> list[list[list[int]]]:
    """Sampled outputs of every prompt without a user's seed.

    One half has drafts in every round, the other the requested controller.
    """
    r = subject.reference
    outputs: list[list[list[int]]] = [[] for _ in r.prompts]
    jobs = [divmod(i, len(r.prompts)) for i in range(r.settings.samples)]
    # A seed would select coupled sampling.  Without one, a request draws from torch's CPU generator, which is seeded
    # here so that the report is reproducible.
    with unseeded_from(r.settings.seed):
        for half, llm in enumerate((subject.always_drafting, subject.as_requested)):
            prompts = [prompt for turn, prompt in jobs if turn % 2 == half]
            for start in range(0, len(prompts), batch):
                _serve(llm, r, prompts[start : start + batch], outputs, check)
    return outputs


def _serve(llm: Llm, r: Reference, batch: Sequence[int], outputs: list[list[list[int]]], check: Check) -> None:
    """Run one batch of prompts and append its results to ``outputs`` by prompt."""
    room = min(r.target.context_length - len(prompt) for prompt in r.prompts)
    answers = llm.generate(
        [r.prompts[prompt] for prompt in batch],
        prediction=[r.predictions[prompt] for prompt in batch],
        max_new_tokens=min(TABLE_TOKENS, room),
        **r.settings.sampling,
    )
    for prompt, output in zip(batch, answers, strict=True):
        outputs[prompt].append(output.token_ids)
        check.drafted += output.stats.num_draft_tokens


@torch.inference_mode()
def _collect(r: Reference, outputs: Sequence[Sequence[list[int]]]) -> Evidence:
    """Compare every token with the target's distribution after its prefix."""
    rng = Rng((r.settings.seed + 1_000_003) % SEEDS)  # separate from every sample's random stream
    start = r.target.answer_start
    prompts = [[*prompt, *start] for prompt in r.prompts]
    params = SamplingParams(**r.settings.sampling)
    samplers = [Sampler(params, len(p), skipped=len(p) - len(start) if start else 0) for p in prompts]
    begin = Counter((i, tuple(o[:n])) for i, answers in enumerate(outputs) for o in answers for n in range(len(o)))
    evidence = Evidence()
    sequences = [r.target.open() for _ in prompts]
    try:
        for sequence, prompt in zip(sequences, prompts, strict=True):
            r.target.expect(sequence, len(prompt))
            r.target.prefill(sequence, prompt[:-1])
        for row in zip_longest(*outputs):
            jobs = [(i, output) for i, output in enumerate(row) if output is not None]
            for (i, output), logits in zip(jobs, _scored(r.target, sequences, prompts, jobs), strict=True):
                prefixes = [[*prompts[i], *output[:n]] for n in range(len(output))]
                distributions = samplers[i].distributions(logits, prefixes)
                for n, (token, distribution) in enumerate(zip(output, distributions.cpu().double(), strict=True)):
                    evidence.values.append(uniform_value(distribution, token, rng.uniform()))
                    beginning = (i, tuple(output[:n]))
                    if begin[beginning] >= 10:
                        evidence.distributions.setdefault(beginning, distribution.clone())
                        evidence.followers.setdefault(beginning, []).append(token)
    finally:
        for sequence in sequences:
            r.target.release(sequence)
    return evidence


def _scored(
    target: LanguageModel,
    sequences: Sequence[SequenceState],
    prompts: Sequence[list[int]],
    jobs: Sequence[tuple[int, list[int]]],
) -> list[Tensor]:
    """Logits [T, V] of each (prompt, output): a chain after the prompt, dropped afterwards."""
    feeds = [Feed(sequences[i], [prompts[i][-1], *output[:-1]]) for i, output in jobs]
    rows = target.forward(feeds)
    for i, _ in jobs:
        target.commit(sequences[i], ())
    return [row.logits for row in rows]


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Chi-square statistic and degrees of freedom of ``counts`` [K] against ``expected`` [K] (same sum).

    Cells with an expectation below 5 are merged, smallest first.  A count with expectation zero gives infinity.
    """
    counts, expected = counts.double(), expected.double()
    impossible = expected <= 0
    if bool(counts[impossible].sum() > 0):
        return math.inf, 1
    order = expected[~impossible].argsort()
    cells = _merged(counts[~impossible][order].tolist(), expected[~impossible][order].tolist())
    return sum((observed - mean) ** 2 / mean for observed, mean in cells), max(len(cells) - 1, 0)


def upper_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable of ``freedom`` degrees exceeds ``statistic``."""
    if math.isinf(statistic):
        return 0.0
    return _upper(freedom / 2, statistic / 2) if freedom else 1.0


def _upper(shape: float, bound: float) -> float:
    """The regularised upper incomplete gamma function."""
    return float(torch.special.gammaincc(*(torch.tensor(x, dtype=torch.float64) for x in (shape, bound))))


def _merged(counts: Sequence[float], expected: Sequence[float]) -> list[tuple[float, float]]:
    cells: list[tuple[float, float]] = []
    observed = mean = 0.0
    for count, expectation in zip(counts, expected, strict=True):
        observed, mean = observed + count, mean + expectation
        if mean >= 5:
            cells.append((observed, mean))
            observed = mean = 0.0
    if mean > 0 and cells:
        cells[-1] = (cells[-1][0] + observed, cells[-1][1] + mean)
    elif mean > 0:
        cells.append((observed, mean))
    return cells


def uniform_value(distribution: Tensor, token: int, u: float) -> float:
    """Position of a drawn token in its distribution [V], uniform in [0, 1) if the distribution is right.

    The randomised probability integral transform: the mass of all more likely tokens, plus ``u`` times the token's own
    (ties are ordered by index).  ``u`` is a fresh uniform.  A token of probability zero gives 2, as it is impossible.
    """
    mass = distribution[token]
    if float(mass) <= 0:
        return 2.0
    before = distribution[distribution > mass].sum() + distribution[:token][distribution[:token] == mass].sum()
    return float((before + u * mass) / distribution.sum())


def uniformity(values: Sequence[float]) -> tuple[float, int]:
    """Statistic and degrees of freedom of a chi-square test that ``values`` are uniform in [0, 1)."""
    if not values:
        return 0.0, 0
    if max(values) > 1.5:
        return math.inf, 1
    cells = torch.tensor(values, dtype=torch.float64).mul(BINS).long().clamp_(0, BINS - 1)
    counts = torch.bincount(cells, minlength=BINS)
    return chi_square(counts, torch.full((BINS,), len(values) / BINS, dtype=torch.float64))


def smallest_seen(draws: int, freedom: int, level: float) -> float:
    """Total variation between the merged cells at which a chi-square test of ``draws`` draws detects a wrong
    distribution with probability :data:`POWER`.

    A distribution q whose cells differ from p's by a total variation d has a noncentrality of draws * sum (q - p)**2 /
    p, which is at least 4 draws d**2 (Cauchy and Schwarz); the same holds for several tables that differ by d each.
    Errors that cancel within a merged cell are not detected.  1 if nothing can be detected.

    Args:
        freedom: cells minus one (summed over the tables that are tested together).
        level: p-value below which the test fails.
    """
    if draws < 1 or freedom < 1:
        return 1.0
    bound = _crossing(lambda x: _upper(freedom / 2, x / 2) <= level)
    noncentrality = _crossing(lambda x: noncentral_tail(bound, freedom, x) >= POWER)
    return min(1.0, math.sqrt(noncentrality / (4 * draws)))


def noncentral_tail(bound: float, freedom: int, noncentrality: float) -> float:
    """Probability that a noncentral chi-square variable exceeds ``bound``: a Poisson mixture of central ones."""
    mean = noncentrality / 2
    terms = torch.arange(int(mean + 12 * math.sqrt(mean) + 30), dtype=torch.float64)
    weights = (terms * math.log(mean) - mean - torch.lgamma(terms + 1)).exp() if mean > 0 else (terms == 0).double()
    tails = torch.special.gammaincc(freedom / 2 + terms, torch.tensor(bound / 2, dtype=torch.float64))
    return float((weights * tails).sum())


def _crossing(reached: Callable[[float], bool]) -> float:
    """The smallest positive number at which ``reached`` becomes true, to nine digits."""
    low, high = 0.0, 1.0
    while not reached(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
