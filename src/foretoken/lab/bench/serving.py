"""The arms of a benchmark as it runs them: a batch of prompts at a setting, one result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.lab.bench.record import RoundRecorder
from foretoken.lab.bench.results import Setting, UnitResult
from foretoken.lab.bench.specs import PLAIN, split_arm
from foretoken.llm import Llm, load
from foretoken.loading import build_drafter, default_drafter, read_profile
from foretoken.models.base import LanguageModel

if TYPE_CHECKING:
    from foretoken.engine.request import Running
    from foretoken.methods.drafters.base import Drafter

MAX_BATCH = 64
"""Requests that an engine runs together."""


@dataclass(frozen=True)
class Shared:
    """What all arms of a benchmark have in common.

    Attributes:
        target: the target, whose weights every arm runs.
        target_source: what it was loaded from: decides what a drafter without a path means.
        tokenizer: its tokenizer, if any.
        verifier, controller: specs for arms that name no controller of their own.
        profile: a tuned profile, for the arm ``auto``; the others are what their specs say.
        device: where draft models run.
        allow_lossy: permit verifiers that change the target's distribution.
        max_new_tokens: length of every output.
        ignore_eos: go on behind an end-of-text token, so that every arm writes the same number of tokens.
        filters: ``top_k``, ``top_p``, ``min_p``.
        inflate: the size that the target was inflated to, if it was.
    """

    target: LanguageModel
    target_source: Any = "builtin"
    tokenizer: Any | None = None
    verifier: str = "auto"
    controller: str = "auto"
    profile: Path | None = None
    device: str | None = None
    allow_lossy: bool = False
    max_new_tokens: int = 128
    ignore_eos: bool = True
    filters: dict[str, Any] = field(default_factory=dict)
    inflate: str | None = None


@dataclass(frozen=True)
class Unit:
    """A batch of prompts of one category.

    Attributes:
        category, number: which.
        prompts: their numbers within the category.
        ids: their token ids.
        seeds: one per prompt, the same for every arm.
        new_tokens: length of the outputs.
    """

    category: str
    number: int
    prompts: Sequence[int]
    ids: Sequence[Sequence[int]]
    seeds: Sequence[int]
    new_tokens: int


class ServedArm(Protocol):
    """One way to decode.

    Attributes:
        name: as tables show it.
        most_nodes: most nodes per request that it lets the target score; 0 where that is not known.
        remembers: whether a later run of the same prompt may profit from an earlier one: only the first then counts.
    """

    name: str
    most_nodes: int
    remembers: bool

    def can(self, setting: Setting) -> bool:
        """Whether the arm can run at a temperature and batch size."""

    def enter(self, setting: Setting) -> None:
        """Get ready for a setting, with nothing learned at another one."""

    def run(self, unit: Unit, setting: Setting, tracing: bool) -> UnitResult:
        """Decode a unit."""


class OwnArm:
    """foretoken with one drafter and one controller.

    Raises:
        ValueError: an unknown drafter, controller or option, or parts that do not fit each other.
    """

    def __init__(self, name: str, shared: Shared) -> None:
        self.name, self.shared = name, shared
        self.recorder = RoundRecorder()
        self.spec, controller = split_arm(name)
        # An arm is what its name says: only the arm "auto" picks for itself, unless a controller is asked for.
        shared_one = "constant" if shared.controller == "auto" and self.spec != "auto" else shared.controller
        self.controller = controller or shared_one
        self.drafter = self._drafter()
        self.llm = self._llm()
        drafter = self.drafter
        self.remembers = drafter is not None and drafter.traits.shares_state
        self.most_nodes = 1
        if drafter is not None:
            self.most_nodes += drafter.max_nodes if drafter.traits.draws_trees else drafter.max_depth

    def _drafter(self) -> Drafter | None:
        shared, spec = self.shared, self.spec
        if spec in (PLAIN, "none"):
            return None
        chosen: str | None = spec
        if spec == "auto":
            tuned = read_profile(shared.profile) if shared.profile is not None else {}
            chosen = tuned.get("drafter", default_drafter(shared.target, shared.target_source))
        return build_drafter(
            chosen,
            shared.target,
            target_source=shared.target_source,
            tokenizer=shared.tokenizer,
            device=shared.device,
        )

    def _llm(self) -> Llm:
        shared = self.shared
        plain = self.drafter is None
        llm = load(
            shared.target,
            self.drafter,
            "auto" if plain else shared.verifier,
            "auto" if plain else self.controller,
            tokenizer=shared.tokenizer,
            allow_lossy=shared.allow_lossy,
            profile=shared.profile if self.spec == "auto" and not plain else None,
        )
        llm.engine.on_round = self.recorder
        return llm

    @property
    def coupled(self) -> bool:
        """Whether seeds fix sampled outputs whatever drafts, as those of plain decoding."""
        verifier = self.llm.engine.verifier
        return verifier is None or verifier.races

    def can(self, setting: Setting) -> bool:
        """Every setting."""
        return True

    def enter(self, setting: Setting) -> None:
        """A new controller, and a new drafter where the old one may remember outputs."""
        if self.remembers:
            self.drafter = self._drafter()
        self.llm = self._llm()

    def run(self, unit: Unit, setting: Setting, tracing: bool) -> UnitResult:
        """Serve the unit's prompts as one batch."""
        self.recorder.start(tracing)
        runs, spent = self._serve(unit, setting[0])
        prefill_s = sum(run.stats.prefill_s for run in runs)
        outputs = [list(run.output) for run in runs]
        per_pos: list[int] = []
        for run in runs:
            counts = run.stats.num_accepted_tokens_per_pos
            per_pos.extend([0] * (len(counts) - len(per_pos)))
            for i, count in enumerate(counts):
                per_pos[i] += count
        recorder = self.recorder
        return UnitResult(
            arm=self.name,
            temperature=setting[0],
            batch=setting[1],
            category=unit.category,
            unit=unit.number,
            prompts=list(unit.prompts),
            outputs=outputs,
            seconds=max(spent - prefill_s, 1e-9),
            decoded=sum(map(len, outputs)),
            prefill_s=prefill_s,
            drafts=sum(run.stats.num_drafts for run in runs),
            drafted=sum(run.stats.num_draft_tokens for run in runs),
            accepted=sum(run.stats.num_accepted_tokens for run in runs),
            per_pos=per_pos,
            draft_s=recorder.draft_s,
            target_s=recorder.target_s,
            verify_s=recorder.verify_s,
            rounds=[[r.nodes, r.depth, round(r.draft_s, 9)] for r in recorder.rounds],
            trace=recorder.trace(self.shared.tokenizer) if tracing else None,
            seeds=list(unit.seeds) if setting[0] > 0 and self.coupled else None,
        )

    def _serve(self, unit: Unit, temperature: float) -> tuple[list[Running], float]:
        """Finished requests in the unit's order, and all seconds that went by: what a controller does counts too."""
        shared, engine = self.shared, self.llm.engine
        requests = [
            self.llm.request(
                list(ids),
                max_new_tokens=unit.new_tokens,
                temperature=temperature,
                seed=seed,
                ignore_eos=shared.ignore_eos,
                **shared.filters,
            )
            for ids, seed in zip(unit.ids, unit.seeds, strict=True)
        ]
        numbers = [engine.add(request) for request in requests]
        done: dict[int, Running] = {}
        try:
            began = perf_counter()
            while engine.busy:
                for run, emission in engine.step():
                    if emission.error is not None:
                        raise emission.error
                    if emission.finish_reason is not None:
                        done[run.id] = run
            spent = perf_counter() - began
        finally:
            for number in numbers:
                engine.cancel(number)
        return [done[number] for number in numbers], spent


