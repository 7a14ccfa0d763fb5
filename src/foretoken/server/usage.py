"""Usage, times and speculation statistics of an answer, in the formats that benchmark tools read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

from foretoken.engine.stats import SpecStats


def usage(
    prompts: Sequence[SpecStats], all_stats: Sequence[SpecStats], completion: int | None = None
) -> dict[str, Any]:
    """OpenAI's usage object.  ``prompts`` has an entry per prompt (several choices share one), ``all_stats`` one per
    choice. ``completion`` is the number of tokens sent, by default all that were generated."""
    prompt = sum(stats.num_prompt_tokens for stats in prompts)
    cached = sum(stats.num_prompt_tokens - stats.num_prompt_tokens_computed for stats in prompts)
    completion_tokens = sum(stats.num_new_tokens for stats in all_stats) if completion is None else completion
    predicted = sum(stats.num_prediction_places for stats in all_stats)
    accepted = sum(stats.num_accepted_prediction_places for stats in all_stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": predicted - accepted,
            "reasoning_tokens": 0,
        },
    }


def metrics(
    all_stats: Sequence[SpecStats], whole_s: float, longest_draft: int, predicted: float | None = None
) -> dict[str, Any]:
    """Times and speculation statistics of choices, which run side by side: between tokens passes the time of the
    longest."""
    stats = merged(all_stats)
    most = max((choice.num_new_tokens for choice in all_stats), default=0)
    writing_s = max(0.0, whole_s - stats.first_token_s)
    between = writing_s / (most - 1) if most > 1 else 0.0
    return {
        "time_to_first_token_ms": 1e3 * stats.first_token_s,
        "generation_time_ms": 1e3 * writing_s,
        "queue_time_ms": 1e3 * stats.queue_s,
        "mean_itl_ms": 1e3 * between,
        "tokens_per_second": stats.num_new_tokens / whole_s if whole_s > 0 else 0.0,
        "speculative_decoding": {**speculative(stats, longest_draft), "predicted_speedup": predicted},
    }


def speculative(stats: SpecStats, longest_draft: int) -> dict[str, Any]:
    """Counts of rounds and draft tokens; entry j of the histogram is the number of rounds that accepted j.

    It has an entry for every length up to ``num_spec_tokens``, as vLLM's: aiperf silently drops any other.
    """
    rounds = histogram(stats)
    longest = max(longest_draft, len(rounds) - 1)  # a request's tree may be deeper than the drafter's
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [*rounds, *[0] * (longest + 1 - len(rounds))],
        "num_spec_steps": stats.num_drafts,
        "num_drafts": stats.num_drafted_rounds,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": longest,
        "draft_ms": 1e3 * stats.draft_s,
        "target_ms": 1e3 * stats.target_s,
        "verify_ms": 1e3 * stats.verify_s,
        "overhead_ms": 1e3 * stats.overhead_s,
    }


def histogram(stats: SpecStats) -> list[int]:
    """Number of rounds that accepted 0, 1, 2, ... draft tokens."""
    rounds_reaching = [stats.num_drafts, *stats.num_accepted_tokens_per_pos, 0]
    return [reached - further for reached, further in pairwise(rounds_reaching)]


def merged(all_stats: Sequence[SpecStats]) -> SpecStats:
    """Combined statistics of several choices.

    Times are maxima: choices run side by side, so a second in which all of them ran counts once.
    """
    whole = SpecStats.summed(all_stats)
    for name in (field.name for field in fields(SpecStats) if field.name.endswith("_s")):
        setattr(whole, name, max((getattr(stats, name) for stats in all_stats), default=0.0))
    return whole


def timings(prompts: Sequence[SpecStats], all_stats: Sequence[SpecStats]) -> dict[str, Any]:
    """Timings under llama.cpp's names; ``prompts`` has an entry per prompt, ``all_stats`` one per choice."""
    stats, computed = merged(all_stats), sum(stats.num_prompt_tokens_computed for stats in prompts)
    return {
        "cache_n": sum(stats.num_prompt_tokens for stats in prompts) - computed,
        "prompt_n": computed,
        "prompt_ms": 1e3 * stats.prefill_s,
        "predicted_n": stats.num_new_tokens,
        "predicted_ms": 1e3 * max(0.0, stats.total_s - stats.prefill_s),
        "predicted_per_second": stats.tokens_per_s,
        "draft_n": stats.num_draft_tokens,
        "draft_n_accepted": stats.num_accepted_tokens,
    }
