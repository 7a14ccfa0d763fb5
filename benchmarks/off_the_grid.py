"""Move a model's weights off the grid of the 4-bit file that they were made from.

    python benchmarks/off_the_grid.py FOLDER OUT

Folders that were converted from a GGUF file in 4 bits hold 16 values in every 32 weights of a row: quantised once
more in 4 bits they are what they were, and the drafter ``quantized,bits=4`` is the target itself.  Checkpoints trained
in bfloat16 are not like that.  This adds what rounding took, noise spread evenly over one step, to every projection of
the decoder layers.  Text stays sensible (twice the error of the file), and acceptance becomes what it is off the grid.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP, LEVELS = 32, 16


def off_the_grid(weight: Tensor, draws: torch.Generator) -> Tensor:
    """[out, in] with noise of one step of its own group of 32."""
    groups = weight.float().unflatten(1, (-1, GROUP))  # [out, in / 32, 32]
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (LEVELS - 1)
    noise = torch.rand(groups.shape, generator=draws) - 0.5
    return (groups + step * noise).flatten(1).to(weight.dtype).contiguous()


def main() -> None:
    """Copy the folder, and change its projections."""
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: off_the_grid.py FOLDER OUT: FOLDER is a Transformers model with safetensors files")
    source, out = map(Path, sys.argv[1:])
    shutil.copytree(source, out)
    draws = torch.Generator().manual_seed(0)
    for file in sorted(out.glob("*.safetensors")):
        weights = load_file(file)
        for name, weight in weights.items():
            if "proj" in name and weight.ndim == 2 and weight.shape[1] % GROUP == 0:
                weights[name] = off_the_grid(weight, draws)
        save_file(weights, file, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
