"""The ``Drafter`` protocol.

A new drafter is one class with two methods (:meth:`Drafter.propose` and, if it learns from verdicts,
:meth:`Drafter.observe`), one registry row and one docs page.  Callers read its :class:`Traits`, never which methods a
class has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from torch import Tensor

from foretoken.core import Budget, Context, Kind, Limits, Scores, TokenTree, Verdict
from foretoken.methods.drafters.texts import forget
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import WHOLE_TEXT, Window


@dataclass(frozen=True)
class Traits:
    """Properties of a drafter, fixed after construction.

    Attributes:
        kind: how siblings are drawn when sampling (a greedy request always gets point proposals).
        draws_trees: whether proposals can branch.
        sorts: all sorts of proposals when sampling, as (kind, whether it can branch), if there are several.
        shares_state: whether a request's drafts depend on other requests.
        prefers_noise: whether coupling accepts most of its drafts for sampled requests; requests without a seed are
            then coupled, too.  As measured, this holds for drafters that propose a distribution's best tokens (heads),
            not for those that draw.
        rewinds: whether its per-request state supports cutting tokens off, as is necessary inside another drafter,
            which removes rejected drafts.
        runs_target: whether it drafts with parts of the target itself, on ``context.sequence``.
        learns: whether :meth:`Drafter.observe` has an effect; a group does not call it for members that do not learn.
        copies_text: whether it copies earlier text, so that it drafts only where a text repeats itself.
        only_for: description of the requests that it can draft for; empty for all.
        free_for: whether ``drafter="auto"`` should consider it for a target: its bare name builds without training or
            downloads, and it is expected to pay off on this machine.  Called on every such load, so it must be quick
            and must not raise.  ``None``: never.
    """

    kind: Kind = Kind.POINT
    draws_trees: bool = False
    sorts: frozenset[tuple[Kind, bool]] = frozenset()
    shares_state: bool = False
    prefers_noise: bool = False
    rewinds: bool = False
    runs_target: bool = False
    learns: bool = True
    copies_text: bool = False
    only_for: str = ""
    free_for: Callable[[BuildContext], bool] | None = None

    @property
    def proposals(self) -> frozenset[tuple[Kind, bool]]:
        """All sorts of proposals when sampling; a verifier must be right for all."""
        return self.sorts or frozenset({(self.kind, self.draws_trees)})


WIDTH_ONE: Mapping[str, Any] = MappingProxyType({"width": 1})
"""The options of a chain for drafters with candidates per node; see :class:`Drafter`."""


class Foresight(Protocol):
    """A drafter's knowledge of answers before it drafts."""

    def minimum_budget(self, context: Context, budget: Budget) -> Budget:
        """The budget, enlarged where the following tokens are known."""

    def predicted_from(self, context: Context) -> int | None:
        """Index in the caller's prediction where the last draft began (for the statistics); ``None`` for other
        drafts."""


