"""Uses the compiled kernels of an installed wheel, on a machine that has no compiler in its PATH.

    python .ci/kernels.py shipped      # the wheel has them: every value of FORETOKEN_CPU that this CPU has
    python .ci/kernels.py damaged      # one is damaged: one line says so, and text is written all the same
    python .ci/kernels.py none         # the wheel for any machine: what is lacking is said, and text is written

Each check runs in a process of its own with an empty cache folder, and nothing may be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TEXT = """
import json

import foretoken as ft
from foretoken.models import native

llm = ft.load("builtin", drafter="ngram", dtype="bfloat16", quantize={quantize!r})
out = llm.generate("def fib(n):", max_new_tokens=24)
assert out.token_ids == llm.plain.generate("def fib(n):", max_new_tokens=24).token_ids
print(json.dumps([native.described(), llm.describe()["forward"]]))
"""


def run(value: str, quantize: str | None) -> tuple[str, str, str]:
    """Which kernels ran, on which forward, and what was printed on stderr, where ``FORETOKEN_CPU`` has a value."""
    import json

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(sys.executable).parent)
        kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ}
        environment = {**kept, "PATH": path, "XDG_CACHE_HOME": folder, "FORETOKEN_CPU": value}
        program = TEXT.format(quantize=quantize)
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"FORETOKEN_CPU={value}: {done.stderr}")
        if list(Path(folder).rglob("*.so")):
            raise SystemExit(f"FORETOKEN_CPU={value}: kernels were compiled, where a wheel should have them")
        kernels, forward = json.loads(done.stdout.splitlines()[-1])
        return kernels, forward, done.stderr


def values() -> dict[str, str]:
    """Values of ``FORETOKEN_CPU`` that this CPU has, and the instruction sets that they stand for."""
    from foretoken.models.native import library

    found = {value: library._cpu_level(levels) for value, levels in library.ALLOWED.items()}
    return {value: level for value, level in found.items() if level is not None}


def damage() -> None:
    """Change one byte of every library of the wheel."""
    from foretoken.models.native import library

    for file in library.SHIPPED.glob("*.so"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def main() -> None:
    found = values()
    if sys.argv[1] == "shipped":
        for value, level in found.items():
            kernels, forward, _ = run(value, "int4")
            if (kernels, forward) != (f"{level}, from the wheel", "native"):
                raise SystemExit(f"FORETOKEN_CPU={value}: kernels {kernels!r}, forward {forward!r}")
        print(f"kernels without a compiler: {', '.join(found.values())}, from the wheel, on the native forward")
        return
    if sys.argv[1] == "damaged":
        damage()
    kernels, forward, told = run(next(iter(found)), None)
    wanted = {"damaged": "does not have the checksum", "none": "no C++ compiler"}[sys.argv[1]]
    lines = [line for line in told.splitlines() if "checksum" in line]
    if wanted not in kernels or forward == "native" or len(lines) != (sys.argv[1] == "damaged"):
        raise SystemExit(f"kernels {kernels!r}, forward {forward!r}, and on stderr: {told}")
    print(f"kernels where they are {sys.argv[1]}: {forward} forward, {kernels}")


if __name__ == "__main__":
    main()
