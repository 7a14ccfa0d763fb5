"""Deprecated names of moved modules, which still work with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PLACES = {
    "drafters": "methods.drafters",
    "verifiers": "methods.verifiers",
    "trees": "methods.trees",
    "controllers": "methods.controllers",
    "controllers.costs": "core.costs",
    "sampling": "core.sampling",
    "constraints": "core.constraints",
    "costs": "core.costs",
    "specs": "core.specs",
    "names": "core.names",
    "prompts": "core.prompts",
    "bos": "core.bos",
    "conversation": "core.conversation",
    "io": "core.io",
    "formats": "training.formats",
    "grammar": "server.grammar",
    "server.scale": "server.cluster.scale",
    "server.gateway": "server.cluster.gateway",
    "server.replica": "server.cluster.replica",
    "server.routing": "server.cluster.routing",
    "server.fleet_metrics": "server.cluster.fleet_metrics",
    "jobs": "cli.batch",
    "hub_inputs": "loading.hub_inputs",
    "hub_params": "loading.hub_params",
    "loading.checkpoints": "core.io.checkpoints",
    "models.table": "models.other.table",
    "models.llama_cpp_model": "models.other.llama_cpp_model",
    "measure.acceptance": "lab.acceptance",
    "measure.prompts": "lab.prompts",
    "measure.costs": "lab.bench.costs",
    "measure": "loading.measured",
    "bench.report": "lab.report",
    "bench.cards": "lab.report.cards",
    "bench": "lab.bench",
    "show": "lab.report.show",
    "tune": "lab.tune",
    "parity": "lab.parity",
    "theory.trees": "lab.plan.speedup",
    "theory": "lab.plan",
}
"""Names below ``foretoken``: the old name of a module or package, and its new one."""

NAMES = {
    "lab.report.write_plots": "lab.report.plots.write_plots",
    "lab.report.write_report": "lab.report.page.write_report",
    "models.gguf.GgufModel": "models.other.llama_cpp_model.LlamaCppModel",
}
"""The same for functions and classes that a package has no longer."""


class MovedFinder(MetaPathFinder, Loader):
    """Imports the module of the new name under the old one: a single module, so that its classes are identical."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.removeprefix("foretoken.") in NAMES:
            _add_name(fullname)
            return None
        new = new_name(fullname)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        warnings.warn(f"{fullname} is now {new}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(new_name(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which the import system has replaced; nothing runs again."""
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Install the old names. The finder comes first, because a submodule of an old name would otherwise be loaded
    twice."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())


def _add_name(name: str) -> None:
    """Give a package the name that ``from package import name`` has missed. Python then looks for a module of that
    name, is told that there is none, and reads the package again."""
    package, _, attribute = name.rpartition(".")
    new = "foretoken." + NAMES[name.removeprefix("foretoken.")]
    module, _, renamed = new.rpartition(".")
    setattr(sys.modules[package], attribute, getattr(importlib.import_module(module), renamed))
    warnings.warn(f"{name} is now {new}", DeprecationWarning, stacklevel=3)


def new_name(name: str) -> str | None:
    """The new name of a module; ``None`` if ``name`` is not an old one."""
    head, _, tail = name.partition(".")
    if head != "foretoken":
        return None
    parts = tail.split(".")
    for length in range(min(len(parts), 2), 0, -1):
        new = PLACES.get(".".join(parts[:length]))
        if new is not None:
            return ".".join(("foretoken", new, *parts[length:]))
    return None
