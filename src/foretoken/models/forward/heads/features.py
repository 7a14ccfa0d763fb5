"""A small network that reads a token and a hidden state at every position, as a :class:`LanguageModel`.

EAGLE's head, MTP modules and similar networks are one-layer language models over pairs of a token embedding and a
feature.  As language models, they share the library's cache, masks, ragged batches and trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.base import Capabilities, CapabilityError, Feed, LanguageModel, Rows
from foretoken.models.cache.masks import LayerMask, RowPlan
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.cache.window import WHOLE_TEXT, Window
from foretoken.models.clock import now
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.lean import HeadRun, LeanHead
from foretoken.models.forward.heads.native import NativeHead
from foretoken.models.forward.lean import SPARED
from foretoken.models.forward.parts import TargetParts
from foretoken.models.native.library import NotCoveredError
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.layers import WHOLE, LayerPlan
from foretoken.models.network.rotary import ChangingRotary
from foretoken.models.runner import SCRATCH_ROOM, TreeRunner


class HeadForward:
    """A network over pairs of a token embedding and a hidden state, with its logits.

    Args:
        net: one of :mod:`foretoken.methods.drafters.nets` over embeddings and features, with ``head_state``.  It runs
            in float32, its layer in bfloat16 if that is faster, and moves to the target's device.
        parts: the target's embedding and vocabulary projection.
        target: the target model (for its context length and end-of-sequence ids).
        project: logits [m, V_d] of states [m, D]; over the target's vocabulary by default.

    Attributes:
        depth: number of layers with keys and values.
    """

    context_why = ""
    rotary: ChangingRotary | None = None
    spared: int | None = SPARED
    skips_masked = False
    dtype = torch.float32

    def __init__(self, net: Any, parts: TargetParts, target: LanguageModel, project: Any | None = None) -> None:
        self.model = net.to(parts.device).eval()
        self.parts, self.device = parts, parts.device
        self.project = DraftHead(parts) if project is None else project
        self.capabilities = Capabilities(layer_windows=False)
        self.vocab_size, self.context_length = target.vocab_size, target.context_length
        self.eos_token_ids = target.eos_token_ids
        self.layer_masks: Mapping[str, LayerMask] = {"": getattr(net, "mask", LayerMask())}
        self.head = LeanHead.of(self.model)
        self.name = "public" if self.head is None else "lean"
        self.num_layers = self.depth = int(getattr(net, "num_layers", 1))

    @property
    def run_dtype(self) -> torch.dtype:
        return self.dtype

    def check(self, plan: LayerPlan) -> None:
        raise CapabilityError("this model cannot run a part of its layers: it is one layer over the target's states")

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        return [self.run(call) for call in calls]

    def run(self, call: NetworkCall) -> Outputs:
        """Logits [n, V] per feed and the output [b, width, D] from ids, positions and states."""
        if self.head is None:
            return self._run_module(call)
        run = HeadRun(self.head, call)
        layout = run.layout
        embeddings = self.embedded(layout.flat(call.ids))
        output = self.model(embeddings, layout.flat(call.states), run.positions, None, run)  # type: ignore[arg-type]
        scored, spans = layout.scored(output, call.wanted)
        if len(scored):
            logits = self.project(self.model.head_state(scored))
        else:
            logits = scored.new_zeros(0, self.vocab_size)
        return [logits[start:end] for start, end in spans], {"state": layout.padded(output)}

    def embedded(self, ids: Tensor) -> Tensor:
        """Float32 [.., D] of ids, by the network's own embedding if it has one."""
        own = getattr(self.model, "embed_tokens", None)
        return self.parts.embedding(ids).float() if own is None else F.embedding(ids, own.weight.detach()).float()

    def _keep(self, call: NetworkCall) -> Any:
        """Storage of keys and values for the network's own forward, by layer if it has several."""
        if self.num_layers > 1:
            return lambda layer, key, value: call.cache.update(key, value, layer)
        return partial(call.cache.update, layer_idx=0)

    def _run_module(self, call: NetworkCall) -> Outputs:
        """The same through the network's own forward, for networks that share the target's layer."""
        output = self.model(self.embedded(call.ids), call.states, call.positions, call.masks[""], self._keep(call))
        return self._outputs(call, output, self.model.head_state(output[:, call.first :]))

    def _outputs(self, call: NetworkCall, output: Tensor, scored: Tensor) -> Outputs:
        """Outputs of a call from its output [b, width, D] and the states to project [b, k, D]."""
        if scored.shape[1]:
            logits = self.project(scored.flatten(0, 1)).view(*scored.shape[:2], -1)
        else:
            logits = scored.new_zeros(len(scored), 0, self.vocab_size)
        return call.feed_logits(logits), {"state": output}


