"""The name of a forward's cache argument, read from its signature, through wrappers too."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import new_model, plain_logits, prompt_of
from torch import nn

from foretoken.models import wrap
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.traits import CACHE_NAMES, cache_argument, cache_name
from foretoken.models.sequential import SequentialModel


class Old(nn.Module):
    """As before Transformers 5.24."""

    def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any: ...


class New(nn.Module):
    """As since then."""

    def forward(self, input_ids: Any, cache: Any = None) -> Any: ...


class Bare(nn.Module):
    """Without a cache."""

    def forward(self, input_ids: Any) -> Any: ...


class Wrapper(nn.Module):
    """Hands everything on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Old(), "past_key_values"),
        (New(), "cache"),
        (Bare(), None),
        (Wrapper(Old()), "past_key_values"),
        (Wrapper(Wrapper(New())), "cache"),
        (Wrapper(Bare()), None),
        (nn.Sequential(New()), None),  # it hands nothing on by name
    ],
)
def test_the_name_is_that_of_the_signature(module: nn.Module, name: str | None) -> None:
    assert cache_name(module) == name
    if name is None:
        with pytest.raises(CapabilityError, match="takes no cache"):
            cache_argument(module)
    else:
        assert cache_argument(module) == name


def handing_on(model: Any) -> Any:
    """The same model, of a subclass whose forward names nothing."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(kind, self).forward(*args, **kwargs)

    kind: Any = type("HandingOn", (type(model),), {"forward": forward})
    model.__class__ = kind
    return model


@pytest.mark.parametrize(("name", "kind"), [("llama", HuggingFaceModel), ("bloom", SequentialModel)])
def test_a_subclass_that_hands_everything_on_keeps_its_cache(name: str, kind: type) -> None:
    network = handing_on(new_model(name, **{"n_layer": 2, "n_head": 4} if name == "bloom" else {}))
    assert cache_name(network) in CACHE_NAMES
    model = wrap(network, lean=False)
    assert isinstance(model, kind)
    sequence, prompt = model.open(), prompt_of(9)
    model.prefill(sequence, prompt[:-1])
    (rows,) = model.forward([Feed(sequence, [prompt[-1], 5])])
    expected = plain_logits(network, [*prompt, 5])[-2:]
    assert float((rows.logits - expected).abs().max() / expected.std()) < 1e-4
