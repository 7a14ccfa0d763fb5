"""The methods: one file each, by what they decide.  ``foretoken.methods()`` is their catalogue."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Catalogue(ModuleType):
    """The package can be called, because the public function has the same name."""

    def __call__(self) -> list[dict[str, Any]]:
        from foretoken.registry import methods

        return methods()


sys.modules[__name__].__class__ = _Catalogue
