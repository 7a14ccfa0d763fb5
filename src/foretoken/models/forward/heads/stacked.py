"""Several prediction modules in sequence, one per draft step (DeepSeek-V3, arXiv 2412.19437, section 2.2).

At position p, module k reads token p + 1 and the state of module k - 1 at position p - 1; the first module reads the
target's state of position p.  So all modules read a committed position, each with its own cache, and the next position
needs their states.  The first module drafts the first token, the second module the second; the last module continues
alone.  In a tree, the depth of a node counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.base import Feed, LanguageModel, Rows, SequenceState, Snapshot
from foretoken.models.cache.masks import LayerMask, unseen
from foretoken.models.forward.heads.features import FeatureModel, HeadForward
from foretoken.models.forward.parts import TargetParts
from foretoken.models.network.call import NetworkCall, Outputs


class StackedModules(nn.Module):
    """M modules, in step order."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)
        mask = getattr(modules[0], "mask", None)
        self.mask = mask if isinstance(mask, LayerMask) else LayerMask()

    def head_state(self, output: Tensor, step: int = 0) -> Tensor:
        """Input of the vocabulary projection at a draft step, from outputs [..., M D]."""
        last = min(step, len(self.steps) - 1)
        return self.steps[last].head_state(output.unflatten(-1, (len(self.steps), -1))[..., last, :])  # type: ignore[operator]


class _StackedForward(HeadForward):
    """The modules in sequence; ``step`` is the draft step of a call."""

    step = 0

    def __init__(self, net: StackedModules, *rest: Any) -> None:
        super().__init__(net, *rest)
        self.depth = len(net.steps)

    def run(self, call: NetworkCall) -> Outputs:
        """Logits [n, V] per feed and the outputs [b, width, M D]."""
        step = self.step
        embeddings = self.parts.embedding(call.ids).float()
        states: Any = call.states
        inputs = states.unflatten(-1, (self.depth, -1))  # [b, width, M, D]
        outputs: list[Tensor] = []
        for index, module in enumerate(self.model.steps):
            if index < min(step, self.depth - 1):
                outputs.append(inputs[:, :, index])  # its step is over
                continue
            features = inputs[:, :, index]
            if step and step <= index:
                features = inputs[:, :, index - 1]
            elif index and not step:  # within a feed, the previous position is the previous row
                features = torch.cat([features[:, :1], outputs[-1][:, :-1]], 1)
            keep, mask = partial(call.cache.update, layer_idx=index), self._mask(call, index)
            outputs.append(module(embeddings, features, call.positions, mask, keep))
        output = torch.cat(outputs, -1)
        return self._outputs(call, output, self.model.head_state(output[:, call.first :], step))

    def _mask(self, call: NetworkCall, index: int) -> Tensor | None:
        """Hide the positions before a module's index, which have no state for it to read."""
        mask = call.masks[""]
        if not index:
            return mask
        slots = torch.arange(call.cache.used, device=self.device)
        if call.cache.cut is not None:
            slots = call.cache.cut.slots(slots[None, None, :, None])[0, 0, :, 0]
        if mask is None:
            mask = torch.zeros((len(call.ids), 1, call.ids.shape[1], len(slots)), dtype=self.dtype, device=self.device)
        void = slots < index
        late = call.positions[:, None, :, None] >= index
        return mask.masked_fill(void & late, unseen(self.dtype))


class StackedModel(FeatureModel):
    """The modules as one model that drafts level by level; the tap ``"state"`` holds the states of all [n, M D].

    Attributes:
        count: M, the number of modules.
    """

    forwards: _StackedForward
    kind = _StackedForward

    def __init__(
        self, net: StackedModules, parts: TargetParts, target: LanguageModel, project: Any | None = None
    ) -> None:
        super().__init__(net, parts, target, project)
        self.count = len(net.steps)
        self._read: dict[int, list[Tensor]] = {}  # per sequence, the states [n, (M - 1) D] for its next positions

    def release(self, sequence: SequenceState) -> None:
        self._read.pop(id(sequence), None)
        super().release(sequence)

    @torch.inference_mode()
    def snapshot(self, sequence: SequenceState, length: int) -> Snapshot | None:
        """Copy the keys and values, and in one more layer the states that the next position reads."""
        snapshot = super().snapshot(sequence, length)
        if snapshot is None:
            return None
        states = torch.cat(self._read[id(sequence)])[None, :length]
        return replace(snapshot, layers=[*snapshot.layers, (states, states[:, :, :0])])

    def restore(self, sequence: SequenceState, snapshot: Snapshot, length: int) -> None:
        *layers, beside = snapshot.layers
        super().restore(sequence, replace(snapshot, layers=layers), length)
        if beside is not None:
            self._read[id(sequence)] = [beside[0][0, :length]]

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ("state",)) -> list[Rows]:
        """Read committed positions, whose ``states`` are the target's [n, D], or take one draft step from states [n, M
        D]; all nodes must have the same depth."""
        reads = [feed for feed in feeds if feed.states is not None and feed.states.shape[-1] == self.parts.hidden_size]
        # Reading the text is the first draft step; later steps follow text that has been read.
        self.forwards.step = 0 if reads else _step_of(feeds)
        rows = super().forward([self._beside_read(feed) for feed in feeds] if reads else feeds, taps)
        if reads:
            width = (self.count - 1) * self.parts.hidden_size
            for feed, row in zip(feeds, rows, strict=True):
                self._read.setdefault(id(feed.sequence), []).append(row.taps["state"][:, :width])
        return rows

    def _beside_read(self, feed: Feed) -> Feed:
        """Concatenate the target's states with those of the modules at the position before the feed."""
        if feed.states is None:
            return feed  # rejected later
        before = self._read.get(id(feed.sequence))
        width = (self.count - 1) * self.parts.hidden_size
        beside = feed.states.new_zeros(width) if before is None else before[-1][-1].to(feed.states)
        return replace(feed, states=torch.cat([feed.states, beside.expand(len(feed.states), -1)], -1))


def _step_of(feeds: Sequence[Feed]) -> int:
    """Draft step of the nodes in feeds: 1 directly after the text."""
    steps: set[int] = set()
    for feed in feeds:
        depths = feed.sequence.scratch_depths
        parents = [len(depths) - 1] if feed.parents is None else feed.parents
        steps.update(1 if parent < 0 else depths[parent] + 2 for parent in parents)
    if len(steps) > 1:
        raise ValueError(f"several prediction modules draft level by level, not the steps {sorted(steps)} at once")
    return steps.pop()
