"""Tiny random drafters written by the ``speculators`` package, with what its networks compute for fixed inputs.

``tests/training/formats/test_speculators_package.py`` imports them and compares.  The package pins its own
Transformers, so it gets an environment of its own, see ``speculators_check.py``; it also needs
``pip install --no-deps hs-connectors``.

    X/bin/python benchmarks/speculators_fixtures.py --out tests/training/formats/speculators

Every folder holds ``config.json`` and ``model.safetensors`` as the package saves them.  The file beside it holds
inputs, and outputs in float32 of the stored bfloat16 weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, DRAFTED, SIZE, LAYERS, LENGTH = 48, 20, 16, 4, 6
TAPS, MASK, BLOCK, ANCHOR = [1, 2, 3], 5, 4, 4
DEPTHS = 3
"""Positions that P-EAGLE predicts after the text."""
LAYER = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_config(kind: str, **changes: Any) -> Any:
    """The decoder layers of a drafter, run without compiled attention."""
    from transformers import LlamaConfig, Qwen3Config

    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**{**LAYER, **changes})
    config._attn_implementation = "eager"
    return config


def fields(algorithm: str, layers: Any, tokens: int, reduced: bool = True) -> dict[str, Any]:
    """Settings that all kinds of drafters have."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return {
        "transformer_layer_config": layers,
        "draft_vocab_size": DRAFTED if reduced else VOCAB,
        "speculators_config": SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    }


def filled(model: Any, seed: int) -> Any:
    """The model with random bfloat16 weights in float32, norms near one, and an irregular draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name and weight.dim() == 1)
            weight.copy_(values.to(torch.bfloat16))
    if getattr(model, "t2d", None) is not None:
        chosen = torch.arange(1, VOCAB, 2)[:DRAFTED]
        maps = {"t2d": torch.zeros(VOCAB, dtype=torch.bool), "d2t": chosen - torch.arange(DRAFTED)}
        maps["t2d"][chosen] = True
        model.load_vocab_mappings(**maps)
    return model.float().eval()


def without_loss(model: Any) -> Any:
    """A context in which the package computes no loss, for which it needs Triton."""
    module = sys.modules[type(model).__module__]
    return mock.patch.object(module, "compute_metrics", lambda *_, **__: (torch.zeros(()), {}))


class Heard:
    """Outputs of modules in the order of their calls."""

    def __init__(self, **modules: Any) -> None:
        self.outputs: dict[str, list[Tensor]] = {name: [] for name in modules}
        for name, module in modules.items():
            module.register_forward_hook(lambda _module, _inputs, output, name=name: self.outputs[name].append(output))


def eagle3(layers: Any, **variant: Any) -> tuple[Any, dict[str, Tensor]]:
    """Two steps over a text: the second one reads the first one's outputs."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig(**fields("eagle3", layers, 3), eagle_aux_hidden_state_layer_ids=TAPS, **variant)
    model = filled(Eagle3DraftModel(config), 1)
    tokens, hidden = torch.arange(3, 3 + LENGTH)[None], random(2, 1, LENGTH, len(TAPS) * SIZE)
    heard = Heard(logits=model.lm_head)
    model(hidden, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=2)
    return model, {"tokens": tokens, "hidden": hidden, "logits": torch.stack(heard.outputs["logits"])}


def peagle(layers: Any, **variant: Any) -> tuple[Any, dict[str, Tensor]]:
    """A text and the masks after it."""
    from speculators.models.peagle import core
    from speculators.models.peagle.config import PEagleSpeculatorConfig

    ids = {"eagle_aux_hidden_state_layer_ids": TAPS, "mask_token_id": MASK}
    config = PEagleSpeculatorConfig(**fields("peagle", layers, DEPTHS), **ids, **variant)
    model = filled(core.PEagleDraftModel(config), 3)
    whole = LENGTH + DEPTHS - 1
    tokens, hidden = torch.arange(3, 3 + whole)[None], random(4, 1, whole, len(TAPS) * SIZE)
    anchors = torch.tensor([*range(LENGTH), *[LENGTH - 1] * (DEPTHS - 1)])
    depths = torch.tensor([*[0] * LENGTH, *range(1, DEPTHS)])
    heard = Heard(logits=model.lm_head)
    with mock.patch.object(core, "generate_cod_sample_indices", lambda **_: (anchors, depths)), without_loss(model):
        model(
            hidden,
            tokens,
            torch.zeros(1, whole, dtype=torch.long),
            verifier_last_hidden_states=random(5, 1, whole, SIZE),
            num_depths=DEPTHS,
        )
    read = {"tokens": tokens[:, :LENGTH], "hidden": hidden[:, :LENGTH]}
    return model, {**read, "logits": heard.outputs["logits"][0]}


