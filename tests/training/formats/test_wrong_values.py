"""Every key of a ``config.json`` with a value that it cannot have: refused by one line, or read as nothing else."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_folders import hub_folder
from test_bad_checkpoints import refused
from tiny_nets import save_net

from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.training.formats import export_drafter
from foretoken.training.formats.base import Checkpoint, NetFormat, Target
from foretoken.training.formats.catalogue import find_layout
from foretoken.training.formats.folders import Found
from foretoken.training.formats.llama_layer import layer_shape
from foretoken.training.formats.values import class_of, flag, listed, number, positive, whole

WRONG: list[Any] = ["x", 5.5, -3, math.nan, 2**70, [], ["x"], {}, True]
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "block_size")
UNREAD = ("torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "max_position_embeddings", "model_type",
          "use_sliding_window", "enable_confidence_head", "confidence_head_with_markov", "speculators_version",
          "projector_type", "architectures", "speculators_config", "speculators_model_type")  # fmt: skip
"""What is written for others, and tells us nothing."""


def objects(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The places of all objects that a configuration is read from."""
    yield ()
    yield from ((key,) for key in ("dflash_config", "transformer_layer_config", "eagle_config") if key in config)


@pytest.mark.parametrize(
    ("method", "layout"),
    [("dflash", "plain"), ("dflash2", "plain"), ("dspark", "speculators"), ("eagle3", "plain"), ("eagle", "vllm")],
)
def test_every_key(method: str, layout: str, target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    export_drafter(f"{method}:{save_net(method, tmp_path / 'mine', target)}", folder, layout, target)
    whole_, opened = Found(folder), Target.open(str(target))
    config, tensors, reader = whole_.config, whole_.tensors(), find_layout(method, layout, None).load()
    assert isinstance(reader, NetFormat)
    right, count = reader.read(Checkpoint(config, tensors), opened).config, 0
    for place in objects(config):
        for key in config[place[0]] if place else config:
            for value in WRONG:
                changed: dict[str, Any] = copy.deepcopy(config)
                (changed[place[0]] if place else changed)[key] = value
                try:
                    read = reader.read(Checkpoint(changed, tensors), opened).config
                except ValueError as error:
                    assert "\n" not in str(error) and "convert" not in str(error), (place, key, value)
                    count += 1
                else:
                    inner = not place and key in config.get("dflash_config", {})  # which goes first
                    assert key not in SIZES or inner, (place, key, value)
                    same = json.dumps(read) == json.dumps(right)
                    assert same or (isinstance(value, int | float) and math.isfinite(value)), (place, key, value)
                    assert same or key not in UNREAD
    assert count > 60


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ({"block_size": 5.5}, "block_size in config.json must be a whole number from .* to .*, not 5.5"),
        ({"block_size": "eight"}, "block_size in config.json is 'eight', which is not a number"),
        ({"block_size": math.nan}, "block_size in config.json is not a number that a network can have"),
        ({"block_size": -4}, "a block has 2 to 256 rows, not -4"),
        ({"mask_token_id": 90.0}, "mask token 90.0 is not one of the target's 96 tokens"),
        ({"mask_token_id": True}, "mask token True is not one of the target's"),
        ({"target_layer_ids": 3}, "target_layer_ids in config.json must be a list, not 3"),
        ({"causal": "no"}, "causal in config.json must be true or false, not 'no'"),
        ({"input_embedding_scale": 0}, "input_embedding_scale in config.json must be above 0, not 0"),
    ],
)
def test_block_drafters(inner: dict[str, Any], words: str, target: Path, tmp_path: Path) -> None:
    refused(hub_folder(tmp_path / "hub", **inner), target, words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 2**40}, "num_hidden_layers in config.json must be a whole number from 1 to 256"),
        ({"num_hidden_layers": 3}, "lacks the tensor layers.2"),
        ({"num_hidden_layers": 1}, "holds a tensor layers.1.* that this network does not have"),
        ({"num_attention_heads": 0}, "num_attention_heads in config.json must be a whole number from 1"),
        ({"num_key_value_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"rope_theta": -1}, "rope_theta in config.json must be above 0"),
        ({"layer_types": "full_attention"}, "layer_types in config.json must be a list"),
        ({"architectures": 5, "block_size": 1}, "a block has 2 to 256 rows"),
    ],
)
def test_the_layers_of_block_drafters(config: dict[str, Any], words: str, target: Path, tmp_path: Path) -> None:
    refused(hub_folder(tmp_path / "hub", config), target, words)


LAYER = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": None, "rope_parameters": ROPE},
        {"rope_theta": 500, "rope_parameters": ROPE},
        {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
        {"rope_parameters": {"rope_theta": 500.0, "full_attention": {"rope_type": "default"}}},
        {"rope_scaling": {"full_attention": ROPE, "sliding_attention": None}},
    ],
)
def test_the_base_of_rotary_embeddings_is_found_wherever_it_stands(fields: dict[str, Any]) -> None:
    assert layer_shape({**LAYER, **fields})["rope_theta"] == 500.0
    assert layer_shape(LAYER)["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 1e4}},
            "10000 in rope_parameters.sliding",
        ),
        (
            {"full_attention": {**ROPE, "rope_type": "yarn", "factor": 4.0}, "sliding_attention": ROPE},
            "several rotary embeddings .rope_parameters.full_attention, rope_parameters.sliding_attention",
        ),
        (
            {"full_attention": {**ROPE, "partial_rotary_factor": "half"}},
            "partial_rotary_factor in config.json is 'half'",
        ),
        ({"full_attention": {"rope_theta": "many"}}, "rope_theta in config.json is 'many', which is not a number"),
        ("yarn", "of the type 'yarn' cannot have these parameters: .*Missing required keys"),
        ({"rope_type": "linear", "factor": math.nan}, "of the type 'linear' cannot have these parameters"),
    ],
)
def test_rotary_embeddings_of_kinds_of_layers_that_ours_has_not(parameters: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LayerConfig(**layer_shape({**LAYER, "rope_parameters": parameters}))


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, None),
        ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": None}},
            {"rope_type": "yarn", "factor": 4.0, "max_position_embeddings": 64},
        ),
        (
            {"original_max_position_embeddings": 16, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
    ],
)
def test_the_parameters_of_rotary_embeddings(fields: dict[str, Any], rope: Any) -> None:
    shape = layer_shape({**LAYER, **fields})
    assert shape["rope"] == rope and LayerConfig(**shape).head_dim == 8


def test_values() -> None:
    fields: dict[str, Any] = {"a": 3, "b": 2.0, "c": False, "d": [1], "e": None, "architectures": "Qwen3Model"}
    assert number(fields, "none", "a") == 3 and whole(fields, "b") == 2 and type(whole(fields, "b")) is int
    assert number(fields, "e", default=1.5) == 1.5 and whole(fields, "e", default=0) == 0
    assert positive(fields, "a", default=1.0) == 3.0 and positive(fields, "none", default=1.0) == 1.0
    assert flag(fields, "e", "c") is False and flag(fields, "none") is None and listed(fields, "d") == [1]
    assert listed(fields, "e") is None and class_of(fields) == "Qwen3Model"
    assert [class_of({"architectures": value}) for value in (["A", "B"], [], 5, [5], None)] == ["A", "", "", "", ""]
    with pytest.raises(ValueError, match="lacks none"):
        number(fields, "none")
