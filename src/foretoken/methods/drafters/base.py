"""The ``Drafter`` protocol: which tokens to guess.

A new drafter is one class with two methods (:meth:`Drafter.propose` and, when it learns from verdicts,
:meth:`Drafter.observe`), one registry row and one docs page.  What it is stands in its :class:`Traits`: nobody looks at
which methods a class has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from foretoken.core import Budget, Context, Kind, Limits, Scores, TokenTree, Verdict
from foretoken.methods.drafters.texts import forget
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import WHOLE_TEXT, Window

UNKNOWN_COST = 0.1
"""Cost of a draft level of a network whose size is not known, in target calls."""


@dataclass(frozen=True)
class Traits:
    """What a drafter is, fixed once it is made.

    Attributes:
        kind: how siblings are drawn when sampling (a greedy request always gets point proposals).
        draws_trees: whether proposals can branch.
        sorts: where there are several, all sorts of proposals when sampling, as (kind, whether it can branch).
        shares_state: whether a request's drafts depend on other requests.
        prefers_noise: whether its drafts for sampled requests are accepted more often when they are coupled than under
            any other rule; requests without a seed are then coupled, too.  So it is, as measured, where the best tokens
            of a distribution are proposed as they are (heads), and not where tokens are drawn from it.
        rewinds: whether its per-request state survives that the text is cut back; only such a drafter can work inside
            another one, where rejected drafts take text away again.
        runs_target: whether it drafts with parts of the target itself, on ``context.sequence``.
        learns: whether :meth:`Drafter.observe` does anything; a group shows no rounds to members that do not learn.
        only_for: the requests that it can draft for, in words, where those are not all.
        free_for: whether ``drafter="auto"`` should have it among its choices for a target: its bare name can be built
            without anything to be trained or downloaded, and it is expected to pay on this machine.  Asked of the class
            whenever a target is loaded with ``drafter="auto"``: it must be quick, and must not raise.  ``None``: never.
    """

    kind: Kind = Kind.POINT
    draws_trees: bool = False
    sorts: frozenset[tuple[Kind, bool]] = frozenset()
    shares_state: bool = False
    prefers_noise: bool = False
    rewinds: bool = False
    runs_target: bool = False
    learns: bool = True
    only_for: str = ""
    free_for: Callable[[BuildContext], bool] | None = None

    @property
    def proposals(self) -> frozenset[tuple[Kind, bool]]:
        """Every sort of proposal when sampling: a verifier must be right for all."""
        return self.sorts or frozenset({(self.kind, self.draws_trees)})


class Foresight(Protocol):
    """What a drafter knows of answers before it guesses."""

    def minimum_budget(self, context: Context, budget: Budget) -> Budget:
        """The budget, or a larger one where it is known what follows, so that no guess is needed."""

    def predicted_from(self, context: Context) -> int | None:
        """Where in the caller's prediction the last draft began (for the statistics); ``None`` for other drafts."""


class Drafter(ABC):
    """One way to guess tokens.

    Eight hooks may be overridden: :meth:`start`, :meth:`propose` (which must be), :meth:`propose_batch`,
    :meth:`observe`, :meth:`rewind` and :meth:`finish` are called for requests, :meth:`cost_beside` and :meth:`describe`
    say what it is to controllers and users.  All else is data.

    Whatever the method: an option outside its range is a ``ValueError`` of the constructor, a model without what the
    method needs a ``CapabilityError``.  What is made of more than options has a class method ``build(path, context,
    **options)`` for specs ``NAME[:PATH][,KEY=VALUE...]``.  It raises these, too, and a ``ValueError`` for a path that
    it does not take, for files that are missing, damaged or of another target, and for a draft vocabulary that is none
    (``vocab=N|FILE``: the tokens that can be guessed).

    Attributes:
        name: registry key.
        taps: names of target hidden states that the drafter needs (see :mod:`foretoken.models.base`).
        max_depth: longest draft that it makes by default; controllers start from it.
        max_nodes: most draft nodes that it makes by default.
        traits: what it is, by its class or by its options.
        spec: the spec string that it was built from, "" for one that was made by hand.
        target_bytes: weights of the target, 0 where they are not known; what it costs is a share of them.
        drafters: the members of a group; of any other nobody.
    """

    name: ClassVar[str]
    taps: Sequence[str] = ()
    max_depth: int = 8
    max_nodes: int = 64
    traits: Traits = Traits()
    spec: str = ""
    target_bytes: int = 0
    drafters: Sequence[Drafter] = ()

    @property
    def limits(self) -> Limits:
        """What this drafter can draft, for the controller."""
        cost = self.cost_beside(self.target_bytes)
        return Limits(self.spec or self.name, self.max_depth, self.max_nodes, cost, states=self.states)

    def cost_beside(self, target_bytes: int) -> float:
        """What a level of its drafts costs by its size, in target calls; 0 for a drafter that runs no network.

        This is the one guess that controllers and groups start from, until they have measured.

        Args:
            target_bytes: weights of the target; 0 where they are not known.
        """
        model = getattr(self, "model", None)
        return share_of_bytes(model.weight_bytes, target_bytes) if isinstance(model, LanguageModel) else 0.0

    def describe(self) -> list[dict[str, Any]]:
        """What it drafts with, of a group one entry for each member: ``"drafter"``, its spec; where it runs a network,
        ``"vocabulary"``, how many tokens it can guess; of a draft model ``"weights"``, their dtype or what they are
        quantised to; and of a trained head ``"forward"``, what runs its network, and ``"native_off"``, why that is not
        our library (empty where it is)."""
        return [{"drafter": self.spec or self.name}]

    @property
    def states(self) -> Any:
        """Fingerprint of the draft model whose hidden states it tells a :class:`~foretoken.core.PathStop`, or None."""
        return None

    @property
    def foresight(self) -> Foresight | None:
        """What it knows before it guesses; ``None`` where every draft is a guess."""
        return None

    def start(self, context: Context) -> None:  # noqa: B027
        """A request joined (``context.hidden`` holds the prompt's taps).

        Nobody knows yet whether it will be drafted for: what a draft needs to read is read when one is asked for
        (:mod:`foretoken.methods.drafters.texts`).
        """

    @abstractmethod
    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """Guess what follows ``context.tokens``; the tree's root is ``context.root``."""

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Guess for several requests; override when a batch is cheaper than its parts."""
        return [
            self.propose(c, b) if b.max_depth > 0 and b.max_nodes > 0 else TokenTree.root_only(c.root)
            for c, b in zip(contexts, budgets, strict=True)
        ]

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:  # noqa: B027
        """Learn from a verdict; ``context.tokens`` already contains the new tokens.  See ``Traits.learns``."""

    def rewind(self, context: Context, length: int) -> None:  # noqa: B027
        """The text was cut back to its first ``length`` tokens (``context.tokens`` already is); see ``Traits``."""

    def finish(self, context: Context) -> None:
        """The request ended: what is kept in ``context.state`` under the drafter, or under a pair that begins with it,
        goes; override for what is kept elsewhere."""
        forget(self, context)


class BatchDrafter(Drafter):
    """A drafter for which a batch is cheaper than its parts: one request is a batch of one."""

    @abstractmethod
    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Guess for several requests."""

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        return self.propose_batch([context], [budget])[0]


