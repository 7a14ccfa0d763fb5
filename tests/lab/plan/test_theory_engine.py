"""The engine itself, with independent acceptance: what it measures is what the formulas say, and not a little else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from foretoken.core import Budget, Context, StepRecord, TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.lab.plan.speedup import expected_tokens, survival, tree_tokens
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.multi_round import MultiRoundVerifier
from foretoken.methods.verifiers.point import PointVerifier
from foretoken.methods.verifiers.rejection import RejectionVerifier
from toys import engine, fixed_tables, serve

P, Q = [0.5, 0.3, 0.15, 0.05], [0.3, 0.3, 0.1, 0.3]
ROUNDS = 400
"""Per request; four requests share a batch."""
SIGMAS = 4.0
"""A right engine misses this bound once in 16 000 runs; the seeds are fixed."""


def overlap(p: Sequence[float] | np.ndarray, q: Sequence[float]) -> float:
    """Chance that a token drawn from q is accepted against p."""
    return float(np.minimum(p, q).sum())


class Recorder(ConstantController):
    """Keeps the accepted counts of every request, round by round."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: dict[int, list[int]] = {}

    def observe(self, context: Context, record: StepRecord) -> None:
        self.accepted.setdefault(record.request_id, []).append(record.num_accepted_tokens)


def accepted_counts(drafter: ModelDrafter | ScriptedDrafter, verifier: Verifier, depth: int) -> np.ndarray:
    """[4 * ROUNDS] accepted tokens of rounds that all have room for the whole draft; independent of each other."""
    target, _ = fixed_tables(P, Q)
    recorder = Recorder()
    room = (ROUNDS + 1) * (depth + 1)
    requests = [Request([0], SamplingParams(temperature=1.0), room, seed=seed) for seed in range(4)]
    runs = serve(engine(target, drafter, verifier, recorder, max_batch=4), requests)
    for run in runs:  # the statistic that users see is the mean of these records
        counts = recorder.accepted[run.id]
        assert run.stats.mean_acceptance_length == pytest.approx(1 + np.mean(counts))
    return np.concatenate([counts[:ROUNDS] for counts in recorder.accepted.values()])


def bound(counts: np.ndarray) -> float:
    return SIGMAS * float(counts.std()) / math.sqrt(len(counts))


def test_the_measured_mean_acceptance_length_is_equation_1() -> None:
    k = 4
    _, draft = fixed_tables(P, Q)
    counts = accepted_counts(ModelDrafter(draft, k=k), RejectionVerifier(), k)
    alpha = overlap(P, Q)
    assert alpha == pytest.approx(0.75)
    distribution = -np.diff([1.0, *survival(alpha, k), 0.0])  # of 0 to k accepted tokens
    spread = math.sqrt(distribution @ np.arange(k + 1) ** 2 - (distribution @ np.arange(k + 1)) ** 2)
    exact = SIGMAS * spread / math.sqrt(len(counts))  # the distribution's own spread, not the sample's
    assert abs(1 + counts.mean() - expected_tokens(alpha, k)) < exact
    shares = np.bincount(counts, minlength=k + 1) / len(counts)
    assert (np.abs(shares - distribution) < SIGMAS * np.sqrt(distribution * (1 - distribution) / len(counts))).all()
    for wrong in (expected_tokens(alpha, k - 1), expected_tokens(alpha, k + 1), expected_tokens(alpha - 0.07, k)):
        assert abs(1 + counts.mean() - wrong) > exact


def test_a_tree_of_independent_draws() -> None:
    """Sibling by sibling: what is left of p after a rejection meets q again (SpecInfer)."""
    _, draft = fixed_tables(P, Q)
    drafter = ModelDrafter(draft, tree="2x2", draw="iid")
    counts = accepted_counts(drafter, MultiRoundVerifier(), 2)
    first = overlap(P, Q)
    rest = np.maximum(np.array(P) - Q, 0)
    second = (1 - first) * overlap(rest / rest.sum(), Q)
    promised = tree_tokens([2, 2], [[first, second]] * 2)
    assert abs(1 + counts.mean() - promised) < bound(counts)
    assert abs(1 + counts.mean() - expected_tokens(first, 2)) > bound(counts)


def test_a_tree_of_certain_guesses() -> None:
    """Each child is accepted with the target's chance of its token (Medusa, EAGLE-2)."""
    parents = [-1, 0, 0, 1, 1, 2]
    tokens = [0, 1, 0, 2, 0]  # of the five draft nodes

    def propose(context: Context, budget: Budget) -> TokenTree:
        if budget.max_depth < 2:
            return TokenTree.root_only(context.root)
        return TokenTree((context.root, *tokens), tuple(parents))

    counts = accepted_counts(ScriptedDrafter(propose=propose), PointVerifier(), 2)
    promised = 1 + P[0] + P[1] + P[0] * (P[0] + P[2]) + P[1] * P[0]
    assert abs(1 + counts.mean() - promised) < bound(counts)
