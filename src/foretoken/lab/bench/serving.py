"""foretoken as an arm of a benchmark, and arms from their specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.core import RoundTimes, TokenTree, Verdict
from foretoken.engine.request import Running
from foretoken.engine.stats import SpecStats
from foretoken.lab.bench.arms import Arm, ArmSetup, Unit
from foretoken.lab.bench.costs import DraftRound
from foretoken.lab.bench.results import Condition, UnitResult
from foretoken.lab.bench.specs import PLAIN, controller_of, is_foreign, split_arm
from foretoken.lab.report.show.texts import token_namer
from foretoken.lab.timing import Stopwatch
from foretoken.llm import Llm, load
from foretoken.loading import default_drafter, read_profile
from foretoken.registry import convert_options, parse_spec

if TYPE_CHECKING:
    from foretoken.methods.drafters.base import Drafter


MOST_TRACED = 48
"""Most traced rounds of a request."""
Bare = tuple[Sequence[int], Sequence[int], Sequence[bool]]
"""Tokens, parents and probes of a tree, without its distributions."""


@dataclass
class RoundRecorder:
    """An engine's ``on_round`` callback that does little while timed; figures are computed later.  With ``tracing``,
    trees of the first request are kept too."""

    tracing: bool = False
    _rounds: list[tuple[list[Sequence[int]], RoundTimes]] = field(default_factory=list)
    _trees: list[tuple[Bare, Verdict, RoundTimes]] = field(default_factory=list)
    _first: int = -1
    _untraced: int = 0

    def start(self, tracing: bool) -> None:
        """Clear the previous run."""
        self.tracing, self._first, self._untraced = tracing, -1, 0
        self._rounds, self._trees = [], []

    def __call__(
        self, runs: Sequence[Running], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: RoundTimes
    ) -> None:
        if not runs:  # all of them failed in this round
            return
        # Parents only: a tree holds its draft distributions, which are large.
        self._rounds.append(([tree.parents for tree in trees], times))
        if not self.tracing:
            return
        if self._first < 0:
            self._first = runs[0].id
        if runs[0].id != self._first:
            return
        if len(self._trees) == MOST_TRACED:
            self._untraced += 1
        else:
            tree = trees[0]
            self._trees.append(((tree.tokens, tree.parents, tree.probes), verdicts[0], times))

    def spent(self) -> dict[str, float]:
        """Seconds in the drafter, target and verifier, counting each round of the batch once."""
        names = ("draft_s", "target_s", "verify_s")
        return {name: sum(getattr(times, name) for _, times in self._rounds) for name in names}

    @property
    def rounds(self) -> list[DraftRound]:
        """Draft sizes and times by round."""
        return [
            DraftRound(sum(map(len, parents)), max(map(_depth, parents)), times.draft_s)
            for parents, times in self._rounds
        ]

    def trace(self, tokenizer: Any | None) -> list[dict[str, Any]]:
        """The traced rounds for the summary's ``traces``.  The last one has the number of ``more_rounds``, if any."""
        rounds = [_traced(*traced, tokenizer) for traced in self._trees]
        if self._untraced:
            rounds[-1]["more_rounds"] = self._untraced
        return rounds


def _depth(parents: Sequence[int]) -> int:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def _traced(bare: Bare, verdict: Verdict, times: RoundTimes, tokenizer: Any | None) -> dict[str, Any]:
    tree = TokenTree(bare[0], bare[1], probes=bare[2])
    status = ["root", *(["rejected"] * (len(tree) - 1))]
    for node, probe in enumerate(tree.probes):
        if probe:
            status[node] = "probe"
    for node in verdict.path:
        status[node] = "accepted"
    origin = "plain" if tree.num_drafts == 0 else "bonus" if verdict.next_is_bonus else "recovered"
    text = token_namer(tokenizer)
    return {
        "tokens": list(tree.tokens),
        "texts": [text(token) for token in tree.tokens],
        "parents": list(tree.parents),
        "status": status,
        "next": {"token": verdict.next_token, "text": text(verdict.next_token), "origin": origin},
        "draft_ms": 1000 * times.draft_s,
        "target_ms": 1000 * times.target_s,
    }


