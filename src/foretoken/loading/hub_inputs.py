"""Inputs of ``model.generate`` beside token ids: which are supported, and which would be dropped silently."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from foretoken.loading.hub_params import STATEFUL
from foretoken.models.network.traits import CACHE_NAMES

ASSISTED = {
    "prompt_lookup_num_tokens": 'drafter="ngram"',
    "assistant_early_exit": 'drafter="early_exit"',
    "use_mtp": 'drafter="mtp"',
}
"""Transformers' own ways to speculate, and the drafters to pass instead."""
OTHER_METHODS = {
    GenerationMode.CONTRASTIVE_SEARCH: "contrastive search (penalty_alpha with top_k)",
    GenerationMode.DOLA_GENERATION: "dola_layers",
    GenerationMode.CONSTRAINED_BEAM_SEARCH: "constrained beam search (force_words_ids, constraints)",
}
PEFT_HOOKS = ("_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook")


def caller_of_generate(model: Any) -> Mapping[str, Any]:
    """The arguments of the running ``model.generate`` call; empty if the loop was called directly.

    Transformers 5.24 passes neither ``streamer`` nor ``assistant_model`` nor ``synced_gpus`` to a custom loop, and a
    streamer without an end blocks its reader forever.  So they are read from the call's frame.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            return frame.f_locals if frame.f_locals.get("self") is model else {}
        frame = frame.f_back
    return {}


def check_supported(
    model: Any,
    input_ids: Tensor,
    config: GenerationConfig,
    processors: Sequence[Any],
    synced_gpus: bool,
    arguments: Mapping[str, Any],
    call: Mapping[str, Any],
) -> None:
    """Raise ``ValueError`` with the names of unsupported inputs and settings.

    Args:
        input_ids: [B, n].
        arguments: the arguments of the model's own forward.
    """
    problems = {
        "encoder-decoder models": bool(getattr(model.config, "is_encoder_decoder", False)),
        "beam search (num_beams > 1)": (config.num_beams or 1) > 1,
        "synced_gpus": synced_gpus or bool(call.get("synced_gpus")),
        "assistant_model (pass it as drafter=)": call.get("assistant_model") is not None,
        "cache_implementation='quantized', which changes the output": config.cache_implementation == "quantized",
    }
    if config.return_dict_in_generate:
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            problems[name] = bool(getattr(config, name, False))
    problems.update({type(p).__name__: isinstance(p, STATEFUL) for p in processors})
    refused = [name for name, wrong in problems.items() if wrong]
    refused.extend(_other_methods(model, config))
    refused.extend(_inputs_that_would_be_dropped(arguments, input_ids))
    refused.extend(_ways_of_its_own(model))
    if refused:
        _forget_rows(model)
        raise ValueError(f"foretoken.custom_generate does not support {', '.join(refused)}: leave it out of this call")
    if str(config.cache_implementation).startswith("offloaded"):
        logging.getLogger("foretoken").warning(
            "cache_implementation=%r has no effect with foretoken.custom_generate: its keys and values stay on the "
            "model's device",
            config.cache_implementation,
        )


def _other_methods(model: Any, config: GenerationConfig) -> Iterator[str]:
    """Requested decoding methods other than greedy decoding and sampling.

    A model's own configuration may ask for speculation; a drafter takes its place.
    """
    brought = getattr(model, "generation_config", None)
    for name, instead in ASSISTED.items():
        value = getattr(config, name, None)
        if value is not None and value is not False and value != getattr(brought, name, None):
            yield f"{name} (pass {instead})"
    if isinstance(config, GenerationConfig) and (config.num_beams or 1) == 1:
        method = config.get_generation_mode()
        # In assisted methods a drafter takes the place of the assistant.
        supported = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
        if method not in supported:
            yield OTHER_METHODS.get(method, str(method.value))


def _inputs_that_would_be_dropped(arguments: Mapping[str, Any], input_ids: Tensor) -> Iterator[str]:
    """Names of the arguments that would change the output of the model's own forward."""
    for name, value in arguments.items():
        # These change how a forward runs, not its result; the loop reads the mask.
        if value is None or value is False or name in ("attention_mask", "use_cache", "logits_to_keep"):
            continue
        if name in CACHE_NAMES:
            # ``generate`` creates an empty one if none was passed.
            if getattr(value, "_is_user_defined", False) or int(value.get_seq_length()) > 0:
                yield f"{name}= (it keeps its own cache: pass all token ids and no cache)"
        elif name == "position_ids":
            if not _are_usual(value, arguments.get("attention_mask"), input_ids.shape[1]):
                yield "position_ids= that do not count the tokens from 0"
        else:
            yield f"{name}="


def _are_usual(positions: Tensor, mask: Tensor | None, length: int) -> bool:
    """Whether positions [..., n] are those of ``generate`` for tokens after left padding."""
    if positions.shape[-1] != length:
        return False
    if mask is None:
        return bool((positions == torch.arange(length, device=positions.device)).all())
    usual = (mask.long().cumsum(-1) - 1).to(positions.device)
    return bool(((positions == usual) | (mask == 0).to(positions.device)).all())


def _ways_of_its_own(model: Any) -> Iterator[str]:
    """Ways in which other code prepares a model's inputs before every forward, such as PEFT's prompt learning."""
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    owner = getattr(prepare, "__self__", None)
    config = getattr(owner, "active_peft_config", None)
    if owner is not model and getattr(config, "is_prompt_learning", False):
        kind = getattr(config, "peft_type", "prompt learning")
        kind = str(getattr(kind, "value", kind)).replace("_", " ").lower()
        yield f"PEFT's {kind}, whose trained prompt it would leave out"
    elif getattr(prepare, "__func__", prepare) is not getattr(type(model), "prepare_inputs_for_generation", None):
        yield "a prepare_inputs_for_generation that was set on the model"
    if any(_name_of(hook) in PEFT_HOOKS for m in model.modules() for hook in m._forward_pre_hooks.values()):
        yield "PEFT's adapter_names= or alora_offsets=, which count the rows of a batch"


def _forget_rows(model: Any) -> None:
    """Remove the hooks of this call that PEFT leaves on the model after an error; they only fit its rows."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if _name_of(hook) in PEFT_HOOKS:
                module._forward_pre_hooks.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _name_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__name__", ""))
