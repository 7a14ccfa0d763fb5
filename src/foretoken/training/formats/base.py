"""Base classes of the layouts: export of our drafters, and import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.loading import BUILTIN, drafter_folder, load_model, load_tokenizer, resolve
from foretoken.methods.drafters.nets.store import WEIGHTS, load_weights, read_description, save_drafter
from foretoken.models.base import LanguageModel
from foretoken.models.checks.finite import check_stored
from foretoken.models.forward.parts import Fingerprint, TargetParts
from foretoken.registry import Spec
from foretoken.training.formats.folders import NOTE, Found, write_json, write_tensors
from foretoken.training.formats.quantised import dequantised
from foretoken.training.formats.values import whole

NOTE_VERSION = 1
DTYPE = torch.bfloat16
"""Dtype of stored drafters."""
EMBEDDING = "embed_tokens.weight"
OWN_EMBEDDING = (
    "the checkpoint has a token embedding of its own, which was kept: if few drafts are accepted, it is for another "
    "--target"
)
"""Warning about an embedding that is not the target's."""


@dataclass
class Target:
    """The model of a drafter; ``source`` is ``builtin``, a folder or a hub id."""

    source: str
    model: LanguageModel

    @classmethod
    def open(cls, source: str) -> Target:
        """Load the model.  Raises ``ValueError`` if it cannot be loaded."""
        return cls(source, load_model(source, exact="approximate"))  # approximate: leaves the weights unchanged

    @cached_property
    def parts(self) -> TargetParts:
        """The parts that a drafter uses."""
        return TargetParts(self.model)

    @cached_property
    def tokenizer(self) -> Any | None:
        return load_tokenizer(self.source)

    @property
    def name(self) -> str:
        """Name of the target for another program."""
        return resolve(self.source) if self.source == BUILTIN else self.source

    @property
    def architectures(self) -> list[str]:
        """Names of the target's class."""
        return list(getattr(self.parts.network.config, "architectures", None) or [type(self.parts.network).__name__])

    def head(self, rows: Tensor | None = None) -> Tensor:
        """The vocabulary projection [V, D], or some of its rows, in the stored dtype.  Raises ``ValueError`` if it has
        a bias, which no layout can hold."""
        if self.parts.head.bias is not None:
            raise ValueError("the target's vocabulary projection has a bias, which this format cannot hold")
        weight = self.parts.head.weight.detach()[: self.parts.vocab_size].to(DTYPE).cpu()
        return weight if rows is None else weight[rows.cpu()]

    def is_head(self, weight: Tensor, rows: Tensor | None = None) -> bool:
        """Whether a projection is this target's own, in bfloat16."""
        return self.parts.head.bias is None and _same(weight, self.head(rows))

    def is_embedding(self, weight: Tensor) -> bool:
        """Whether an embedding [V, D] is this target's own, in any precision; padding rows do not count."""
        embedding = self.parts.embed.weight.detach().cpu()
        count = min(len(embedding), len(weight))
        return embedding.shape[1:] == weight.shape[1:] and bool(
            torch.allclose(weight[:count].float(), embedding[:count].float(), rtol=2**-7, atol=1e-7)
        )

    def own_embedding(self, embedding: Tensor | None) -> Tensor | None:
        """A checkpoint's embedding [V, D] without padding rows; ``None`` if it is this target's own."""
        if embedding is None or self.is_embedding(embedding):
            return None
        return embedding[: self.parts.vocab_size].contiguous()

    def speculators_config(self, algorithm: str, **proposal: float) -> dict[str, Any]:
        """Serving settings of vllm-project/speculators for a drafter of this target with one greedy proposal method."""
        return {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", **proposal}],
            "verifier": {"name_or_path": self.name, "architectures": self.architectures},
        }


def _same(weight: Tensor, other: Tensor) -> bool:
    """Whether both are equal in bfloat16; float16 cannot hold the smallest values."""
    return weight.shape == other.shape and float((weight.to(DTYPE) - other).abs().max()) <= 1e-7


@dataclass(frozen=True)
class Trained:
    """A trained drafter of ours: arguments of the network's configuration, and tensors by the network's names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A drafter in another layout: ``config.json`` and tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class Format(ABC):
    """One layout of one method; ``warnings`` are notes for the user about the last export or import."""

    method: ClassVar[str]

    def __init__(self) -> None:
        self.warnings: list[str] = []

    @abstractmethod
    def recognises(self, source: Found) -> bool:
        """Whether a folder has this layout."""

    def inputs(self, spec: Spec, target: str) -> list[Path]:
        """Folders that an export reads: the drafter's."""
        if spec.options:
            raise ValueError(f"options of {self.method} are not exported: leave out {', '.join(spec.options)}")
        return [drafter_folder(self.method, spec.path, target)]

    @abstractmethod
    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        """Export into an empty folder.  Raises ``ValueError`` if this layout cannot hold the drafter."""

    def refusal(self, engine: str, folder: Path, target: Target) -> str | None:
        """Why an engine of this layout cannot load the drafter that was written to a folder; ``None`` if it can."""
        return None

    @abstractmethod
    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        """Import into an empty folder; returns a spec with ``{}`` in place of the folder's path.  Raises ``ValueError``
        if the drafter does not fit the target, is damaged, or needs features that our network lacks."""