class OwnArm(Arm):
    """foretoken with one drafter and one controller."""

    def __init__(self, name: str, shared: ArmSetup) -> None:
        self.name, self.shared = name, shared
        self.recorder = RoundRecorder()
        self.spec, self.controller = split_arm(name)[0], controller_of(name, shared.controller)
        profile = shared.profile if self.spec == "auto" else None
        self._tuned = {} if profile is None else read_profile(profile)
        self.drafter = self._drafter()
        self.llm = self._llm()
        self.ran = self._ran()
        drafter = self.drafter
        self.remembers = drafter is not None and drafter.traits.shares_state
        self.most_nodes = 1
        if drafter is not None:
            self.most_nodes += drafter.max_nodes if drafter.traits.draws_trees else drafter.max_depth

    def _drafter(self) -> Drafter | None:
        shared, spec = self.shared, self.spec
        if spec in (PLAIN, "none"):
            return None
        if spec == "auto":
            return shared.drafter(self._tuned.get("drafter", default_drafter(shared.target, shared.source)))
        return shared.drafter(spec)

    def _ran(self) -> dict[str, str]:
        if self.drafter is None:
            return dict.fromkeys(("drafter", "controller", "verifier"), "none")
        chosen = {"controller": self.controller, "verifier": self.shared.verifier}
        tuned = {role: self._tuned.get(role, spec) if spec == "auto" else spec for role, spec in chosen.items()}
        return {"drafter": self.drafter.spec, **tuned}

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
        """Whether seeds determine sampled outputs regardless of drafts, as in plain decoding."""
        verifier = self.llm.engine.verifier
        return verifier is None or verifier.races

    def enter(self, setting: Condition) -> None:
        """Make a new controller, and a new drafter if the old one may remember outputs."""
        if self.remembers:
            self.drafter = self._drafter()
        self.llm = self._llm()

    def run(self, unit: Unit, setting: Condition, tracing: bool = False) -> UnitResult:
        """Decode the unit's prompts as one batch."""
        self.recorder.start(tracing)
        runs, spent, read_s = self._serve(unit, setting[0])
        counted, recorder = runs[: unit.num_counted], self.recorder
        total = SpecStats.summed(run.stats for run in counted)
        return UnitResult(
            arm=self.name,
            temperature=setting[0],
            batch=setting[1],
            category=unit.category,
            unit=unit.number,
            prompts=list(unit.prompts[: unit.num_counted]),
            outputs=[list(run.output) for run in counted],
            seconds=max(spent - read_s, 1e-9),
            decoded=sum(len(run.output) for run in runs),
            prefill_s=read_s,
            drafts=total.num_drafts,
            drafted=total.num_draft_tokens,
            accepted=total.num_accepted_tokens,
            per_pos=total.num_accepted_tokens_per_pos,
            **recorder.spent(),
            rounds=[[r.nodes, r.depth, round(r.draft_s, 9)] for r in recorder.rounds],
            trace=recorder.trace(self.shared.tokenizer) if tracing else None,
            seeds=list(unit.seeds[: unit.num_counted]) if setting[0] > 0 and self.coupled else None,
        )

    def _serve(self, unit: Unit, temperature: float) -> tuple[list[Running], float, float]:
        """Finished requests in the unit's order, total seconds (including the controller's), and prefill seconds."""
        shared = self.shared
        requests = [
            self.llm.request(
                list(ids),
                max_new_tokens=unit.new_tokens,
                temperature=temperature,
                seed=seed,
                ignore_eos=shared.ignore_eos,
                cache_salt=salt,
                **shared.filters,
            )
            for ids, seed, salt in zip(unit.ids, unit.seeds, unit.salts, strict=True)
        ]
        read_before, watch = self.llm.engine.read_s, Stopwatch()
        finished = self.llm.calls.finish(requests)
        return finished, watch.seconds, self.llm.engine.read_s - read_before


def make_arm(spec: str, shared: ArmSetup) -> Arm:
    """An arm from its spec: ``transformers:plain``, ``transformers:assisted[,k=K]``,
    ``transformers:prompt_lookup[,k=K]``, ``llama.cpp``, ``llama.cpp:prompt_lookup[,k=K]``, ``llama.cpp:draft[,k=K]``,
    or ``DRAFTER[@CONTROLLER]`` (``plain`` and ``none`` are plain decoding).

    Raises ``ValueError`` for an unknown arm, drafter or option, a target that the arm cannot run, and a missing
    package.
    """
    if not is_foreign(spec):
        return OwnArm(spec, shared)
    parsed = parse_spec(spec)
    classes = _classes(parsed.name)
    kind = parsed.path or "plain"
    if kind not in classes:
        choices = ", ".join(f"{parsed.name}:{name}" for name in classes)
        raise ValueError(f"unknown arm {parsed.name}:{kind}: choose one of {choices}")
    cls: Any = classes[kind]
    arm: Arm = cls(spec, shared, **convert_options("drafter", f"{parsed.name}:{kind}", cls, parsed.options))
    return arm


def _classes(engine: str) -> Mapping[str, Any]:
    if engine == "transformers":
        from foretoken.lab.bench import transformers_arms

        return transformers_arms.ARMS
    from foretoken.lab.bench import llama_cpp_arms

    return llama_cpp_arms.ARMS
