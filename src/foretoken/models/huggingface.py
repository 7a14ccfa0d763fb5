"""A Transformers causal LM as a :class:`LanguageModel`: a runner over its network that follows changes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import Feed, SequenceState
from foretoken.models.cache.masks import LayerMask
from foretoken.models.cache.rectangle import HostCache, TreeCache
from foretoken.models.cache.window import Window
from foretoken.models.checks.fast_paths import Probe
from foretoken.models.clock import now
from foretoken.models.forward.native import NativeForward
from foretoken.models.forward.native_chain import ChainEnd, NativeChains, Pick
from foretoken.models.forward.network import Network
from foretoken.models.forward.parts import storage_of
from foretoken.models.linear.packing import weight_bytes
from foretoken.models.network.alone import alone, lock_of
from foretoken.models.network.layers import WHOLE, LayerPlan
from foretoken.models.network.watch import Watch
from foretoken.models.refusals import lost_bits
from foretoken.models.runner import SCRATCH_ROOM, TreeRunner


def _stored_as(model: Any) -> str:
    """Storage format of a network's weights if its dtype does not show it: from a GGUF file, or quantised."""
    stored_as: str = getattr(model, "stored_as", "")
    quantised = getattr(model, "quantised_to", "") or storage_of(model)
    return stored_as or (f"{quantised}, with activations in" if quantised else "")


