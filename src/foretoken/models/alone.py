"""One thread at a time in a network whose forward something is switched for.

Attention functions, hooks of taps and replaced sublayers are written on the network itself, which other threads may be
using: through another :class:`~foretoken.models.base.LanguageModel` that wraps it, or through the hook for
``model.generate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

_LOCKS: dict[str, WeakKeyDictionary[Any, Any]] = {}
_GUARD = Lock()


def lock_of(owner: Any, purpose: str = "forward") -> Any:
    """The reentrant lock of an object for a purpose; the same one as long as the object lives.

    ``"forward"`` is held for one forward at most and never waits for another lock, ``"call"`` for a whole round or
    call of :func:`foretoken.custom_generate`: so no two threads can wait for each other.
    """
    with _GUARD:
        locks = _LOCKS.setdefault(purpose, WeakKeyDictionary())
        lock = locks.get(owner)
        if lock is None:
            lock = locks[owner] = RLock()
        return lock


@contextmanager
def alone(network: Any) -> Iterator[None]:
    """Inside the block no other thread switches anything on the network, and dropout is off; a network in training is
    put back into training."""
    with lock_of(network):
        training = [module for module in network.modules() if module.training] if network.training else []
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def switched_attention(owner: Any) -> Iterator[None]:
    """Use our attention for a forward, in which nobody else runs the model, then put back what was there."""
    with alone(owner.model):
        before = [config._attn_implementation_internal for config in owner._configs]
        for config in owner._configs:
            config._attn_implementation_internal = owner._attention
        try:
            yield
        finally:
            for config, name in zip(owner._configs, before, strict=True):
                config._attn_implementation_internal = name
