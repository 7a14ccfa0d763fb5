"""All layouts by method and name, imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretoken.core.names import did_you_mean, unknown

if TYPE_CHECKING:
    from foretoken.training.formats.base import Format

ENGINES = ("vllm", "sglang", "huggingface")


@dataclass(frozen=True)
class Layout:
    """One layout of one method.

    Attributes:
        name: value of ``--format``.
        home: ``module:Class`` below ``foretoken.training.formats``.
        engines: engines that read it, each with a warning or an empty string.
    """

    method: str
    name: str
    home: str
    summary: str
    engines: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> Format:
        module, _, name = self.home.partition(":")
        layout: Format = getattr(importlib.import_module(f"foretoken.training.formats.{module}"), name)()
        return layout


LAYOUTS: tuple[Layout, ...] = (
    # If two could read a checkpoint, the first one does.
    Layout("eagle3", "speculators", "eagle3:Eagle3Speculators", "vllm-project/speculators", {"vllm": ""}),
    Layout("peagle", "speculators", "peagle:PeagleSpeculators", "vllm-project/speculators", {"vllm": ""}),
    Layout("peagle", "plain", "peagle:PeaglePlain", "EAGLE-3's names and mask_hidden", {"vllm": ""}),
    Layout("eagle3", "plain", "eagle3:Eagle3Plain", "EAGLE, SpecForge, AngelSlim", {"vllm": "", "sglang": ""}),
    Layout("dflash", "speculators", "dflash:DflashSpeculators", "vllm-project/speculators", {"vllm": ""}),
    Layout("dflash", "plain", "dflash:DflashPlain", "z-lab's DFlash, SpecForge", {"vllm": ""}),
    Layout("dflash2", "speculators", "dflash:Dflash2Speculators", "vllm-project/speculators", {"vllm": ""}),
    Layout("dflash2", "plain", "dflash:Dflash2Plain", "z-lab's DFlash2", {"vllm": ""}),
    Layout("dspark", "speculators", "dflash:DsparkSpeculators", "vllm-project/speculators", {"vllm": ""}),
    Layout("dspark", "plain", "dflash:DsparkPlain", "DeepSpec, SpecForge, LFM2's drafters", {"vllm": ""}),
    Layout("mtp", "speculators", "mtp:MtpSpeculators", "vllm-project/speculators", {"vllm": ""}),
    Layout("mtp", "native", "mtp:MtpTargetCheckpoint", "the target's own checkpoint"),
    Layout("eagle", "vllm", "eagle:EagleVllm", "vLLM: the bias of fc is folded into the attention", {"vllm": ""}),
    Layout("eagle", "plain", "eagle:EaglePlain", "EAGLE-1 and EAGLE-2, SGLang", {"sglang": ""}),
    Layout(
        "medusa",
        "vllm",
        "medusa:MedusaVllm",
        "vLLM's Medusa",
        {"vllm": "vLLM 0.33 and later cannot load Medusa: this needs vLLM 0.32 or older"},
    ),
    Layout("medusa", "original", "medusa:MedusaOriginal", "FasterDecoding/Medusa"),
    Layout("pard", "plain", "model:PardFolder", "AMD's PARD: a Hugging Face folder with a pard_token", {"vllm": ""}),
    Layout("uno", "peft", "uno:UnoPeft", "a PEFT adapter, as UNO's are published"),
    Layout("model", "plain", "model:ModelFolder", "a Hugging Face folder", dict.fromkeys(ENGINES, "")),
    Layout("early_exit", "plain", "own_layers:EarlyExit", "the exit layer, as JSON", {"huggingface": ""}),
    Layout("layer_skip", "plain", "own_layers:LayerSkip", "the skipped sublayers, as JSON"),
)

DEFAULTS = {
    "eagle3": "plain",
    "peagle": "plain",
    "dflash": "plain",
    "dflash2": "plain",
    "dspark": "plain",
    "eagle": "plain",
    "medusa": "original",
}
"""Default layout by method, if the engine can load it."""


def methods() -> list[str]:
    return list(dict.fromkeys(layout.method for layout in LAYOUTS))


def names() -> list[str]:
    return sorted({layout.name for layout in LAYOUTS})


def layouts_of(method: str) -> list[Layout]:
    """The layouts of a method.  Raises ``ValueError``: it has none; the message lists the methods that have one."""
    layouts = [layout for layout in LAYOUTS if layout.method == method]
    if not layouts:
        raise unknown(f"no other project supports drafters of the method {method!r}", method, methods())
    return layouts


def find_layout(method: str, name: str | None, engine: str | None) -> Layout:
    """The layout to write: the named one, the engine's, or the method's usual one.  Raises ``ValueError`` for unknown
    names, and for an engine that cannot load it; says what can."""
    layouts = layouts_of(method)
    if engine is not None and engine not in ENGINES:
        raise unknown(f"unknown engine {engine!r}", engine, ENGINES)
    if name is not None and name not in (layout.name for layout in layouts):
        raise ValueError(
            f"{method} has no format {name!r}: {did_you_mean(name, [layout.name for layout in layouts])}"
            f"choose one of {_list(layouts)}"
        )
    able = [layout for layout in layouts if engine is None or engine in layout.engines]
    if not able:
        raise ValueError(f"{engine} cannot load a drafter {method!r} in any format: leave --engine out")
    if name is None:
        return next((layout for layout in able if layout.name == DEFAULTS.get(method)), able[0])
    for layout in able:
        if layout.name == name:
            return layout
    raise ValueError(f"{engine} cannot load {method} in the format {name!r}: choose {_list(able)}")


def _list(layouts: Sequence[Layout]) -> str:
    return ", ".join(sorted(layout.name for layout in layouts))
