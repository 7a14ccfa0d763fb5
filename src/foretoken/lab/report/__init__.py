"""The report of a benchmark: one HTML file that needs nothing else, and pictures for papers.

Nothing is imported until it is used: ``show`` is below this package, and draws without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.lab.report.page import write_report as write_report
    from foretoken.lab.report.plots import write_plots as write_plots

HOMES = {"write_plots": "plots", "write_report": "page"}
__all__ = ["write_plots", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'foretoken.lab.report' has no attribute {name!r}")
    return getattr(import_module(f"foretoken.lab.report.{HOMES[name]}"), name)
