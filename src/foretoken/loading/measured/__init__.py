"""Measured costs of this machine: calls, rounds, and the load by other processes."""
