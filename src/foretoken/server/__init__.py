"""OpenAI-compatible serving of one engine."""

from __future__ import annotations

import os

# PyTorch keeps a compiled oneDNN product for every number of rows and shape of weight, .4 to .6 MB each, up to 1,024 of
# them: batches that come and go meet all numbers, so a server would grow for hours.  A product that was given up is
# compiled again in half a millisecond.  Both caches read this when they are first used; a user's own setting stays.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "256")
