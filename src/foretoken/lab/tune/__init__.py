"""Searches for the drafter, length, tree and layers that pay for a target on this machine."""
