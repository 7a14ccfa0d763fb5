"""Speculative against plain decoding on a target: equal outputs, equal distributions."""
