"""An export that its reader would refuse or misread is not written."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import pytest
from tiny_nets import save_net

from foretoken.training.formats import export_drafter, import_drafter


@pytest.mark.parametrize(("layers", "is_read"), [("1,2,4", False), ("0,2,3", False), ("1,2,3", True), ("last", True)])
def test_depths_that_sglang_does_not_read(layers: str, is_read: bool, target: Path, tmp_path: Path) -> None:
    drafter = f"eagle3:{save_net('eagle3', tmp_path / 'mine', target, layers=layers)}"
    export_drafter(drafter, tmp_path / "vllm", None, target, engine="vllm")
    if is_read:
        export_drafter(drafter, tmp_path / "sglang", None, target, engine="sglang")
    else:
        with pytest.raises(ValueError, match=f"fuses the depths {layers}, and SGLang reads 1 to 3: train with others"):
            export_drafter(drafter, tmp_path / "sglang", None, target, engine="sglang")
        assert not (tmp_path / "sglang").exists()


def test_ready_lines_are_quoted(target: Path, tmp_path: Path) -> None:
    """For a shell, or as Python's strings."""
    out = tmp_path / "a \"b'c"
    drafter = f"eagle3:{save_net('eagle3', tmp_path / 'mine', target, layers='1,2,3')}"
    ready = {
        engine: export_drafter(drafter, out, None, target, engine=engine, force=True)["ready"]
        for engine in ("vllm", "sglang")
    }
    option, value = shlex.split(ready["vllm"])
    assert option == "--speculative-config" and json.loads(value)["model"] == str(out)
    assert shlex.split(ready["sglang"])[3] == str(out)
    ready["huggingface"] = export_drafter(f"model:{target}", out, None, target, engine="huggingface", force=True)[
        "ready"
    ]
    names = [node.value for node in ast.walk(ast.parse(ready["huggingface"])) if isinstance(node, ast.Constant)]
    assert names == [str(out)]


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_depths_without_a_number(method: str, target: Path, tmp_path: Path) -> None:
    """The plain layout numbers the outputs of all layers but the last; none numbers the embedding."""
    last = save_net(method, tmp_path / "last", target, taps="2,4")
    with pytest.raises(ValueError, match=r"depths 2,4, and this format holds 1 to 3; speculators holds the last one"):
        export_drafter(f"{method}:{last}", tmp_path / "theirs", "plain", target)
    export_drafter(f"{method}:{last}", tmp_path / "theirs", "speculators", target)
    assert import_drafter(tmp_path / "theirs", tmp_path / "ours", target)["method"] == method
    first = save_net(method, tmp_path / "first", target, taps="0,2")
    for format, most in (("plain", 3), ("speculators", 4)):
        with pytest.raises(ValueError, match=f"depths 0,2, and this format holds 1 to {most}"):
            export_drafter(f"{method}:{first}", tmp_path / format, format, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "last", "ours", "theirs"]
