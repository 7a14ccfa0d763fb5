"""Verdict on a run in words: the fastest arm, arms slower than plain decoding, and reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from foretoken.lab.report.figures import Speedup, equality, overall
from foretoken.lab.report.read import PLAIN, Condition, Run, number, setting_name, setting_of


@dataclass(frozen=True)
class Remark:
    """One sentence; ``tone`` decides its colour."""

    text: str
    tone: Literal["good", "bad", "even"] = "even"


def verdict(run: Run) -> list[Remark]:
    """The remarks of a run: the first setting in detail, others by their fastest arm."""
    first, *others = run.settings
    remarks = _at_length(run, first)
    for setting in others:
        ranked = _ranked(run, setting)
        if ranked:
            arm, speedup = ranked[0]
            name = setting_name(setting)
            fastest = f"{name[0].upper()}{name[1:]}: the fastest{_so_far(run)} is {arm}, {_times(speedup)}."
            remarks.append(Remark(fastest, "even" if _unsure(speedup) else "good" if speedup.value > 1 else "bad"))
        remarks += _silent(run, setting)
    return [*remarks, *_outputs(run)]


def _so_far(run: Run) -> str:
    return " so far" if run.unfinished else ""


def _silent(run: Run, setting: Condition) -> list[Remark]:
    """Remarks on arms without drafts: their speeds and texts are plain decoding's."""
    return [
        Remark(f"{arm} drafted nothing ({setting_name(setting)}): it decoded plainly, so nothing of it is compared.")
        for arm in run.rivals
        if run.drafted_nothing(setting, arm)
    ]


def _ranked(run: Run, setting: Condition) -> list[tuple[str, Speedup]]:
    rivals = [arm for arm in run.rivals if not run.drafted_nothing(setting, arm)]
    speedups = [(arm, s) for arm in rivals if (s := overall(run, setting, arm)) is not None]
    return sorted(speedups, key=lambda pair: -pair[1].value)


def _at_length(run: Run, setting: Condition) -> list[Remark]:
    ranked = _ranked(run, setting)
    silent = _silent(run, setting)
    if not ranked:
        return silent or [Remark(_nothing_measured(run, setting))]
    arm, best = ranked[0]
    if best.value <= 1:
        remarks = [Remark(f"Nothing is faster than plain decoding{_so_far(run)} ({setting_name(setting)}).", "bad")]
    else:
        length = _tokens_per_round(run, setting, arm)
        detail = f", with {length:.2f} tokens per round" if length else ""
        doubt = "; but this run cannot tell it from plain decoding" if _unsure(best) else ""
        fastest = f"Fastest{_so_far(run)} ({setting_name(setting)}): {arm}, {_times(best)}{detail}{doubt}."
        remarks = [Remark(fastest, "even" if doubt else "good")]
        ranked = ranked[1:]
    return [*remarks, *(_compared(run, setting, name, speedup) for name, speedup in ranked), *silent]


def _nothing_measured(run: Run, setting: Condition) -> str:
    if not run.rivals:
        return "This run has no arm beside plain decoding, so there is nothing to compare."
    if "overall" not in run.summary and any(run.at(setting, arm) for arm in run.rivals):
        return "Without a summary, arms are compared by category only."
    when = "yet: it was interrupted" if run.unfinished else f"at {setting_name(setting)}"
    return f"This run has measured no arm beside plain decoding {when}, so there is nothing to compare."


def _compared(run: Run, setting: Condition, arm: str, speedup: Speedup) -> Remark:
    if speedup.low is None:
        return Remark(f"Not told from plain by this run: {arm}, {_times(speedup)}.")
    if _unsure(speedup):
        return Remark(f"As fast as plain, within what this run can tell: {arm}, {_times(speedup)}.")
    if speedup.value >= 1:
        return Remark(f"Faster than plain: {arm}, {_times(speedup)}.", "good")
    reason = why(run, setting, arm)
    because = f", because {reason}" if reason else ""
    return Remark(f"Slower than plain: {arm}, {_times(speedup)}{because}.", "bad")


def _unsure(speedup: Speedup) -> bool:
    """Whether an arm cannot be distinguished from plain decoding; a single prompt has no spread to judge by."""
    return speedup.low is None or speedup.high is None or speedup.low <= 1 <= speedup.high


