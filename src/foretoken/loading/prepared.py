"""The wrapped targets of :func:`foretoken.custom_generate`, kept with the model between calls.

Wrapping a target copies its weights and tries its forwards, which takes far longer than a short completion.
"""

from __future__ import annotations

from typing import Any

from foretoken.loading.memory import explains_full_memory
from foretoken.loading.models import load_model
from foretoken.loading.tokenizers import tokenizer_when_needed
from foretoken.models.base import LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.alone import lock_of
from foretoken.models.network.watch import Watch

ATTRIBUTE = "_foretoken_prepared"
"""Attribute of the model that holds them; deleting it frees the memory."""


class Prepared:
    """A wrapped target, valid while its network does not change.

    Attributes:
        tokenizer: the model's tokenizer, read when needed; ``None`` if it has none.
    """

    def __init__(self, model: Any, exact: str) -> None:
        self.tokenizer = tokenizer_when_needed(model)
        self._target = load_model(model, exact=exact)
        with lock_of(model):
            self._watch = Watch(model)

    def is_still(self, model: Any) -> bool:
        """Whether it was made from this model in its present state."""
        with lock_of(model):
            return self._watch.network is model and not self._watch.has_changed()

    def target(self) -> LanguageModel:
        """A target for one more engine.  Its sequences and everything that a drafter adds to it belong to that
        engine."""
        if not isinstance(self._target, HuggingFaceModel):
            return self._target
        target = self._target.sibling()
        target.forwards.extra = list(target.forwards.extra)
        return target


class _ByExact(dict[str, Prepared]):
    """Wrapped targets of a model by ``exact``; copies and pickles of the model hold ``None`` instead."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@explains_full_memory
def prepared_of(model: Any, exact: str) -> Prepared:
    """The model's wrapped target, remade if the model has changed.  Calls must come from one thread at a time."""
    stored = vars(model).get(ATTRIBUTE)
    prepared = None if stored is None else stored.get(exact)
    if prepared is not None and prepared.is_still(model):
        return prepared
    if stored is None or prepared is not None:  # the others are outdated too, and hold memory that the new one needs
        stored = vars(model)[ATTRIBUTE] = _ByExact()
    prepared = stored[exact] = Prepared(model, exact)
    return prepared
