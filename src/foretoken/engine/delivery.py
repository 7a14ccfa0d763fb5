"""The last stages of a round: commit, delivery of tokens, and feedback to drafter and controller.

Output is truncated only here, by the request's :class:`~foretoken.engine.stopping.Stopper`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic

from torch import Tensor

from foretoken.core import HiddenStates, RoundTimes, StepRecord
from foretoken.engine.ends import end_where_nothing_follows
from foretoken.engine.logprobs import TokenLogprobs, logprobs_of
from foretoken.engine.request import Emission, Origin, Running, Turn
from foretoken.engine.requests import Requests
from foretoken.engine.trace import trace


class Delivery:
    """Delivers a round's results to an engine's requests; ``members`` are the names of a group's drafters."""

    def __init__(self, requests: Requests, members: Sequence[str]) -> None:
        self.requests, self.members = requests, members
        self.target, self.drafter, self.controller = requests.target, requests.drafter, requests.controller

    def commit(self, turns: Sequence[Turn]) -> None:
        """Keep the accepted path in the target's cache, and append the tokens to the output."""
        for turn in turns:
            run, tree, scores, verdict = turn.run, turn.tree, turn.scores, turn.verdict
            self._note_drafter(turn)
            path = [0, *verdict.path]
            self.target.commit(run.open_sequence, path)
            tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
            stuck = (i for i in range(len(tokens)) if tuple(tokens[:i]) in scores.stuck)
            num_allowed = next(stuck, len(tokens)) if scores.stuck else len(tokens)
            num_kept, reason = run.stopper.push(tokens[:num_allowed])
            if reason is None and num_allowed < len(tokens):
                reason = end_where_nothing_follows(run, tokens[:num_allowed])
            last: Origin = "plain" if tree.num_drafts == 0 else "bonus" if verdict.next_is_bonus else "recovered"
            accepted: Origin = "accepted"
            origins = [*([accepted] * len(verdict.path)), last][:num_kept]
            hidden = HiddenStates.of(scores.taps).at(path) if scores.taps else {}
            self._extend(run, tokens[:num_kept], hidden)
            run.origins.extend(origins)
            run.finish_reason = reason
            logprobs: Sequence[TokenLogprobs] = ()
            if run.request.logprobs is not None:
                logprobs = logprobs_of(scores.logits[path], tokens[:num_kept], run.request.logprobs)
                run.logprobs.extend(logprobs)
            turn.emission = Emission(run.id, tokens[:num_kept], origins, reason, logprobs, run.rounds[-1:])

    def _note_drafter(self, turn: Turn) -> None:
        run, tree, name = turn.run, turn.tree, self._drafter_of(turn)
        if tree.num_drafts:
            run.stats.drafters[name] = run.stats.drafters.get(name, 0) + 1
        if run.request.explain:
            tests = run.context.rng.tests or []
            run.rounds.append(trace(len(run.rounds), tree, turn.scores, turn.verdict, name, turn.verifier, tests))
            run.context.rng.tests = []

    def _drafter_of(self, turn: Turn) -> str:
        """Source of the round's draft: the request's rule, a group member, a known continuation, or the drafter."""
        if turn.rule is not None:
            return turn.rule.name
        if self.drafter is None:
            return "none"
        member = _member_of(turn)
        if 0 <= member < len(self.members):
            return self.members[member]
        return turn.run.context.source or self.drafter.name

    def _extend(self, run: Running, tokens: Sequence[int], hidden: Mapping[str, Tensor]) -> None:
        context = run.context
        if len(context.tokens) == context.prompt_length:
            run.stats.first_token_s = monotonic() - run.arrived_s
        context.hidden_start = len(context.tokens) - 1
        list.extend(context.tokens, tokens)  # the methods of ``tokens`` raise for all other code
        if context.sampler.noise is not None:
            context.sampler.noise.forget(len(context.tokens) - context.prompt_length)
        context.hidden = hidden
        if self.requests.prefix_cache.keeps:
            run.add_states(hidden)

    def teach(self, turns: Sequence[Turn]) -> None:
        """Show the drafter the verdicts of requests that it may draft for."""
        for turn in turns:
            run = turn.run
            may_draft = turn.rule is None and run.request.max_draft_tokens != 0
            if self.drafter is not None and may_draft and run.finish_reason is None:
                self.drafter.observe(run.context, turn.tree, turn.scores, turn.verdict)

    def account(self, turn: Turn, counts: tuple[int, int], times: RoundTimes) -> None:
        """Add the round to the request's statistics, and report it to the controller.

        Args:
            counts: requests of the round, and the rows that the target ran for them.
        """
        run, tree = turn.run, turn.tree
        emitted = len(run.origins) - run.stats.num_new_tokens
        accepted = min(len(turn.verdict.path), emitted)  # an end inside the draft cut the others away
        run.stats.add_round(tree.num_drafts, accepted, emitted, turn.was_asked)
        run.stats.add_times(times)
        if run.request.explain:
            run.rounds[-1] = run.rounds[-1].timed(times)
            turn.emission = replace(turn.emission, rounds=run.rounds[-1:])
        if self.drafter is not None and self.drafter.foresight is not None and turn.is_drafted:
            start = self.drafter.foresight.predicted_from(run.context)
            if start is not None:
                run.note_prediction(range(start, start + tree.num_drafts), accepted)
        if self.controller is not None and turn.planned:
            batch, nodes = counts
            record = StepRecord(
                run.id,
                len(tree),
                tree.num_drafts,
                len(turn.verdict.path),
                batch,
                *times,
                nodes,
                _member_of(turn),
                max(tree.depths),
                len(self.requests.waiting),
                turn.allowed,
            )
            self.controller.observe(run.context, record)


def _member_of(turn: Turn) -> int:
    """Index of the group member that drafted last; -1 without one."""
    return turn.tree.drafters[-1] if turn.tree.drafters else -1
