"""Grammar constraint of one request: a matcher that follows any prefix.

The draft model and the target query the nodes of a tree in any order.  The matcher is at one position of the output;
for another it rolls back to the common prefix and advances again, which takes microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from foretoken.core.constraints import CannotGoOn


class GrammarConstraint:
    """A :class:`foretoken.core.constraints.Constraint` from a compiled grammar at its beginning."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self.ends = matcher, vocab_size, ends
        self._text: list[int] = []
        self._lock = threading.Lock()

    @property
    def processor(self) -> GrammarConstraint:
        """The constraint itself."""
        return self

    def fresh(self) -> GrammarConstraint:
        """The same grammar at its beginning for another request, without compiling it again; for a constraint that no
        request has used yet."""
        return GrammarConstraint(self._matcher.deep_copy(), self._vocab_size, self.ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] in which tokens that may not follow the output [1, n] are impossible.

        An output that breaks the grammar (a node below a refused draft token) gets the end of text: its distribution is
        never sampled, but must be valid.  For an output that keeps to the grammar no token may remain, if other
        processors have excluded all that the grammar allows.  Raises :class:`CannotGoOn` if following the grammar
        exceeds the limits, which does not mean that the output is wrong.
        """
        with self._lock:
            fits, allowed = self._allowed(input_ids[0].tolist())
        mask = torch.from_numpy(allowed).to(scores.device)
        width = min(scores.shape[-1], len(allowed))
        masked = torch.full_like(scores, -torch.inf)
        masked[:, :width] = torch.where(mask[:width], scores[:, :width], -torch.inf)
        if not fits:
            masked[:, min((end for end in self.ends if end < scores.shape[-1]), default=0)] = 0.0
        return masked

    def forced(self, output: Sequence[int]) -> list[int]:
        """Tokens that must follow, in the tokenizer's spelling; empty if there is a choice."""
        with self._lock:
            if not self._go_to(list(output)) or self._matcher.is_stopped():
                return []
            return [int(token) for token in self._matcher.compute_ff_tokens()]

    def fits(self, output: Sequence[int], drafts: Sequence[int]) -> int:
        """Number of draft tokens that may follow in sequence; the grammar refuses the rest."""
        with self._lock:
            if not self._go_to(list(output)):
                return 0
            if self._matcher.is_stopped():
                return int(bool(drafts) and drafts[0] in self.ends)
            return int(self._matcher.validate_tokens(list(drafts)))

    def may_end(self, output: Sequence[int]) -> bool:
        """Whether the output tokens complete the grammar."""
        with self._lock:
            return self._go_to(list(output)) and bool(self._matcher.is_stopped() or self._matcher.is_accepting())

    def _allowed(self, output: list[int]) -> tuple[bool, np.ndarray]:
        """Whether the output keeps to the grammar, and a mask [vocab_size] of the tokens that may follow."""
        if not self._go_to(output):
            return False, np.zeros(self._vocab_size, dtype=bool)
        if self._matcher.is_stopped():
            allowed = np.zeros(self._vocab_size, dtype=bool)
            allowed[[end for end in self.ends if end < self._vocab_size]] = True
            return True, allowed
        bits = self._matcher.compute_bitmask()
        self._check()
        if int.from_bytes(bits, "little").bit_count() == 1:
            self._check_only(bits)
        every = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
        return True, every[: self._vocab_size].astype(bool)

    def _check_only(self, bits: bytes) -> None:
        """Raise ``CannotGoOn`` for a forced special token that llguidance does not accept: it spells forced text as the
        tokenizer does, special tokens included."""
        token = int.from_bytes(bits, "little").bit_length() - 1
        if token not in self.ends and not self._matcher.validate_tokens([token]):
            raise CannotGoOn(f"the grammar spells the special token {token} by its text: write <[{token}]> instead")

    def _go_to(self, output: list[int]) -> bool:
        """Move to the end of the output; false if the grammar does not allow it."""
        same = common_length(self._text, output)
        self._check()
        if same < len(self._text):
            if not self._matcher.rollback(len(self._text) - same):
                raise RuntimeError(f"the grammar cannot be rolled back: {self._matcher.get_error()[:200]}")
            del self._text[same:]
        new = output[same:]
        consumed = self._matcher.try_consume_tokens(new) if new else 0
        self._check()
        self._text.extend(new[:consumed])
        return consumed == len(new)

    def _check(self) -> None:
        """Raise ``CannotGoOn`` on an error: it looks like the end of text, and an interrupted output must not pass for
        complete."""
        if self._matcher.is_error():
            raise CannotGoOn(f"the grammar cannot be advanced: {reason_of(self._matcher)}")


def reason_of(matcher: LLMatcher) -> str:
    """Error of a matcher in one line."""
    return " ".join(matcher.get_error().split())[:200]


def common_length(first: list[int], second: list[int]) -> int:
    """Length of the common prefix, nearly always the whole shorter list, which is checked first."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
