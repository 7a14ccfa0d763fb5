"""A draft model with another tokenizer drafts text, which is tokenized again for the target.

SLEM, string-level exact match: Timor et al. 2025 (arXiv 2502.05202); Transformers' universal assisted generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foretoken.core import Budget, Context, TokenTree, check_least
from foretoken.methods.drafters.base import BatchDrafter, BuildContext, Traits
from foretoken.methods.drafters.drawing import ends_draft
from foretoken.methods.drafters.growing import check_growth
from foretoken.methods.drafters.texts import TextReader, level
from foretoken.methods.drafters.vocabulary import (
    ReadText,
    Vocabulary,
    common_border,
    spelled,
    translated_spellings,
    whole_characters,
)
from foretoken.models.base import Feed, LanguageModel, SequenceState
from foretoken.models.cache.window import Window


class RetokenizeDrafter(BatchDrafter):
    """Drafts with a model of any tokenizer, through text.

    The draft model writes its ``k`` most likely tokens, one after another.  The target's tokenizer encodes their text
    together with the target's last tokens; the tokens after the last committed one are the proposal.  Their number may
    differ from ``k``, and is 0 if that tokenization has no border there.  Proposals are deterministic, so they are
    lossless for every sampler.

    Args:
        k: tokens that the draft model writes per round.
        lookbehind: tokens before new text that are tokenized again together with it, on either side.
    """

    name = "retokenize"
    traits = Traits(learns=False)

    def __init__(
        self,
        model: LanguageModel,
        vocabulary: Vocabulary,
        target_vocabulary: Vocabulary,
        k: int = 4,
        lookbehind: int = 10,
    ) -> None:
        check_least(self.name, 1, k=k, lookbehind=lookbehind)
        check_growth(model, False)
        self.model, self.k, self.lookbehind = model, k, lookbehind
        self.vocabulary, self.target_vocabulary = vocabulary, target_vocabulary
        self.max_depth = 2 * k  # tokens of the target may be shorter
        self._for_draft = translated_spellings(target_vocabulary, vocabulary)
        self._for_target = translated_spellings(vocabulary, target_vocabulary)

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        quantize: str = "auto",
        window: int = 0,
        sink: int = 0,
        **options: Any,
    ) -> RetokenizeDrafter:
        """Build from a spec ``retokenize[:PATH]``: load the draft model and its tokenizer.

        Args:
            quantize, window, sink: as for :class:`~foretoken.methods.drafters.model.ModelDrafter`.
        """
        model, tokenizer = context.foreign_draft_model(cls.name, path, quantize=quantize, window=Window(window, sink))
        vocabulary = Vocabulary.of(tokenizer, model.vocab_size)
        target_vocabulary = Vocabulary.of(context.tokenizer, context.target.vocab_size)
        return cls(model, vocabulary, target_vocabulary, **options)

    def start(self, context: Context) -> None:
        """Begin with an empty text, which is tokenized when a draft is requested."""
        context.state[self] = ReadText()

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Write all drafts together, one draft forward per token, then tokenize each for the target."""
        readings: list[ReadText] = [context.state[self] for context in contexts]
        for context, reading in zip(contexts, readings, strict=True):
            self._follow(context, reading)
        levels = level((self, "text"), TextReader(self.model), contexts, [reading.ids for reading in readings])
        steps = [self._steps(*each) for each in zip(readings, budgets, levels, strict=True)]
        trees = []
        drafts = self._write(contexts, readings, budgets, steps)
        for context, budget, reading, draft in zip(contexts, budgets, readings, drafts, strict=True):
            tokens = self._retokenized(context, reading, draft)
            trees.append(TokenTree.chain(context.root, tokens[: min(budget.max_depth, budget.max_nodes)]))
        return trees

    # -- the target's text for the draft model -----------------------------------------------------------------------

    def _follow(self, context: Context, reading: ReadText) -> None:
        new = reading.characters.decode(spelled(self._for_draft, context.tokens[reading.count :]))
        reading.count = len(context.tokens)
        if new:
            length = self._append(reading, new)
            sequence: SequenceState | None = context.state.get((self, "text"))
            if sequence is not None and len(sequence.tokens) > length:
                self.model.rewind(sequence, length)

    def _append(self, reading: ReadText, new: str) -> int:
        """Add to ``reading.ids``; return how many tokens stayed and are followed by another one."""
        vocabulary = self.vocabulary
        if not reading.ids:
            reading.ids = vocabulary.encode_text(new)
            return 0
        recent = reading.ids[-self.lookbehind :]
        start = len(reading.ids) - len(recent)
        # New text may merge with the text before it: both are tokenized, and the tokens that changed are replaced.
        again = vocabulary.encode(vocabulary.bytes_of(recent).decode(errors="ignore") + new)
        old_end, new_end = common_border(vocabulary, recent, again, len(new.encode()))
        if vocabulary.bytes_of(again[new_end:]) == vocabulary.bytes_of(recent[old_end:]) + new.encode():
            reading.ids[start + old_end :] = again[new_end:]
            return min(start + old_end, len(reading.ids) - 1)
        reading.ids += vocabulary.spell(new)
        return len(reading.ids) - 1

    # -- drafts ------------------------------------------------------------------------------------------------------

    def _write(
        self,
        contexts: Sequence[Context],
        readings: Sequence[ReadText],
        budgets: Sequence[Budget],
        steps: Sequence[int],
    ) -> list[list[int]]:
        """The draft model's likeliest tokens after every text, one per step."""
        drafts: list[list[int]] = [[] for _ in readings]
        live = [i for i, count in enumerate(steps) if count]
        sequences: dict[int, SequenceState] = {i: contexts[i].state[self, "text"] for i in live}
        unread: list[Sequence[int]] = [self.model.catch_up(sequences[i], readings[i].ids) for i in live]
        while live:
            feeds = [Feed(sequences[i], tokens, wanted=1) for i, tokens in zip(live, unread, strict=True)]
            logits = torch.cat([rows.logits for rows in self.model.forward(feeds)])  # [live, V']
            going = []
            for i, row, token in zip(live, logits, logits.argmax(-1).tolist(), strict=True):
                drafts[i].append(token)
                if len(drafts[i]) < steps[i] and not ends_draft(budgets[i], row, token):
                    going.append(i)
            live, unread = going, [drafts[i][-1:] for i in going]
        return drafts

    def _steps(self, reading: ReadText, budget: Budget, is_level: bool) -> int:
        room = self.model.context_length - len(reading.ids)
        return max(0, min(self.k, budget.max_depth, room + 1)) if is_level and reading.ids and budget.max_nodes else 0

    # -- the draft model's text for the target -----------------------------------------------------------------------

    def _retokenized(self, context: Context, reading: ReadText, draft: Sequence[int]) -> list[int]:
        """The target's tokens for the draft's text after the committed text; empty if they do not fit."""
        spelling, begun = spelled(self._for_target, draft), reading.characters.getstate()[0]
        if not spelling.startswith(begun):
            return []  # the target has begun another character
        vocabulary = self.target_vocabulary
        # The lookbehind may begin inside a character and the draft end inside one.
        no_first_bytes = bytes(range(0x80, 0xC0))
        recent = vocabulary.bytes_of(context.tokens[-self.lookbehind :]).lstrip(no_first_bytes)
        whole = whole_characters(recent + spelling[len(begun) :])
        tokens = vocabulary.encode(whole.decode())
        start, size = len(tokens), len(whole) - len(recent)
        while start and size > 0:
            start -= 1
            size -= len(vocabulary.spellings[tokens[start]])
        ends_alike = whole.endswith(vocabulary.bytes_of(tokens[start:]))
        return tokens[start:] if size == 0 and ends_alike else []
