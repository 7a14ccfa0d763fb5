"""A drafter in another project's layout that is used before it is imported: the message says how to import it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_nets import save_net

import foretoken as ft
from foretoken.core.io.drafter_folders import IMPORTED
from foretoken.registry import find
from foretoken.training.formats import export_drafter, import_drafter
from foretoken.training.formats.catalogue import LAYOUTS

TRAINED = [(layout.method, layout.name) for layout in LAYOUTS if find("drafter", layout.method).needs_training]


def test_what_can_be_imported_is_known() -> None:
    assert {method for method, _ in TRAINED} == set(IMPORTED)


@pytest.mark.parametrize(("method", "layout"), [pair for pair in TRAINED if pair[0] != "mtp"])
def test_the_command_is_named_and_works(method: str, layout: str, target: Path, tmp_path: Path) -> None:
    export_drafter(f"{method}:{save_net(method, tmp_path / 'mine', target)}", tmp_path / "theirs", layout, target)
    folder, out = tmp_path / "theirs", tmp_path / "ours"
    with pytest.raises(ValueError, match="is in another project's layout") as caught:
        ft.load(str(target), f"{method}:{folder}")
    message = str(caught.value)
    assert f"`foretoken import MODEL {folder} --out OUT`, and use {method}:OUT" in message and "\n" not in message
    import_drafter(folder, out, str(target))
    assert ft.load(str(target), f"{method}:{out}").generate([3, 4, 5], max_new_tokens=4).token_ids


@pytest.mark.parametrize("method", IMPORTED)
def test_a_folder_that_is_not_there(method: str, target: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"`foretoken train .* or import another project's with `foretoken import"
    ) as e:
        ft.load(str(target), f"{method}:{tmp_path / 'nothing'}")
    assert "\n" not in str(e.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no trained drafter \(drafter.json\)"):
        ft.load(str(target), f"{method}:{tmp_path / 'empty'}")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is in another project's layout"):
        ft.load(str(target), f"{method}:{tmp_path / 'empty'}")
