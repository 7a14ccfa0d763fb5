"""Base of drafters that consist of other drafters.

A member learns from rounds.  The tree that the target scored need not be its own, so every round is translated for it
(:func:`show`): first its own tree with the accepted part, then every further token as a round of plain decoding.  It
cannot distinguish this from being the only drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core import Budget, Context, HiddenStates, Kind, Scores, TokenTree, Verdict
from foretoken.core.outside import is_outside
from foretoken.methods.drafters.base import BatchDrafter, Drafter, Traits, finish_all
from foretoken.methods.drafters.outside import check_count, check_proposal, entries_of, within
from foretoken.methods.trees.operations import select, truncate


@dataclass(slots=True)  # not frozen: both are made for every request in every round, which takes three times as long
class MemberTree:
    """A member's proposal.

    Attributes:
        nodes: the group tree's node for each of its nodes.
    """

    tree: TokenTree
    nodes: Sequence[int]


@dataclass(slots=True)
class Proposal:
    """A group's tree, and the members' parts (by index) of it."""

    tree: TokenTree
    parts: Mapping[int, MemberTree]


class GroupDrafter(BatchDrafter):
    """Several drafters for one request.

    Its kind is the most demanding one among its members.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        check_members(self.name, drafters)
        if self.foresight is None:
            check_no_foresight(self.name, drafters)
        self.drafters = tuple(drafters)
        self._observers = [i for i, member in enumerate(drafters) if member.traits.learns]
        self.taps = tuple(dict.fromkeys(tap for member in drafters for tap in member.taps))
        self.max_depth = max(member.max_depth for member in drafters)
        all_traits = [member.traits for member in drafters]
        sorts = frozenset[tuple[Kind, bool]]().union(*(traits.proposals for traits in all_traits))
        demanding = (Kind.WITHOUT_REPLACEMENT, Kind.IID, Kind.POINT)
        kind = next(kind for kind in demanding if any(kind is drawn for drawn, _ in sorts))
        self.traits = Traits(
            kind,
            any(traits.draws_trees for traits in all_traits),
            sorts,
            shares_state=any(traits.shares_state for traits in all_traits),
            # Not where a member draws: whether coupling costs it more than the others gain has not been measured.
            prefers_noise=kind is Kind.POINT and any(traits.prefers_noise for traits in all_traits),
            runs_target=any(traits.runs_target for traits in all_traits),
        )
        self.vocab_size = next((v for v in map(vocabulary_of, drafters) if v is not None), None)

    def describe(self) -> list[dict[str, Any]]:
        return [entry for member in self.drafters for entry in entries_of(member)]

    def cost_beside(self, target_bytes: int) -> float:
        return max(member.cost_beside(target_bytes) for member in self.drafters)

    def start(self, context: Context) -> None:
        for member in self.drafters:
            member.start(context)

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        last: Proposal | None = context.state.pop(self, None)
        parts = {} if last is None else parts_of(last, tree)
        for index in self._observers:
            if len(tree) == 1:  # plain decoding looks the same to every member
                self.drafters[index].observe(context, tree, scores, verdict)
            else:
                show(self.drafters[index], context, parts.get(index), scores, verdict)

    def finish(self, context: Context) -> None:
        super().finish(context)
        finish_all(self.drafters, context)