class Drafter(ABC):
    """A method of drafting tokens.

    Of eight hooks, :meth:`start`, :meth:`propose` (the only abstract one), :meth:`propose_batch`, :meth:`observe`,
    :meth:`rewind` and :meth:`finish` are called for requests; :meth:`cost_beside` and :meth:`describe` inform
    controllers and users.  All else is data.

    The constructor raises ``ValueError`` for an option outside its range and ``CapabilityError`` for a model without a
    required capability.  A drafter that needs more than options has a class method ``build(path, context, **options)``
    for specs ``NAME[:PATH][,KEY=VALUE...]``.  It raises these errors, too, and a ``ValueError`` for a path that it does
    not take, for files that are missing, damaged or of another target, and for an invalid draft vocabulary
    (``vocab=N|FILE``: the tokens that can be drafted).

    Attributes:
        name: registry key.
        taps: names of target hidden states that the drafter needs (see :mod:`foretoken.models.base`).
        max_depth: default maximum draft length; controllers start from it.
        max_nodes: default maximum number of draft nodes.
        traits: its properties, by class or by options.
        spec: the spec string that it was built from, "" if there was none.
        target_bytes: size of the target's weights, 0 if unknown; the drafter's cost is a share of it.
        drafters: the members of a group; empty for other drafters.
        chain: options with which it drafts chains only; empty if it always does, or never.  Specs that leave the shape
            open take them for targets that cannot score trees.
    """

    name: ClassVar[str]
    chain: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    taps: Sequence[str] = ()
    max_depth: int = 8
    max_nodes: int = 64
    traits: Traits = Traits()
    spec: str = ""
    target_bytes: int = 0
    drafters: Sequence[Drafter] = ()

    @classmethod
    def shape_for(cls, target: LanguageModel) -> Mapping[str, Any]:
        """Options of a shape that the target can score, for a drafter whose shape nobody has chosen."""
        return {} if target.capabilities.tree_mask else cls.chain

    @property
    def limits(self) -> Limits:
        cost = self.cost_beside(self.target_bytes)
        return Limits(self.spec or self.name, self.max_depth, self.max_nodes, cost, states=self.states)

    def cost_beside(self, target_bytes: int) -> float:
        """Cost of a draft level by size, in target calls; 0 for a drafter that runs no network.

        This is the only estimate of controllers and groups before they have measured.

        Args:
            target_bytes: size of the target's weights; 0 if unknown.
        """
        model = getattr(self, "model", None)
        return share_of_bytes(model.weight_bytes, target_bytes) if isinstance(model, LanguageModel) else 0.0

    def describe(self) -> list[dict[str, Any]]:
        """One entry for the drafter, or one for each member of a group.

        Keys: ``"drafter"``, its spec; for a network ``"vocabulary"``, the number of tokens that it can draft; for a
        draft model ``"weights"``, their dtype or quantisation; for a trained drafter ``"forward"``, the implementation
        that runs its network, and ``"native_off"``, why that is not our library (empty if it is).
        """
        return [{"drafter": self.spec or self.name}]

    @property
    def states(self) -> Any:
        """Fingerprint of the draft model whose hidden states reach a :class:`~foretoken.core.PathStop`, or ``None``."""
        return None

    @property
    def foresight(self) -> Foresight | None:
        """Knowledge before drafting; ``None`` if every draft is a guess."""
        return None

    def start(self, context: Context) -> None:  # noqa: B027
        """A request joined (``context.hidden`` holds the prompt's taps).

        It may never be drafted for, so a drafter reads tokens only when a draft is requested
        (:mod:`foretoken.methods.drafters.texts`).
        """

    @abstractmethod
    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """Draft the tokens after ``context.tokens``; the tree's root is ``context.root``."""

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Draft for several requests; override if a batch is cheaper than its parts."""
        return [
            self.propose(c, b) if b.max_depth > 0 and b.max_nodes > 0 else TokenTree.root_only(c.root)
            for c, b in zip(contexts, budgets, strict=True)
        ]

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:  # noqa: B027
        """Learn from a verdict; ``context.tokens`` already contains the new tokens.  See ``Traits.learns``."""

    def rewind(self, context: Context, length: int) -> None:  # noqa: B027
        """The sequence was cut back to its first ``length`` tokens (``context.tokens`` already is); see ``Traits``."""

    def finish(self, context: Context) -> None:
        """The request ended: remove its entries of ``context.state`` under the drafter or a pair that begins with it;
        override for state kept elsewhere."""
        forget(self, context)


class BatchDrafter(Drafter):
    """A drafter for which a batch is cheaper than its parts; one request is a batch of one."""

    @abstractmethod
    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Draft for several requests."""

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        return self.propose_batch([context], [budget])[0]


def finish_all(drafters: Sequence[Drafter], context: Context) -> None:
    """Tell all drafters in turn that the request ended, even if one of them raises."""
    with ExitStack() as last_first:
        for drafter in reversed(drafters):
            last_first.callback(drafter.finish, context)


