"""Other weights for a model that serves, made ready beside it and taken at once."""

from __future__ import annotations

import copy
from typing import Any

from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.rotary import ChangingRotary
from foretoken.models.network.traits import attention_configs
from foretoken.models.network.watch import Watch


def over(model: HuggingFaceModel, network: Any) -> HuggingFaceModel:
    """The model over another network of the same shape, fused weights and all, for :func:`exchange`.

    Nothing that runs meanwhile is touched: another thread may go on with the model.
    """
    other = copy.copy(model)
    other.model, other._configs = network, attention_configs(network)
    other.rotary = ChangingRotary.of(network)
    if model.is_lean:
        other._lean = model._lean.again(other)
    other._watch = Watch(network)
    return other


def exchange(model: HuggingFaceModel, other: HuggingFaceModel) -> None:
    """Let a model go on with the network of ``other``, which :func:`over` has made ready.

    Open sequences stay, as with :meth:`~foretoken.models.huggingface.HuggingFaceModel.take_weights`.  It takes no time,
    but where CUDA graphs hold the places of the present weights: then the new ones are copied there.
    """
    if model.graphs is not None:
        model.take_weights(other.model)
        return
    model.model, model._configs, model.rotary = other.model, other._configs, other.rotary
    model._lean, model._watch = other._lean, other._watch
    if model._lean is not None:
        model._lean.owner = model
    model.weights_version += 1
