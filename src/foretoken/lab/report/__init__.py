"""The report of a benchmark: one self-contained HTML file, and charts for papers."""
