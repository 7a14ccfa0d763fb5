"""Text that the caller expects in the answer: the file being edited, the last version of a document.

The idea of OpenAI's "predicted outputs" (2024).  As long as the answer agrees with the prediction, its next tokens are
the draft; after a divergence, the tokens generated since locate the position again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from foretoken.core import Budget, Context, check_least
from foretoken.methods.drafters.base import BuildContext, Foresight, Traits
from foretoken.methods.drafters.sources import NOTHING, NgramSource, SourceDraft, SourceDrafter

LONGEST = 12
"""Maximum number of matching tokens that are compared."""

MOST_DOUBT = 4
"""Wrong next tokens, less the right ones since, from which the answer is held to have left the prediction.  As measured
on edited code and prose, 2 costs a round for every second change of one word, and 4 hardly any for changes of three."""


class PredictionSource(NgramSource):
    """Follows a prediction.

    Attributes:
        at: index of the prediction's token that comes next, if the answer keeps agreeing.
        lost: tokens generated since the last divergence, 0 while it agrees.
        doubt: wrong next tokens of the prediction, less the right ones since; at most ``MOST_DOUBT``.  Unlike ``lost``
            it outlasts a place that was found by a word that both texts happen to have.
        drafted: index where the last draft began.
    """

    def __init__(self, prediction: Sequence[int], prompt_length: int, most: int) -> None:
        super().__init__()
        self.prediction, self.prompt_length, self.most = list(prediction), prompt_length, most
        self.at = self.lost = self.doubt = self.drafted = 0
        self._trail: list[tuple[int, int, int]] = []  # ``at``, ``lost`` and ``doubt`` before every token of the answer
        self._positions: dict[int, list[int]] = {}
        for position, token in enumerate(self.prediction):
            self._positions.setdefault(token, []).append(position)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.text.append(token)
            if len(self.text) > self.prompt_length:
                self._trail.append((self.at, self.lost, self.doubt))
                self._follow(token)

    def rewind(self, length: int) -> None:
        """Restore the position in the prediction at that length."""
        answer = max(length - self.prompt_length, 0)
        if answer < len(self._trail):
            self.at, self.lost, self.doubt = self._trail[answer]
            del self._trail[answer:]
        super().rewind(length)

    def _follow(self, token: int) -> None:
        agrees = self.at < len(self.prediction) and self.prediction[self.at] == token
        self.doubt = max(self.doubt - 1, 0) if agrees else min(self.doubt + 1, MOST_DOUBT)
        if agrees and not self.lost:
            self.at += 1
            return
        # Assume that as many tokens were replaced as generated: right for a changed word, and the start of the search.
        self.at += 1
        self.lost += 1
        position = self._nearest()
        if position is not None:
            self.at, self.lost = position, 0

    def _nearest(self, candidates: int = 32) -> int | None:
        """Index in the prediction after the match of the last generated tokens: most matching tokens, then nearest.

        Checks ``candidates`` positions of the last token in each direction.
        """
        positions = self._positions.get(self.text[-1], [])
        middle = bisect_left(positions, self.at - 1)
        best: tuple[int, int] | None = None
        following = None
        for position in positions[max(0, middle - candidates) : middle + candidates]:
            distance = abs(position + 1 - self.at)
            matching = self._matching(position)
            near = distance <= 4 ** (matching + 1)  # 16 for one matching token, 64, 256, ...
            if near and (best is None or (matching, -distance) > best):
                best, following = (matching, -distance), position + 1
        return following

    def _matching(self, position: int) -> int:
        """Number of tokens up to ``position`` in the prediction that match the end of the answer."""
        count, end = 0, len(self.text) - 1
        longest = min(LONGEST, position + 1, len(self.text) - self.prompt_length)
        while count < longest and self.prediction[position - count] == self.text[end - count]:
            count += 1
        return count

    def propose(self, budget: Budget) -> SourceDraft:
        self.drafted = self.at
        tokens = self.prediction[self.at : self.at + min(self.most, budget.max_depth, budget.max_nodes)]
        return SourceDraft.copied(tokens, LONGEST if not self.lost else 1)


class NoPrediction(NgramSource):
    """A request without a prediction, which gets no draft."""

    def propose(self, budget: Budget) -> SourceDraft:
        return NOTHING


class PredictionDrafter(SourceDrafter):
    """Drafts from ``generate(..., prediction=...)``.

    Args:
        k: maximum draft tokens.
        default: prediction (token ids) of a request without one.
    """

    name = "prediction"
    traits = Traits(rewinds=True, learns=False, only_for="requests with prediction=...")

    def __init__(self, k: int = 16, default: Sequence[int] = ()) -> None:
        check_least(self.name, 1, k=k)
        self.max_depth, self.default = k, default
        self.vocab_size: int | None = None

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> PredictionDrafter:
        """Build from a spec, which takes no path because the text comes with each request."""
        if path is not None:
            raise ValueError("drafter 'prediction' takes no path: give the text with generate(..., prediction=...)")
        drafter = cls(**options)
        drafter.vocab_size = context.target.vocab_size
        return drafter

    @property
    def foresight(self) -> Foresight:
        return self

    def minimum_budget(self, context: Context, budget: Budget) -> Budget:
        """The budget unchanged, because a controller decides how much of the prediction is drafted."""
        return budget

    def predicted_from(self, context: Context) -> int | None:
        source = context.state.get(self)
        return source.drafted if isinstance(source, PredictionSource) else None

    def is_left(self, context: Context) -> bool:
        """Whether the answer seems to have left the prediction; its tokens may bring it back."""
        source = self.source(context)
        return isinstance(source, PredictionSource) and source.doubt >= MOST_DOUBT

    def open(self, context: Context) -> NgramSource:
        prediction = self.default if context.prediction is None else context.prediction
        if not prediction:
            return NoPrediction()
        bad = [t for t in prediction if t < 0 or (self.vocab_size is not None and t >= self.vocab_size)]
        if bad:
            raise ValueError(f"prediction token {bad[0]} is outside the vocabulary of {self.vocab_size}")
        return PredictionSource(prediction, context.prompt_length, self.max_depth)
