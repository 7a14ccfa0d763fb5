"""Our kernels for products of a few rows, where PyTorch has none that reads weights at memory speed."""

from foretoken.models.native.library import described, why_not

__all__ = ["described", "why_not"]
