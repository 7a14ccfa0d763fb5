"""A small network that reads a token and a hidden state at every place, as a :class:`LanguageModel`.

EAGLE's head, MTP modules and their kin are language models of one layer over pairs of a token's embedding and a
feature.  Run this way they have the library's cache, masks, ragged batches and trees without a line of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import Capabilities, Feed, LanguageModel, Rows
from foretoken.models.cache.masks import LayerMask
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.cache.window import Cut, Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.lean import HeadRun, LeanHead
from foretoken.models.forward.lean import SPARED
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import SCRATCH_ROOM, HuggingFaceModel
from foretoken.models.network.call import Call
from foretoken.models.network.layers import WHOLE


class FeatureModel(HuggingFaceModel):
    """Feeds carry ``states``; the tap ``"state"`` is the network's output, the feature of the following place.

    Args:
        net: one of :mod:`foretoken.drafters.nets` over embeddings and features, with ``head_state``; it is run in
            float32, its layer in bfloat16 where that is faster, and moves to the target's device.
        parts: the target's embedding and vocabulary projection.
        target: the model that is drafted for (its context length and end-of-text ids).
        project: logits [m, V_d] of states [m, D]; over the target's vocabulary by default.

    Attributes:
        window: what is read of long texts, for a network without a window of its own; everything by default.
    """

    def __init__(self, net: Any, parts: TargetParts, target: LanguageModel, project: Any | None = None) -> None:
        self.model = net.to(parts.device).eval()
        self.parts = parts
        self.project = DraftHead(parts) if project is None else project
        self.capabilities = Capabilities(layer_windows=False)
        self.vocab_size = target.vocab_size
        self.context_length = target.context_length
        self.eos_token_ids = target.eos_token_ids
        self.device = parts.device
        self.dtype = torch.float32
        self.exact, self.spared = "distribution", SPARED
        self.layer_masks = {"": getattr(net, "mask", LayerMask())}
        self.window = Window()
        self.num_layers = 1
        self.num_layer_runs = 0.0
        self.cache = TreeCache(1, self.context_length + SCRATCH_ROOM)
        self._lean, self.forward_name = self, "lean"  # the one way to run it
        self.head = LeanHead.of(self.model)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ("state",)) -> list[Rows]:
        """Append places and score them; every feed brings its ``states`` [n, D].

        Raises:
            ValueError: a feed without states, or two feeds for one sequence.
        """
        if any(feed.states is None or len(feed.states) != len(feed.tokens) for feed in feeds):
            raise ValueError("every token of a feed needs a hidden state")
        self._check(feeds, ())  # its only tap is its own
        before = [len(feed.sequence.scratch_tokens) for feed in feeds]
        try:
            states = [feed.states for feed in feeds if feed.states is not None]
            return self._score(feeds, [self._append(feed) for feed in feeds], taps, WHOLE, states)  # type: ignore[arg-type]
        except BaseException:
            for feed, size in zip(feeds, before, strict=True):
                feed.sequence.drop_last(len(feed.sequence.scratch_tokens) - size)
            raise

    def run(self, call: Call) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Logits [n, V] per feed and the output [b, width, D] from ids, positions and states."""
        if self.head is None:
            return self._run_module(call)
        run = HeadRun(self.head, call)
        places = run.places
        embeddings = self.parts.embedding(places.taken(call.ids)).float()
        output = self.model(embeddings, places.taken(call.states), run.positions, None, run)  # type: ignore[arg-type]
        kept, spans = places.wanted(output, call.wanted)
        if len(kept):
            logits = self.project(self.model.head_state(kept))
        else:
            logits = kept.new_zeros(0, self.vocab_size)
        return [logits[start:end] for start, end in spans], {"state": places.padded(output)}

    def _cut(self, starts: Sequence[int]) -> Cut | None:
        """A network with a window of its own keeps that."""
        trained = any(mask.kind != "full" for mask in self.layer_masks.values())
        return None if trained else super()._cut(starts)

    def _run_module(self, call: Call) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The same through the network's own forward, for one whose layer is the target's."""
        (b, width), first = call.ids.shape, call.first

        def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return call.cache.update(key, value, 0)

        output = self.model(self.parts.embedding(call.ids).float(), call.states, call.positions, call.masks[""], keep)
        kept = self.model.head_state(output[:, first:]).flatten(0, 1)
        logits = (
            self.project(kept).view(b, width - first, -1) if width > first else kept.new_zeros(b, 0, self.vocab_size)
        )
        return call.taken(logits), {"state": output}