def _times(speedup: Speedup) -> str:
    if speedup.low is None or speedup.high is None:
        return f"{speedup.value:.2f}x (no interval)"
    return f"{speedup.value:.2f}x (95 % CI {speedup.low:.2f} to {speedup.high:.2f})"


def _mean(run: Run, setting: Condition, arm: str, name: str) -> float | None:
    stored = number((run.overall(setting, arm) or {}).get(name))
    values = [value for cell in run.at(setting, arm) if (value := number(cell.get(name))) is not None]
    return stored if stored is not None else fmean(values) if values else None


def _tokens_per_round(run: Run, setting: Condition, arm: str) -> float | None:
    return _mean(run, setting, arm, "mean_acceptance_length")


def why(run: Run, setting: Condition, arm: str) -> str:
    """Reason why an arm is slow: the gain of its rounds, and their costs beyond a plain round in descending order.

    A round that writes L tokens pays if it costs less than L plain rounds.
    """
    length = _tokens_per_round(run, setting, arm)
    costs = sorted(extra_costs(run, setting, arm).items(), key=lambda pair: -pair[1])
    # Costs below this share of a plain round are omitted
    parts = [f"{part} {cost:.2f}" for part, cost in costs if cost >= 0.05]
    cost = f"{' and '.join(parts)} of a plain round" if parts else ""
    if length is None:
        return cost
    gain = length - 1
    if gain < 0.3:
        rate = _mean(run, setting, arm, "acceptance_rate")
        few = f"few drafts are accepted ({gain:.2f} tokens per round" + (f", {rate:.0%} of them)" if rate else ")")
        return f"{few} while {cost}" if cost else few
    return f"{cost}, more than the {gain:.2f} further tokens per round bring" if cost else ""


def extra_costs(run: Run, setting: Condition, arm: str) -> dict[str, float]:
    """Costs of an arm's round beyond a plain one, in plain rounds; empty if the run did not record them.

    Times per token are multiplied by L, the tokens of a round, so that ``1 + sum of extra costs = L / speed-up``.
    """
    length = _tokens_per_round(run, setting, arm)
    arm_times = per_token(run.at(setting, arm))
    plain = next((times for name in PLAIN if (times := per_token(run.at(setting, name)))), None)
    whole = sum(plain.values()) if plain else 0.0
    if length is None or arm_times is None or plain is None or whole <= 0:
        return {}
    return {
        "drafting costs": length * arm_times["draft_s"] / whole,
        "the target call grows with its nodes by": (length * arm_times["target_s"] - plain["target_s"]) / whole,
        "overhead adds": (length * arm_times["overhead_s"] - plain["overhead_s"]) / whole,
    }


def per_token(cells: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Seconds per new token by stage, over all cells; ``None`` if a cell lacks one."""
    sums = dict.fromkeys(("new_tokens", "draft_s", "target_s", "overhead_s"), 0.0)
    for cell in cells:
        for name in sums:
            value = number(cell.get(name))
            if value is None:
                return None
            sums[name] += value
    tokens = sums.pop("new_tokens")
    return {name: spent / tokens for name, spent in sums.items()} if tokens else None


def _outputs(run: Run) -> Sequence[Remark]:
    """Number of cells with plain decoding's texts, among those with drafts."""
    judged = [(cell, badge) for cell in run.cells if (badge := equality(cell)) and number(cell.get("drafted")) != 0]
    if not judged:
        return []
    badges = [badge for _, badge in judged]
    differs, ties = badges.count("differs"), badges.count("ties")
    sampled = sum(setting_of(cell)[0] > 0 for cell, _ in judged)
    share = "all" if sampled == len(judged) else f"{sampled} of them"
    compared = f"{len(judged)} compared cells" + (f" ({share} sampled, with the same seeds)" if sampled else "")
    end = "; this run was interrupted, and its remaining prompts are unknown." if run.unfinished else "."
    if differs:
        return [Remark(f"Output differs from plain decoding's in {differs} of {compared}{end}", "bad")]
    if ties:
        return [Remark(f"Output equals plain decoding's but for numerical ties in {ties} of {compared}{end}")]
    return [Remark(f"Output equals plain decoding's in all {compared}{end}", "even" if run.unfinished else "good")]