def share_of_bytes(num_bytes: int, target_bytes: int) -> float:
    """What a step of a network costs, in target calls: its share of the target's bytes, because reading weights is what
    a step takes.

    Args:
        num_bytes: bytes that the network reads per step; 0 where that is not known.
        target_bytes: those of the target; 0 where that is not known.
    """
    return num_bytes / target_bytes if num_bytes and target_bytes else UNKNOWN_COST


Verify = Callable[[TokenTree, Scores, Any], Verdict]
"""The rule by which a drafter that runs a loop of its own verifies what is guessed for it."""


@dataclass(frozen=True)
class BuildContext(ABC):
    """The target that a drafter is built for, and everything that is loaded for it; made by :mod:`foretoken.loading`.

    Attributes:
        target: the model that is drafted for.
        source: what it was loaded from: ``"builtin"``, a path, a hub id, or the network itself.
        tokenizer: the target's; ``None`` where there is none.
        device: where draft models go; ``None`` means the target's device.
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
            name: of the drafter that asks, for messages.
            path: a folder or hub id; ``None`` is the built-in draft model, for the built-in target.
            packed: whether weights may be rearranged for speed; otherwise they stay where they can be trained.
            quantize: ``"int8"``, ``"int4"``, one of them with ``-a8`` for activations of 8 bits, ``"none"``, or
                ``"auto"``: what is fastest on the CPU, if they may be rearranged.
            window: what it reads of long texts.

        Raises:
            ValueError: no path and no built-in draft for this target, another tokenizer, or another ``quantize``.
            CapabilityError: a window for a model that reads the whole text.
        """

    @abstractmethod
    def foreign_draft_model(
        self, name: str, path: str | None, *, quantize: str = "auto", window: Window = WHOLE_TEXT
    ) -> tuple[LanguageModel, Any]:
        """A draft model and its own tokenizer, which may be another than the target's; the rest as above.

        Raises:
            ValueError: no path and no built-in draft for this target, or a model without a tokenizer.
            CapabilityError: a window for a model that reads the whole text.
        """

    @abstractmethod
    def drafter(self, spec: str) -> Drafter | None:
        """Another drafter for the same target.

        Raises:
            ValueError: an unknown name or option, or a draft model that does not fit.
        """

    @abstractmethod
    def members(self, specs: str | None, most: int | None = None) -> list[Drafter]:
        """The drafters of ``A|B|...``; by default what needs no training for this target, at most ``most`` of it.

        Raises:
            ValueError: as :meth:`drafter`; an empty place in the list, or ``none`` in it.
        """

    @abstractmethod
    def nested(self, outer: str, spec: str, *, for_target: bool = True) -> Drafter:
        """A drafter that works for the drafter ``outer``, with the target's own options unless it drafts for a model
        that is not the target (``for_target=False``: then no draft model is built in).

        Raises:
            ValueError: an unknown name or option, no drafter at all, or one that cannot be nested.
        """

    @abstractmethod
    def has_trained(self, name: str) -> bool:
        """Whether the library ships a trained drafter of this method for the target."""

    @abstractmethod
    def folder(self, name: str, path: str | None) -> Path:
        """Where a trained drafter of a spec ``name[:path]`` is.

        Raises:
            ValueError: no such folder, or no path for a target that is not built in.
        """

    @abstractmethod
    def has_native_head(self) -> bool:
        """Whether the target's own checkpoint holds a multi-token prediction head."""

    @abstractmethod
    def native_head(self) -> Sequence[dict[str, Tensor]]:
        """The modules of that head, one dictionary of weights each.

        Raises:
            ValueError: there is none, it lacks tensors, or files are damaged.
        """
