"""One thread at a time in a network whose forward something is switched for, and nobody else sees what is switched.

Hooks of taps and replaced sublayers are written on the network itself, which other threads may be using: through
another :class:`~foretoken.models.base.LanguageModel` that wraps it, through the hook for ``model.generate``, or without
us, through Transformers' own ``generate``.  The first two wait for each other; for the third, what is switched looks
at the thread that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock, get_ident, local
from typing import Any
from weakref import WeakKeyDictionary

_LOCKS: dict[str, WeakKeyDictionary[Any, Any]] = {}
_GUARD = Lock()
BUILDING = RLock()
"""Held while a network is built: meanwhile the whole process has its default dtype (Transformers), and another number
of threads (GGUF).  Two threads that put these back in another order would leave the wrong ones for ever."""


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
    """Inside the block no other thread switches anything on the network, it runs as it was before it was compiled, and
    dropout is off; a network in training is put back into training."""
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
    """Inside the block a network whose forward was compiled (``model.forward = torch.compile(model.forward)``, or
    ``model.compile()``) runs the forward that was, which takes calls of every shape: the compiled one would be compiled
    again for most of ours, or refuse them.  Other threads keep a compiled ``forward``."""
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
    """A function for this thread alone: others get what ``elsewhere`` gives, or ``None``."""
    thread = get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            return function(*args, **kwargs)
        return None if elsewhere is None else elsewhere(*args, **kwargs)

    return run


@contextmanager
def switched_attention(owner: Any) -> Iterator[None]:
    """Use our attention for a forward of this thread, in which no other of ours runs the model."""
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
"""Of every thread: the attention that it uses, by the identity of the configuration that is asked for it."""
_ANSWERING: dict[type, int] = {}
"""How many forwards run with configurations of a class."""
NAME = "_attn_implementation"


@contextmanager
def _answering_by_thread(kind: type) -> Iterator[None]:
    """Inside the block configurations of a class name the attention of the thread that asks.

    The name is not written on the configuration: other threads would read it there, and run without a causal mask.
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
    """The property of a class of configurations that names their attention, where a thread may have its own.

    ``honest`` is what the class has otherwise, perhaps from a parent; ``own`` the same, if it is the class's own.
    """

    def __init__(self, honest: property, replaced: Any) -> None:
        super().__init__(self._read, honest.fset)
        self._honest, self.replaced = honest, replaced

    def _read(self, config: Any) -> Any:
        name = getattr(_NAMES, "by_config", {}).get(id(config))
        return name if name is not None or self._honest.fget is None else self._honest.fget(config)
