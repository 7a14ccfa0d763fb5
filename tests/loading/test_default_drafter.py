"""``drafter="auto"`` chooses among the drafters that a target has for free, as the drafters themselves say."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretoken as ft
import foretoken.registry as registry
from foretoken.core import Budget, Context, TokenTree
from foretoken.loading import (
    DEFAULT_GROUP,
    LoadingContext,
    build_drafter,
    default_drafter,
    default_members,
    free_drafters,
    load_model,
)
from foretoken.methods.drafters.base import BuildContext, Drafter, Traits
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.models import wrap
from foretoken.models.base import LanguageModel
from foretoken.models.other.table import TableModel
from foretoken.registry import Row, rows
from native_checkpoints import save_family
from toys import llama


def has_head(context: BuildContext) -> bool:
    OwnHead.calls.append((context.target, context.source))
    return str(context.source).endswith("with_head")


class OwnHead(Drafter):
    """Stands for a head inside a target's checkpoint: there for some sources only."""

    name = "own_head"
    traits = Traits(free_for=has_head)
    calls: ClassVar[list[Any]] = []

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        return TokenTree.chain(context.root, context.tokens[-2:][: budget.max_depth])


@pytest.fixture(autouse=True)
def own_head(monkeypatch: pytest.MonkeyPatch) -> type[OwnHead]:
    """A registry row, behind all others, that nothing else knows."""
    module = ModuleType("foretoken.methods.drafters.own_head")
    module.OwnHead = OwnHead  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = Row("own_head", "drafter", "methods.drafters.own_head:OwnHead", "", "A head.", kind="point", needs="a head")
    monkeypatch.setattr(registry, "ROWS", (*registry.ROWS, row))
    registry._find.cache_clear()
    monkeypatch.setattr(OwnHead, "calls", [])
    return OwnHead


@pytest.fixture
def target() -> LanguageModel:
    return wrap(llama(dtype=torch.float32))


def test_nothing_is_free_unless_its_class_says_so(target: LanguageModel) -> None:
    assert free_drafters(target, "somewhere") == ["ngram"]
    context, by_name = (
        LoadingContext(target, "somewhere"),
        {row.name: row.load().traits.free_for for row in rows("drafter")},
    )
    assert [name for name, free_for in by_name.items() if free_for is not None and free_for(context)] == ["ngram"]


def test_the_default_is_a_group_of_what_is_free_networks_first(target: LanguageModel) -> None:
    assert default_drafter(target, "somewhere") == "ngram"
    assert default_drafter(target, "model_with_head") == "router,drafters=(own_head|ngram)"
    assert OwnHead.calls == [(target, "somewhere"), (target, "model_with_head")]


def test_the_order_does_not_hang_on_the_words_of_the_catalogue(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reworded = [replace(row, needs="repeated text" if row.name == "ngram" else "") for row in rows()]
    monkeypatch.setattr(registry, "ROWS", tuple(sorted(reworded, key=lambda row: row.name != "ngram")))
    assert default_drafter(target, "model_with_head") == "router,drafters=(own_head|ngram)"


def test_the_builtin_target_keeps_its_group() -> None:
    plain = TableModel.random(4, seed=0)
    assert default_drafter(plain, "builtin") == DEFAULT_GROUP == default_drafter(plain, "builtin:early_exit")
    assert OwnHead.calls == []


def test_what_cannot_be_rolled_back_is_decoded_plainly(target: LanguageModel, monkeypatch: Any) -> None:
    class Recurrent:
        capabilities = type("C", (), {"rollback": False})

    assert default_drafter(Recurrent(), "model_with_head") is None  # type: ignore[arg-type]


def test_nothing_free_is_plain_decoding(target: LanguageModel, monkeypatch: Any) -> None:
    monkeypatch.setattr(registry, "ROWS", tuple(row for row in rows() if row.name != "ngram"))
    assert default_drafter(target, "somewhere") is None


def test_the_default_group_can_be_built_and_is_served_by_auto(target: LanguageModel) -> None:
    built = build_drafter(default_drafter(target, "model_with_head"), target, target_source="model_with_head")
    assert isinstance(built, RouterDrafter) and [drafter.name for drafter in built.drafters] == ["own_head", "ngram"]
    llm = ft.load(target, built)
    assert type(llm.engine.controller).__name__ == "AutoController"
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1]
    options = {"max_new_tokens": 24, "ignore_eos": True}
    assert llm.generate(prompt, **options).token_ids == llm.plain.generate(prompt, **options).token_ids


def test_what_copies_text_costs_a_controller_nothing_alone_as_in_a_group(target: LanguageModel) -> None:
    alone = build_drafter("ngram", target)
    group = build_drafter("router,drafters=(ngram)", target)
    assert alone is not None and group is not None
    assert alone.limits.relative_cost == 0 and group.limits.members == (alone.limits,)


def test_groups_without_members_take_what_is_free(target: LanguageModel) -> None:
    assert default_members(target, "somewhere") == ["ngram", "suffix,share=false"]
    assert default_members(target, "model_with_head") == ["own_head", "ngram", "suffix,share=false"]
    assert default_members(target, "builtin") == ["model", "ngram", "suffix,share=false"]


def test_a_head_in_the_checkpoint_is_free_if_it_can_be_run(tmp_path: Path) -> None:
    save_family(tmp_path, "glm4_moe")
    target = load_model(tmp_path, dtype="float32")
    assert default_drafter(target, str(tmp_path)) == "router,drafters=(mtp|ngram)"
    assert default_drafter(target, target.model) == "ngram"  # type: ignore[attr-defined]  # handed in
    llm = ft.load(tmp_path, dtype="float32")
    more = {"max_new_tokens": 12, "ignore_eos": True}
    assert llm.generate([3, 1, 4, 1, 5], **more).token_ids == llm.plain.generate([3, 1, 4, 1, 5], **more).token_ids


def test_a_head_that_lost_tensors_does_not_keep_a_target_from_loading(tmp_path: Path) -> None:
    save_family(tmp_path, "glm4_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if "eh_proj" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})
    llm = ft.load(tmp_path, dtype="float32")
    assert llm.drafter is not None and llm.drafter.spec == "ngram"


def test_load_asks_for_the_target_and_its_source_and_a_profile_wins(tmp_path: Any) -> None:
    model = llama(dtype=torch.float32)
    llm = ft.load(model)
    assert llm.drafter is not None and llm.drafter.spec == "ngram"
    assert [(type(target).__name__, source) for target, source in OwnHead.calls] == [("HuggingFaceModel", model)]
    profile = tmp_path / "profile.json"
    profile.write_text('{"drafter": "ngram,k=3"}', encoding="utf-8")
    llm = ft.load(model, profile=profile)
    assert llm.drafter is not None and llm.drafter.spec == "ngram,k=3"


def test_a_target_with_a_head_in_its_checkpoint_drafts_with_it() -> None:
    hybrid = load_model("builtin:hybrid", dtype="float32")
    assert free_drafters(hybrid, "builtin:hybrid") == ["mtp", "ngram"]
    assert default_drafter(hybrid, "builtin:hybrid") == "router,drafters=(mtp|ngram)"
    assert ft.load("builtin:hybrid", dtype="float32").generate([1, 2, 3], max_new_tokens=8).token_ids
