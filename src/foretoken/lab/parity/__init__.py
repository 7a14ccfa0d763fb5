"""Speculative against plain decoding on a given target: equal texts, equal distributions."""
