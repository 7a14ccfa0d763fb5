"""A target, a draft model and a drafter in its plainest form, for the tests of parity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, Rng, TokenTree
from foretoken.core.sampling import draw
from foretoken.lab.parity.report import Report, Settings
from foretoken.lab.parity.run import run_parity
from foretoken.methods.drafters.base import Drafter, Traits
from foretoken.models.base import Feed, LanguageModel, Rows
from foretoken.models.other.table import TableModel
from toys import MarkovTable, next_logits, tables

PROMPTS = [[0, 1, 2, 3, 0, 1], [2], [3, 3, 1]]
SURE = 1e-6
"""False-alarm rate of these tests."""


def models(**more: Any) -> tuple[MarkovTable, MarkovTable]:
    """A target and a draft model that is mostly something else, so that errors weigh much."""
    return tables(closeness=0.1, seed=3, **more)


def parity(drafter: Drafter, target: LanguageModel | None = None, **more: Any) -> Report:
    """A report on one drafter, which drafts in every round unless another controller is named."""
    settings = {"max_new_tokens": 12, "samples": 600, "false_alarm": SURE, "controller": "constant", **more}
    return run_parity(target or models()[0], None, [drafter], PROMPTS, Settings(**settings))


def differences(report: Report) -> dict[str, int]:
    """Differences by mode."""
    return {check.mode: check.differences for check in report.checks}


class Planted(Drafter):
    """A chain of draws in its plainest form; subclasses plant errors in it."""

    name = "model"
    max_depth = 3
    traits = Traits(Kind.IID)

    def __init__(self) -> None:
        self.model = models()[1]

    def choose(self, distribution: Tensor, rng: Rng) -> int:
        """A draft token."""
        return draw(distribution, rng.uniform())

    def keeps(self, distribution: Tensor, token: int) -> bool:
        """Whether a drawn token stays in the draft."""
        return True

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """The chain with the distributions that its tokens were drawn from."""
        drafts: list[int] = []
        distributions: list[Tensor] = []
        for _ in range(min(self.max_depth, budget.max_depth)):
            prefix = [*context.tokens, *drafts]
            distributions.append(context.sampler.distribution(next_logits(self.model, prefix), prefix))
            token = self.choose(distributions[-1], context.rng)
            if not self.keeps(distributions[-1], token):
                distributions.pop()
                break
            drafts.append(token)
        return TokenTree.chain(context.root, drafts, torch.stack(distributions) if distributions else None)


class Wavering(TableModel):
    """A target whose best two tokens are a hair apart, and change places where several rows are scored together."""

    def __init__(self, exactness: str = "rounding") -> None:
        super().__init__(lambda _: torch.tensor([0.1, 0.4, 0.4 - 1e-13, 0.1], dtype=torch.float64), 4)
        self.exactness, self.exactness_why = exactness, "said by this test"

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """The table's rows, with 1e-12 more for token 2 where a feed has several."""
        rows = super().forward(feeds, taps)
        for row in rows:
            if len(row.logits) > 1:
                row.logits[:, 2] += 1e-12
        return rows
