"""The target drafts for itself with weights in 8 or 4 bits, over its own keys and values.

ML-SpecQD (https://arxiv.org/abs/2503.13565) drafts with a quantised copy of the target; QSpec
(https://arxiv.org/abs/2410.11305) shares its keys and values and overwrites the draft's by verification.
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
"""Expected speed over plain decoding from which on ``auto`` has it among its choices, and finds out what comes true.

At 1.2 a model of 135M parameters had it in every second run: it is the fastest, and 1.17 to 1.44 was expected.
"""
FULL = "16"
"""``bits`` that quantise nothing: for tests, and to see what the rest of a round costs."""


def pays_here(context: BuildContext) -> bool:
    """Whether the target is big, and a short measurement of one layer's products promises anything; not of a network
    that the caller hands in, perhaps with every request, and that gets no second weights unasked."""
    return isinstance(context.source, str | Path) and expected_gain(context.target, Scheme()) >= PAYS


class QuantizedDrafter(ModelDrafter):
    """Drafts with the target's own network, its linear layers quantised.

    Args:
        bits: ``8``, ``4``, or ``auto`` for what is faster here, layer by layer; 16 quantises nothing.
        k: chain length, when no tree is asked for.
        group: weights of a row that share an int4 scale: 32, 64 or 128.
        activations: bits of the inputs, ``8``, ``15``, or ``auto``: 8 where that is faster here, layer by layer.
        tree, draw: as for the drafter ``model``.
        head: the vocabulary projection that takes the place of the target's, over the tokens that can be guessed.

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
        """From a spec ``quantized[,vocab=N|FILE][,inner=SPEC[,width=W]]``.

        ``vocab`` are the tokens that can be guessed.  With ``inner`` the drafts are themselves sped up by another
        drafter: a ``cascade`` whose draft model is the quantised target, or with ``width`` above 1 a ``staged`` one.

        Raises:
            ValueError: a path, an inner drafter that does not fit, a tree or a draft vocabulary of it, or no such
                draft vocabulary.
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
        """The kinds of the second weights, and how many tokens it can guess."""
        second = getattr(self.model, "weights", None)
        if second is None:
            return super().describe()
        kinds = "+".join(f"int{bits}" for bits in sorted({product.bits for product in second.all_products}))
        return [{**entry, "weights": kinds} for entry in super().describe()]

    def cost_beside(self, target_bytes: int) -> float:
        """The second weights, and the projection that takes the place of theirs."""
        return share_of_bytes(self.model.weight_bytes + (self.head.weight_bytes if self.head else 0), target_bytes)

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Grow all trees level by level, and leave the target's sequences as they were."""
        try:
            return super().propose_batch(contexts, budgets)
        finally:
            for context in contexts:
                context.sequence.clear_scratch()


def scheme_of(bits: str, group: int, activations: str = "auto") -> Scheme | None:
    """Options -> how weights are quantised; ``None`` for not at all.

    Raises:
        ValueError: a value outside its choices.
    """
    if bits not in ("4", "8", "auto", FULL):
        raise ValueError(f"quantized needs bits=4, 8 or auto (or 16, which quantises nothing), not {bits}")
    scheme = Scheme("8" if bits == FULL else bits, group, activations)
    return None if bits == FULL else scheme
