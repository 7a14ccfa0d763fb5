"""Checks of verifiers and verdicts; errors of outside verifiers name the class, rule and line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.core import Kind, TokenTree, Verdict
from foretoken.core.outside import OutsideError, fault_message, fault_of, line_of
from foretoken.methods.verifiers.base import Verifier


class VerifierError(OutsideError):
    """A verifier from outside raised an error, or broke a rule of the protocol."""


def check_verifier(verifier: Any) -> None:
    """Raise ``VerifierError`` for an invalid verifier.

    Raises:
        VerifierError: a class instead of an object, another type, or a verifier without its class attributes.
    """
    if fault := fault_of(verifier, Verifier, "verifier"):
        raise VerifierError(fault)
    cls = type(verifier)
    for kinds in (verifier.kinds, cls.kinds):  # pairs with drafters are checked by class
        if not isinstance(kinds, set | frozenset) or not kinds or not all(isinstance(kind, Kind) for kind in kinds):
            origin = f"{cls.__name__} ({line_of(cls)})"
            raise VerifierError(f"{origin} has kinds = {kinds!r}: write a set, such as frozenset({{Kind.IID}})")


def check_verdict(verdict: Any, tree: TokenTree, verifier: Verifier, vocab_size: int) -> None:
    """Check a verdict before it is committed, because afterwards the output would be silently wrong.

    Raises:
        VerifierError: it is no verdict, its path is not a path from the root's child downwards, or its token is
            invalid.
    """
    if not isinstance(verdict, Verdict):
        raise _broken(verifier, f"returned {type(verdict).__name__}, not a Verdict")
    if not isinstance(verdict.path, Sequence):
        raise _broken(verifier, f"gave a path of type {type(verdict.path).__name__}: it must be a tuple of nodes")
    last = 0
    for node in verdict.path:
        if type(node) is not int:
            raise _broken(verifier, f"gave a path with a node of type {type(node).__name__}: it must be an int")
        if not 1 <= node < len(tree):
            valid = f"draft nodes go from 1 to {len(tree) - 1}" if len(tree) > 1 else "nothing was drafted"
            raise _broken(verifier, f"gave a path with node {node}: {valid}, and the root is not listed")
        if tree.parents[node] != last:
            raise _broken(verifier, f"gave the path {tuple(verdict.path)}: node {node} is not a child of node {last}")
        if tree.probes and tree.probes[node]:
            raise _broken(verifier, f"gave a path with node {node}, which is a probe")
        last = node
    token = verdict.next_token
    if type(token) is not int:
        raise _broken(verifier, f"gave a next token of type {type(token).__name__}: it must be an int")
    if not 0 <= token < vocab_size:
        raise _broken(verifier, f"gave the next token {token}: ids go from 0 to {vocab_size - 1}")


def _broken(verifier: Verifier, rule: str) -> VerifierError:
    cls = type(verifier)
    names = ("verify", "decide_fast", "decide")  # in the order in which they call one another
    method = next(name for name in names if getattr(cls, name) is not getattr(Verifier, name))
    return VerifierError(fault_message(cls, method, rule))
