"""What an output must look like, so that engine and drafters need no grammar library.

A :class:`Constraint` says token by token what may follow.  A :class:`FiniteLanguage` is all that may be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from foretoken.core.processed import LogitsProcessor


class CannotGoOn(ValueError):
    """What was asked for contradicts itself from some token of the text on; the request alone is to blame."""


class Constraint(Protocol):
    """A rule for a request's output.

    Attributes:
        processor: gives tokens that may not follow the output so far no probability; a pure function of (output
            tokens [1, n] without the prompt, scores), since it is called for the nodes of different branches, and for
            other requests between them where one constraint is given to several.  After an output of which it knows no
            continuation it may leave nothing.
        ends: ids by which it says that nothing may follow; each of them ends the text.
    """

    @property
    def ends(self) -> frozenset[int]:
        """See above."""

    @property
    def processor(self) -> LogitsProcessor:
        """See above."""

    def forced(self, output: Sequence[int]) -> list[int]:
        """Tokens that must follow these output tokens; none where there is a choice."""

    def may_end(self, output: Sequence[int]) -> bool:
        """Whether these output tokens are all that was asked for."""


@dataclass(frozen=True)
class FiniteLanguage:
    """All the outputs that are allowed, as one tree of tokens: the output is drawn from it as a whole.

    A constraint masks: it takes away the tokens that may not come next, and the model's probabilities of those that are
    left do not know what they lead to.  From a language a string is drawn with the probability that the model gives to
    all of it, so the output has the model's distribution on condition that it is a string of the language.

    Every string is one sequence of tokens, and the end of the text follows it: that is what makes "no" an output of
    its own beside "not now".

    Attributes:
        tokens: [N] token ids; node 0 stands for the text before the output and has none (-1).
        parents: [N] the node before each, -1 for node 0; a node comes before all nodes below it, and what is below a
            node follows it directly (preorder).
        whole: [N] whether a string of the language ends with the node.
        ends: ids by which the grammar says that nothing may follow; those of the model count as well.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    whole: tuple[bool, ...]
    ends: frozenset[int] = frozenset()

    @classmethod
    def of(cls, strings: Iterable[Sequence[int]], ends: Iterable[int] = ()) -> FiniteLanguage:
        """The language of these strings, each given by its tokens.  Raises ``ValueError`` where there are none, or one
        holds a token that ends the text."""
        ordered, last = sorted({tuple(string) for string in strings}), frozenset(ends)
        if not ordered:
            raise ValueError("the language is empty: give at least one string")
        bad = next((token for string in ordered for token in string if token in last), None)
        if bad is not None:
            raise ValueError(f"a string of the language holds token {bad}, which ends the text")
        tokens, parents, whole = [-1], [-1], [False]
        path: list[int] = [0]  # nodes of the string before, which shares its beginning with the next one
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
        """Tokens of the longest string, without the end."""
        depths = [0] * len(self)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return max(depths)

    def string(self, node: int) -> list[int]:
        """The tokens down to a node."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    @property
    def strings(self) -> list[list[int]]:
        """The tokens of every string, in the order of the nodes with which they end."""
        return [self.string(node) for node, is_whole in enumerate(self.whole) if is_whole]


OutputRule = Constraint | FiniteLanguage
"""What an output may be told to look like."""
