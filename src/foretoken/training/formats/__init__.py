"""Export and import of drafters in other projects' layouts.  Heavy modules are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.training.formats.transfer import export_drafter as export_drafter
    from foretoken.training.formats.transfer import import_drafter as import_drafter

__all__ = ["export_drafter", "import_drafter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'foretoken.training.formats' has no attribute {name!r}")
    from foretoken.training.formats import transfer

    return getattr(transfer, name)
