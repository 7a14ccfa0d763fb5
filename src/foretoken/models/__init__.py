"""How causal language models are run: see :class:`foretoken.models.base.LanguageModel`."""

from __future__ import annotations

from typing import Any

from foretoken.models.base import LanguageModel


def wrap(model: Any, *, exact: str = "distribution", lean: bool = True, in_place: bool = False) -> LanguageModel:
    """A ``PreTrainedModel`` (or a :class:`LanguageModel`, returned as it is) as a language model.

    Models that cannot take trees get :class:`~foretoken.models.sequential.SequentialModel`.  ``in_place`` lets the
    model's linear layers be packed (see :class:`~foretoken.models.huggingface.HuggingFaceModel`).
    """
    if isinstance(model, LanguageModel):
        return model
    from foretoken.models.capabilities import detect
    from foretoken.models.huggingface import HuggingFaceModel
    from foretoken.models.sequential import SequentialModel

    if detect(model).tree_mask:
        return HuggingFaceModel(model, exact=exact, lean=lean, in_place=in_place)
    return SequentialModel(model)
