"""How causal language models are run: see :class:`foretoken.models.base.LanguageModel`."""

from __future__ import annotations

from typing import Any

from foretoken.models.base import LanguageModel


def wrap(model: Any, *, exact: str = "distribution", lean: bool = True, in_place: bool = False) -> LanguageModel:
    """A ``PreTrainedModel`` (or a :class:`LanguageModel`, returned as it is) as a language model.

    Models that cannot take trees get :class:`~foretoken.models.sequential.SequentialModel`, or
    :class:`~foretoken.models.stateful.StatefulModel` where they have recurrent layers whose state survives a trial.
    ``in_place`` lets linear layers be packed (see :class:`~foretoken.models.huggingface.HuggingFaceModel`).
    """
    if isinstance(model, LanguageModel):
        return model
    from foretoken.models.base import CapabilityError
    from foretoken.models.capabilities import detect
    from foretoken.models.huggingface import HuggingFaceModel
    from foretoken.models.packing import Packing, pack_linears
    from foretoken.models.sequential import SequentialModel
    from foretoken.models.stateful import StatefulModel

    capabilities = detect(model)
    if capabilities.tree_mask:
        return HuggingFaceModel(model, exact=exact, lean=lean, in_place=in_place)
    if in_place and exact != "bitwise":
        pack_linears(model, Packing.of(model, model.dtype, model.device, blocks=False, in_place=True))
    if capabilities.rollback:
        return SequentialModel(model)
    try:
        return StatefulModel(model)
    except CapabilityError as error:
        return SequentialModel(model, str(error))
