"""Searches: which drafter, length, tree and layers pay for a target on this machine."""
