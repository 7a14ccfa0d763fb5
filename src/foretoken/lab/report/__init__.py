"""The report of a benchmark: one HTML file that needs nothing else, and pictures for papers."""
