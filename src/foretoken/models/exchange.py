"""Other weights for a model that serves, made ready beside it and taken at once."""

from __future__ import annotations

import copy
from typing import Any

from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.watch import Watch


def over(model: HuggingFaceModel, network: Any) -> HuggingFaceModel:
    """The model over another network of the same shape, fused weights and all, for :func:`exchange`.

    Nothing that runs meanwhile is touched: another thread may go on with the model.
    """
    other = copy.copy(model)
    other.forwards, other._watch = model.forwards.over(network), Watch(network)
    return other


def exchange(model: HuggingFaceModel, other: HuggingFaceModel) -> None:
    """Let a model go on with the network of ``other``, which :func:`over` has made ready.

    Open sequences stay, as with :meth:`~foretoken.models.huggingface.HuggingFaceModel.take_weights`.  It takes no time,
    but where CUDA graphs hold the places of the present weights: then the new ones are copied there.
    """
    if model.graphs is not None:
        model.take_weights(other.model)
        return
    model.forwards, model._watch = other.forwards, other._watch
    model.weights_version += 1