def ask(member: Drafter, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
    """A member's trees within the budgets; it is not called for an empty budget."""
    trees: list[TokenTree | None] = [None] * len(contexts)
    chosen = [i for i, budget in enumerate(budgets) if budget.max_depth > 0 and budget.max_nodes > 0]
    if chosen:
        proposed = member.propose_batch([contexts[i] for i in chosen], [budgets[i] for i in chosen])
        is_foreign = is_outside(type(member))
        if is_foreign:
            check_count(proposed, len(chosen), member)
        for i, tree in zip(chosen, proposed, strict=True):
            if is_foreign:
                check_proposal(tree, contexts[i], member, None, thorough=True)
            trees[i] = within(tree, budgets[i], member) if is_foreign else truncate(tree, budgets[i].deepest)
    return [TokenTree.root_only(c.root) if tree is None else tree for tree, c in zip(trees, contexts, strict=True)]


def parts_of(proposal: Proposal, tree: TokenTree) -> Mapping[int, MemberTree]:
    """The members' parts of a scored tree: those of the proposal, without the nodes that a controller cut from it; none
    of another tree."""
    kept = tree.nodes_in(proposal.tree)
    if kept is None or len(kept) == len(proposal.tree):
        return {} if kept is None else proposal.parts
    new_index = {node: i for i, node in enumerate(kept)}
    parts = {}
    for index, part in proposal.parts.items():
        own = [i for i, node in enumerate(part.nodes) if node in new_index]
        parts[index] = MemberTree(select(part.tree, own), [new_index[part.nodes[i]] for i in own])
    return parts


def show(member: Drafter, context: Context, part: MemberTree | None, scores: Scores, verdict: Verdict) -> None:
    """Report a round to a member: its own part as its round, and the rest as rounds of plain decoding."""
    tree = scores.tree
    nodes = [0, *verdict.path]  # the node before each new token
    tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
    first = 0
    if part is not None:
        path = part.tree.path_along(tokens[:-1])
        last = path[-1] if path else 0
        part_scores = _scores_at(scores, part.tree, part.nodes)
        member.observe(context, part.tree, part_scores, Verdict(path, tokens[len(path)], not part.tree.children[last]))
        first = len(path) + 1
    for node, token in zip(nodes[first:], tokens[first:], strict=True):
        root = TokenTree.root_only(tree.tokens[node])
        member.observe(context, root, _scores_at(scores, root, [node]), Verdict((), token, next_is_bonus=True))


def _scores_at(scores: Scores, tree: TokenTree, nodes: Sequence[int]) -> Scores:
    """The scores of ``tree``, whose nodes are at ``nodes`` of the scored tree."""
    if list(nodes) == list(range(len(scores.tree))):
        return replace(scores, tree=tree, _distributions={})
    rows = slice(nodes[0], nodes[0] + 1) if len(nodes) == 1 else list(nodes)  # a slice does not copy
    taps = HiddenStates.of(scores.taps).at(rows) if scores.taps else {}
    return Scores(scores.logits[rows], tree, scores.node_prefix(nodes[0]), scores.sampler, taps)


def check_members(name: str, drafters: Sequence[Drafter]) -> None:
    """Check that the members can form a group.

    Raises:
        ValueError: no members, a member that is no drafter, the same object twice, or different vocabularies.
    """
    if not drafters:
        raise ValueError(f"drafter {name!r} needs at least one member, for example {name},drafters=(ngram|suffix)")
    for member in drafters:
        if not isinstance(member, Drafter):
            raise ValueError(f"a member of {name!r} must be a drafter, not {type(member).__name__}")
    if len(set(map(id, drafters))) < len(drafters):
        raise ValueError(f"drafter {name!r} has the same object twice among its members: give separate objects")
    sizes = {size: member.name for member in drafters if (size := vocabulary_of(member)) is not None}
    if len(sizes) > 1:
        listed = " and ".join(f"{size} ({member})" for size, member in sizes.items())
        raise ValueError(
            f"the members of {name!r} have different vocabularies, {listed}: take drafters of one tokenizer"
        )


def check_no_foresight(name: str, drafters: Sequence[Drafter]) -> None:
    """Raise ``ValueError`` for a member whose knowledge a group without foresight would hide: known tokens would wait
    for the controller, and predicted ones be counted as none."""
    for member in drafters:
        if member.foresight is not None:
            raise ValueError(
                f"drafter {member.name!r} cannot be a member of {name!r}, which would hide what it knows: use "
                f"known,inner=({name},drafters=(...)), which drafts from prediction=... and forced tokens first"
            )


def vocabulary_of(drafter: Drafter) -> int | None:
    """The width of a drafter's distributions; ``None`` if it has none."""
    return getattr(drafter, "vocab_size", None)
