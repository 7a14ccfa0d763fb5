"""Consistency training of a target: its Jacobi iteration reaches the fixed point in fewer steps.

Kou et al. 2024, "CLLMs: Consistency Large Language Models" (arXiv 2403.00835).  There is no other network: the result
is a target, and ``jacobi`` drafts for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.jacobi import JacobiDrafter
from foretoken.models.network.chains import joint_states
from foretoken.training.recipes.base import Batch, TargetRecipe, check_rank, mean_of, some_positions
from foretoken.training.recipes.features import at_rows, some_rows, texts_of


@dataclass(frozen=True)
class JacobiSettings:
    """Training settings.

    Attributes:
        m: tokens per block, the drafter's draft length.
        blocks: blocks per text and step.
        text: weight of the target's cross-entropy with the text, which keeps it a language model (10 in the paper).
        smoothing: label smoothing of that loss (0.1 in the paper).
        rank: 0 trains all weights, a positive rank only a low-rank update of the decoder's linear layers.
    """

    m: int = 8
    blocks: int = 16
    text: float = 10.0
    smoothing: float = 0.0
    rank: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("m", self.m, 2), ("blocks", self.blocks, 1)):
            if value < least:
                raise ValueError(f"jacobi needs {name} >= {least}, not {value}")
        if not self.text >= 0 or not 0 <= self.smoothing < 1:
            raise ValueError(f"jacobi needs text >= 0 and 0 <= smoothing < 1, not {self.text} and {self.smoothing}")
        check_rank(self.rank, trains_target=True)


class JacobiRecipe(TargetRecipe):
    """At a random point of a block's trajectory the target learns its prediction at the block's fixed point.

    The trajectories are greedy ones of the current target after positions of the text, from the drafter's initial
    guess.
    """

    drafter_class = JacobiDrafter
    config_class: ClassVar[type[Any]] = JacobiSettings
    fixed = ()
    needs = ("tree_mask", "a target that takes trees, and {} does not")
    config: JacobiSettings

    def from_target(self) -> dict[str, Any]:
        return {}

    def configure(self, settings: Mapping[str, str]) -> JacobiSettings:
        config: JacobiSettings = super().configure(settings)
        longest = self.target.context_length
        if longest < config.m + 2:
            raise ValueError(
                f"jacobi needs a context of m + 2 = {config.m + 2} tokens, and the target's is {longest}: give a "
                "smaller m"
            )
        return config

    def spec(self, folder: object) -> str:
        """A spec without a folder: only the target is loaded."""
        return f"jacobi,m={self.config.m}"

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return JacobiDrafter(self.config.m)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """The consistency loss plus the weighted loss on the text."""
        tokens = batch.tokens[:, :-1]
        # Blocks end within the target's context; positions before learned tokens come first.
        beyond = batch.length + self.config.m + 1 - self.target.context_length
        columns = some_rows(batch, max(1, beyond), generator, self.config.blocks) + 1
        steps, targets = self.trajectory(tokens, columns)
        torch.clear_autocast_cache()  # PyTorch 2.9 and 2.10 keep casts made without gradients
        reached = (steps == steps[-1]).all(-1).float().argmax(0)  # [b, g]: first point equal to the fixed one
        uniforms = torch.rand(reached.shape, generator=generator).to(reached.device)
        chosen = (uniforms * reached).long()
        start = steps.gather(0, chosen[None, ..., None].expand(1, *steps.shape[1:]))[0]  # [b, g, m]
        states, text_states = joint_states(self.model, tokens, columns, start, grad=True)
        differs = ((start != steps[-1]).cumsum(-1) > 0).float()  # equal prefixes give equal predictions
        counted = batch.counted(texts_of(columns), columns.flatten())
        if counted is not None:
            differs = differs * counted.view(*columns.shape, 1)
        logits = self.parts.logits(text_states).float()
        total = mean_of(-(targets * torch.log_softmax(logits, -1)).sum(-1), differs)
        if not self.config.text:
            return total
        rows, text_columns = some_positions(
            batch, 128 * len(tokens), 0, generator
        )  # positions for the loss on the text
        text_loss = F.cross_entropy(
            self.parts.logits(states[rows, text_columns]).float(),
            batch.tokens[rows, text_columns + 1],
            reduction="none",
            label_smoothing=self.config.smoothing,
        )
        return total + self.config.text * mean_of(text_loss, batch.counted(rows, text_columns))

    @torch.no_grad()
    def trajectory(self, tokens: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The Jacobi iteration after positions [b, g] of texts [b, n]: its points [s, b, g, m], the last of them fixed,
        and the target's distributions [b, g, m, V] after the tokens of that one.

        A block is fixed after m steps at the latest, or when a step changes nothing.
        """
        m = self.config.m
        point = tokens.gather(1, columns)[..., None].expand(-1, -1, m).contiguous()
        points = [point]
        while True:
            states, text_states = joint_states(self.model, tokens, columns, point)
            logits = self.parts.logits(text_states)
            first = self.parts.logits(at_rows(states, columns)).argmax(-1)  # [b, g]
            following = torch.cat([first[..., None], logits[:, :, :-1].argmax(-1)], -1)
            if len(points) > m or torch.equal(following, point):
                return torch.stack(points), torch.softmax(logits.float(), -1)
            points.append(following)
            point = following
