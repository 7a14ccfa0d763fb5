"""The report of a benchmark: one HTML file that needs nothing else, and pictures for papers."""

from __future__ import annotations

from foretoken.lab.report.page import write_report
from foretoken.lab.report.plots import write_plots

__all__ = ["write_plots", "write_report"]
