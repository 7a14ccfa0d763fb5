"""The interface between the trainer and a method's recipe."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.core.docstrings import meaning_of
from foretoken.core.names import unknown
from foretoken.core.specs import Option
from foretoken.methods.drafters.base import Drafter
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel

LARGE_VOCABULARY = 16384
"""Vocabulary size from which drafters with the target's projection predict only frequent tokens."""
FREQUENT, COVERED = 4096, 0.995
"""Least number of frequent tokens, and the share of the training text that they cover, if a quarter of all does."""
LAYER_WINDOWS = ("layer_windows", "a target whose layers can be run one by one")
"""What a method needs that runs only a part of the target's layers."""
EXPLAINED = "`foretoken methods {}` explains them"
SHAPE = ("heads", "kv_heads", "head_dim", "ffn")
"""Settings of a layer's shape, by default that of the target's layers."""
COUNTED = 2**22
"""Tokens of the training text counted at once."""


class Batch:
    """Texts with the target's hidden states.

    A position is a text's row and a token's column c.  The state and the target's distribution *at* it are those after
    token c, so they predict token c + 1.  A drafter that reads the state at c and the token at c + 1 predicts token c +
    2, which is compared with the distribution at c + 1.  ``learned`` refers to tokens, not positions: the prediction at
    c counts if token c + 1 is learned.

    Attributes:
        tokens: int64 [b, n + 1].
        taps: hidden states of the first n tokens by name, each [b, n, D].
        learned: bool [b, n + 1]: tokens to predict, an assistant's in a conversation; ``None``: all.
    """

    def __init__(
        self,
        tokens: Tensor,
        taps: Mapping[str, Tensor],
        parts: TargetParts,
        step: int = 0,
        steps: int = 1,
        learned: Tensor | None = None,
    ) -> None:
        self.tokens, self.taps, self.parts, self.step, self.steps = tokens, taps, parts, step, steps
        self.learned = learned

    @property
    def length(self) -> int:
        """n: number of tokens with hidden states."""
        return self.tokens.shape[1] - 1

    @torch.no_grad()
    def teacher(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The target's distributions [m, V] after the tokens at (row, column), float32."""
        return torch.softmax(self.parts.logits(self.taps["last"][rows, columns]).float(), -1)

    def counted(self, rows: Tensor, columns: Tensor) -> Tensor | None:
        """Whether the token after the one at (row, column) is learned, float32 of their shape; ``None``: all."""
        return None if self.learned is None else self.learned[rows, columns + 1].float()


class Recipe(ABC):
    """The training of one method.

    ``config``, a ``config_class``, holds three sets of values:

    ======================  ============================================================================================
    what a user may set     ``settings``: fields of ``config_class`` that are not ``fixed``; ``configure`` reads their
                            values (``read_settings`` does, without a target), ``described_settings`` lists them, and
                            the ``target_defaults`` among them without a default
    what the network needs  fields of ``net_config`` (without one, of ``config_class``): settings, and the ``fixed``
                            fields, whose values ``from_target`` gives with the ``target_defaults``; ``build`` reads it
    what is stored          ``stored_config``: the same, in ``drafter.json``; without the ``shape`` of the drafter's
                            trees, options that depend on the target it then drafts for
    ======================  ============================================================================================

    Attributes:
        config_class: dataclass of all three.
        drafter_class: class of the drafter, which has the method's name, and if it has a network its class
            (``net_class``) and the dataclass of its shape (``net_config``).
        lr: default learning rate.
        target_lr: learning rate of the target's weights relative to ``lr``, if they are trained too.
    """

    method: ClassVar[str]
    drafter_class: ClassVar[type[Any]]
    config_class: ClassVar[type[Any]]
    net_config: ClassVar[type[Any] | None] = None
    net_class: ClassVar[type[nn.Module]] = nn.Module
    lr: ClassVar[float] = 5e-3
    weight_decay: ClassVar[float] = 0.0
    target_lr: ClassVar[float] = 0.1
    fixed: ClassVar[tuple[str, ...]] = ("hidden_size", "vocab_size")
    """Fields that the target determines."""
    target_defaults: ClassVar[tuple[str, ...]] = ()
    """Settings whose default depends on the target."""
    needs: ClassVar[tuple[str, str] | None] = None
    """For a method that runs the target's layers: a capability of the target, if any, and the requirement in words."""
    frequent: Tensor | None = None
    """[V_d] the frequent tokens, the most frequent one first; ``None``: the drafter predicts all tokens."""

    def __init_subclass__(cls) -> None:
        drafter = vars(cls).get("drafter_class")
        if drafter is not None:
            cls.method = drafter.name
            cls.net_config = getattr(drafter, "net_config", None)
            cls.net_class = getattr(drafter, "net_class", nn.Module)

    def __init__(self, target: LanguageModel, parts: TargetParts, settings: Mapping[str, str], seed: int = 0) -> None:
        self.target, self.parts = target, parts
        self._check_target()
        parts.check_head()
        self.config = self.configure(settings)
        self.check_ahead(target.context_length, "the target's context")  # before a network of that size is created
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = self.build()

    def _check_target(self) -> None:
        """Raise ``CapabilityError`` if the method runs the target's layers, and the target is not a network of layers
        or lacks a required capability."""
        if self.needs is None:
            return
        (capability, words), target = self.needs, self.target
        if not isinstance(target, HuggingFaceModel) or (capability and not getattr(target.capabilities, capability)):
            raise CapabilityError(f"{self.method} needs {words.format(type(target).__name__)}")

    @property
    def model(self) -> HuggingFaceModel:
        """The target, for recipes that run its layers."""
        return cast(HuggingFaceModel, self.target)

    @property
    def taps(self) -> Sequence[str]:
        """Hidden states that the loss needs; must include ``"last"`` if it uses the teacher's distribution."""
        return ("last",)

    @property
    def trains_target(self) -> bool:
        """Whether the target's weights change too: the run then gives a target and a drafter for it."""
        return False

    @property
    def reduces(self) -> bool:
        """Whether the drafter predicts only tokens frequent in its training text if the vocabulary is large."""
        return False

    @property
    def update_rank(self) -> int:
        """Rank of a low-rank update, if only that is trained of the target; 0: all weights, or a frozen target. Not the
        ``rank`` of a drafter's own matrices (``dflash2``, ``dspark``, ``uno``)."""
        return int(getattr(self.config, "rank", 0)) if self.trains_target else 0

    @property
    def ahead(self) -> int:
        """Number of tokens after a position that are predicted from it; a block must be longer."""
        return 1

    def check_ahead(self, context: int, whose: str) -> None:
        """Raise ``ValueError`` if blocks of ``context`` tokens are too short for the settings."""
        if context <= self.ahead:
            raise ValueError(
                f"{self.method} would learn {self.ahead:,} tokens ahead with these settings: {whose} of "
                f"{context:,} tokens is too short"
            )

    @property
    def writer(self) -> LanguageModel:
        """The model that writes training text, for runs with written text."""
        return self.target

    @property
    def has_net(self) -> bool:
        """Whether there is a network to store besides the target."""
        return any(True for _ in self.net.parameters())

    def beside(self, target: LanguageModel) -> Self:
        """The same recipe and network for another copy of the target."""
        recipe = copy.copy(self)
        recipe.target, recipe.parts = target, TargetParts(target)
        return recipe

    def prepare(self, tokens: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Read all learned token ids of the training text before the first step (the same ones on resume)."""
        if self.reduces and self.parts.vocab_size >= LARGE_VOCABULARY:
            frequent = frequent_tokens(tokens, self.parts.vocab_size)
            self.frequent = torch.from_numpy(frequent).to(self.parts.device)

    def configure(self, settings: Mapping[str, str]) -> Any:
        """The settings from the target and from ``key=value`` strings.  Raises ``ValueError`` as :meth:`read_settings`,
        and for a number out of range, or values that are wrong together or for this target."""
        by_name, values = self.settings(), self.read_settings(settings)
        config = self.config_class(**{**self.from_target(), **values})
        for key, value in values.items():
            _check_number(key, value, by_name[key].default)
        return config

    @classmethod
    def read_settings(cls, settings: Mapping[str, str]) -> dict[str, Any]:
        """Values of ``key=value`` strings, without a target.  Raises ``ValueError`` for an unknown key (lists the valid
        ones), and for a value of the wrong type."""
        by_name = cls.settings()
        values: dict[str, Any] = {}
        for key, text in settings.items():
            if key not in by_name:
                subject, more = f"unknown setting {key!r} of {cls.method!r}", f"; {EXPLAINED.format(cls.method)}"
                raise unknown(subject, key, list(by_name), lead="valid ones:", more=more)
            values[key] = _convert(key, text, type(by_name[key].default))
        return values

    @classmethod
    def settings(cls) -> dict[str, Field[Any]]:
        """The fields of the configuration that ``--set`` takes."""
        return {f.name: f for f in fields(cls.config_class) if f.name not in cls.fixed}

    @classmethod
    def described_settings(cls) -> list[Option]:
        """The settings with their meanings, from the docstrings of the configuration."""
        described = []
        for name, field in cls.settings().items():
            default: Any = None if name in cls.target_defaults else field.default
            described.append(Option(name, type(field.default).__name__, default, meaning_of(cls.config_class, name)))
        return described

    def from_target(self) -> dict[str, Any]:
        """Values of the fields that the target determines."""
        return {"hidden_size": self.parts.hidden_size, "vocab_size": self.parts.vocab_size}

    def build(self) -> nn.Module:
        """A new network."""
        return self.net_class((self.net_config or self.config_class)(**self.stored_config()))

    @abstractmethod
    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """The loss of one batch, a scalar."""

    @property
    def shape(self) -> Mapping[str, Any]:
        """Options of the drafter's shape: a chain for a target that cannot score trees."""
        shape: Mapping[str, Any] = self.drafter_class.shape_for(self.target)
        return shape

    @abstractmethod
    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        """A drafter with the current network."""

    def spec(self, folder: Path | str) -> str:
        """The spec string of a drafter that was stored in ``folder``."""
        return f"{self.method}:{folder}"

    def measure(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Measurements on held-out text for drafting, stored with the weights."""
        return {}

    def reported(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """The part of these measurements that stands in the report of the run, too."""
        return {}

    def stored_config(self) -> dict[str, Any]:
        """The network's shape as stored: only the fields that it needs."""
        config = asdict(self.config)
        return config if self.net_config is None else {f.name: config[f.name] for f in fields(self.net_config)}


class TargetRecipe(Recipe):
    """Trains the target itself: there is no other network, and the loss reads the text."""

    target_lr = 1.0
    lr = 1e-3
    trains_target = True
    taps: Sequence[str] = ()

    def build(self) -> nn.Module:
        return nn.Module()


def _convert(key: str, text: str, kind: type[Any]) -> Any:
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"setting {key}={text!r} must be of type {kind.__name__}") from None


def _check_number(key: str, value: Any, default: Any) -> None:
    """Raise ``ValueError`` for numbers that are not finite, and for negative ones unless the default is negative."""
    if isinstance(value, int | float) and not min(0, default) <= value < math.inf:
        raise ValueError(f"setting {key}={value} must be a finite number, and not negative")


def check_rank(rank: int, trains_target: bool) -> None:
    """Raise ``ValueError`` for a negative ``rank``, and for one without a trained target."""
    if rank < 0 or (rank and not trains_target):
        raise ValueError(f"rank must be 0, or above 0 in a mode that trains the target, not {rank}")


def check_labels(labels: str, decay: float = 1.0) -> None:
    """Raise ``ValueError`` for unknown ``labels``, and for a ``decay`` that is not positive."""
    if labels not in ("target", "text"):
        raise ValueError(f"labels must be target or text, not {labels!r}")
    if not decay > 0:
        raise ValueError(f"decay must be above 0, not {decay}")


def check_depths(setting: str, depths: str, layers: int) -> None:
    """Raise ``ValueError`` for depths (joined by commas) beyond the target's number of layers."""
    deepest = max(map(int, depths.split(",")))
    if deepest > layers:
        raise ValueError(f"{setting}={depths} reach to {deepest}, and the target has {layers}")


def cross_entropies(logits: Tensor, distribution: Tensor) -> Tensor:
    """-sum distribution log softmax(logits) of each row, float32 [m]; logits and distribution [m, V]."""
    return -(distribution * torch.log_softmax(logits.float(), -1)).sum(-1)


def soft_cross_entropy(logits: Tensor, distribution: Tensor, counted: Tensor | None = None) -> Tensor:
    """Mean of :func:`cross_entropies` over (counted) rows; counted [m]."""
    return mean_of(cross_entropies(logits, distribution), counted)


def cross_entropy(logits: Tensor, labels: Tensor, counted: Tensor | None = None) -> Tensor:
    """Mean cross-entropy in nats over (counted) rows; logits [m, V], labels and counted [m]."""
    if counted is None:
        return F.cross_entropy(logits.float(), labels)
    return mean_of(F.cross_entropy(logits.float(), labels, reduction="none"), counted)


def mean_of(losses: Tensor, counted: Tensor | None) -> Tensor:
    """Mean of the counted losses, by default all; 0 if none counts."""
    return losses.mean() if counted is None else (losses * counted).sum() / counted.sum().clamp_min(1)


def some_positions(
    batch: Batch, count: int, margin: int, generator: torch.Generator, ahead: int = 1
) -> tuple[Tensor, Tensor]:
    """Rows and columns [count] of random positions followed by at least ``margin`` tokens; logits of all positions
    would be too many.

    If only some tokens are learned, the token ``ahead`` positions later is one of them, provided such a position
    exists.
    """
    b, n = batch.tokens.shape[0], batch.length - margin
    if n < 1:
        raise ValueError(f"blocks of {batch.length} tokens are too short: use a larger --context")
    positions = (
        torch.arange(0) if batch.learned is None else batch.learned[:, ahead : ahead + n].cpu().flatten().nonzero()
    )
    if len(positions):
        chosen = positions[torch.randint(len(positions), (count,), generator=generator), 0]
    else:
        chosen = torch.randint(b * n, (count,), generator=generator)
    return (chosen // n).to(batch.tokens.device), (chosen % n).to(batch.tokens.device)


def text_loss(batch: Batch, count: int, generator: torch.Generator) -> Tensor:
    """The target's own cross-entropy with the text at ``count`` random positions per text."""
    rows, columns = some_positions(batch, count * len(batch.tokens), 0, generator)
    logits = batch.parts.logits(batch.taps["last"][rows, columns])
    return cross_entropy(logits, batch.tokens[rows, columns + 1], batch.counted(rows, columns))


def token_counts(tokens: np.ndarray[Any, np.dtype[Any]], vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Counts of each of ``vocab_size`` ids in a text."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), COUNTED):
        counts += np.bincount(tokens[start : start + COUNTED], minlength=vocab_size)
    return counts


def frequent_tokens(tokens: np.ndarray[Any, np.dtype[Any]], vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The ids that make up nearly all of a text, the most frequent one first; the lower id wins a tie.

    At most a quarter of all: with more the projection would no longer be cheap."""
    counts = token_counts(tokens, vocab_size)
    order = np.argsort(-counts, kind="stable")
    needed = int(np.searchsorted(np.cumsum(counts[order]), COVERED * counts.sum())) + 1
    return order[: max(FREQUENT, min(needed, vocab_size // 4))]