def share_of_bytes(num_bytes: int, target_bytes: int) -> float:
    """Cost of a network's step in target calls: its share of the target's bytes, because reading weights dominates; 0.1
    for unknown sizes.

    Args:
        num_bytes: bytes that the network reads per step; 0 if unknown.
        target_bytes: those of the target; 0 if unknown.
    """
    return num_bytes / target_bytes if num_bytes and target_bytes else 0.1


Verify = Callable[[TokenTree, Scores, Any], Verdict]
"""Rule by which a drafter with an inner loop verifies inner drafts; it must keep the inner model's distribution."""


@dataclass(frozen=True)
class BuildContext(ABC):
    """The target that a drafter is built for, and loaders of its other parts; made by :mod:`foretoken.loading`.

    Attributes:
        target: the target model.
        source: origin of the target: ``"builtin"``, a path, a hub id, or the network itself.
        tokenizer: the target's; ``None`` if it has none.
        device: device of draft models; ``None`` means the target's.
    """

    target: LanguageModel
    source: Any
    tokenizer: Any | None = None
    device: Any = None

    @property
    @abstractmethod
    def inner_rule(self) -> Verify:
        """The best lossless rule for a tree, for drafters that verify inside their own loop."""

    @abstractmethod
    def draft_model(
        self, name: str, path: str | None, *, packed: bool = True, quantize: str = "auto", window: Window = WHOLE_TEXT
    ) -> LanguageModel:
        """The draft model of a spec ``name[:path]``, checked against the target.

        Args:
            name: the requesting drafter's name, for messages.
            path: a folder or hub id; ``None`` is the built-in draft model, for the built-in target.
            packed: whether weights may be rearranged for speed; otherwise they stay trainable.
            quantize: ``"int8"``, ``"int4"``, one of them with ``-a8`` for activations of 8 bits, ``"none"``, or
                ``"auto"``: the fastest on the CPU, if weights may be rearranged.
            window: the part of long sequences that it reads.

        Raises:
            ValueError: no path and no built-in draft for this target, another tokenizer, or another ``quantize``.
            CapabilityError: a window for a model that always reads the whole sequence.
        """

    @abstractmethod
    def foreign_draft_model(
        self, name: str, path: str | None, *, quantize: str = "auto", window: Window = WHOLE_TEXT
    ) -> tuple[LanguageModel, Any]:
        """A draft model and its own tokenizer, which may differ from the target's; otherwise as :meth:`draft_model`.

        Raises:
            ValueError: no path and no built-in draft for this target, or a model without a tokenizer.
            CapabilityError: a window for a model that always reads the whole sequence.
        """

    @abstractmethod
    def drafter(self, spec: str) -> Drafter | None:
        """Another drafter for the same target.

        Raises:
            ValueError: an unknown name or option, or a draft model that does not fit.
        """

    @abstractmethod
    def members(self, specs: str | None, most: int | None = None) -> list[Drafter]:
        """The drafters of ``A|B|...``; by default at most ``most`` of those that need no training for this target.

        Raises:
            ValueError: as :meth:`drafter`; an empty item in the list, or ``none`` in it.
        """

    @abstractmethod
    def nested(self, outer: str, spec: str, *, for_target: bool = True) -> Drafter:
        """A drafter inside the drafter ``outer``, with the target's options; with ``for_target=False`` it drafts for
        another model, and no draft model is built in.

        Raises:
            ValueError: an unknown name or option, no drafter at all, or one that cannot be nested.
        """

    @abstractmethod
    def has_trained(self, name: str) -> bool:
        """Whether the library ships a trained drafter of this method for the target."""

    @abstractmethod
    def folder(self, name: str, path: str | None) -> Path:
        """Folder of the trained drafter of a spec ``name[:path]``.

        Raises:
            ValueError: no such folder, or no path for a target that is not built in.
        """

    @abstractmethod
    def has_native_head(self) -> bool:
        """Whether the target's own checkpoint holds a multi-token prediction head."""

    @abstractmethod
    def native_head(self) -> Sequence[dict[str, Tensor]]:
        """The weights of that head, one dictionary per module.

        Raises:
            ValueError: there is none, it lacks tensors, or files are damaged.
        """