class ForeignArm:
    """Another engine on the same weights; it serves one request at a time.

    Raises:
        ValueError: an unknown arm or option, a target that it cannot run, or a missing package.
    """

    remembers = False
    most_nodes = 0

    def __init__(self, name: str, shared: Shared) -> None:
        from foretoken.lab.bench.arms import ArmContext, make_arm

        if any(shared.filters.get(key) != neutral for key, neutral in NO_FILTERS.items() if key in shared.filters):
            raise ValueError(f"{name} compares by temperature alone: leave out --top-k, --top-p and --min-p")
        context = ArmContext(
            shared.target, shared.target_source, shared.tokenizer, device=shared.device, ignore_eos=shared.ignore_eos
        )
        self.name, self.shared = name, shared
        self.arm = make_arm(name, context)

    def can(self, setting: Setting) -> bool:
        """Batches of one."""
        return setting[1] == 1

    def enter(self, setting: Setting) -> None:
        """It keeps nothing."""

    def run(self, unit: Unit, setting: Setting, tracing: bool) -> UnitResult:
        """Decode the unit's one prompt."""
        found = self.arm.generate(list(unit.ids[0]), unit.new_tokens, setting[0], unit.seeds[0])
        return UnitResult(
            arm=self.name,
            temperature=setting[0],
            batch=1,
            category=unit.category,
            unit=unit.number,
            prompts=list(unit.prompts),
            outputs=[list(found.token_ids)],
            seconds=max(found.seconds, 1e-9),
            decoded=found.num_decoded,
            prefill_s=found.prefill_s,
            mean_acceptance_length=found.mean_acceptance_length,
        )


NO_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def make_served_arm(name: str, shared: Shared) -> ServedArm:
    """The arm of a spec: another engine's (see :mod:`foretoken.lab.bench.arms`) or a drafter's, ``@`` controller.

    Raises:
        ValueError: nothing of that name, or it does not fit the target.
    """
    from foretoken.lab.bench.arms import is_foreign

    return ForeignArm(name, shared) if is_foreign(name) else OwnArm(name, shared)
