"""Encoder-decoder models as target or draft model: the encoder reads the prompt, the decoder writes the answer.

The engine and drafters see an ordinary sequence: the prompt, then the tokens every answer starts with
(``answer_start``), then the completion.  The last prompt token is thus the decoder's first, and ``ngram`` can also copy
from the encoder's input.  A sequence knows how many of its tokens belong to the encoder (``num_inputs``); they take no
slots.  See ``docs/encoder_decoder.md``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import CapabilityError, Feed, LanguageModel, Rows, SequenceState
from foretoken.models.cache.cross import Encoded
from foretoken.models.cache.masks import RowPlan
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.checks.answer_trial import check_answers
from foretoken.models.forward.decoding import DecoderForward
from foretoken.models.network.alone import alone, lock_of
from foretoken.models.network.watch import Watch
from foretoken.models.runner import SCRATCH_ROOM, TreeRunner

UNKNOWN = -1


@dataclass
class AnswerState(SequenceState):
    """A sequence whose first tokens are an encoder's input.

    Attributes:
        num_inputs: number of encoder tokens; -1: still unknown.
        encoded: the encoder's output, once all of them are there.
    """

    num_inputs: int = UNKNOWN
    encoded: Encoded | None = field(default=None, repr=False, compare=False)

    @property
    def num_committed(self) -> int:
        """Slots of committed tokens; encoder tokens have none."""
        return max(0, len(self.tokens) - max(self.num_inputs, 0)) if self.encoded is not None else 0

    @property
    def num_slots(self) -> int:
        return self.num_committed + len(self.scratch_tokens)


class EncoderDecoderModel(TreeRunner):
    """Runs an encoder-decoder ``PreTrainedModel`` over prompts and trees of their answers.

    Args:
        model: a model with a vocabulary projection and a decoder with T5's kind of positions.
        exact: see :class:`~foretoken.models.huggingface.HuggingFaceModel`.

    Raises:
        CapabilityError: the decoder has other positions or no start token, or its logits differ from those of its own
            forward.
    """

    forwards: DecoderForward

    def __init__(self, model: Any, *, exact: str = "distribution") -> None:
        forwards = DecoderForward(model, exact)
        super().__init__(forwards, TreeCache(forwards.num_layers, forwards.context_length + SCRATCH_ROOM))
        self.answer_start = forwards.answer_start
        self.graphs_off = "an encoder-decoder model does not support fixed shapes"
        self._peak_input_bytes = 0
        with lock_of(model):
            with alone(model):
                check_answers(self)
            self._watch = Watch(model)

    def _renew(self) -> None:
        self.forwards.renew()
        self.cache = TreeCache(self.cache.num_layers, self.cache.max_slots)
        super()._renew()

    @property
    def config(self) -> Any:
        return self.forwards.config

    @property
    def exact(self) -> str:
        return self.forwards.exact

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self) -> SequenceState:
        """Open a new, empty sequence.  Without :meth:`expect`, the first prefill is the encoder's input."""
        self.follow()
        return self.pool.open(AnswerState(row=0))

    def open_beside(self, source: SequenceState | None) -> SequenceState:
        """Open a sequence that drafts for the target's answer in ``source``."""
        if not isinstance(source, AnswerState) or source.num_inputs == UNKNOWN:
            raise CapabilityError("a draft model with an encoder needs a target with an encoder, whose input it reads")
        sequence = _answer_state(self.open())
        sequence.num_inputs = source.num_inputs
        return sequence

    def expect(self, sequence: SequenceState, length: int) -> None:
        """Announce a prompt of ``length`` tokens, start tokens of the answer included."""
        state = _answer_state(sequence)
        if state.num_inputs == UNKNOWN:
            state.num_inputs = max(0, length - len(self.answer_start))

    def release(self, sequence: SequenceState) -> None:
        super().release(sequence)
        self.forwards.forget(_answer_state(sequence).encoded)

    def rewind(self, sequence: SequenceState, length: int) -> None:
        """Keep the first ``length`` tokens; a truncated encoder input is read again once it is complete."""
        super().rewind(sequence, length)
        if length < _answer_state(sequence).num_inputs:
            _answer_state(sequence).encoded = None

    snapshot = LanguageModel.snapshot  # none: every input token sees all others, so a prefix is useless

    @property
    def kv_bytes(self) -> int:
        return self.pool.num_bytes() + self._input_bytes()

    @property
    def kv_peak_bytes(self) -> int:
        return self.pool.peak_bytes + self._peak_input_bytes

    def _input_bytes(self) -> int:
        inputs = (_answer_state(sequence).encoded for sequence in self.pool.sequences)
        return sum(encoded.nbytes for encoded in inputs if encoded is not None)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token of an answer; a prompt token takes as much in cross-attention."""
        probe = copy.copy(self)
        probe.separate(TreeCache(self.cache.num_layers, self.cache.max_slots))
        sequence = probe.open()
        probe.prefill(sequence, self.answer_start[:1])
        probe.forward([Feed(sequence, self.answer_start[:1], wanted=0)])
        return sequence.cache.slot_bytes

    def _slots(self, sequence: SequenceState) -> int:
        return _answer_state(sequence).num_committed

    def _row_plan(self, sequence: SequenceState, new: int, after: int | None = None) -> RowPlan:
        if after is not None:
            raise CapabilityError("nodes must follow the end of the answer in an encoder-decoder model")
        return RowPlan(self._slots(sequence), sequence.scratch_parents, sequence.scratch_depths, new)

    # -- reading -----------------------------------------------------------------------------------------------------

    def prefill(self, sequence: SequenceState, tokens: Sequence[int], taps: Sequence[str] = ()) -> dict[str, Tensor]:
        """Commit ``tokens``: those of the encoder, which are read once complete, then those of the decoder.

        Taps of encoder tokens are always the encoder's last hidden states, and come with the last of these tokens.
        """
        state = _answer_state(sequence)
        if state.num_inputs == UNKNOWN:
            state.num_inputs = len(tokens)
        count = max(0, min(len(tokens), state.num_inputs - len(state.tokens)))
        states: dict[str, list[Tensor]] = {name: [] for name in taps}
        state.tokens.extend(tokens[:count])
        if count and len(state.tokens) == state.num_inputs:
            state.encoded = self.forwards.encode(state.tokens)
            self._peak_input_bytes = max(self._peak_input_bytes, self._input_bytes())
            for parts in states.values():
                parts.append(state.encoded.states)
        if len(tokens) > count:
            for name, rows in super().prefill(sequence, tokens[count:], taps).items():
                states[name].append(rows)
        return {name: torch.cat(parts) for name, parts in states.items() if parts}

    prefill_batch = LanguageModel.prefill_batch  # one by one: an input must not depend on the rows read beside it

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """Append and score nodes of answers; leading tokens that belong to the encoder are committed first."""
        return super().forward([self._of_answer(feed) for feed in feeds], taps)

    def _of_answer(self, feed: Feed) -> Feed:
        state = _answer_state(feed.sequence)
        if state.encoded is not None:
            return feed
        missing = max(state.num_inputs, 0) - len(state.tokens)
        if len(feed.tokens) <= missing or not (state.tokens or missing > 0):
            raise ValueError("an encoder's input is read by prefill, as a whole, before its answer is scored")
        self.prefill(state, feed.tokens[:missing])
        return replace(feed, tokens=feed.tokens[missing:], parents=None if missing else feed.parents)


def _answer_state(sequence: SequenceState) -> AnswerState:
    if not isinstance(sequence, AnswerState):
        raise ValueError("this sequence belongs to another model: open it with open or open_beside")
    return sequence