def block(kind: str, layers: Any, reduced: bool = True, **variant: Any) -> tuple[Any, dict[str, Tensor]]:
    """One block after a text: logits, and what its last stage adds to them."""
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.models.dflash import core

    config_class = SpeculatorModelConfig.registry[kind]
    ids = {"aux_hidden_state_layer_ids": TAPS, "mask_token_id": MASK, "block_size": BLOCK}
    config = config_class(**fields(kind, layers, BLOCK - 1, reduced), **ids, **variant)
    model = filled(SpeculatorModel.registry[kind](config), 6)
    length = ANCHOR + BLOCK
    tokens, hidden = torch.arange(7, 7 + length)[None], random(7, 1, length, len(TAPS) * SIZE)
    heard = Heard(logits=model.lm_head, states=model.norm)
    stages: dict[str, Tensor] = {}
    if kind == "dspark":
        stages_of = model.markov_head.block_bias
        model.markov_head.block_bias = lambda **inputs: stages.setdefault("bias", stages_of(**inputs))
        model.confidence_head.register_forward_hook(lambda _m, _i, output: stages.setdefault("confidence", output))
    if kind == "dflash2":
        scores_of = model.candidate_selector.score_candidates

        def scored(unary: Tensor, states: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
            stages["candidates"], stages["scores"] = candidates, scores_of(unary, states, before, candidates)
            return stages["scores"]

        model.candidate_selector.score_candidates = scored
    anchors = torch.tensor([ANCHOR]), torch.tensor([True])
    with mock.patch.object(core, "select_anchors", lambda *_: anchors), without_loss(model):
        model(
            hidden,
            tokens,
            torch.ones(1, length),
            random(8, 1, length, SIZE),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
    ids_read = torch.tensor([int(tokens[0, ANCHOR]), *[MASK] * (BLOCK - 1)])
    given = {"tokens": tokens, "hidden": hidden[:, :ANCHOR], "embeddings": model.embed_tokens.weight[ids_read]}
    if not reduced:  # the package takes the target's, so it does not store it
        given["head"] = model.lm_head.weight.clone()
    return model, {**given, "logits": heard.outputs["logits"][0], "states": heard.outputs["states"][0], **stages}


def mtp(layers: Any) -> tuple[Any, dict[str, Tensor]]:
    """Two steps over a text."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    settings = fields("mtp", layers, 2)
    del settings["draft_vocab_size"]
    model = filled(SpeculatorModel.registry["mtp"](SpeculatorModelConfig.registry["mtp"](**settings)), 9)
    tokens, hidden = torch.arange(3, 3 + LENGTH)[None], random(10, 1, LENGTH, SIZE)
    heard = Heard(states=model.mtp_layers[0])
    model(tokens, hidden)
    embeddings = model.embed_tokens.weight[tokens[0]]
    return model, {"hidden": hidden, "embeddings": embeddings, "states": torch.stack(heard.outputs["states"])}


CASES: dict[str, Callable[[], tuple[Any, dict[str, Tensor]]]] = {
    "eagle3": lambda: eagle3(layer_config("llama", num_hidden_layers=1, rope_parameters=PLAIN)),
    "eagle3_before_residual": lambda: eagle3(
        layer_config("qwen3", num_hidden_layers=1), norm_before_residual=True, norm_before_fc=True
    ),
    "eagle3_3.1": lambda: eagle3(
        layer_config("llama", num_hidden_layers=2, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
        norm_before_residual=True,
        fc_norm=True,
        norm_output=True,
    ),
    "peagle": lambda: peagle(layer_config("llama", num_hidden_layers=2), norm_before_residual=True, fc_norm=True),
    "dflash": lambda: block("dflash", layer_config("qwen3", num_hidden_layers=2, rope_parameters=YARN)),
    "dflash2": lambda: block(
        "dflash2",
        layer_config("qwen3", num_hidden_layers=1),
        reduced=False,
        conv_group_size=8,
        selector_rank=4,
        selector_top_k=6,
        sliding_window_non_causal=True,
    ),
    "dspark": lambda: block(
        "dspark", layer_config("qwen3", num_hidden_layers=1), markov_rank=4, markov_head_type="gated"
    ),
    "mtp": lambda: mtp(layer_config("qwen3", num_hidden_layers=LAYERS)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True, help="folder of all fixtures")
    out = parser.parse_args().out
    for name, case in CASES.items():
        with torch.no_grad():
            model, expected = case()
        model.to(torch.bfloat16).save_pretrained(out / name)
        (out / name / "config.py").unlink()  # a copy of the package's code
        save_file({key: value.contiguous().clone() for key, value in expected.items()}, out / f"{name}.safetensors")
        stored = load_file(out / name / "model.safetensors")
        size = sum(file.stat().st_size for file in (*(out / name).iterdir(), out / f"{name}.safetensors"))
        print(f"{name}: {len(stored)} tensors, {size} bytes")


if __name__ == "__main__":
    main()
