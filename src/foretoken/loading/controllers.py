"""Controllers from spec strings, with the trained networks they need."""

from __future__ import annotations

from typing import Any

from torch import nn

from foretoken.core.io.checkpoints import ZOO
from foretoken.core.io.hub_ids import expanded
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.nets.specdec_pp import StopHead, StopHeadConfig
from foretoken.methods.drafters.nets.store import build_net, read_stored
from foretoken.registry import make

METHOD = "specdec_pp"


class ControllerContext:
    """Loads the networks of controllers."""

    def stop_head(self, path: str | None) -> tuple[nn.Module, Any]:
        """The head in a folder (default: the built-in draft model's), and the fingerprint of the model that it reads.
        Raises ``ValueError`` if there is no trained head."""
        folder = ZOO / METHOD if path is None else expanded(path)
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is not a folder with a trained stop head: make one with `foretoken train {METHOD}`"
            )
        described, draft = read_stored(folder, METHOD, "stop head")
        return build_net(folder, StopHead, StopHeadConfig, described, "stop head").eval(), draft


def build_controller(spec: str) -> Controller:
    """The controller of a spec string."""
    built: Controller = make("controller", spec, ControllerContext())
    return built
