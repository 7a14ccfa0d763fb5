"""The loop: one round serves every running request, knows only protocols, and is the same for every method.

    budget = controller.budget(request)
    tree   = drafter.propose(context, budget)
    scores = target.forward(tree)
    verdict = verifier.verify(tree, scores, rng)
    target.commit(verdict.path); drafter.observe(...); controller.observe(...)
    emit

Plain decoding is the same loop with an empty draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from foretoken.controllers.base import Controller
from foretoken.drafters.base import Drafter
from foretoken.engine.request import Emission, Origin, Request, Running
from foretoken.engine.stopping import Stopper
from foretoken.models.base import CapabilityError, Feed, LanguageModel
from foretoken.models.clock import now
from foretoken.noise import Noise, check_seed, random_seed
from foretoken.sampling import Sampler
from foretoken.trees.operations import truncate
from foretoken.types import Budget, Context, Kind, Rng, Scores, StepRecord, TokenTree, Verdict
from foretoken.verifiers.base import Verifier
from foretoken.verifiers.pairing import auto_verifier, check_pair, check_proposals
from foretoken.verifiers.together import verify_together

NOTHING = Budget(max_depth=0, max_nodes=0)

OnRound = Callable[[Sequence[Running], Sequence[TokenTree], Sequence[Verdict], tuple[float, float, float, float]], None]
"""Told of every round: the requests, their trees and verdicts, and (draft_s, target_s, verify_s, total_s)."""


class Engine:
    """Serves requests over one target.

    Args:
        target: the model whose law is kept.
        drafter: what guesses, or ``None`` for plain decoding.
        verifier: the acceptance rule, or ``None`` to choose the best lossless one for every tree.
        controller: how much to guess; needed with a drafter.
        tokenizer: for stop strings.
        allow_lossy: accept a verifier that changes the target's law.
        max_batch: most requests that run together; others wait.
        on_round: told of every finished round, for benchmarks and displays; its time is in no round's.

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
        on_round: OnRound | None = None,
    ) -> None:
        self.target, self.drafter, self.verifier, self.controller = target, drafter, verifier, controller
        self.tokenizer, self.allow_lossy, self.max_batch = tokenizer, allow_lossy, max_batch
        self.on_round = on_round
        self.waiting: list[tuple[int, Request]] = []
        self.running: list[Running] = []
        self._ids = self._rounds = 0
        self._books_s = 0.0
        self._device = getattr(target, "device", None)  # whose work the times of a round wait for
        self._automatic: dict[tuple[Kind, bool, bool, bool], Verifier] = {}
        if drafter is not None:
            self._check_target(drafter)
            if controller is None:
                raise ValueError("a drafter needs a controller, for example ConstantController()")
            controller.attach(drafter.limits)
        if verifier is not None:
            self._check_verifier(verifier, greedy=verifier.greedy_only)
        if controller is not None and not controller.drafts:
            self.drafter = None  # plain decoding: not even the drafter's prefill runs
        self.taps: Sequence[str] = self.drafter.taps if self.drafter is not None else ()

    def _check_verifier(self, verifier: Verifier, greedy: bool) -> None:
        drafter = self.drafter
        if drafter is None:
            check_pair(min(verifier.kinds), False, verifier, "none", self.allow_lossy, greedy)
        else:
            check_proposals(drafter.proposals, verifier, drafter.name, self.allow_lossy, greedy)

    def _check_target(self, drafter: Drafter) -> None:
        offered = self.target.capabilities
        needed = ["rollback"]
        if drafter.draws_trees:
            needed += ["tree_mask", "keep_path"]
        if drafter.taps:
            needed.append("taps")
        if drafter.runs_target:
            needed.append("layer_windows")
        for name in needed:
            if not getattr(offered, name):
                reason = offered.missing.get(name, f"the target lacks {name}")
                raise CapabilityError(f"drafter {drafter.name!r} needs a target with {name}: {reason}")

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queue a request; it joins before the next round.  Returns its id.

        Raises:
            ValueError: an empty prompt, one that leaves no room in the context, ``max_new_tokens`` below 1, token ids
                outside the vocabulary, a seed that is none, or sampling that the verifier is not right for.
        """
        if request.seed is not None:
            check_seed(request.seed)
        room = self.target.context_length - len(request.prompt)
        if not request.prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if room < 1:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens and the model's context is {self.target.context_length}: "
                "shorten the prompt"
            )
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
        if request.max_new_tokens > room:
            raise ValueError(
                f"max_new_tokens={request.max_new_tokens} goes past the model's context: the prompt has "
                f"{len(request.prompt)} tokens, so at most {room} of {self.target.context_length} are left"
            )
        for what, ids in (("prompt token", request.prompt), ("logit_bias token", request.params.logit_bias)):
            bad = [t for t in ids if not 0 <= t < self.target.vocab_size]
            if bad:
                raise ValueError(f"{what} {bad[0]} is outside the vocabulary of {self.target.vocab_size}")
        if self.verifier is not None:
            self._check_verifier(self.verifier, greedy=request.params.temperature == 0)
        self._stopper(request)  # checks the stop strings
        self._ids += 1
        self.waiting.append((self._ids, request))
        return self._ids

    def cancel(self, request_id: int) -> None:
        """Drop a request, waiting or running."""
        self.waiting = [(i, r) for i, r in self.waiting if i != request_id]
        for run in [r for r in self.running if r.id == request_id]:
            self._leave(run)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def holds(self, request_id: int) -> bool:
        """Whether a request is waiting or running."""
        return any(i == request_id for i, _ in self.waiting) or any(run.id == request_id for run in self.running)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            run = self._joined(*self.waiting.pop(0))
            try:
                self._prefill(run)
            except BaseException:
                self._leave(run)
                raise

    def _joined(self, request_id: int, request: Request) -> Running:
        tokens = list(request.prompt)
        seed = self._seed(request)
        noise = Noise(seed) if seed is not None and self._races(request) else None
        sampler = Sampler(request.params, len(tokens), noise)
        context = Context(request_id, tokens, len(tokens), sampler, Rng(seed or 0), prediction=request.prediction)
        context.max_length = len(tokens) + request.max_new_tokens
        sequence = context.sequence = self.target.open()
        run = Running(request, context, sequence, self._stopper(request), seed=seed)
        self.running.append(run)
        return run

    @staticmethod
    def _seed(request: Request) -> int | None:
        """Given, or drawn; none for a greedy request."""
        if request.params.temperature == 0:
            return None
        return random_seed() if request.seed is None else request.seed

    def _races(self, request: Request) -> bool:
        """Whether draft and target share noise: then the seed fixes the text.  By default where a seed was given, or
        where it is accepted most; a verifier with draws of its own that was asked for has no use for it."""
        if self.verifier is not None:
            return self.verifier.races
        return request.seed is not None or (self.drafter is not None and self.drafter.prefers_noise)

    def _stopper(self, request: Request) -> Stopper:
        eos = frozenset() if request.ignore_eos else self.target.eos_token_ids
        return Stopper(eos, request.stop, request.max_new_tokens, self.tokenizer)

    def _prefill(self, run: Running) -> None:
        began = now(self._device)
        # The last prompt token is the first root: the prefill needs no logits and no special first step.
        run.context.hidden = self.target.prefill(run.sequence, run.context.tokens[:-1], self.taps)
        if self.drafter is not None:
            self.drafter.start(run.context)
        run.stats.prefill_s = run.stats.total_s = now(self._device) - began

    def _leave(self, run: Running) -> None:
        self.running.remove(run)
        self.target.release(run.sequence)
        if self.drafter is not None:
            self.drafter.finish(run.context)
        if self.controller is not None:
            self.controller.finish(run.context)

    def close(self) -> None:
        """Drop everything (also what an interrupted round left behind)."""
        self.waiting.clear()
        for run in list(self.running):
            self._leave(run)

    # -- one round ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[tuple[Running, Emission]]:
        """Admit what waits, run one round for everything that runs, return what each request gained.

        When a round is broken off (an interrupt, bad logits), the requests that it left half-done are dropped and the
        others go on with the next one.
        """
        before = {run.id: len(run.context.tokens) for run in self.running}
        try:
            self._admit()
            return self._round(list(self.running))
        except BaseException:
            self._recover(before)
            raise

    def _recover(self, before: Mapping[int, int]) -> None:
        """Bring every request back to the state between two rounds, or drop it."""
        for run in list(self.running):
            try:
                if run.sequence.scratch_tokens:
                    self.target.commit(run.sequence, ())
            except CapabilityError:  # a cache that cannot be rolled back
                self._leave(run)
                continue
            have = len(run.context.tokens)
            if len(run.sequence.tokens) != have - 1 or before.get(run.id, have) != have:
                self._leave(run)

    def _round(self, runs: Sequence[Running]) -> list[tuple[Running, Emission]]:
        """One round of requests that are all between two rounds."""
        if not runs:
            return []
        began = now(self._device)
        trees = self._propose(runs)
        drafted = now(self._device)
        target_before, rows_before = self.target.run_s, self.target.run_rows
        rows = self.target.forward([self._feed(r, t) for r, t in zip(runs, trees, strict=True)], self.taps)
        target_s = self.target.run_s - target_before
        scored = now(self._device)
        all_scores = [
            Scores(row.logits, tree, run.context.tokens, run.context.maker, row.taps)
            for run, tree, row in zip(runs, trees, rows, strict=True)
        ]
        verifiers = [self._verifier_for(tree, scores) for tree, scores in zip(trees, all_scores, strict=True)]
        verdicts = verify_together(verifiers, all_scores, [run.context.rng for run in runs])
        verified = now(self._device)
        emissions = [
            (run, self._commit(run, tree, scores, verdict))
            for run, tree, scores, verdict in zip(runs, trees, all_scores, verdicts, strict=True)
        ]
        observed_s = self._observe(runs, trees, all_scores, verdicts)
        taken = now(self._device)
        # What the books of the last round took is part of serving, and known only now.
        times = (drafted - began + observed_s, target_s, verified - scored, taken - began + self._books_s)
        self._rounds += 1
        counts = (len(runs), self.target.run_rows - rows_before or sum(map(len, trees)))
        for run, tree, verdict in zip(runs, trees, verdicts, strict=True):
            self._account(run, tree, verdict, counts, times)
        self._books_s = now(self._device) - taken
        if self.on_round is not None:
            self.on_round(runs, trees, verdicts, times)
        for run, emission in emissions:
            if emission.finish_reason is not None:
                self._leave(run)
        return emissions

    def _propose(self, runs: Sequence[Running]) -> list[TokenTree]:
        trees: list[TokenTree | None] = [None] * len(runs)
        if self.drafter is not None and self.controller is not None:
            chosen, budgets = [], []
            wanted = self.controller.budgets([run.context for run in runs])
            for i, (run, budget) in enumerate(zip(runs, wanted, strict=True)):
                budget = self._fit(run, budget) if budget.max_depth > 0 else budget
                if budget.max_depth > 0 and budget.max_nodes > 0:
                    chosen.append(i)
                    budgets.append(budget)
            proposed = self.drafter.propose_batch([runs[i].context for i in chosen], budgets) if chosen else []
            for i, tree, budget in zip(chosen, proposed, budgets, strict=True):
                trees[i] = truncate(tree, budget.deepest)
        return [tree or TokenTree.root_only(run.context.root) for tree, run in zip(trees, runs, strict=True)]

    def _fit(self, run: Running, budget: Budget) -> Budget:
        """Never draft past the room that is left: one token of every round is the target's own."""
        depth = min(budget.max_depth, run.context.max_length - len(run.context.tokens) - 1)
        if depth < budget.max_depth:
            budget = replace(budget, max_depth=max(depth, 0))
        return budget if budget.otherwise is None else replace(budget, otherwise=self._fit(run, budget.otherwise))

    def _feed(self, run: Running, tree: TokenTree) -> Feed:
        if tree.tokens[0] != run.context.root:
            raise ValueError(f"the drafter's tree starts with token {tree.tokens[0]}, not with the last committed one")
        return Feed(run.sequence, tree.tokens, tree.parents)

    def _verifier_for(self, tree: TokenTree, scores: Scores) -> Verifier:
        kind = tree.kind
        if len(tree) == 1 and self.verifier is not None and kind not in self.verifier.kinds:
            kind = min(self.verifier.kinds)  # an empty draft is of any kind
        key = (kind, not tree.is_chain, scores.maker.greedy, scores.maker.fixed)
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

    def _commit(self, run: Running, tree: TokenTree, scores: Scores, verdict: Verdict) -> Emission:
        path = [0, *verdict.path]
        self.target.commit(run.sequence, path)
        tokens = [tree.tokens[node] for node in verdict.path]
        tokens.append(verdict.next_token)
        kept, reason = run.stopper.push(tokens)
        last: Origin = "plain" if tree.num_drafts == 0 else "bonus" if verdict.next_is_bonus else "recovered"
        accepted: Origin = "accepted"
        origins = [*([accepted] * len(verdict.path)), last][:kept]
        context = run.context
        context.hidden_start = len(context.tokens) - 1
        context.tokens.extend(tokens[:kept])
        if context.maker.noise is not None:
            context.maker.noise.forget(len(context.tokens) - context.prompt_length)
        context.hidden = {name: rows[path] for name, rows in scores.taps.items()}
        run.origins.extend(origins)
        run.finish_reason = reason
        return Emission(run.id, tokens[:kept], origins, reason)

    def _observe(
        self, runs: Sequence[Running], trees: Sequence[TokenTree], scores: Sequence[Scores], verdicts: Sequence[Verdict]
    ) -> float:
        if self.drafter is None:
            return 0.0
        began = now(self._device)
        for run, tree, score, verdict in zip(runs, trees, scores, verdicts, strict=True):
            if run.finish_reason is None:
                self.drafter.observe(run.context, tree, score, verdict)
        return now(self._device) - began

    def _account(
        self,
        run: Running,
        tree: TokenTree,
        verdict: Verdict,
        counts: tuple[int, int],
        times: tuple[float, float, float, float],
    ) -> None:
        draft_s, target_s, verify_s, total_s = times
        accepted = len(verdict.path)
        run.stats.add_round(tree.num_drafts, accepted, len(run.origins) - run.stats.num_new_tokens)
        run.stats.add_times(draft_s, target_s, verify_s, total_s)
        if self.drafter is not None and self.drafter.counts_predictions:
            run.stats.num_prediction_tokens += tree.num_drafts
            run.stats.num_accepted_prediction_tokens += accepted
        if self.controller is not None and self.controller.watches:
            batch, nodes = counts
            member = tree.drafters[-1] if tree.drafters else -1
            record = StepRecord(
                run.id,
                len(tree),
                tree.num_drafts,
                accepted,
                batch,
                *times,
                self._rounds,
                nodes,
                member,
                max(tree.depths),
                len(self.waiting),
            )
            self.controller.observe(run.context, record)
