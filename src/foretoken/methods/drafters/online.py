"""A draft model that learns from the target while it serves: online speculative decoding.

Liu et al. 2023 (arXiv 2310.07177).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretoken.core import Budget, Context, Scores, TokenTree, Verdict
from foretoken.core.io.hub_ids import expanded
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.learning.learner import LearnConfig, Learner
from foretoken.methods.drafters.learning.lessons import Mistake
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.models.base import LanguageModel


@dataclass
class _Notes:
    """State of one request: the root's index in the current round, the rejected positions, and whether the learner may
    use them."""

    root: int = -1
    teaches: bool = True
    mistakes: list[Mistake] = field(default_factory=list)


class OnlineDrafter(ModelDrafter):
    """Drafts with a copy of a model, which is trained on the positions where the target rejected it.

    Args:
        model: the draft model; it is copied, not changed.
        every: finished requests between two updates; 0 switches learning off.
        lr, loss, beta, budget, keep, window, top, thread: as in
            :class:`~foretoken.methods.drafters.learning.learner.LearnConfig`.
        salted: also learn from requests with a ``cache_salt``, though their weights then draft for everybody.
        save: folder that the draft model is written to after every update, for ``model:FOLDER``; by default none.
        tokenizer: saved beside the weights.

    Attributes:
        learner: ``None`` if learning is off.

    Raises:
        ValueError: an option outside its range.
        CapabilityError: the draft model cannot draft as specified, or has no trainable weights.
        OSError: the folder of ``save`` cannot be created.
    """

    name = "online"
    traits = replace(ModelDrafter.traits, learns=True)

    def __init__(
        self,
        model: LanguageModel,
        k: int = 4,
        tree: str = "",
        draw: str = "",
        target: LanguageModel | None = None,
        every: int = 8,
        lr: float = 1e-4,
        loss: str = "fkl",
        beta: float = 0.5,
        budget: float = 0.1,
        keep: int = 64,
        window: int = 128,
        top: int = 256,
        salted: bool = False,
        thread: bool = True,
        save: str = "",
        tokenizer: Any | None = None,
    ) -> None:
        if every < 0:
            raise ValueError(f"online needs every >= 0 (0: no learning), not {every}")
        config = LearnConfig(every or 1, lr, loss, beta, budget, keep, window, top, thread)
        if save:
            expanded(save).mkdir(parents=True, exist_ok=True)  # a wrong path fails now
        self.learner: Learner | None = Learner(model, config, save, tokenizer) if every else None
        super().__init__(model if self.learner is None else self.learner.served, k, tree, draw, target)
        self.salted = salted
        self.traits = replace(self.traits, shares_state=self.learner is not None)

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> OnlineDrafter:
        """Build from a spec ``online[:PATH]``: load the draft model, with trainable weights."""
        model = context.draft_model(cls.name, path, packed=False)
        return cls(model, target=context.target, tokenizer=context.tokenizer, **options)

    def report(self) -> dict[str, Any]:
        """The learner's counters, see :class:`~foretoken.methods.drafters.learning.learner.LearningReport`."""
        return {} if self.learner is None else self.learner.report()

    def save(self, folder: str | Path) -> None:
        """Write the learnt draft model as a model folder, for ``model:FOLDER`` or ``online:FOLDER``.

        Raises:
            ValueError: learning is off, so there is nothing new to write.
            OSError: the folder cannot be written.
        """
        if self.learner is None:
            raise ValueError("nothing was learnt with every=0: the draft model is as it was loaded")
        self.learner.save(folder)

    def start(self, context: Context) -> None:
        if self.learner is not None:
            context.state[self, "notes"] = _Notes(teaches=self.salted or not context.salt)
            self.learner.joined()
        super().start(context)

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        if self.learner is not None:
            self.learner.take()
        for context in contexts:
            notes: _Notes | None = context.state.get((self, "notes"))
            if notes is not None:
                notes.root = len(context.tokens) - 1
        return super().propose_batch(contexts, budgets)

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Record the target's distribution at a rejected position.  A bonus token is no mistake, because no draft token
        was there."""
        notes: _Notes | None = context.state.get((self, "notes"))
        if notes is None or not notes.teaches or self.learner is None or verdict.next_is_bonus:
            return
        # The rejected draft tokens followed this node, so its logits are the target's distribution at their position.
        node = verdict.path[-1] if verdict.path else 0
        position = notes.root + len(verdict.path) + 1
        notes.mistakes.append(self.learner.mistake(position, scores.logits[node]))

    def rewind(self, context: Context, length: int) -> None:
        super().rewind(context, length)
        notes: _Notes | None = context.state.get((self, "notes"))
        if notes is not None:
            notes.mistakes = [mistake for mistake in notes.mistakes if mistake.position <= length]

    def finish(self, context: Context) -> None:
        notes: _Notes | None = context.state.get((self, "notes"))
        with ExitStack() as last_first:
            if notes is not None and self.learner is not None:
                last_first.callback(self.learner.left)
                if notes.teaches:
                    last_first.callback(self.learner.finished, list(context.tokens), notes.mistakes)
            super().finish(context)
