"""Does the ``speculators`` package load our eagle3 export, and compute what our network computes?

It pins its own Transformers, so it gets an environment of its own; nothing is installed into the project's:

    python -m venv X
    X/bin/pip install torch==2.13.0 transformers safetensors numpy
    X/bin/pip install --no-deps speculators
    X/bin/pip install pydantic pydantic-settings loguru openai aiohttp httpx psutil datasets rich typer

    foretoken export eagle3 --format speculators --out DIR
    X/bin/python benchmarks/speculators_check.py DIR --drafter src/foretoken/zoo/eagle3

``--drafter`` is the folder that DIR was exported from: the package's own model, with the weights that it loaded from
DIR, is then run beside ours on random embeddings and features.  Exit code 0 when all is well, 1 when not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

FIELDS = (
    "speculators_model_type",
    "architectures",
    "draft_vocab_size",
    "target_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)
BORROWED = ("embed_tokens", "verifier_lm_head", "verifier_norm")
"""What the package takes from the target."""


def read_config(folder: Path) -> Any:
    """The package's own configuration of the folder; prints what it read.

    Raises:
        ValueError: a field differs from the one in ``config.json``.
    """
    from speculators import SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    print(f"configuration: {type(config).__module__}.{type(config).__name__}")
    for name in FIELDS:
        value = getattr(config, name)
        print(f"  {name} = {value}")
        if name in stored and stored[name] != value:
            raise ValueError(f"{name} is {value!r} there and {stored[name]!r} in config.json")
    layer = config.transformer_layer_config
    print(f"  transformer_layer_config = {type(layer).__name__}")
    for name, value in stored["transformer_layer_config"].items():
        have = getattr(layer, name, None)
        if name not in ("rope_theta", "torch_dtype") and have != value:
            raise ValueError(f"transformer_layer_config.{name} is {have!r} there and {value!r} in config.json")
    if layer.rope_parameters["rope_theta"] != stored["transformer_layer_config"]["rope_theta"]:
        raise ValueError(f"rope_theta became {layer.rope_parameters}")
    method = config.speculators_config.proposal_methods[0]
    print(f"  proposal = {type(method).__name__}, {method.speculative_tokens} tokens")
    print(f"  verifier = {config.speculators_config.verifier.architectures}")
    return config


def load_network(folder: Path, config: Any) -> Any:
    """The package's own network, with the weights that Transformers loads into it from the folder.

    Raises:
        ValueError: tensors that are missing, or that it does not know.
    """
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import PreTrainedModel

    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = None  # no target is needed to look at the layer
    load = PreTrainedModel.from_pretrained.__func__
    model, info = load(Eagle3DraftModel, folder, config=config, output_loading_info=True, dtype="float32")
    missing = [name for name in info["missing_keys"] if not name.startswith(BORROWED)]
    print(f"network: {type(model).__name__}; missing {missing}, unexpected {sorted(info['unexpected_keys'])}")
    if missing or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError(f"its tensors are not ours: {info}")
    return model.eval()


def compare(model: Any, drafter: Path) -> None:
    """One step of their network and of ours on the same random input.

    Raises:
        ValueError: they differ.
    """
    import torch

    from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
    from foretoken.methods.drafters.nets.store import load_weights

    shape = Eagle3Config(**json.loads((drafter / "drafter.json").read_text(encoding="utf-8"))["config"])
    net = Eagle3Net(shape).eval()
    load_weights(drafter, net)
    random = torch.Generator().manual_seed(0)
    taps = torch.randn(1, 7, len(shape.taps) * shape.hidden_size, generator=random)
    embeddings = torch.randn(1, 7, shape.hidden_size, generator=random)
    positions = torch.arange(7)[None]
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        features = net.fuse([taps])
        own_output = net(embeddings, features, positions)
        theirs_in = torch.cat([embeddings, model.fc(taps)], -1)
        turned = model.rotary_emb(theirs_in, positions)
        theirs = model.layers[0](theirs_in, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        pairs = {"features": (features, model.fc(taps)), "output": (own_output, theirs)}
        if net.lm_head is not None:
            pairs["logits"] = net.lm_head(net.head_state(own_output)), model.lm_head(model.norm(theirs))
    for name, (mine, other) in pairs.items():
        gap = float((mine - other).abs().max() / mine.std())
        print(f"  {name}: largest difference {gap:.1e} of a standard deviation")
        if not gap < 1e-4:
            raise ValueError(f"their {name} is not ours")
    if model.d2t is not None and not torch.equal(model.d2t, net.d2t):
        raise ValueError("their d2t is not ours")


def main() -> int:
    """Load, look, compare; prints a verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--drafter", type=Path, help="the folder that it was exported from")
    args = parser.parse_args()
    if not (args.folder / "config.json").exists():
        parser.error(f"{args.folder} has no config.json: export there first")
    try:
        versions = {name: importlib.metadata.version(name) for name in ("speculators", "transformers", "torch")}
        print(", ".join(f"{name} {version}" for name, version in versions.items()))
        config = read_config(args.folder)
        model = load_network(args.folder, config)
        if args.drafter is not None:
            compare(model, args.drafter)
    except Exception as error:  # whatever their code raises is the verdict
        print(f"FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print("PASSED: the speculators package loads it" + (" and computes the same" if args.drafter else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
