"""Products of a few rows in kernels of our own, where PyTorch has none that reads weights at the memory's speed."""

from foretoken.models.native.library import described, why_not

__all__ = ["described", "why_not"]
