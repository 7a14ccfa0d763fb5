"""A constant draft length."""

from __future__ import annotations

from foretoken.core import Budget, Context, Limits, check_least
from foretoken.methods.controllers.base import Controller


class ConstantController(Controller):
    """The same budget every round.

    Args:
        k: draft length; the drafter's own by default; 0 is plain decoding.
        nodes: most draft nodes; the drafter's own by default.
    """

    name = "constant"

    def __init__(self, k: int | None = None, nodes: int | None = None) -> None:
        check_least(self.name, 0, k=k, nodes=nodes)
        self.k, self.nodes = k, nodes
        self._budget = Budget(5 if k is None else k, 64 if nodes is None else nodes)

    @property
    def drafts(self) -> bool:
        return self.k != 0 and self.nodes != 0

    def attach(self, limits: Limits) -> None:
        self._budget = Budget(
            limits.max_depth if self.k is None else self.k, limits.max_nodes if self.nodes is None else self.nodes
        )

    def budget(self, context: Context, batch_size: int) -> Budget:
        return self._budget
