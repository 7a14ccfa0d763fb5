"""``docs/scale.md`` runs: its arithmetic prints what it says, its YAML is YAML, and its options exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import yaml

from foretoken.server.config import ServerSettings

PAGE = (Path(__file__).parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "print(" in block]


def test_the_arithmetic_prints_what_it_says() -> None:
    names: dict[str, Any] = {}
    promised, printed = [], io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in BLOCKS:
            exec(compile(block, "scale.md", "exec"), names)  # blocks build on each other
            promised += re.findall(r"(?:print\(.*\)  |^)# (.+)$", block, re.M)
    assert len(promised) >= 9
    assert printed.getvalue().splitlines() == promised


def test_the_samples_are_yaml_with_options_that_exist() -> None:
    samples = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
    assert [sample["kind"] for sample in samples] == ["InferenceService", "InferencePool"]
    (container,) = samples[0]["spec"]["predictor"]["containers"]
    options = {arg.removeprefix("--").replace("-", "_") for arg in container["args"] if arg.startswith("--")}
    known = set(ServerSettings.__dataclass_fields__) | {"api_key_file"}
    assert options and options <= known
    for option in re.findall(r"foretoken serve MODEL(.*)", PAGE):
        assert set(re.findall(r"--([a-z-]+)", option)) <= {"replicas", "ray-address", "tensor-parallel"}
