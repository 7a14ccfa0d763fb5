"""The target drafts for itself with some of its attention and MLP sublayers skipped.

Draft & Verify, Zhang et al. 2023 (arXiv 2309.08168).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from foretoken.core import Budget, Context, Scores, TokenTree, Verdict
from foretoken.core.budget import MovingThreshold
from foretoken.core.io.hub_ids import expanded
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.own_layers import OwnLayersDrafter, num_layers_of
from foretoken.methods.drafters.skip_default import SkipsNotMeasuredWarning, default_set
from foretoken.methods.drafters.skip_sets import SkipSet, load_skips
from foretoken.models.base import LanguageModel
from foretoken.models.machine import is_full_memory


class LayerSkipDrafter(OwnLayersDrafter):
    """Drafts with all layers but the named attention and MLP sublayers.

    Args:
        attention: layers whose attention is skipped, ``1+3+6-8`` or ``none``.
        mlp: layers whose MLP is skipped.  By default the set is measured on the target's own text with the first
            request, and cached.
        adaptive: end a draft whose distribution is unsure; the threshold follows the request's acceptance rate.
        tokenizer: the target's, for the text that the default set is measured on.
    """

    name = "layer_skip"
    traits = replace(OwnLayersDrafter.traits, learns=True)

    def __init__(
        self,
        target: LanguageModel,
        attention: str = "",
        mlp: str = "",
        k: int = 8,
        adaptive: bool = True,
        tree: str = "",
        draw: str = "",
        *,
        tokenizer: Any | None = None,
    ) -> None:
        layers = num_layers_of(target)
        self.is_decided = bool(attention or mlp)
        if self.is_decided:
            skips = SkipSet.parse(attention, mlp, layers)
            skips.check(target)
        elif layers > 2:
            skips = SkipSet.middle(layers)
            middle = frozenset(range(1, layers - 1))
            for tried in (SkipSet(attention=middle), SkipSet(mlp=middle)):
                tried.check(target)  # the measurement tries any of them
        else:
            raise ValueError(
                f"with {layers} layers nothing is skipped by default: give the layers, for example attention=1"
            )
        super().__init__(target, skips.plan, k, tree, draw)
        self.skips, self.adaptive, self.tokenizer = skips, adaptive, tokenizer
        self._is_unusable = self._has_warned = False

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, vocab: str = "", **options: Any) -> LayerSkipDrafter:
        """Build from a spec; ``layer_skip:FILE`` takes the set from a file of ``foretoken tune layer-skip``.

        Raises:
            ValueError: a file that is damaged or for another target, both a file and a set, or no such draft
                vocabulary.
            OSError: no such file.
        """
        if path is None:
            return cls(context.target, tokenizer=context.tokenizer, **options).narrowed(vocab, context)
        if options.get("attention") or options.get("mlp"):
            raise ValueError("give layer_skip a file or attention=... and mlp=..., not both")
        skips = load_skips(expanded(path), context.target)
        return cls(context.target, **{**options, **skips.options}).narrowed(vocab, context)

    def start(self, context: Context) -> None:
        """Set the request's threshold by its temperature; the first request also selects the set.

        Warns:
            NothingToSkipWarning: no set pays off.
            SkipsNotMeasuredWarning: the measurement failed. Nothing is drafted then, until a later request can measure
                if memory ran out, else ever.
        """
        if not self._is_unusable:
            try:
                self.decide()
            except Exception as error:
                if isinstance(error, Warning):  # raised by the caller's filters
                    raise
                self._report(error)
        super().start(context)
        context.state[self, "threshold"] = MovingThreshold(0.8 if context.sampler.greedy else 0.5)

    def decide(self) -> None:
        """Measure the best set, if the options have none."""
        if not self.is_decided:
            self.skips = default_set(self.model, self.tokenizer).skips
            self.plan = self.skips.plan
            self.is_decided = True  # not before: an interrupted measurement is made again

    def _report(self, error: Exception) -> None:
        """Note that a measurement failed, and say so once. Only a lack of memory is expected to pass."""
        has_warned, is_passing = self._has_warned, is_full_memory(error)
        self._is_unusable, self._has_warned = not is_passing, True
        if has_warned and is_passing:
            return
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        until = "until a later request's measurement succeeds" if is_passing else "for this model"
        warnings.warn(
            f"layer_skip drafts nothing {until}: measuring which sublayers to skip failed ({reason}); give them, for "
            f"example attention={self.skips.options['attention']}, or use another drafter",
            SkipsNotMeasuredWarning,
            stacklevel=3,
        )

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        if not self.is_decided:  # the measurement failed
            return [TokenTree.root_only(context.root) for context in contexts]
        if self.adaptive:
            budgets = [self._stopping(c, b) for c, b in zip(contexts, budgets, strict=True)]
        return super().propose_batch(contexts, budgets)

    def _stopping(self, context: Context, budget: Budget) -> Budget:
        """The budget with the request's threshold added to its stop rule."""
        gamma: float = context.state[self, "threshold"].value
        context.state[self, "cap"] = min(self.max_depth, budget.max_depth, budget.max_nodes)

        def stop(distribution: Tensor | None, probability: float) -> bool:
            unsure = distribution is not None and float(distribution.max()) < gamma
            return unsure or (budget.stop is not None and budget.stop(distribution, probability))

        return replace(budget, stop=stop)

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Update the threshold, unless this drafter had no part in the round."""
        cap = context.state.pop((self, "cap"), 0)
        if cap and tree.num_drafts:
            context.state[self, "threshold"].update(max(tree.depths), len(verdict.path), cap)
