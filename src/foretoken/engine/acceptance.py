"""The verification stage of a round: chooses each draft's acceptance rule and applies it."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import Kind
from foretoken.core.outside import is_outside
from foretoken.engine.request import Request, Turn
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.batched import verify_batch
from foretoken.methods.verifiers.compatibility import auto_verifier, check_proposals
from foretoken.methods.verifiers.outside import check_verdict


class AcceptanceRules:
    """The acceptance rules of one engine.

    Attributes:
        is_outside: whether the chosen rule comes from outside the package. Its verdicts are checked. It decides request
            by request, because it may have state: after a failure it is not called again for the other requests.
    """

    def __init__(self, verifier: Verifier | None, drafter: Drafter | None, allow_lossy: bool) -> None:
        self.verifier, self.drafter, self.allow_lossy = verifier, drafter, allow_lossy
        self.is_outside = verifier is not None and is_outside(type(verifier))
        self._chosen: dict[tuple[Kind, bool, bool, bool], Verifier] = {}
        if verifier is not None:
            self._check(verifier, greedy=verifier.greedy_only)

    def check(self, request: Request) -> None:
        """Raise ``ValueError`` for sampling that the rule does not support."""
        if self.verifier is not None:
            self._check(self.verifier, greedy=request.params.temperature == 0)

    def _check(self, verifier: Verifier, greedy: bool) -> None:
        drafter = self.drafter
        if drafter is None:
            check_proposals([(min(verifier.kinds), False)], verifier, "none", self.allow_lossy, greedy)
        else:
            check_proposals(drafter.traits.proposals, verifier, drafter.name, self.allow_lossy, greedy)

    def races(self, request: Request) -> bool:
        """Whether draft and target share noise, so that the seed fixes the output. By default with a seed, or where the
        drafter prefers noise; an explicit verifier with its own draws does not use it."""
        if self.verifier is not None:
            return self.verifier.races
        return request.seed is not None or (self.drafter is not None and self.drafter.traits.prefers_noise)

    def verify(self, turns: Sequence[Turn]) -> None:
        """Set each turn's verdict: the accepted path and the token after it."""
        for turn in turns:
            turn.verifier = turn.rule or self._rule_for(turn)
        rngs = [turn.run.context.rng for turn in turns]
        verdicts = verify_batch([turn.verifier for turn in turns], [turn.scores for turn in turns], rngs)
        for turn, verdict in zip(turns, verdicts, strict=True):
            if self.is_outside and turn.rule is None:
                check_verdict(verdict, turn.tree, turn.verifier, turn.scores.logits.shape[-1])
            turn.verdict = verdict

    def _rule_for(self, turn: Turn) -> Verifier:
        tree, scores = turn.tree, turn.scores
        kind = tree.kind
        if len(tree) == 1 and self.verifier is not None and kind not in self.verifier.kinds:
            kind = min(self.verifier.kinds)  # an empty draft fits any kind
        key = (kind, not tree.is_chain, scores.sampler.greedy, scores.sampler.fixed)
        rule = self._chosen.get(key)
        if rule is None:
            _, is_tree, greedy, fixed = key
            if self.verifier is None:
                rule = auto_verifier(kind, is_tree, greedy, fixed)
            else:
                rule = self.verifier
                name = self.drafter.name if self.drafter else "none"
                check_proposals([(kind, is_tree)], rule, name, self.allow_lossy, greedy)
            self._chosen[key] = rule
        return rule
