"""Forwards over a cache and a scratch tree: Transformers' own, lean, native, as CUDA graphs, and of heads.

A runner makes calls, and a ``Network`` runs them on the fastest forward that passed its check: ``public`` is the
model's own code, ``lean`` the same layers in few tensor calls, ``native`` a single call into our library.  Each is the
readable twin of the next.
"""