class FeatureModel(TreeRunner):
    """Feeds carry ``states``; the tap ``"state"`` is the network's output, the feature of the next position.

    Attributes:
        top: number of best tokens per row that a network in our library
            (:class:`~foretoken.models.forward.heads.native.HeadRows`) returns instead of logits; 0: always logits.
        native: the network in our library, if supported; otherwise ``native_off`` holds the reason.
    """

    forwards: HeadForward
    kind: type[HeadForward] = HeadForward

    def __init__(self, net: Any, parts: TargetParts, target: LanguageModel, project: Any | None = None) -> None:
        head = self.kind(net, parts, target, project)
        super().__init__(head, TreeCache(head.depth, head.context_length + SCRATCH_ROOM))
        self.parts, self.project = head.parts, head.project
        self.top, self._is_renewed = 0, False
        self.native: Any = None
        self.native_off = ""
        try:
            self.native = self._native()
        except NotCoveredError as error:
            self.native_off = str(error)

    def _native(self) -> Any:
        """The network in our library.  Raises ``NotCoveredError`` if unsupported."""
        return NativeHead(self.model, self.forwards.embedded, self.project)

    @property
    def forward_name(self) -> str:  # type: ignore[override]
        return self.forwards.name if self.native is None else self.native.name

    @property
    def _reach(self) -> Window:
        """A network that was trained with its own window keeps it."""
        trained = any(mask.kind != "full" for mask in self.forwards.layer_masks.values())
        return WHOLE_TEXT if trained else self.window

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ("state",)) -> list[Rows]:
        """Append and score nodes; every feed needs its ``states`` [n, D]."""
        if any(feed.states is None or len(feed.states) != len(feed.tokens) for feed in feeds):
            raise ValueError("every token of a feed needs a hidden state")
        self._check(feeds, ())  # its only tap is the network's own
        states = [feed.states for feed in feeds if feed.states is not None]
        return self._whole(feeds, taps, inputs=states)

    def _score(
        self,
        feeds: Sequence[Feed],
        plans: Sequence[RowPlan],
        taps: Sequence[str],
        plan: LayerPlan = WHOLE,
        inputs: Sequence[Sequence[Tensor] | Tensor] = (),
    ) -> list[Rows]:
        if self._runs_native(feeds):
            return self._native_rows(feeds, plans)
        return super()._score(feeds, plans, taps, plan, inputs)

    def _runs_native(self, feeds: Sequence[Feed]) -> bool:
        """Whether our library runs these nodes; follows the weights when a text is read on.

        The number of nodes does not matter: drafts must not depend on how a text was split into chunks.
        """
        if any(feed.parents is None for feed in feeds):
            if not self._is_renewed:
                self._renew_native()
            self._is_renewed = False
        return self.native is not None and (self.native.predicts or all(feed.wanted == 0 for feed in feeds))

    def _renew_native(self) -> None:
        try:
            if self.native is not None:
                self.native.renew()
        except NotCoveredError as error:
            self.native, self.native_off = None, str(error)

    @torch.inference_mode()
    def fused(self, states: Tensor) -> Tensor:
        """One state [n, D] from concatenated hidden states of several depths [n, k D], by the network's ``fc``; without
        ``fc``, the only one."""
        self._renew_native()
        self._is_renewed = True  # fused states are read next
        if self.model.fc is None:
            return states.float()
        if self.native is None or self.native.fuse is None:
            return self.model.fc(states.float())
        return self.native.fuse(states.to(torch.bfloat16))

    def _native_rows(self, feeds: Sequence[Feed], plans: Sequence[RowPlan]) -> list[Rows]:
        for feed, plan in zip(feeds, plans, strict=True):
            self.pool.make_room(feed.sequence, plan.committed + len(plan.parents))
        start_s = now(self.device)
        rows = list(self._run_native(feeds, plans))
        self.run_s += now(self.device) - start_s
        self.run_rows += sum(plan.new for plan in plans)
        self.pool.note_size()
        return rows

    def _run_native(self, feeds: Sequence[Feed], plans: Sequence[RowPlan]) -> Sequence[Rows]:
        return self.native.run(feeds, plans, self.forwards.layer_masks[""], self.window, self.top)
