"""Feeds for forwards and the comparison of two of them: shared by the tests of the lean forward."""

from __future__ import annotations

import random
from typing import Any

import torch
from checkpoints import prompt_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foretoken.models.base import Feed, Rows, SequenceState
from foretoken.models.checks.fast_paths import Checks
from foretoken.models.forward.lean import LeanForward
from foretoken.models.forward.network import Network
from foretoken.models.huggingface import HuggingFaceModel

TAPS = ["layer:0", "layer:1", "layer:3", "last"]


def path_to(sequence: SequenceState, node: int) -> list[int]:
    """Scratch nodes from the top to ``node``."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = sequence.scratch_parents[node]
    return path[::-1]


def outputs(model: HuggingFaceModel) -> list[Rows]:
    """Prefill, ragged trees, growth, a commit and a plain token: everything that a forward is asked."""
    rng = random.Random(0)
    a, b = model.open(), model.open()
    model.prefill(a, prompt_of(21))
    model.prefill(b, prompt_of(4, seed=1))
    rows = model.forward(
        [Feed(s, prompt_of(n, seed=n), [rng.randrange(-1, i) for i in range(n)]) for s, n in ((a, 7), (b, 3))], TAPS
    )
    rows += model.forward([Feed(b, [5, 6], [1, 3], wanted=1)], TAPS)
    model.commit(b, [0])
    rows += model.forward([Feed(b, [9]), Feed(a, [4, 4], [2, 2], wanted=0)], ["last"])
    model.commit(a, [])
    rows += model.forward([Feed(a, [8])])
    for sequence in (b, a):
        model.release(sequence)
    return rows


def compare(got: list[Rows], expected: list[Rows], tolerance: float) -> None:
    for rows, reference in zip(got, expected, strict=True):
        assert rows.taps.keys() == reference.taps.keys()
        pairs = [(rows.logits, reference.logits), *((rows.taps[k], reference.taps[k]) for k in rows.taps)]
        for left, right in pairs:
            assert left.shape == right.shape
            if len(left):
                assert float((left - right).square().mean(-1).sqrt().max() / right.std()) < tolerance


def agrees(owner: Network, lean: LeanForward) -> bool:
    """Whether a forward passes the check of fast paths."""
    judge = Checks(owner, None).judge
    return judge is not None and judge.fault(owner, lean.run, lean.dtype, lean.is_coarse) is None


class InFloat64(TorchFunctionMode):
    """Inside this context nothing is taken down to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept ``float()``, and float32 wherever it is named."""
        if func is Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args = [wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {k: wide.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)
