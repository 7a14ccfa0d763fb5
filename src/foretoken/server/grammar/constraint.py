"""One request's grammar: a matcher that follows whatever prefix it is asked about.

The nodes of a tree are asked about in any order, by the draft model and by the target.  The matcher stands at one
place of the text; for another one it goes back to the common beginning and forward again, which costs microseconds.
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
    """See :class:`foretoken.core.constraints.Constraint`; the matcher is a compiled grammar, at its beginning."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self.ends = matcher, vocab_size, ends
        self._text: list[int] = []
        self._lock = threading.Lock()

    @property
    def processor(self) -> GrammarConstraint:
        """The constraint itself."""
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] in which tokens that may not follow the output [1, n] are impossible.

        An output that breaks the grammar (a node below a draft that was refused) gets the end of the text: its
        distribution is never drawn from, but it must be one.  One that keeps to the grammar may be left with nothing,
        where others have ruled out what the grammar asks for.  Raises :class:`CannotGoOn` where following the grammar
        costs more than is allowed, which says nothing about the text so far.
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
        """Tokens that must follow, in the tokenizer's own spelling; none where there is a choice."""
        with self._lock:
            if not self._go_to(list(output)) or self._matcher.is_stopped():
                return []
            return [int(token) for token in self._matcher.compute_ff_tokens()]

    def fits(self, output: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the drafts may follow one after the other; from there on the grammar refuses them."""
        with self._lock:
            if not self._go_to(list(output)):
                return 0
            if self._matcher.is_stopped():
                return int(bool(drafts) and drafts[0] in self.ends)
            return int(self._matcher.validate_tokens(list(drafts)))

    def may_end(self, output: Sequence[int]) -> bool:
        """Whether the grammar is complete with these output tokens."""
        with self._lock:
            return self._go_to(list(output)) and bool(self._matcher.is_stopped() or self._matcher.is_accepting())

    def _allowed(self, output: list[int]) -> tuple[bool, np.ndarray]:
        """Whether the output keeps to the grammar, and [vocab_size] whether each token may follow."""
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
        """llguidance spells forced text as the tokenizer does, so with special tokens, which it then does not take."""
        token = int.from_bytes(bits, "little").bit_length() - 1
        if token not in self.ends and not self._matcher.validate_tokens([token]):
            raise CannotGoOn(f"the grammar spells the special token {token} by its text: write <[{token}]> instead")

    def _go_to(self, output: list[int]) -> bool:
        """Move to the end of the output; false where the grammar does not allow it."""
        same = common_length(self._text, output)
        self._check()
        if same < len(self._text):
            if not self._matcher.rollback(len(self._text) - same):
                raise RuntimeError(f"the grammar cannot be followed back: {self._matcher.get_error()[:200]}")
            del self._text[same:]
        new = output[same:]
        consumed = self._matcher.try_consume_tokens(new) if new else 0
        self._check()
        self._text.extend(new[:consumed])
        return consumed == len(new)

    def _check(self) -> None:
        """An error of the matcher looks like the end of the text: an output that breaks off must not pass for one."""
        if self._matcher.is_error():
            raise CannotGoOn(f"the grammar cannot be followed any further: {reason_of(self._matcher)}")


def reason_of(matcher: LLMatcher) -> str:
    """What is wrong with a matcher, in one line."""
    return " ".join(matcher.get_error().split())[:200]


def common_length(first: list[int], second: list[int]) -> int:
    """Length of the common beginning; nearly always all of the shorter one, which is quick to see."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
