"""Forwards over a cache and a scratch tree: Transformers' own, lean, in one native call, as CUDA graphs, of heads.

A runner makes calls, and a ``Network`` runs them the fastest way that passed its check: ``public`` is the model's own
code, ``lean`` the same layers in few tensor calls, ``native`` those in one call of our library.  Each is the readable
twin of the next.
"""
