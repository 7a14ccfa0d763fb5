"""One decoder layer predicts the target's next feature; its drafts grow as a tree by their own confidence.

EAGLE, Li et al. 2024 (arXiv 2401.15077), with the dynamic trees of EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

from typing import Any

from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.features import FeatureDrafter, load_frequent, load_net
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.models.forward.heads.features import FeatureModel


class EagleDrafter(FeatureDrafter):
    """A dynamic tree of the head's guesses."""

    name = "eagle"

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, vocab: str = "", **options: Any) -> EagleDrafter:
        """From a spec ``eagle[:FOLDER]``; ``vocab=N|FILE`` are the tokens that can be guessed, as trained by default.

        Raises:
            ValueError: no folder, one trained for another target, or damaged files.
        """
        net, parts = load_net(context, cls.name, path, EagleConfig, EagleNet)
        head = load_frequent(context, cls.name, path, parts, vocab)
        return cls.sized(FeatureModel(net, parts, context.target, head), context.target, options)
