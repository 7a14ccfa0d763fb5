"""What the operating system says of the processor; needs no PyTorch."""

from __future__ import annotations

from pathlib import Path


def cpu_info() -> tuple[set[str], str]:
    """Instruction-set flags and model name, where Linux tells them."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return set(), ""
    lines = info.read_text().split("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return set(fields.get("flags", "").split()), fields.get("model name", "")
