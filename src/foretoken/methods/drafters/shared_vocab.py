"""A draft model with another tokenizer drafts the tokens that both vocabularies have.

TLI, token-level intersection: Timor et al. 2025 (arXiv 2502.05202).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Context
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.vocabulary import ReadText, Vocabulary, common_tokens
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import Window


class SharedVocabDrafter(ModelDrafter):
    """Drafts with a model of another tokenizer, restricted to the common tokens.

    The draft distribution is the draft model's over the common tokens alone, mapped to the target's ids and then shaped
    by the request's sampler.  It is an ordinary distribution over the target's vocabulary, so every verifier applies.
    Committed tokens that the draft model lacks are fed to it as the draft tokens that spell them.

    Args:
        vocabulary: spellings of the draft model's tokens.
        target_vocabulary: spellings of the target's tokens, as many as its logits are wide.
        target: the target model, whose costs size trees that grow by the draft's confidence.
    """

    name = "shared_vocab"
    traits = replace(ModelDrafter.traits, rewinds=False)
    draws_together = False  # each request's distribution is mapped from the other vocabulary
    chains_in_one_call = False  # equally large vocabularies may number their tokens differently

    def __init__(
        self,
        model: LanguageModel,
        vocabulary: Vocabulary,
        target_vocabulary: Vocabulary,
        k: int = 4,
        tree: str = "",
        draw: str = "",
        target: LanguageModel | None = None,
    ) -> None:
        super().__init__(model, k, tree, draw, target)
        self.vocab_size = len(target_vocabulary)
        self.vocabulary, self.target_vocabulary = vocabulary, target_vocabulary
        pairs = common_tokens(target_vocabulary, vocabulary)
        if not any(token not in target_vocabulary.special for token in pairs):
            raise ValueError(
                "the draft model's tokenizer has no token in common with the target's: choose a draft model with a "
                "more similar tokenizer, or one of the drafters 'retokenize' and 'ngram'"
            )
        self._draft_of = [pairs.get(token, -1) for token in range(self.vocab_size)]
        self._ids = torch.tensor(sorted(pairs.items())).T  # [2, common]: target ids, draft ids

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
    ) -> SharedVocabDrafter:
        """Build from a spec ``shared_vocab[:PATH]``: load the draft model and its tokenizer."""
        model, tokenizer = context.foreign_draft_model(cls.name, path, quantize=quantize, window=Window(window, sink))
        vocabulary = Vocabulary.of(tokenizer, model.vocab_size)
        target_vocabulary = Vocabulary.of(context.tokenizer, context.target.vocab_size)
        return cls(model, vocabulary, target_vocabulary, **options, target=context.target)

    def read(self, context: Context) -> Sequence[int]:
        """The committed tokens in the draft model's ids; only new ones are translated."""
        reading: ReadText | None = context.state.get((self, "read"))
        if reading is None:
            first = self._own_ids(context.tokens[0], ReadText([]))
            # A sequence begins with the prefix of the draft model's tokenizer, usually its bos.
            prefix = self.vocabulary.prefix
            reading = context.state[(self, "read")] = ReadText([] if prefix[:1] == tuple(first) else list(prefix))
        for token in context.tokens[reading.count :]:
            reading.ids.extend(self._own_ids(token, reading))
        reading.count = len(context.tokens)
        return reading.ids

    def _own_ids(self, token: int, reading: ReadText) -> Sequence[int]:
        """The draft model's ids for one more target token; none while a character is incomplete."""
        draft_id, vocabulary = self._draft_of[token], self.target_vocabulary
        half_written = bool(reading.characters.getstate()[0])
        if token in vocabulary.special or (draft_id >= 0 and not half_written):
            reading.characters.reset()
            return (draft_id,) if draft_id >= 0 else ()
        text = reading.characters.decode(vocabulary.bytes_of((token,)))
        return self.vocabulary.spell(text) if text else ()

    def _readable(self, tokens: list[int]) -> list[int]:
        """Draft tokens in the draft model's ids.

        All are common ones, unless the draft model gives none a probability; its choice then becomes token 0.
        """
        return [max(self._draft_of[token], 0) for token in tokens]

    def _widened(self, logits: Tensor) -> Tensor:
        """Draft logits [n, V'] at the common tokens of the target's vocabulary [n, V], -inf at others."""
        if self._ids.device != logits.device:
            self._ids = self._ids.to(logits.device)
        wide = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return wide.index_copy_(1, self._ids[0], logits.index_select(1, self._ids[1]))

    def _candidates(self, tree: Growing, logits: Tensor, parent: int, width: int) -> tuple[Tensor | None, list[int]]:
        distribution, chosen = super()._candidates(tree, logits, parent, width)
        # Drawn tokens have a positive probability and are common; the best by rank may exceed the number of those.
        return distribution, [token for token in chosen if self._draft_of[token] >= 0]
