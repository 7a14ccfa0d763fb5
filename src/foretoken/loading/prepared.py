"""What :func:`foretoken.custom_generate` has made of a model, kept with the model from one call to the next.

Wrapping a target copies its weights and tries its forwards, which takes far longer than a short answer.
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
"""Where a model has it: deleting the attribute gives the memory back."""


class Prepared:
    """A wrapped target, for as long as its network stays what it is.

    Attributes:
        tokenizer: the model's, read when it is needed; ``None`` where it has none.
    """

    def __init__(self, model: Any, exact: str) -> None:
        self.tokenizer = tokenizer_when_needed(model)
        self._target = load_model(model, exact=exact)
        with lock_of(model):
            self._watch = Watch(model)

    def is_still(self, model: Any) -> bool:
        """Whether it was made of this model as it is now."""
        with lock_of(model):
            return self._watch.network is model and not self._watch.has_changed()

    def target(self) -> LanguageModel:
        """The target for one more engine: what a drafter adds to it, and its texts, are that engine's own."""
        if not isinstance(self._target, HuggingFaceModel):
            return self._target
        target = self._target.sibling()
        target.forwards.extra = list(target.forwards.extra)
        return target


class _ByExact(dict[str, Prepared]):
    """What was prepared of a model, by ``exact``; copies and pickles of the model have ``None`` in its place."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@explains_full_memory
def prepared_of(model: Any, exact: str) -> Prepared:
    """The model's wrapped target, made anew where the model has changed; one thread at a time may ask."""
    stored = vars(model).get(ATTRIBUTE)
    prepared = None if stored is None else stored.get(exact)
    if prepared is not None and prepared.is_still(model):
        return prepared
    if stored is None or prepared is not None:  # others are no better, and hold the memory that the new one needs
        stored = vars(model)[ATTRIBUTE] = _ByExact()
    made = stored[exact] = Prepared(model, exact)
    return made
