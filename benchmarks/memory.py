"""Memory over 10,000 generated tokens: the cache must stop growing and nothing else may grow.

python benchmarks/memory.py
"""

from __future__ import annotations

import gc
import json
import resource

import torch

import foretoken as ft


def live_tensor_bytes() -> int:
    """Bytes of all tensors that Python can reach."""
    tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.layout is torch.strided]
    sizes = {o.data_ptr(): o.numel() * o.element_size() for o in tensors}
    return sum(sizes.values())


def main() -> None:
    """Generate 20 x 500 tokens with one engine and print what memory does."""
    llm = ft.load("builtin", "model,k=4")
    prompt = llm.encode("It was a cold evening in November, and the old house ")
    for i in range(20):
        llm.generate(prompt, max_new_tokens=500, ignore_eos=True, temperature=1.0, seed=i)
        gc.collect()
        row = {
            "tokens": 500 * (i + 1),
            "cache_mb": round(llm.target.cache.num_bytes() / 1e6, 2),
            "live_tensors_mb": round(live_tensor_bytes() / 1e6, 2),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }
        if i in (0, 1, 4, 9, 19):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
