"""Measurement: benchmarks, tuning, parity checks, plans, reports.  The library runs without it."""
