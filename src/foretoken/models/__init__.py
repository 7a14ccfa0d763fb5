"""Running causal language models; see :class:`foretoken.models.base.LanguageModel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foretoken.models.base import LanguageModel
from foretoken.models.refusals import check_exact, lost_bits


def wrap(
    model: Any,
    *,
    exact: str = "distribution",
    lean: bool = True,
    in_place: bool = False,
    probe: Callable[[], Sequence[int] | None] | None = None,
) -> LanguageModel:
    """Wrap a ``PreTrainedModel`` as a language model; a :class:`LanguageModel` is returned unchanged.

    Models that cannot take trees get :class:`~foretoken.models.sequential.SequentialModel`, or
    :class:`~foretoken.models.stateful.StatefulModel` where they have recurrent layers whose state survives a trial.
    Models whose logits depend on how many tokens are read at once are decoded token by token.  Encoder-decoder models
    are :class:`~foretoken.models.encoder_decoder.EncoderDecoderModel`.
    ``in_place`` lets linear layers be packed, and ``probe`` gives the text that fast paths are tried on (see
    :class:`~foretoken.models.huggingface.HuggingFaceModel`).

    Raises:
        ValueError: an unknown ``exact``.
        CapabilityError: the model is not causal, or cannot be run with a cache.
    """
    check_exact(exact)
    if isinstance(model, LanguageModel):
        return model
    runs = _wrapped(model, exact, lean, in_place, probe)
    if all(refused.path != "bitwise" for refused in runs.refused):  # some models report it themselves
        runs.refused += lost_bits(exact, runs.exactness, runs.exactness_why)
    return runs


def _wrapped(
    model: Any, exact: str, lean: bool, in_place: bool, probe: Callable[[], Sequence[int] | None] | None
) -> LanguageModel:
    """The model that passes its trial."""
    if getattr(model.config, "is_encoder_decoder", False):
        from foretoken.models.encoder_decoder import EncoderDecoderModel

        return EncoderDecoderModel(model, exact=exact)
    from foretoken.models.checks.cache_trial import cache_fault
    from foretoken.models.sequential import SequentialModel

    runs = _causal(model, exact, lean, in_place, probe)
    fault = cache_fault(model, runs)
    return runs if fault is None else SequentialModel(model, fault)


def _causal(
    model: Any, exact: str, lean: bool, in_place: bool, probe: Callable[[], Sequence[int] | None] | None
) -> LanguageModel:
    from foretoken.models.base import CapabilityError
    from foretoken.models.huggingface import HuggingFaceModel
    from foretoken.models.linear.packing import Packing, pack_linears
    from foretoken.models.network.capabilities import detect
    from foretoken.models.sequential import SequentialModel
    from foretoken.models.stateful import StatefulModel

    capabilities = detect(model)
    if capabilities.tree_mask:
        return HuggingFaceModel(model, exact=exact, lean=lean, in_place=in_place, probe=probe)
    if in_place and exact != "bitwise":
        pack_linears(model, Packing.of(model, model.dtype, model.device, blocks=False, in_place=True))
    if capabilities.rollback:
        return SequentialModel(model)
    try:
        return StatefulModel(model, joined=exact != "bitwise")
    except CapabilityError as error:
        return SequentialModel(model, str(error))
