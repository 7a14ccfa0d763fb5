"""Several drafters draft at once, and their trees are verified as one.

SpecInfer, Miao et al. 2023 (https://arxiv.org/abs/2305.09781): the merged token tree of several draft models, every
node with the distribution that it was really drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretoken.core import Budget, Context, Kind, TokenTree
from foretoken.methods.drafters.base import BuildContext, Drafter
from foretoken.methods.drafters.group import GroupDrafter, MemberTree, Proposal, ask
from foretoken.methods.trees.operations import merge


class EnsembleDrafter(GroupDrafter):
    """The union of its members' trees.

    Equal nodes of deterministic members become one; a drawn node stays a separate trial with its own distribution.  The
    nodes of the budget are shared evenly in the members' order, and a member's unused nodes go to those after it.

    Args:
        drafters: the members, in the order of their trials at every node.  The members of an ensemble among them become
            members of this one.
    """

    name = "ensemble"

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__([m for d in drafters for m in (d.drafters if isinstance(d, EnsembleDrafter) else (d,))])
        for member in self.drafters:
            if member.traits.runs_target:
                raise ValueError(
                    f"drafter {member.name!r} drafts on the target's own cache, which must hold its tree alone: "
                    "it cannot be in an ensemble, use it in a router"
                )
        self.max_nodes = sum(member.max_nodes for member in self.drafters)
        branches = len(self.drafters) > 1 or self.traits.draws_trees  # two members make two branches
        # In rounds in which no drawing member has a draft, the tree is a point tree.
        sorts = frozenset({(self.traits.kind, branches), (Kind.POINT, branches)})
        self.traits = replace(self.traits, draws_trees=branches, sorts=sorts)

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, drafters: str | None = None) -> EnsembleDrafter:
        """Build from a spec ``ensemble[,drafters=(A|B|...)]``.

        Args:
            drafters: specs of the members, joined by ``|``; earlier ones are tried first.  By default the target's
                default drafter and one that copies.
        """
        if path is not None:
            raise ValueError("drafter 'ensemble' takes no path: ensemble,drafters=(model:PATH|ngram)")
        return cls(context.members(drafters, most=2))

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        rooms = [budget.max_nodes for budget in budgets]
        proposed: list[list[TokenTree]] = [[] for _ in contexts]
        for waiting, member in zip(range(len(self.drafters), 0, -1), self.drafters, strict=True):
            # Rounded up: a single node goes to the first member.
            shares = [replace(b, max_nodes=-(-room // waiting)) for b, room in zip(budgets, rooms, strict=True)]
            for i, tree in enumerate(ask(member, contexts, shares)):
                proposed[i].append(tree)
                rooms[i] -= tree.num_drafts
        return [self._merged(context, trees) for context, trees in zip(contexts, proposed, strict=True)]

    def _merged(self, context: Context, trees: Sequence[TokenTree]) -> TokenTree:
        tree, node_maps = merge(trees, self.traits.kind)
        parts = {i: MemberTree(part, node_map) for i, (part, node_map) in enumerate(zip(trees, node_maps, strict=True))}
        context.state[self] = Proposal(tree, parts)
        return tree
