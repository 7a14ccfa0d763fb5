"""Output constraints, independent of any grammar library.

A :class:`Constraint` limits the next token. A :class:`FiniteLanguage` lists all allowed outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from foretoken.core.processed import LogitsProcessor


class CannotGoOn(ValueError):
    """The request contradicts itself from some token on; only this request fails."""


class Constraint(Protocol):
    """A rule for a request's output.

    Attributes:
        processor: sets the probability of forbidden next tokens to 0. It must be a pure function of (output tokens [1,
            n] without the prompt, scores), because calls for different branches, and for other requests that share the
            constraint, alternate. It may mask every token after an output without a valid continuation.
        ends: token ids by which the constraint ends the output.
    """

    @property
    def ends(self) -> frozenset[int]:
        """See above."""

    @property
    def processor(self) -> LogitsProcessor:
        """See above."""

    def forced(self, output: Sequence[int]) -> list[int]:
        """Tokens that must follow these output tokens; empty where there is a choice."""

    def may_end(self, output: Sequence[int]) -> bool:
        """Whether these output tokens are complete."""


@dataclass(frozen=True)
class FiniteLanguage:
    """All allowed outputs as one token tree, from which a whole output is drawn.

    A constraint masks forbidden next tokens, so the model's probabilities of the remaining tokens ignore where these
    lead. A string of the language is drawn with the model's probability of the whole string instead. The output
    therefore has the model's distribution, conditioned on the language.

    Each string is one token sequence followed by the end of text, which makes "no" a different output from "not now".

    Attributes:
        tokens: [N] token ids; node 0 is the end of the prompt and has no token (-1).
        parents: [N] parent of each node, -1 for node 0; nodes are in preorder.
        whole: [N] whether a string of the language ends at the node.
        ends: token ids by which the grammar ends the output, in addition to the model's.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    whole: tuple[bool, ...]
    ends: frozenset[int] = frozenset()

    @classmethod
    def of(cls, strings: Iterable[Sequence[int]], ends: Iterable[int] = ()) -> FiniteLanguage:
        """The language of these token sequences. Raises ``ValueError`` if there are none, or if one contains a token
        that ends the text."""
        ordered, last = sorted({tuple(string) for string in strings}), frozenset(ends)
        if not ordered:
            raise ValueError("the language is empty: give at least one string")
        bad = next((token for string in ordered for token in string if token in last), None)
        if bad is not None:
            raise ValueError(f"a string of the language holds token {bad}, which ends the text")
        tokens, parents, whole = [-1], [-1], [False]
        path: list[int] = [0]  # nodes of the previous string, whose prefix the next one shares
        before: tuple[int, ...] = ()
        for string in ordered:
            shared = next((i for i, (a, b) in enumerate(zip(before, string, strict=False)) if a != b), len(before))
            del path[shared + 1 :]
            for token in string[shared:]:
                parents.append(path[-1])
                path.append(len(tokens))
                tokens.append(token)
                whole.append(False)
            whole[path[-1]], before = True, string
        return cls(tuple(tokens), tuple(parents), tuple(whole), last)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def longest(self) -> int:
        """Length of the longest string in tokens, without the end."""
        depths = [0] * len(self)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return max(depths)

    def string(self, node: int) -> list[int]:
        """The tokens on the path to a node."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    @property
    def strings(self) -> list[list[int]]:
        """The tokens of every string, in the order of their last nodes."""
        return [self.string(node) for node, is_whole in enumerate(self.whole) if is_whole]


OutputRule = Constraint | FiniteLanguage
"""Rule for an output."""