class NetFormat(Format):
    """A layout of a trained network: two pure functions, :meth:`write` and :meth:`read`."""

    net_config: ClassVar[type[Any]]
    net_class: ClassVar[type[Any]]
    weights: ClassVar[str] = WEIGHTS
    config_file: ClassVar[str] = "config.json"

    @abstractmethod
    def write(self, trained: Trained, target: Target) -> Checkpoint:
        """Convert ours to theirs."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        """Convert theirs to ours."""

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        (source,) = self.inputs(spec, target.source)
        fingerprint = target.parts.fingerprint()
        description = read_description(source, self.method, fingerprint)
        net = self.network(description["config"])
        load_weights(source, net)
        checkpoint = self.write(Trained(description["config"], stored(net)), target)
        write_tensors(folder / self.weights, checkpoint.tensors)
        write_json(folder / self.config_file, checkpoint.config)
        note = {"format": NOTE_VERSION, "method": self.method, "target": asdict(fingerprint)}
        write_json(folder / NOTE, {**note, "measured": description["measured"], **self.noted(description["config"])})

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        source.check_whole(self.config_file)
        fingerprint = target.parts.fingerprint()
        measured = measured_for(source, self.method, fingerprint)
        tensors = unquantised(source, self.warnings)
        if any(value.is_floating_point() and value.dtype != DTYPE for value in tensors.values()):
            self.warnings.append("the weights were rounded to bfloat16")
        config = source.config if self.config_file == "config.json" else source.json(self.config_file)
        trained = self.read(Checkpoint(config, tensors), target)
        net = self.network(trained.config)
        parameters = net.state_dict()
        check_stored(tensors.items(), source.path)
        net.load_state_dict({name: value.to(parameters[name].dtype) for name, value in trained.tensors.items()})
        save_drafter(folder, self.method, trained.config, net, fingerprint, measured)
        return f"{self.method}:{{}}"

    def noted(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Facts of a configuration that the layout has no keys for; they are kept in the note beside an export."""
        return {}

    def network(self, config: Mapping[str, Any]) -> nn.Module:
        """An untrained network of this shape."""
        net: nn.Module = self.net_class(self.net_config(**config))
        return net

    def shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes of the network's tensors by our names."""
        with torch.device("meta"):
            return {name: tuple(value.shape) for name, value in self.network(config).state_dict().items()}


def unquantised(source: Found, warnings: list[str]) -> dict[str, Tensor]:
    """All tensors of a checkpoint, in bfloat16 if they are quantised, with a warning.  Raises ``ValueError`` for a
    quantisation that cannot be read."""
    tensors, method = dequantised(source.config, source.tensors())
    if method:
        warnings.append(f"the weights are quantised with {method}, and were read as bfloat16")
    return tensors


def stored(net: nn.Module) -> dict[str, Tensor]:
    """A network's tensors in the dtypes of a drafter's folder."""
    return {n: v.detach().to(DTYPE if v.is_floating_point() else v.dtype) for n, v in net.state_dict().items()}


def measured_for(source: Found, method: str, fingerprint: Fingerprint) -> dict[str, Any]:
    """Measurements from the note beside an export of ours; empty for other checkpoints.  Raises ``ValueError`` if the
    export was made for another target."""
    note = source.json(NOTE) if source.path.is_dir() else {}
    if not note or note.get("method") != method:
        return {}
    try:
        difference = Fingerprint(**note["target"]).difference(fingerprint)
        measured: dict[str, Any] = dict(note.get("measured") or {})
        table = torch.tensor(measured.get("accuracies") or [[0.0]])  # [K][R]
        if table.dim() != 2 or not table.numel():
            raise ValueError
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise ValueError(f"{source.path / NOTE} is damaged: copy it again, or remove it") from None
    if difference:
        raise ValueError(f"{source.path} was made for another target: {difference}")
    return measured


def by_names(tensors: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    """Tensors by other names.  Raises ``ValueError`` for two with one name."""
    names: dict[str, str] = {}
    for theirs in tensors:
        other = names.setdefault(rename(theirs), theirs)
        if other != theirs:
            raise ValueError(f"the checkpoint holds {other} and {theirs}, which are one tensor of this network")
    return {name: tensors[theirs] for name, theirs in names.items()}


def renamed(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    ignored: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Their tensors by our names.  Raises ``ValueError``, with their name of the first such tensor, if one is missing,
    superfluous or misshapen.

    Args:
        shapes: shapes by our names.
        names: their names by our names.
    """
    for ours, theirs in names.items():
        if theirs not in tensors:
            raise ValueError(f"the checkpoint lacks the tensor {theirs}: it is incomplete")
        if tuple(tensors[theirs].shape) != shapes[ours]:
            shape = list(tensors[theirs].shape)
            raise ValueError(f"{theirs} is {shape} and must be {list(shapes[ours])} for this target and config.json")
    extra = sorted(set(tensors) - set(names.values()) - set(ignored))
    if extra:
        raise ValueError(f"the checkpoint holds a tensor {extra[0]} that this network does not have")
    return {ours: tensors[theirs] for ours, theirs in names.items()}


def check_sizes(config: Mapping[str, Any], target: Target) -> None:
    """Raise ``ValueError`` for a hidden size or a vocabulary other than the target's; a padded vocabulary may differ a
    little."""
    size = whole(config, "hidden_size", default=target.parts.hidden_size)
    if size != target.parts.hidden_size:
        raise ValueError(f"the checkpoint is for a hidden size of {size}, the target's is {target.parts.hidden_size}")
    target_vocab = target.parts.vocab_size
    vocab = whole(config, "vocab_size", default=target_vocab)
    if abs(vocab - target_vocab) > min(512, max(vocab, target_vocab) // 100):
        raise ValueError(f"the checkpoint is for a vocabulary of {vocab}, the target's has {target_vocab}")
