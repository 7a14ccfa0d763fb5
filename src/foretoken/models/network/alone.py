"""Exclusive use of a network while something in it is switched, invisibly to other threads.

Hooks of taps and replaced sublayers are set on the network itself.  Other threads may be using it: through another
:class:`~foretoken.models.base.LanguageModel`, through the hook for ``model.generate``, or through Transformers' own
``generate`` without us.  The first two wait for each other; for the third, switches depend on the current thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock, get_ident, local
from typing import Any
from weakref import WeakKeyDictionary


class ThreadLock:
    """A reentrant lock of threads, for ``with``.

    Entering raises ``RuntimeError`` in a process that was forked while another thread had the lock.  That thread does
    not exist there: it would never give the lock back, nor finish what it was changing.

    Args:
        refusal: the error's text.
    """

    def __init__(self, refusal: str) -> None:
        self._lock, self._refusal, self._lost = RLock(), refusal, False

    def __enter__(self) -> None:
        if self._lost:
            raise RuntimeError(self._refusal)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def after_fork(self) -> None:
        """Find out, in a forked process that has one thread so far, whether the lock is lost."""
        self._lost = self._lost or not self._lock.acquire(blocking=False)
        if not self._lost:
            self._lock.release()


_LOCKS: dict[str, WeakKeyDictionary[Any, ThreadLock]] = {}
_GUARD = Lock()
BUILDING = ThreadLock("the process was forked while another thread loaded a model: fork before or after that")
"""Held while a network is built, which changes the default dtype (Transformers) or the number of threads (GGUF) of the
whole process.  Two threads that restored these in another order would leave wrong values forever."""


def lock_of(owner: Any, purpose: str = "forward") -> ThreadLock:
    """The reentrant lock of an object for a purpose; the same one throughout the object's life.

    ``"forward"`` is held for at most one forward and never waits for another lock; ``"call"`` is held for a whole round
    or call of :func:`foretoken.custom_generate`.  So there are no deadlocks.
    """
    with _GUARD:
        locks = _LOCKS.setdefault(purpose, WeakKeyDictionary())
        lock = locks.get(owner)
        if lock is None:
            refusal = "the process was forked while another thread used this model: load it in each process"
            lock = locks[owner] = ThreadLock(refusal)
        return lock


def _after_fork() -> None:
    """Mark, in a forked process, the locks that other threads of its parent had."""
    _GUARD.release()
    for lock in [BUILDING, *(lock for locks in _LOCKS.values() for lock in locks.values())]:
        lock.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(before=_GUARD.acquire, after_in_parent=_GUARD.release, after_in_child=_after_fork)


@contextmanager
def alone(network: Any) -> Iterator[None]:
    """Inside the block, no other thread switches anything on the network, its uncompiled forward runs, and dropout is
    off; training mode is restored afterwards."""
    with lock_of(network), _not_compiled(network):
        training = [module for module in network.modules() if module.training] if network.training else []
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def _not_compiled(network: Any) -> Iterator[None]:
    """Inside the block, a compiled network (``model.forward = torch.compile(model.forward)``, or ``model.compile()``)
    runs its original forward, which accepts every shape: the compiled one would be recompiled for most of our calls, or
    reject them.  Other threads keep a compiled ``forward``."""
    attributes = vars(network)
    compiled = {name: attributes[name] for name in ("forward", "_compiled_call_impl") if name in attributes}
    plain = getattr(compiled.get("forward"), "_torchdynamo_orig_callable", None)
    if plain is not None:
        attributes["forward"] = only_here(plain, compiled["forward"])
    if "_compiled_call_impl" in attributes:
        attributes["_compiled_call_impl"] = None
    try:
        yield
    finally:
        attributes.update(compiled)


def only_here(function: Callable[..., Any], elsewhere: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function for this thread only: other threads get the result of ``elsewhere``, or ``None``.

    Its attribute ``runs`` is ``function``.
    """
    thread = get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            return function(*args, **kwargs)
        return None if elsewhere is None else elsewhere(*args, **kwargs)

    run.runs = function  # type: ignore[attr-defined]
    return run


@contextmanager
def switched_attention(owner: Any) -> Iterator[None]:
    """Use our attention in a forward of this thread, while none of our other threads runs the model."""
    with alone(owner.model), ExitStack() as classes:
        for kind in {type(config) for config in owner.configs}:
            classes.enter_context(_answering_by_thread(kind))
        before = getattr(_NAMES, "by_config", {})
        _NAMES.by_config = {**before, **{id(config): owner.attention for config in owner.configs}}
        try:
            yield
        finally:
            _NAMES.by_config = before


_NAMES = local()
"""Per thread: the attention to use, by identity of the configuration that is read."""
_ANSWERING: dict[type, int] = {}
"""Number of running forwards per configuration class."""
NAME = "_attn_implementation"


@contextmanager
def _answering_by_thread(kind: type) -> Iterator[None]:
    """Inside the block, configurations of a class report the current thread's attention.

    The name is not stored in the configuration: other threads would read it there, and run without a causal mask.
    """
    with _GUARD:
        count = _ANSWERING[kind] = _ANSWERING.get(kind, 0) + 1
        if count == 1:
            setattr(kind, NAME, _Answering(getattr(kind, NAME), kind.__dict__.get(NAME)))
    try:
        yield
    finally:
        with _GUARD:
            _ANSWERING[kind] -= 1
            if not _ANSWERING[kind]:
                original = kind.__dict__[NAME].replaced
                delattr(kind, NAME) if original is None else setattr(kind, NAME, original)


class _Answering(property):
    """Property of a configuration class that reports the attention per thread.

    ``honest`` is the original property, possibly inherited; ``replaced`` is the same if the class itself defines it.
    """

    def __init__(self, honest: property, replaced: Any) -> None:
        super().__init__(self._read, honest.fset)
        self._honest, self.replaced = honest, replaced

    def _read(self, config: Any) -> Any:
        name = getattr(_NAMES, "by_config", {}).get(id(config))
        return name if name is not None or self._honest.fget is None else self._honest.fget(config)
