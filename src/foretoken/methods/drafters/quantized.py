"""The target drafts for itself with weights in 8 or 4 bits, over its own keys and values.

ML-SpecQD (https://arxiv.org/abs/2503.13565) drafts with a quantised copy of the target; QSpec
(https://arxiv.org/abs/2410.11305) shares the target's keys and values, and verification overwrites the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.core import Budget, Context, TokenTree
from foretoken.methods.drafters.base import BuildContext, share_of_bytes
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.narrowed import reduced_head
from foretoken.methods.drafters.staged import sped_up
from foretoken.models.base import LanguageModel
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.variants.quantised_gain import expected_gain
from foretoken.models.variants.second_weights import OwnWeightsModel, Scheme

PAYS = 1.0
"""Minimum expected speed over plain decoding at which ``auto`` tries it and measures the real one.

No margin is needed, because a trial shows the real speed, and the expected one varies between runs: 1.17 to 1.44 for a
model of 135M parameters, for which it is the fastest drafter.
"""
FULL = "16"
"""Value of ``bits`` that quantises nothing, for tests and to measure the rest of a round."""


def pays_here(context: BuildContext) -> bool:
    """Whether the target is big, and a short measurement of one layer's products promises a gain.

    False for a network passed by the caller, perhaps with every request, which gets no second weights unasked.
    """
    return isinstance(context.source, str | Path) and expected_gain(context.target, Scheme()) >= PAYS


class QuantizedDrafter(ModelDrafter):
    """Drafts with the target's own network, its linear layers quantised.

    Args:
        bits: ``8``, ``4``, or ``auto``: 4 in layers where that is 1.25 times as fast as 8; 16 quantises nothing.
        k: chain length without a tree.
        group: weights of a row that share an int4 scale: 32, 64 or 128.
        activations: bits of the inputs, ``8``, ``15``, or ``auto``: 8 in layers where that is faster.
        head: the vocabulary projection over the draft vocabulary that replaces the target's.

    Raises:
        ValueError: an option outside its range, or too little memory for the second set of weights.
        CapabilityError: the target cannot be quantised.
    """

    name = "quantized"
    traits = replace(ModelDrafter.traits, rewinds=False, free_for=pays_here)  # drafts grow on the target's own sequence

    def __init__(
        self,
        target: LanguageModel,
        bits: str = "auto",
        k: int = 8,
        group: int = 32,
        tree: str = "",
        draw: str = "",
        activations: str = "auto",
        *,
        head: DraftHead | None = None,
    ) -> None:
        self.head = head
        scheme = scheme_of(bits, group, activations)
        if scheme is not None and head is not None:
            scheme = replace(scheme, head=False)
        super().__init__(OwnWeightsModel(target, scheme), k, tree, draw, target)

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        inner: str = "",
        width: int = 1,
        vocab: str = "",
        **options: Any,
    ) -> Any:
        """Build from a spec ``quantized[,vocab=N|FILE][,inner=SPEC[,width=W]]``.

        With ``inner`` another drafter accelerates the drafts: a ``cascade`` whose draft model is the quantised target,
        or with ``width`` above 1 a ``staged`` one.

        Args:
            inner: drafter that accelerates the quantised network, as in a ``cascade``: ``(ngram,n=3,k=8)``; not with
                ``tree``, ``draw`` or ``vocab``.
            width: with ``inner``, tokens per position; above 1 they are siblings, as in ``staged``.

        Raises:
            ValueError: a path, an inner drafter that does not fit or is combined with a tree or draft vocabulary, or no
                such draft vocabulary.
        """
        if path is not None:
            raise ValueError("drafter 'quantized' takes no path: it drafts with the target's own weights")
        if not inner:
            if width != 1:
                raise ValueError("quantized takes width=... with inner=... only; for a tree give tree=3x2x1")
            quantised = str(options.get("bits", "auto")) != FULL
            return cls(context.target, **options, head=reduced_head(vocab, context.target, context, quantised))
        if vocab:
            raise ValueError(f"quantized with inner={inner} drafts from the whole vocabulary: leave out vocab={vocab}")

        def model(bits: str = "auto", group: int = 32, **more: Any) -> LanguageModel:
            return OwnWeightsModel(context.target, scheme_of(bits, group, **more))

        built = sped_up(cls.name, context, inner, options, model, width)
        built.traits = replace(built.traits, runs_target=True)  # its chains grow on the target's own sequence
        return built

    def describe(self) -> list[dict[str, Any]]:
        """Adds the data types of the second weights."""
        second = getattr(self.model, "weights", None)
        if second is None:
            return super().describe()
        kinds = "+".join(f"int{bits}" for bits in sorted({product.bits for product in second.all_products}))
        return [{**entry, "weights": kinds} for entry in super().describe()]

    def cost_beside(self, target_bytes: int) -> float:
        """Cost of the second weights, with the projection that replaces theirs."""
        return share_of_bytes(self.model.weight_bytes + (self.head.weight_bytes if self.head else 0), target_bytes)

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Grow all trees level by level, and clear the target's scratch."""
        try:
            return super().propose_batch(contexts, budgets)
        finally:
            for context in contexts:
                context.sequence.clear_scratch()


def scheme_of(bits: str, group: int, activations: str = "auto") -> Scheme | None:
    """Quantisation scheme of the options; ``None`` for no quantisation.

    Raises:
        ValueError: a value outside its choices.
    """
    if bits not in ("4", "8", "auto", FULL):
        raise ValueError(f"quantized needs bits=4, 8 or auto (or 16, which quantises nothing), not {bits}")
    scheme = Scheme("8" if bits == FULL else bits, group, activations)
    return None if bits == FULL else scheme
