"""The measuring laboratory: benchmarks, tuning, checks of exactness, plans, reports.  The library runs without it."""
