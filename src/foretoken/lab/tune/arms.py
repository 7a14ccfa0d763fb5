"""The arms of a race: a target with a drafter and a controller, run round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.core import RoundTimes, TokenTree, Verdict
from foretoken.core.costs import RoundCosts
from foretoken.core.noise import unseeded_from
from foretoken.engine.request import Running
from foretoken.lab.tune.race import Round
from foretoken.llm import assemble
from foretoken.methods.drafters.base import Drafter
from foretoken.models.base import LanguageModel


class Arm:
    """One way of decoding; see :class:`~foretoken.lab.tune.race.Racer`.

    Args:
        target: the model.
        drafter: what guesses; ``None`` decodes plainly.
        controller: its spec.
        new_tokens: most tokens of an answer, which ends at the model's end of text.
        temperature: 0 is greedy.
        seed: of the first sampled answer; the next ones count on.
        costs: what the controller starts from.

    Raises:
        ValueError: parts that do not fit each other.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        controller: str = "constant",
        new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        costs: RoundCosts | None = None,
    ) -> None:
        self.drafter = drafter
        self._llm = assemble(target, drafter, "auto", controller, None)
        self._engine = self._llm.engine
        self._engine.on_round = self._note
        if costs is not None and self._engine.controller is not None:
            self._engine.controller.start_from(costs)
        self._options: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": temperature}
        self._new_tokens, self._room = new_tokens, new_tokens
        self._seed, self._seen = seed, Round(0, 1, 0, 0, 0.0, 0.0)

    def begin(self, prompt: Sequence[int]) -> None:
        """Take the next prompt."""
        with unseeded_from(self._seed):  # a seed of its own would couple the drafts, and other ones be the best
            self._engine.add(self._llm.request(list(prompt), **self._options))
        self._seed, self._room = self._seed + 1, self._new_tokens

    def advance(self) -> Round | None:
        """Run one round; ``None`` when the answer has ended.

        Raises:
            ValueError: the round failed.
        """
        if not self._engine.busy:
            return None
        ((_, emission),) = self._engine.step()
        if emission.error is not None:
            raise emission.error
        written, room = len(emission.token_ids), self._room
        self._room -= written
        return self._seen._replace(written=written, room=room, tokens=tuple(emission.token_ids))

    def cancel(self) -> None:
        """Drop what is left of the answer."""
        self._engine.close()

    def _note(
        self, runs: Sequence[Running], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: RoundTimes
    ) -> None:
        for tree, verdict in zip(trees, verdicts, strict=True):
            self._seen = Round(0, len(tree), max(tree.depths), len(verdict.path), times.draft_s, times.total_s)
