"""Costs of rounds and drafts on this machine, measured when a model is loaded, before the first request.

A controller that guesses how the cost of a target call grows with the draft loses speed if it grows fast: where five
rows cost three times one (a GGUF file), the trials take .15 of plain decoding's speed from a first completion of 64
tokens.  The measurements are kept in the user's cache folder, by model and machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from foretoken.core import Budget, Context, RoundTimes, TokenTree
from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.core.outside import is_outside
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.loading.measured.profile import COMPARED, fingerprint_of, machine_of
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.base import Drafter
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import measure_target, way_of
from foretoken.models.checks.fast_paths import code_version, fingerprint
from foretoken.models.machine import KeptResults, any_text, is_busy

LENGTHS, ROUNDS = (1, 4), 2
"""Lengths of the timed drafts, and drafts of each after one warm-up."""
KEPT = KeptResults(
    "rounds", lambda: f"quickest {code_version()}"
)  # results without this stamp are means, which pauses distort


class FixedDepthController(Controller):
    """Requests drafts of one length from one member of a group; ``None`` is a drafter that is no group."""

    name = "asked"

    def __init__(self, member: int | None, depth: int, nodes: int) -> None:
        self._budget = Budget(depth, nodes, member=member)

    def budget(self, context: Context, batch_size: int) -> Budget:
        return self._budget


def calibrated(target: LanguageModel, drafter: Drafter) -> RoundCosts:
    """The costs of a target and a drafter on this machine, from the cache or measured now.

    A drafter that learns from all requests is not measured, because it would learn from this run; nor is one without a
    network.
    """
    key = _key(target, drafter)
    try:
        return RoundCosts.from_dict(KEPT.stored()[key])
    except (KeyError, ValueError):  # never measured, or damaged
        pass
    costs = measured(target, drafter)
    if not is_busy():
        KEPT.keep(key, costs.as_dict())
    return costs


@torch.inference_mode()
def measured(target: LanguageModel, drafter: Drafter) -> RoundCosts:
    """Time a few target calls and drafts of every network.  Acceptance is left to the requests."""
    tokens = any_text(target, min(32, target.context_length // 4))
    counts = [n for n in (1, 2, 5, 9) if n <= 1 + drafter.max_nodes]  # a plain round, and drafts of usual lengths
    # The quickest call counts, so that a pause of the machine does not: ``auto`` starts from these costs and corrects
    # them only by trying.
    curve = measure_target(target, tokens, counts, 3, typical=min)
    limits, drafters = drafter.limits, {}
    for index, member in enumerate(limits.members or (limits,)):
        if member.relative_cost and not drafter.traits.shares_state:
            nodes = max(member.max_nodes, 1)
            lengths = sorted({min(length, member.max_depth) for length in LENGTHS})
            own_index = index if limits.members else None
            seconds = {k: _draft_s(target, drafter, tokens, FixedDepthController(own_index, k, nodes)) for k in lengths}
            drafters[member.name] = line_of(seconds)
    return RoundCosts(curve, drafters, _rest_s(target, tokens, curve))


def line_of(seconds: Mapping[int, float]) -> DrafterCost:
    """Cost of a call and of a level, from drafts of one or two lengths."""
    (short, short_s), (long, long_s) = min(seconds.items()), max(seconds.items())
    step_s = (long_s - short_s) / (long - short) if long > short else long_s / long
    step_s = min(max(step_s, 0.0), long_s / long)  # neither a call nor a step costs less than nothing
    return DrafterCost(max(long_s - step_s * long, 0.0), step_s, [])


def _draft_s(target: LanguageModel, drafter: Drafter, tokens: Sequence[int], controller: FixedDepthController) -> float:
    depth = controller.budget(None, 1).max_depth  # type: ignore[arg-type]
    times = _rounds(target, drafter, controller, tokens, (1 + ROUNDS) * (1 + depth) + depth)
    return min([record.draft_s for record in times[1 : 1 + ROUNDS]] or [record.draft_s for record in times])


def _rest_s(target: LanguageModel, tokens: Sequence[int], curve: TargetCost) -> float:
    """Seconds of a plain round outside of the target's call."""
    times = _rounds(target, None, None, tokens, 1 + ROUNDS)
    return max(median(record.total_s - record.target_s for record in times), 0.0) if times else 0.0


def _rounds(
    target: LanguageModel, drafter: Drafter | None, controller: Controller | None, text: Sequence[int], tokens: int
) -> list[RoundTimes]:
    """Times of up to ``1 + ROUNDS`` rounds; the rest of the request is dropped."""
    times: list[RoundTimes] = []

    def note(runs: Any, trees: Sequence[TokenTree], verdicts: Any, spent: RoundTimes) -> None:
        times.append(spent)

    engine = Engine(target, drafter, None, controller, on_round=note)
    most = max(1, min(tokens, target.context_length - len(text)))
    try:
        engine.add(Request(text, max_new_tokens=most, ignore_eos=True))
        while engine.busy and len(times) <= ROUNDS:
            for _, emission in engine.step():
                if emission.error is not None:
                    raise emission.error
    finally:
        engine.close()
    return times


def _key(target: LanguageModel, drafter: Drafter) -> str:
    """Cache key of a model, a machine, a drafter, and the forwards that run both."""
    machine, limits = machine_of(target), drafter.limits
    network = target.model  # hashing its rows would unpack packed weights: seconds at 1.5B
    sampled = fingerprint(network) if isinstance(network, torch.nn.Module) else None
    about = {
        "target": sampled or fingerprint_of(target),
        "forward": way_of(target),
        "drafts": [_forward_of(member) for member in drafter.drafters or (drafter,)],
        "machine": {key: machine[key] for key in COMPARED},
        "versions": machine["versions"],
        "members": [[member.name, member.max_depth, member.max_nodes] for member in limits.members or (limits,)],
    }
    return hashlib.blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _forward_of(member: Drafter) -> Any:
    """What runs a drafter's network: a draft model's forward, or that of a trained head."""
    model = getattr(member, "model", None)
    if isinstance(model, LanguageModel):
        return way_of(model)
    return None if is_outside(type(member)) else [entry.get("forward") for entry in member.describe()]
