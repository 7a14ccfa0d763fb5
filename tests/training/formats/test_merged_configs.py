"""Values that stand twice in a config.json, in the layer's own part and beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_bad_checkpoints import change, checkpoint

from foretoken.training.formats import import_drafter


def set_fields(folder: Path, **fields: Any) -> None:
    """With nulls as they are, unlike ``change``."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash"])
def test_a_null_hides_nothing(method: str, target: Path, tmp_path: Path) -> None:
    source = checkpoint(method, "speculators", target, tmp_path)
    layer = json.loads((source / "config.json").read_text())["transformer_layer_config"]
    layer |= {"rope_theta": 5e5, "rms_norm_eps": 1e-3}
    set_fields(source, transformer_layer_config=layer, rope_theta=None, rms_norm_eps=None, hidden_size=None)
    import_drafter(source, tmp_path / "ours", target)
    config = json.loads((tmp_path / "ours" / "drafter.json").read_text())["config"]
    assert (config["rope_theta"], config["eps"]) == (5e5, 1e-3)


def test_a_null_of_a_wrapper_hides_nothing(target: Path, tmp_path: Path) -> None:
    source = checkpoint("eagle", "plain", target, tmp_path)
    inner = json.loads((source / "config.json").read_text()) | {"rope_theta": 5e5}
    (source / "config.json").write_text(json.dumps({"model_type": "eagle", "rope_theta": None, "model": inner}))
    import_drafter(source, tmp_path / "ours", target)
    assert json.loads((tmp_path / "ours" / "drafter.json").read_text())["config"]["rope_theta"] == 5e5


@pytest.mark.parametrize("method", ["eagle", "eagle3", "peagle"])
def test_rotated_pairs_are_told_of(method: str, target: Path, tmp_path: Path) -> None:
    """Engines rotate halves in these layers whatever the key says."""
    source = checkpoint(method, "plain", target, tmp_path)
    change(source, None, rope_interleave=True)
    (warning,) = import_drafter(source, tmp_path / "ours", target)["warnings"]
    assert warning.startswith("config.json has rope_interleave, which is ignored")
    change(source, None, rope_interleave=False)
    assert import_drafter(source, tmp_path / "again", target)["warnings"] == []