class HuggingFaceModel(TreeRunner):
    """Runs a ``PreTrainedModel`` over committed prefixes plus scratch trees.

    The model object stays unchanged: its attention function is switched only during a forward.

    Args:
        model: any causal LM whose attention takes additive 4-D masks.
        exact: ``"distribution"`` (any kernel); ``"bitwise"`` (our own kernels, or float64 attention and products of a
            constant number of rows, so that a bfloat16 target gives the same tokens with and without speculation); or
            ``"approximate"`` (cheaper arithmetic for a draft model, whose distribution is free).
        lean: use a forward with few Python calls for known families, if it passes a check against the public one.
        in_place: whether the model may be changed: projections then replace its linear layers if another layout is
            faster on this machine (:meth:`unpack` undoes that).  Otherwise the lean forward copies weights, and large
            models do not use it.
        probe: returns token ids of an ordinary text for the checks of fast paths
            (:mod:`foretoken.models.checks.fast_paths`).
        network: builds the model's forward, which may count layers differently.

    Raises:
        CapabilityError: the model cannot take trees (use :func:`foretoken.models.wrap`, which falls back).
    """

    forwards: Network

    def __init__(
        self,
        model: Any,
        *,
        exact: str = "distribution",
        lean: bool = True,
        in_place: bool = False,
        probe: Probe | None = None,
        network: Callable[..., Network] = Network,
    ) -> None:
        forwards = network(model, exact, lean=lean, in_place=in_place, probe=probe)
        super().__init__(forwards, TreeCache(forwards.depth, forwards.context_length + SCRATCH_ROOM))
        self.stored_as = _stored_as(model)
        with lock_of(model):
            with alone(model):
                self._choose()
            self._watch = Watch(model)

    def _choose(self) -> None:
        network = self.forwards
        checks = network.choose()
        self.refused = network.refused
        if network.exact != "approximate":
            self.exactness, self.exactness_why = checks.exactness(network.way, self)
        self.refused += lost_bits(network.exact, self.exactness, self.exactness_why)

    def _renew(self) -> None:
        self.forwards.renew()
        graphs, self.graphs = self.graphs, None
        self._begin_anew()
        if graphs is not None:
            graphs.stop("the model was changed after it was loaded")

    def _begin_anew(self) -> None:
        """Choose and check the forward again; open sequences keep the old cache, to which nothing else writes."""
        self.cache = self.cache.fresh()
        self._watch = None  # the checks open sequences
        self._choose()
        self._watch = Watch(self.model)

    @property
    def config(self) -> Any:
        return self.forwards.config

    @property
    def exact(self) -> str:
        return self.forwards.exact

    @property
    def is_lean(self) -> bool:
        """Whether forwards run on the lean twin instead of the public one."""
        return self.forwards.fast is not None

    @property
    def copied_bytes(self) -> int:  # type: ignore[override]
        fast = self.forwards.fast
        return 0 if fast is None else weight_bytes(self.model, fast.products) - self.weight_bytes

    def unpack(self) -> None:
        """Restore the model's plain linear layers, with the same weights; forwards are then public."""
        if self._sequences:
            raise ValueError("requests are running on the packed model: finish or close them before it is unpacked")
        self.forwards.unpack()
        self.graphs, self.graphs_off = None, "the model was unpacked"
        with lock_of(self.model), alone(self.model):
            self._begin_anew()

    def keep_on_host(self) -> None:
        """Keep keys and values in host memory from now on; a forward holds one layer's at a time on its device."""
        if self.device.type == "cpu":
            raise ValueError("offload=true is for a target on a GPU: on the CPU keys and values are in host memory")
        if self._sequences:
            raise ValueError("requests are running: finish or close them before keys and values go to host memory")
        graphs, self.graphs = self.graphs, None
        self.graphs_off = "its keys and values are in host memory"
        if graphs is not None:
            graphs.stop(self.graphs_off)
        self.cache = HostCache(self.cache.num_layers, self.cache.max_slots)

    # -- chains ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def chains(
        self, feeds: Sequence[Feed], counts: Sequence[int], pick: Pick | None = None, plan: LayerPlan = WHOLE
    ) -> list[list[int]] | None:
        """Chains on the native forward, if every layer sees the whole text; ``plan`` has the meaning of
        :meth:`forward_part`."""
        native = self.forwards.native(plan)
        if native is None or self.rotary is not None or not all(map(self._is_seen_whole, feeds, counts)):
            return None
        states = pick is not None and pick.states
        for feed, count in zip(feeds, counts, strict=True):
            self.pool.make_room(feed.sequence, feed.sequence.num_slots + len(feed.tokens) + count)
        first = [replace(feed, wanted=0 if states else 1) for feed in feeds]
        taps = ("last",) if states else ()
        rows = self.forward(first, taps) if plan == WHOLE else self.forward_part(first, plan, taps)
        x = torch.cat([row.taps["last"][-1:] if states else row.logits for row in rows])
        every, sequences = range(len(feeds)), [feed.sequence for feed in feeds]
        last = list(x.argmax(-1).tolist() if pick is None else pick.choose(every, 0, x))
        tokens, sizes = [[token] for token in last], [len(sequence.scratch_tokens) for sequence in sequences]
        try:
            self._extend(native, sequences, counts, tokens, pick)
        except BaseException:
            for sequence, size in zip(sequences, sizes, strict=True):
                sequence.drop_last(len(sequence.scratch_tokens) - size)
            raise
        return tokens

    def _is_seen_whole(self, feed: Feed, count: int) -> bool:
        """Whether a feed and the chain after it form one chain in which every layer sees every earlier token."""
        scratch, last = feed.sequence.scratch_parents, feed.sequence.num_slots + len(feed.tokens) + count
        if feed.states is not None or not feed.is_chain or list(scratch) != list(range(-1, len(scratch) - 1)):
            return False
        if self.window.size and last - self.window.size > self.window.sink:
            return False
        return all(kind == LayerMask() or last <= kind.size for kind in self.forwards.layer_masks.values())

    def _extend(
        self,
        native: NativeForward,
        sequences: Sequence[SequenceState],
        counts: Sequence[int],
        chains: Sequence[list[int]],
        pick: Pick | None,
    ) -> None:
        """Append further tokens to the first ones in ``chains``."""
        if max(counts) < 2:
            return
        ends = [
            ChainEnd(sequence.cache, sequence.row, sequence.num_slots, sequence.num_slots, count - 1)
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        start_s, steps = now(self.device), NativeChains(native, ends)
        for number in range(max(counts) - 1):
            active, x, best = steps.step(number, [tokens[-1] for tokens in chains], pick is not None and pick.states)
            for i in active:
                sequences[i].append(chains[i][-1:], [len(sequences[i].scratch_tokens) - 1])
            if pick is None and best is not None:
                chosen: Sequence[int] = [tokens[0] for tokens in best.tokens(None)]
            else:
                chosen = pick.choose(active, number + 1, x if pick.states else native.transform_logits(x))  # type: ignore[union-attr]
            for i, token in zip(active, chosen, strict=True):
                chains[i].append(token)
            self.run_rows += len(active)
        self.run_s += now(self.device) - start_s

    @property
    def num_ids(self) -> int:
        return self.vocab_size + sum(len(extra.rows) for extra in self.forwards.extra)

    def extra_embeddings(self, rows: Tensor, user: object = None) -> int:
        return self.forwards.add_rows(rows, user)

    def take_weights(self, source: torch.nn.Module) -> None:
        """Copy the weights of ``source``, a network of the same shape, over the present ones.

        Open sequences stay valid: their caches come from the old weights, later rows from the new ones.
        """
        self.forwards.take_weights(source)
        self._watch = Watch(self.model)
        self.weights_version += 1

    def over(self, network: Any) -> HuggingFaceModel:
        """This model with another network of the same shape, fused weights included, for :meth:`go_on_with`.

        It does not affect this model, which another thread may be using.
        """
        clone = copy.copy(self)
        clone.forwards, clone._watch = self.forwards.over(network), Watch(network)
        return clone

    def go_on_with(self, other: HuggingFaceModel) -> None:
        """Switch to the network of a model from :meth:`over`; open sequences stay valid.

        This takes no time, except with CUDA graphs: they hold the addresses of the present weights, so the new ones are
        copied.
        """
        if self.graphs is not None:
            self.take_weights(other.model)
            return
        self.forwards, self._watch = other.forwards, other._watch
        self.weights_version += 1

    def sibling(self) -> HuggingFaceModel:
        """The same weights with separate sequences, for engines that take turns.

        A forward covers all rows from its first sequence to its last, so rows of another engine in a shared cache would
        cost time.  :meth:`take_weights` must be called on every sibling.
        """
        clone = copy.copy(self)
        clone.forwards = copy.copy(self.forwards)
        clone.separate(TreeCache(self.cache.num_layers, self.cache.max_slots))
        return clone

    def windowed(self, window: Window) -> HuggingFaceModel:
        """A :meth:`sibling` that reads texts through a window, without CUDA graphs, whose shapes are fixed."""
        clone = self.sibling()
        clone.window, clone.graphs_off = window, "it reads a window of the text"
        return clone
