"""A draft model trained to fill masks predicts all positions of a draft in one pass.

PARD, An et al. 2025 (arXiv 2504.18583); with the target's states beside the tokens PARD-2 (2605.08632).  The unread
tokens are followed by k - 1 mask tokens, under the usual causal mask: the last token's row predicts the first position,
every mask's row the next one.  With distinct masks, one per position, it is the independent parallel drafter of SpecDec
(Xia et al. 2022, arXiv 2203.16487), whose positions have learned queries of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from foretoken.core import Context, check_least
from foretoken.methods.drafters.base import BuildContext, share_of_bytes
from foretoken.methods.drafters.growing import check_growth, cut_back, readable, widened
from foretoken.methods.drafters.narrowed import bytes_read, described, light_head, projected, reduced_head
from foretoken.methods.drafters.parallel import ParallelDrafter, Predictions
from foretoken.methods.drafters.reading import ReadingDrafter
from foretoken.methods.drafters.target_states import TargetStates, projection_of
from foretoken.methods.drafters.texts import TextReader, level
from foretoken.models.base import Feed, LanguageModel, SequenceState
from foretoken.models.cache.window import Window
from foretoken.models.forward.heads.draft_head import DraftHead

MASK = "pard_token"
"""Key of the mask token in a model's configuration."""
MASKS = "pard_tokens"
"""Key of the number of distinct masks, with consecutive ids from the mask token on; one without it."""
TRAINED = 8
"""Number of positions that published PARD models were trained to predict."""


class ModelIds:
    """Mapping from a draft model's logits to the target's tokens.

    Args:
        vocab_size: V of the target.
        head: a vocabulary projection that replaces the model's.
    """

    def __init__(self, vocab_size: int, head: DraftHead | None = None) -> None:
        self.vocab_size, self.head = vocab_size, head

    def cut(self, logits: Tensor) -> Tensor:
        """Logits [n, V'] without those of tokens that the target lacks (a head has none)."""
        return logits if self.head is not None else logits[:, : self.vocab_size]

    def mapped(self, tokens: Tensor) -> Tensor:
        return tokens if self.head is None else self.head.mapped(tokens)

    def widened(self, logits: Tensor) -> Tensor:
        return widened(logits if self.head is None else self.head.widened(logits), self.vocab_size)


