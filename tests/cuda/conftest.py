"""Every test here needs a CUDA device.

``FORETOKEN_FAKE_CUDA=1`` runs them on the stand-in instead, to try the tests themselves: slow, and no proof of anything
that a GPU does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fake_graphs import fake_cuda_graphs

sys.path += [str(Path(__file__).parents[1] / name) for name in ("exactness", "models")]  # cases, matrix, checkpoints

FAKE = os.environ.get("FORETOKEN_FAKE_CUDA") == "1"


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    if not FAKE and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    with fake_cuda_graphs() if FAKE else nullcontext():
        yield
