"""What pyproject.toml cannot say: a wheel for one kind of machine, with the compiled kernels in it.

``FORETOKEN_WHEEL_KERNELS=1 python -m build --wheel`` compiles them for every instruction set of this kind of machine
and fails where it cannot.  Without the variable the wheel is for any machine and its kernels are compiled at first use.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SWITCH = "FORETOKEN_WHEEL_KERNELS"
NATIVE = Path("foretoken/models/native")


def compiling() -> Any:
    """The module of the package, without the package, which needs PyTorch."""
    spec = importlib.util.spec_from_file_location("compiling", Path("src") / NATIVE / "compiling.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{SWITCH}: the sources are not here")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """The package, and the libraries beside the sources that they are made of."""

    def run(self) -> None:
        super().run()
        try:
            compiling().write_all(Path(self.build_lib) / NATIVE / "compiled")
        except (OSError, subprocess.SubprocessError) as error:
            raise SystemExit(f"{SWITCH}=1: the kernels could not be compiled: {error}") from None


class ForOneMachine(Distribution):
    """What goes where files of one kind of machine go."""

    def has_ext_modules(self) -> bool:
        return True


class MachineWheel(bdist_wheel):
    """Libraries are called by ctypes: the wheel depends on the machine, and on no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


ASKED = os.environ.get(SWITCH, "0")
if ASKED not in ("0", "1"):
    raise SystemExit(f"{SWITCH} must be 0 or 1, not {ASKED!r}")
if ASKED == "1":
    setup(distclass=ForOneMachine, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": MachineWheel})
else:
    setup()
