"""The loop: one round serves every running request, knows only protocols, and is the same for every method.

    budget = controller.budget(request)
    tree   = drafter.propose(context, budget)
    scores = target.forward(tree)
    verdict = verifier.verify(tree, scores, rng)
    target.commit(verdict.path); drafter.observe(...); controller.observe(...)
    emit

Plain decoding is the same loop with an empty draft.  Between two rounds requests leave, join, and have pieces of their
prompts read (:mod:`foretoken.engine.requests`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Budget, Kind, RoundTimes, Scores, StepRecord, TokenTree, Verdict
from foretoken.engine.ends import end_where_nothing_follows
from foretoken.engine.logprobs import TokenLogprobs, logprobs_of
from foretoken.engine.request import Emission, Origin, Running
from foretoken.engine.requests import CHANGED, Requests, Turn
from foretoken.engine.trace import trace
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.outside import check_proposal, has_outside
from foretoken.methods.drafters.texts import ALL, BESIDE, DraftTexts
from foretoken.methods.trees.operations import truncate
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.batched import verify_batch
from foretoken.methods.verifiers.compatibility import auto_verifier, check_pair, check_proposals
from foretoken.models.base import CapabilityError, Feed, LanguageModel
from foretoken.models.clock import now
from foretoken.models.forward.attention import few_plans

OnRound = Callable[[Sequence[Running], Sequence[TokenTree], Sequence[Verdict], RoundTimes], None]
"""Told of every round: the requests, their trees and verdicts, and (draft_s, target_s, verify_s, total_s)."""


class Engine(Requests):
    """Serves requests over one target.

    Args:
        target: the model whose distribution is kept.
        drafter: what guesses, or ``None`` for plain decoding.
        verifier: the acceptance rule, or ``None`` to choose the best lossless one for every tree.
        controller: how much to guess; needed with a drafter.
        tokenizer: for stop strings.
        allow_lossy: accept a verifier that changes the target's distribution.
        max_batch: most requests that run together; others wait.
        kv_memory: bytes of keys and values that running and kept texts may take; ``None`` for no limit.
        prefill_chunk: tokens of prompts that are read before every round; ``None`` reads whole prompts at once.
        prefix_bytes: bytes of finished texts that are kept, so that others need not read the same beginning again.
        on_round: told of every finished round, for benchmarks and displays; its time is in no round's.

    Attributes:
        rounds: how many there were.
        times: their seconds, added up.

    Raises:
        ValueError: the drafter and the verifier do not fit, or the verifier is lossy and that was not allowed.
        CapabilityError: the target cannot do what the drafter needs.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        controller: Controller | None = None,
        *,
        tokenizer: Any | None = None,
        allow_lossy: bool = False,
        max_batch: int = 64,
        kv_memory: int | None = None,
        prefill_chunk: int | None = None,
        prefix_bytes: int = 0,
        on_round: OnRound | None = None,
    ) -> None:
        super().__init__(
            target, drafter, verifier, controller, tokenizer, max_batch, kv_memory, prefill_chunk, prefix_bytes
        )
        self.allow_lossy, self.on_round = allow_lossy, on_round
        self.rounds, self._bookkeeping_s = 0, 0.0
        self.times = RoundTimes(0.0, 0.0, 0.0, 0.0)
        self._members = [] if drafter is None else [member.name for member in drafter.limits.members]
        self._has_outside = has_outside(drafter)
        self._automatic: dict[tuple[Kind, bool, bool, bool], Verifier] = {}
        if drafter is not None:
            self._check_target(drafter)
            if controller is None:
                raise ValueError("a drafter needs a controller, for example ConstantController()")
            controller.attach(drafter.limits)
        if verifier is not None:
            self._check_verifier(verifier, greedy=verifier.greedy_only)

    def _check_verifier(self, verifier: Verifier, greedy: bool) -> None:
        drafter = self.drafter
        if drafter is None:
            check_pair(min(verifier.kinds), False, verifier, "none", self.allow_lossy, greedy)
        else:
            check_proposals(drafter.traits.proposals, verifier, drafter.name, self.allow_lossy, greedy)

    def _check_drafter(self, name: str | None) -> None:
        if name is not None and name not in self._members:
            known = ", ".join(self._members) or "nobody: this drafter is no group"
            raise ValueError(f"drafter {name!r} is not among those that draft here: {known}")

    def _check_target(self, drafter: Drafter) -> None:
        offered = self.target.capabilities
        needed = ["rollback"]
        if drafter.traits.draws_trees:
            needed += ["tree_mask", "keep_path"]
        if drafter.taps:
            needed.append("taps")
        if drafter.traits.runs_target:
            needed.append("layer_windows")
        for name in needed:
            if not getattr(offered, name):
                reason = offered.missing.get(name, f"the target lacks {name}")
                raise CapabilityError(f"drafter {drafter.name!r} needs a target with {name}: {reason}")

    # -- one round ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[tuple[Running, Emission]]:
        """Admit what waits, read prompts, run one round for everything that runs; return what each request gained.

        A request for which something raises ends with ``finish_reason`` "error".  When a round is broken off by an
        interrupt, the requests that it left half-done are dropped and the others go on with the next one.
        """
        before = {run.id: len(run.context.tokens) for run in self.running}
        try:
            with few_plans(self._device):
                self._drop_stale()
                self._admit()
                self._read()
                emissions = self._round([run for run in self.running if run.started])
        except BaseException:
            self._recover(before)
            raise
        ended, self._ended = self._ended, []
        return [*emissions, *ended]

    def _round(self, runs: Sequence[Running]) -> list[tuple[Running, Emission]]:
        """One round of requests that are all between two rounds."""
        if not runs:
            return []
        turns = [turn for run in runs for turn in self._guard(self._begin, [Turn(run)])]
        began = now(self._device)
        self._begin_reading(runs)
        turns = self._guard(self._propose, turns)
        began += self._note_reading(turns)  # which is no part of the round, as the target's reading is none
        drafted = now(self._device)
        target_before, rows_before = self.target.run_s, self.target.run_rows
        turns = self._guard(self._score, turns)
        target_s = self.target.run_s - target_before
        scored = now(self._device)
        turns = self._guard(self._verify, turns)
        verified = now(self._device)
        turns = self._each(self._commit, turns)
        committed = now(self._device)
        turns = self._each(self._observe, turns)
        taken = now(self._device)
        # What the bookkeeping of the last round took is part of serving, and known only now.
        draft_s = drafted - began + taken - committed
        times = RoundTimes(draft_s, target_s, verified - scored, taken - began + self._bookkeeping_s)
        self.rounds, self.times = self.rounds + 1, RoundTimes(*map(sum, zip(self.times, times, strict=True)))
        self.reading.note_round(times.total_s)
        counts = (len(turns), self.target.run_rows - rows_before or sum(len(turn.tree) for turn in turns))
        turns = self._each(lambda alone: self._account(alone[0], counts, times), turns)
        self._bookkeeping_s = now(self._device) - taken
        if self.on_round is not None:
            self.on_round([t.run for t in turns], [t.tree for t in turns], [t.verdict for t in turns], times)
        turns = self._each(self._let_go, turns)
        return [(turn.run, turn.emission) for turn in turns]

    def _let_go(self, turns: Sequence[Turn]) -> None:
        """Let requests leave that have all their tokens."""
        for turn in turns:
            if turn.emission.finish_reason is not None:
                self.target.follow()
                if turn.run.weights_version != self.target.weights_version:
                    raise ValueError(CHANGED)
                self._leave(turn.run)

    def _begin(self, turns: Sequence[Turn]) -> None:
        """Nothing is drafted yet, unless a request brings its own tree: making that reads, and is no part of the
        round."""
        for turn in turns:
            run = turn.run
            turn.tree = TokenTree.root_only(run.context.root)
            if run.own is not None:
                began = now(self._device)
                self._drop_scratch(run)
                turn.tree, turn.rule = run.own.propose(self.target, run.context)
                turn.planned = False  # the controller has not decided it
                spent = now(self._device) - began
                run.stats.prefill_s += spent
                run.stats.total_s += spent

    def _propose(self, turns: Sequence[Turn]) -> None:
        open_turns = [turn for turn in turns if turn.rule is None]
        if self.drafter is None or self.controller is None or not open_turns:
            return
        chosen, budgets = [], []
        wanted = self.controller.budgets([turn.run.context for turn in open_turns])
        for turn, asked in zip(open_turns, wanted, strict=True):
            budget = self._as_asked(turn.run, asked)
            wider = self.drafter.minimum_budget(turn.run.context, budget)
            turn.planned = wider is asked
            budget = self._fit(turn.run, wider) if wider.max_depth > 0 else wider
            if budget.max_depth > 0 and budget.max_nodes > 0:
                chosen.append(turn)
                budgets.append(budget)
        if chosen:
            proposed = self.drafter.propose_batch([turn.run.context for turn in chosen], budgets)
            for turn, tree, budget in zip(chosen, proposed, budgets, strict=True):
                check_proposal(tree, turn.run.context, self.drafter, self.target, self._has_outside)
                turn.tree = truncate(tree, budget.deepest)

    def _begin_reading(self, runs: Sequence[Running]) -> None:
        """Drafters may read as much beside a round as the target does, and more than texts grow by meanwhile."""
        most = ALL if self.prefill_chunk is None else max(self._most_to_read(), 2 * BESIDE)
        self.pace.left, self.pace.spent_s = most, 0.0
        for run in runs:
            texts = DraftTexts.of(run.context)
            texts.waits = texts.has_read = False

    def _note_reading(self, turns: Sequence[Turn]) -> float:
        """Tell requests what drafters have read of their texts before they drafted; returns the seconds that it
        took."""
        spent = self.pace.spent_s
        for turn in turns:
            texts = DraftTexts.of(turn.run.context)
            stats = turn.run.stats
            stats.num_draft_prompt_tokens_computed = texts.num_read
            if texts.has_read:
                stats.prefill_s += spent
                stats.total_s += spent
            if texts.waits and not turn.tree.num_drafts:
                turn.planned = False  # the controller would learn that nothing is drafted
        return spent

    def _score(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._drop_scratch(turn.run)
        rows = self.target.forward([self._feed(turn.run, turn.tree) for turn in turns], self.taps)
        for turn, row in zip(turns, rows, strict=True):
            context = turn.run.context
            turn.scores = Scores(row.logits, turn.tree, context.tokens, context.sampler, row.taps)

    def _drop_scratch(self, run: Running) -> None:
        """What an attempt that failed has left."""
        if run.text.scratch_tokens and not run.text.provisional:
            self.target.commit(run.text, ())

    def _verify(self, turns: Sequence[Turn]) -> None:
        verifiers = [self._verifier_for(turn) for turn in turns]
        rngs = [turn.run.context.rng for turn in turns]
        verdicts = verify_batch(verifiers, [turn.scores for turn in turns], rngs)
        for turn, verdict in zip(turns, verdicts, strict=True):
            turn.verdict = verdict

    def _as_asked(self, run: Running, budget: Budget) -> Budget:
        """The controller's budget, or that of the member which the request has named."""
        name = run.request.drafter
        if name is None or self.drafter is None:
            return budget
        member = self._members.index(name)
        limits = self.drafter.limits.members[member]
        return Budget(limits.max_depth, limits.max_nodes, member=member)

    def _fit(self, run: Running, budget: Budget) -> Budget:
        """Never draft past the room that is left (one token of every round is the target's own), past what the
        target can read in one way, or past what the request allows."""
        depth = min(budget.max_depth, run.context.max_length - len(run.context.tokens) - 1)
        depth = min(depth, self.target.room(run.text) - 1)  # the root takes one
        if run.request.max_draft_tokens is not None:
            depth = min(depth, run.request.max_draft_tokens)
        if depth < budget.max_depth:
            budget = replace(budget, max_depth=max(depth, 0))
        return budget if budget.otherwise is None else replace(budget, otherwise=self._fit(run, budget.otherwise))

    def _feed(self, run: Running, tree: TokenTree) -> Feed:
        return Feed(run.text, tree.tokens, tree.parents)

    def _verifier_for(self, turn: Turn) -> Verifier:
        if turn.rule is not None:
            return turn.rule
        tree, scores = turn.tree, turn.scores
        kind = tree.kind
        if len(tree) == 1 and self.verifier is not None and kind not in self.verifier.kinds:
            kind = min(self.verifier.kinds)  # an empty draft is of any kind
        key = (kind, not tree.is_chain, scores.sampler.greedy, scores.sampler.fixed)
        found = self._automatic.get(key)
        if found is None:
            _, is_tree, greedy, fixed = key
            if self.verifier is None:
                found = auto_verifier(kind, is_tree, greedy, fixed)
            else:
                found = self.verifier
                name = self.drafter.name if self.drafter else "none"
                check_pair(kind, is_tree, found, name, self.allow_lossy, greedy)
            self._automatic[key] = found
        return found

    def _commit(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            run, tree, scores, verdict = turn.run, turn.tree, turn.scores, turn.verdict
            name = self._who(turn)
            if tree.num_drafts:
                run.stats.drafters[name] = run.stats.drafters.get(name, 0) + 1
            if run.request.explain:
                rule, tests = self._verifier_for(turn).name, run.context.rng.tests or []
                run.rounds.append(trace(len(run.rounds), tree, scores, verdict, name, rule, tests))
                run.context.rng.tests = []
            path = [0, *verdict.path]
            self.target.commit(run.text, path)
            tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
            stuck = (i for i in range(len(tokens)) if tuple(tokens[:i]) in scores.stuck)
            written = next(stuck, len(tokens)) if scores.stuck else len(tokens)
            kept, reason = run.stopper.push(tokens[:written])
            if reason is None and written < len(tokens):
                reason = end_where_nothing_follows(run, tokens[:written])
            last: Origin = "plain" if tree.num_drafts == 0 else "bonus" if verdict.next_is_bonus else "recovered"
            accepted: Origin = "accepted"
            origins = [*([accepted] * len(verdict.path)), last][:kept]
            self._extend(run, tokens[:kept], {name: rows[path] for name, rows in scores.taps.items()})
            run.origins.extend(origins)
            run.finish_reason = reason
            found: Sequence[TokenLogprobs] = ()
            if run.request.logprobs is not None:
                found = logprobs_of(scores.logits[path], tokens[:kept], run.request.logprobs)
                run.logprobs.extend(found)
            turn.emission = Emission(run.id, tokens[:kept], origins, reason, found, run.rounds[-1:])

    def _who(self, turn: Turn) -> str:
        """Who drafted: the request itself, or the member of a group, where there is one."""
        tree = turn.tree
        if turn.rule is not None:
            return turn.rule.name
        if self.drafter is None:
            return "none"
        members = self._members
        member = tree.drafters[-1] if tree.drafters else -1
        return members[member] if 0 <= member < len(members) else self.drafter.name

    def _extend(self, run: Running, tokens: Sequence[int], hidden: dict[str, Tensor]) -> None:
        context = run.context
        if len(context.tokens) == context.prompt_length:
            run.stats.first_token_s = monotonic() - run.arrived_s
        context.hidden_start = len(context.tokens) - 1
        context.tokens.extend(tokens)
        if context.sampler.noise is not None:
            context.sampler.noise.forget(len(context.tokens) - context.prompt_length)
        context.hidden = hidden
        if self.prefix_cache.keeps:
            run.add_states(hidden)

    def _observe(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if self.drafter is not None and turn.run.finish_reason is None:
                self.drafter.observe(turn.run.context, turn.tree, turn.scores, turn.verdict)

    def _account(self, turn: Turn, counts: tuple[int, int], times: RoundTimes) -> None:
        run, tree = turn.run, turn.tree
        accepted = len(turn.verdict.path)
        run.stats.add_round(tree.num_drafts, accepted, len(run.origins) - run.stats.num_new_tokens)
        run.stats.add_times(times)
        if run.request.explain:
            run.rounds[-1] = run.rounds[-1].timed(times)
            turn.emission = replace(turn.emission, rounds=run.rounds[-1:])
        theirs = self.drafter is not None and turn.rule is None and tree.num_drafts > 0
        start = self.drafter.predicted_from(run.context) if self.drafter is not None and theirs else None
        if start is not None:
            run.note_prediction(range(start, start + tree.num_drafts), accepted)
        if self.controller is not None and self.controller.watches and turn.planned:
            batch, nodes = counts
            member = tree.drafters[-1] if tree.drafters else -1
            record = StepRecord(
                run.id,
                len(tree),
                tree.num_drafts,
                accepted,
                batch,
                *times,
                self.rounds,
                nodes,
                member,
                max(tree.depths),
                len(self.waiting),
            )
            self.controller.observe(run.context, record)
