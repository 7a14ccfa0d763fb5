"""Models that cannot take trees: plain decoding, and chains where Transformers' own cache can be rolled back.

Every sequence has its own Transformers cache and is run alone through the public forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import CapabilityError, Feed, LanguageModel, Rows, SequenceState
from foretoken.models.capabilities import detect
from foretoken.models.huggingface import eos_ids
from foretoken.models.taps import recording


class SequentialModel(LanguageModel):
    """ALiBi, recurrent and convolutional models.

    Args:
        model: any causal LM with ``use_cache``.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.capabilities = detect(model)
        self.vocab_size = int(self.config.vocab_size)
        self.context_length = int(getattr(self.config, "max_position_embeddings", 0) or 2**20)
        self.eos_token_ids = eos_ids(model)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._caches: dict[int, Any] = {}
        self._opened = 0

    def open(self) -> SequenceState:
        """A new, empty sequence with a cache of its own."""
        self._opened += 1
        return SequenceState(row=self._opened)

    def release(self, sequence: SequenceState) -> None:
        """Free the cache."""
        self._caches.pop(sequence.row, None)

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        """Keep a leading part of the scratch chain, roll the rest back.

        Raises:
            CapabilityError: the path is no leading part, or the cache cannot be rolled back.
        """
        if list(path) != list(range(len(path))):
            raise CapabilityError(self.capabilities.missing["keep_path"])
        surplus = len(sequence.scratch_tokens) - len(path)
        if surplus:
            if not self.capabilities.rollback:
                raise CapabilityError(self.capabilities.missing["rollback"])
            self._caches[sequence.row].crop(-surplus)
        sequence.tokens.extend(sequence.scratch_tokens[: len(path)])
        sequence.clear_scratch()

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """Feed each sequence's chain through the model's own forward and cache.

        Raises:
            CapabilityError: a feed branches.
        """
        return [self._one(feed, taps) for feed in feeds]

    def _one(self, feed: Feed, taps: Sequence[str]) -> Rows:
        sequence, count = feed.sequence, len(feed.tokens)
        old = len(sequence.scratch_tokens)
        chain = list(range(old - 1, old - 1 + count))
        if feed.parents is not None and list(feed.parents) != chain:
            raise CapabilityError(f"only chains can be scored: {self.capabilities.missing['tree_mask']}")
        if not self.capabilities.rollback and old + count > 1 and feed.wanted != 0:
            raise CapabilityError(f"only one token at a time can be scored: {self.capabilities.missing['rollback']}")
        sequence.append(feed.tokens, chain)
        ids = torch.tensor([list(feed.tokens)], device=self.device)
        wanted = count if feed.wanted is None else feed.wanted
        began = perf_counter()
        with recording(self.model, taps) as hidden:
            out = self._run(ids, sequence)
        self.run_s += perf_counter() - began
        logits: Tensor = out.logits[0]
        return Rows(logits[len(logits) - wanted :], {name: h[0] for name, h in hidden.items()})

    def _run(self, ids: Tensor, sequence: SequenceState) -> Any:
        cache = self._caches.get(sequence.row)
        key = "cache_params" if cache is not None and self._cache_key == "cache_params" else self._cache_key
        out = self.model(input_ids=ids, use_cache=True, **({key: cache} if cache is not None else {}))
        self._caches[sequence.row] = out[key] if key in out else out.past_key_values
        return out

    @property
    def _cache_key(self) -> str:
        """Mamba-like models call their cache differently."""
        import inspect

        parameters = inspect.signature(inspect.unwrap(type(self.model).forward)).parameters
        return "cache_params" if "cache_params" in parameters else "past_key_values"