class PardDrafter(ReadingDrafter, ParallelDrafter):
    """Trees of the likeliest prefixes, or drawn chains and trees, over independently predicted positions.

    Args:
        k: tokens predicted in one pass, the longest path of a tree.  Quality drops beyond the trained number (8 for
            published models).
        mask: id of the mask token of all positions; -1: the one in the model's configuration (``pard_token``), or those
            from it on if the configuration has distinct ones (``pard_tokens`` of them; later positions share the last).
        target: the target model; its vocabulary may be padded to another width than the draft model's.
        taps: let a draft model that was trained with the target's states (PARD-2) read them.
    """

    name = "pard"
    reader: TargetStates | None = None
    """Reads the tokens together with the target's states."""

    def __init__(
        self,
        model: LanguageModel,
        k: int = TRAINED,
        mask: int = -1,
        nodes: int = 16,
        width: int = 8,
        draw: str = "iid",
        tree: str = "",
        target: LanguageModel | None = None,
        taps: bool = True,
    ) -> None:
        check_least(self.name, 1, k=k)
        self._shape(nodes, k, width, draw, tree, rewinds=True)
        self.traits = replace(self.traits, learns=False)
        check_growth(model, branches=False)
        self.model = model
        self.mask, self.num_masks = _masks_of(model, mask)
        self.target_bytes = 0 if target is None else target.weight_bytes
        self.vocab_size = model.vocab_size if target is None else target.vocab_size
        if taps and target is not None:
            self._read_states(target)
        self.head = None

    def _read_states(self, target: LanguageModel) -> None:
        """Read the target's states if the draft model was trained with them, which excludes cutting tokens off."""
        network = self.model.model
        projection = None if network is None else projection_of(network, target)
        if projection is not None:
            self.reader = TargetStates(self.model, projection, self.mask, self.vocab_size)
            self.taps, self.traits = self.reader.taps, replace(self.traits, rewinds=False, learns=True)

    @property
    def head(self) -> DraftHead | None:
        return self.ids.head

    @head.setter
    def head(self, head: DraftHead | None) -> None:
        self.ids = ModelIds(self.vocab_size, head)
        if self.reader is not None:
            self.reader.head = head

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        nodes: int | None = None,
        quantize: str = "auto",
        vocab: str = "",
        window: int = 0,
        sink: int = 0,
        **options: Any,
    ) -> Self:
        """Build from a spec ``pard[:PATH]``: load the draft model and check that it fits the target.

        Args:
            quantize, vocab, window, sink: as for :class:`~foretoken.methods.drafters.model.ModelDrafter`.
        """
        draft = context.draft_model(cls.name, path, quantize=quantize, window=Window(window, sink))
        return cls.over(draft, context, vocab, nodes, **options)

    @classmethod
    def over(
        cls, draft: LanguageModel, context: BuildContext, vocab: str = "", nodes: int | None = None, **options: Any
    ) -> Self:
        """Construct with a loaded draft model; arguments and errors are those of :meth:`build`."""
        built = cls.sized(context.target, nodes, draft, target=context.target, **options)
        built.head = reduced_head(vocab, draft, context) or light_head(draft)
        return built

    def cost_beside(self, target_bytes: int) -> float:
        """A share for every level of the draft model's single run."""
        return share_of_bytes(bytes_read(self.model, self.head) // self.max_depth, target_bytes)

    def describe(self) -> list[dict[str, Any]]:
        return [{**entry, **described(self.model, self.head)} for entry in super().describe()]

    def rewind(self, context: Context, length: int) -> None:
        cut_back(self.model, context.state.get(self), length)

    def _all_predictions(self, contexts: Sequence[Context], depths: Sequence[int]) -> dict[int, Predictions]:
        """Run the pass; masks stay in the scratch until the sequence grows, and are dropped with rejected tokens."""
        sequences = [readable(c.tokens, self.model.vocab_size, self.vocab_size) for c in contexts]
        if self.reader is None:
            is_level = level(self, TextReader(self.model), contexts, sequences)
        else:
            is_level = self.reader.read_up_to_end(contexts)
        ready = [i for i in range(len(contexts)) if is_level[i] and depths[i] > 0]
        if not ready:
            return {}
        if self.reader is not None:
            logits = self.reader.logits_of([contexts[i] for i in ready], [depths[i] for i in ready])
            return {i: self._guess(contexts[i], logits[id(contexts[i])]) for i in ready if id(contexts[i]) in logits}
        feeds = [self._feed(contexts[i].state[self], sequences[i], depths[i]) for i in ready]
        rows = projected(self.head, self.model.forward, feeds)
        return {i: self._guess(contexts[i], row.logits) for i, row in zip(ready, rows, strict=True)}

    def _feed(self, sequence: SequenceState, tokens: Sequence[int], depth: int) -> Feed:
        unread = self.model.catch_up(sequence, tokens)
        masks = [self.mask + min(place, self.num_masks - 1) for place in range(depth - 1)]
        return Feed(sequence, [*unread, *masks], wanted=depth)

    def _guess(self, context: Context, logits: Tensor) -> Predictions:
        cut = self.ids.cut(logits)
        return Predictions(context, cut, self.ids, self._ranker(context))


def mask_token(model: LanguageModel) -> int | None:
    """The mask token in a draft model's configuration; ``None`` if it was not trained to fill masks."""
    return _configured(model, MASK)


def _configured(model: LanguageModel, key: str) -> int | None:
    value = getattr(getattr(model.model, "config", None), key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _masks_of(model: LanguageModel, option: int) -> tuple[int, int]:
    """The first mask token and the number of distinct ones."""
    mask, count = (mask_token(model), _configured(model, MASKS) or 1) if option == -1 else (option, 1)
    if mask is None:
        raise ValueError(
            f"this draft model was not trained on mask tokens: its configuration has no {MASK}; give mask=ID, "
            "or draft token by token with model:PATH"
        )
    if not 0 <= mask <= model.vocab_size - count:
        raise ValueError(f"the mask token must be one of the draft model's {model.vocab_size} tokens, not {mask}")
    return mask, count
