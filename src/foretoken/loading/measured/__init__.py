"""What this machine costs: calls, rounds, and whether something else is busy."""
