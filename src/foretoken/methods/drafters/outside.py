"""Rules that every proposal must obey; errors of external drafters name the class, rule and line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from foretoken.core import Budget, Context, Kind, TokenTree
from foretoken.core.outside import OutsideError, fault_message, is_outside
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.trees.operations import truncate
from foretoken.models.base import LanguageModel


class DrafterError(OutsideError):
    """An external drafter raised an exception, or broke a rule of the protocol."""


def has_outside(drafter: Drafter | None) -> bool:
    """Whether a drafter, or a member of a group, is external."""
    return drafter is not None and (is_outside(type(drafter)) or any(map(has_outside, drafter.drafters)))


def entries_of(drafter: Drafter) -> list[dict[str, Any]]:
    """``describe()`` of a drafter.

    Raises:
        DrafterError: an external one returned something else than a list of dictionaries.
    """
    entries: Any = drafter.describe()
    if is_outside(type(drafter)) and not (isinstance(entries, list) and all(isinstance(e, dict) for e in entries)):
        rule = f"returned {type(entries).__name__}: it must be a list of dictionaries"
        raise DrafterError(fault_message(type(drafter), "describe", rule))
    return list(entries)


def check_count(proposed: Any, count: int, drafter: Drafter) -> None:
    """Check the type and length of ``propose_batch``'s result, before its trees are read.

    Raises:
        DrafterError: it is not one tree for each of ``count`` requests.
    """
    if not isinstance(proposed, Sequence) or len(proposed) != count:
        returned = f"{len(proposed)} trees" if isinstance(proposed, Sequence) else type(proposed).__name__
        raise _broken(drafter, f"returned {returned} for {count} requests: it must be a list with one tree for each")


def check_proposal(tree: Any, context: Context, drafter: Drafter, target: LanguageModel | None, thorough: bool) -> None:
    """Check a proposal before a model reads it: on some devices an invalid id ends the process.

    Args:
        target: the target, for the range of ids; ``None`` if the caller does not know it.
        thorough: also check whether the tokens can have been drawn as recorded, which reads ``q``.

    Raises:
        DrafterError: it is no tree, does not begin at the last committed token, has a token out of range, is of a kind
            that ``traits`` do not declare, or its ``q`` holds no distributions or not those that it was drawn from,
            also by a second draw of a token without replacement; for an external drafter also if tokens, parents, rows
            or members are no ints.
    """
    if not isinstance(tree, TokenTree):
        raise _broken(drafter, f"returned {type(tree).__name__}, not a TokenTree")
    if tree.tokens[0] != context.root:
        raise _broken(drafter, f"returned a tree that starts with token {tree.tokens[0]}, not with context.root")
    if thorough and is_outside(type(drafter)):
        _check_numbers(tree, drafter)
    for node, token in enumerate(tree.tokens[1:], 1):  # the root is committed, not chosen by the drafter
        is_probe = bool(tree.probes) and tree.probes[node]  # may be a row that was added after the vocabulary
        most = sys.maxsize if target is None else target.num_ids if is_probe else target.vocab_size
        if not 0 <= token < most:
            valid = "ids begin at 0" if target is None else f"ids go from 0 to {most - 1}"
            raise _broken(_author(drafter, tree, node), f"proposed token {token}: {valid}")
    if thorough and len(tree) > 1:
        _check_kind(tree, drafter)
        _check_distributions(tree, drafter, None if target is None else target.vocab_size)


def within(tree: TokenTree, budget: Budget, drafter: Drafter) -> TokenTree:
    """A proposal without nodes deeper than its budget allows; an external drafter's chain is cut to the budget's nodes,
    too, which do not count probes.

    Raises:
        DrafterError: a tree of an external drafter has more nodes, whose memory no request has reserved. Cutting them
            would be exact only if their order did not depend on drawn tokens.
    """
    tree = truncate(tree, budget.deepest)
    most = budget.widest
    if tree.num_drafts <= most or not is_outside(type(drafter)):
        return tree
    if not tree.is_chain:
        raise _broken(drafter, f"proposed {tree.num_drafts} draft nodes: budget.max_nodes allows {most}")
    return truncate(tree, most)


def _check_numbers(tree: TokenTree, drafter: Drafter) -> None:
    """Check types: a number that is no int would be written into the output, or fail far from here."""
    parts = (("token", tree.tokens), ("parent", tree.parents), ("row in q_rows", tree.q_rows))
    for name, numbers in (*parts, ("member in drafters", tree.drafters)):
        for number in numbers:
            if type(number) is not int:
                raise _broken(drafter, f"proposed a {name} of type {type(number).__name__}: it must be an int")
    if not isinstance(tree.kind, Kind):
        raise _broken(drafter, f"proposed a tree of the kind {tree.kind!r}: write Kind.{str(tree.kind).upper()}")
    members = len(drafter.drafters) or 1
    for member in tree.drafters:
        if not -1 <= member < members and not member < len(drafter.limits.members):
            raise _broken(
                drafter, f"named member {member} in drafters: they go from 0 to {members - 1}, or are -1 for none"
            )


def _check_kind(tree: TokenTree, drafter: Drafter) -> None:
    promised = drafter.traits.proposals
    kinds = {kind for kind, _ in promised} | {Kind.POINT}  # a greedy request always gets point masses
    missing = [] if tree.kind in kinds else [f"kind=Kind.{tree.kind.name}"]
    if not (tree.is_chain or any(branches for _, branches in promised)):
        missing.append("draws_trees=True")
    if missing:
        sort = f"a {'chain' if tree.is_chain else 'tree'} of kind {tree.kind.name}"
        rule = f"proposed {sort}, which its traits do not declare: write traits = Traits({', '.join(missing)})"
        raise _broken(_author(drafter, tree, -1), rule)


def _check_distributions(tree: TokenTree, drafter: Drafter, vocab_size: int | None) -> None:
    q, rows = tree.q, tree.q_rows
    drawn = [node for node, row in enumerate(rows) if row != -1]
    if q is None or not drawn:
        return
    author = _author(drafter, tree, drawn[0])
    if not isinstance(q, torch.Tensor) or not q.is_floating_point():
        kind = q.dtype if isinstance(q, torch.Tensor) else type(q).__name__
        raise _broken(author, f"gave q of type {kind}: it must be a tensor of floating-point numbers")
    highest = max(tree.tokens[node] for node in drawn)  # probes may lie behind the vocabulary
    fits = q.dim() == 2 and len(rows) == len(tree) and min(rows) >= -1 and max(rows) < len(q)
    if not fits or highest >= q.shape[1]:
        raise _broken(author, f"gave q of shape {list(q.shape)} and q_rows that do not fit a tree of {len(tree)} nodes")
    if vocab_size is not None and q.shape[1] != vocab_size:
        columns = f"{vocab_size} columns, one for each of the target's ids"
        raise _broken(author, f"gave q of shape {list(q.shape)}: its rows must have {columns}")
    # Comparisons with NaN are false, so test what must be true, not what must be false.
    if not bool((q >= 0).all()) or not bool(((q.sum(-1) - 1).abs() <= 1e-3).all()):
        raise _broken(author, "gave q with rows that are not distributions: they must be >= 0 and sum to 1")
    probabilities = q[torch.tensor([rows[n] for n in drawn]), torch.tensor([tree.tokens[n] for n in drawn])]
    if not bool((probabilities > 0).all()):
        raise _broken(author, "proposed a token with probability 0 in q: it was not drawn from q")
    if tree.kind is Kind.WITHOUT_REPLACEMENT:
        _check_siblings(tree, drawn, author)


def _check_siblings(tree: TokenTree, drawn: Sequence[int], author: Drafter) -> None:
    """Check that siblings of one row are distinct: given the first, the same token again has probability 0."""
    seen: set[tuple[int, int, int]] = set()
    for node in drawn:
        draw = (tree.parents[node], tree.q_rows[node], tree.tokens[node])
        if draw in seen:
            token = f"token {tree.tokens[node]} twice below one node"
            raise _broken(author, f"proposed {token} as draws without replacement: independent ones are of Kind.IID")
        seen.add(draw)


def _author(drafter: Drafter, tree: TokenTree, node: int) -> Drafter:
    """The group's member that drafted a node."""
    index = tree.drafters[node] if tree.drafters else -1
    return drafter.drafters[index] if 0 <= index < len(drafter.drafters) else drafter


def _broken(drafter: Drafter, rule: str) -> DrafterError:
    """An error for the result of ``propose`` or ``propose_batch``."""
    cls = type(drafter)
    method = "propose" if cls.propose_batch is Drafter.propose_batch else "propose_batch"
    return DrafterError(fault_message(cls, method, rule))
