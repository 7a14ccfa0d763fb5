"""Forwards over a cache and a scratch tree: Transformers' own, lean, in one native call, as CUDA graphs, of heads."""
