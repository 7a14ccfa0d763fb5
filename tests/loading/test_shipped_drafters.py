"""Trained drafters that come with the library for named models: found by the model's name, by its weights and by
``NAME:MODEL``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.named_models import NAME, register, wheel

from foretoken.loading import drafters
from foretoken.loading.drafters import drafter_folder, has_drafter
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models import wrap
from foretoken.models.base import CapabilityError
from foretoken.models.forward.parts import TargetParts
from toys import llama, llamas


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo with ``eagle3`` for the named model and ``medusa`` for the built-in one."""
    register(monkeypatch, tmp_path / "cache", wheel(tmp_path / "wheels", b"GGUF"), b"GGUF")
    (tmp_path / "zoo" / NAME / "eagle3").mkdir(parents=True)
    (tmp_path / "zoo" / "medusa").mkdir()
    monkeypatch.setattr(drafters, "ZOO", tmp_path / "zoo")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "zoo"


def test_each_target_has_its_own(zoo: Path) -> None:
    assert drafter_folder("eagle3", None, NAME) == zoo / NAME / "eagle3"
    assert drafter_folder("medusa", None, "builtin") == zoo / "medusa"
    assert has_drafter("eagle3", NAME) and has_drafter("medusa", "builtin")
    for name, source in (("medusa", NAME), ("eagle3", "builtin"), ("eagle3", "other/model"), ("eagle3", None)):
        assert not has_drafter(name, source)
        with pytest.raises(ValueError, match=f"drafter '{name}' needs a folder for this target") as error:
            drafter_folder(name, None, source)
        ours = f"; {name}:{NAME} comes with the library for a tiny model"
        assert str(error.value).endswith(ours) == (name == "eagle3")


def test_a_models_name_stands_for_its_drafter(zoo: Path) -> None:
    """The model's file may have any name; a folder that exists comes first."""
    assert drafter_folder("eagle3", NAME, "some/where.gguf") == zoo / NAME / "eagle3"
    with pytest.raises(ValueError, match=f"^{NAME} is not a folder with a trained drafter"):
        drafter_folder("medusa", NAME, "some/where.gguf")
    Path(NAME).mkdir()
    assert drafter_folder("eagle3", NAME, "some/where.gguf") == Path(NAME)


def test_the_same_weights_in_another_folder_have_it_too(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And others do not, whatever their folder is called; of another shape no weight is read."""
    trained, other = wrap(llama(seed=1)), wrap(llama(seed=2))
    save_drafter(zoo / NAME / "eagle3", "eagle3", {}, torch.nn.Linear(2, 2), TargetParts(trained).fingerprint())
    (zoo / NAME / "draft").mkdir()
    Path(NAME).mkdir()
    for source in ("my-model", NAME, trained):
        context = drafters.LoadingContext(trained, source)
        assert context.has_trained("eagle3") and context.folder("eagle3", None) == zoo / NAME / "eagle3"
        assert not context.has_trained("medusa")
        assert drafters._shipped("draft", source, trained) == zoo / NAME / "draft"
        context = drafters.LoadingContext(other, source)
        assert not context.has_trained("eagle3")
        with pytest.raises(ValueError, match="drafter 'eagle3' needs a folder for this target"):
            context.folder("eagle3", None)
    monkeypatch.setattr(TargetParts, "fingerprint", lambda self: pytest.fail("weights were read"))
    wider = wrap(llama(64, seed=1))
    assert not drafters.LoadingContext(wider, "my-model").has_trained("eagle3")


@pytest.mark.parametrize("drafter", ["shared_vocab", "retokenize"])
def test_a_draft_model_with_a_vocabulary_of_its_own(drafter: str, zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found without a path for the named model; a path, or another target, comes before it or has none."""
    paths: list[str | None] = []

    def built(name: str, path: str | None, *rest: object) -> None:
        paths.append(path)
        raise CapabilityError("looked up")

    monkeypatch.setattr(drafters, "build_foreign_draft_model", built)
    (zoo / NAME / "draft").mkdir()
    for source, path in ((NAME, None), (NAME, "other"), ("builtin", None), ("other/model", None)):
        with pytest.raises(CapabilityError, match="looked up"):
            drafters.LoadingContext(llamas()[0], source).foreign_draft_model(drafter, path)
    assert paths == [str(zoo / NAME / "draft"), "other", None, None]
