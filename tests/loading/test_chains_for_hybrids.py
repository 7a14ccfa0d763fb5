"""Drafters of trees on targets whose layers cannot branch: their specs draft chains, and say so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import foretoken as ft
from foretoken.llm import assemble
from foretoken.models import refusals, wrap
from foretoken.models.base import CapabilityError
from foretoken.models.forward.parts import TargetParts
from foretoken.training.recipes import find_recipe
from models.checkpoints import VOCAB, save
from models.hybrids import hybrid
from training.formats.tiny_nets import save_net

TARGETS = ("qwen3_5_text", "lfm2")
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"vocab_size": VOCAB},
    "dspark": {"vocab_size": VOCAB},
    "eagle": {},
    "eagle3": {"layers": "0,1,2", "vocab_size": VOCAB, "draft_vocab": 0},
    "peagle": {"layers": "0,1,2", "vocab_size": VOCAB, "draft_vocab": 0},
    "medusa": {"hidden_size": 48, "vocab_size": VOCAB},
}
PROMPTS = [[5, 9, 2, 7, 5, 9, 2], [3, 1, 4]]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("method", METHODS)
def test_a_spec_without_a_shape_drafts_chains(
    name: str, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is plain decoding's, greedy and with a seed, for requests of different lengths."""
    monkeypatch.setattr(refusals, "_SAID", set())
    target = save(hybrid(name), tmp_path / "target")
    spec = f"{method}:{save_net(method, tmp_path / 'drafter', target, **METHODS[method])}"
    with caplog.at_level(logging.WARNING, "foretoken"):
        plain = ft.load(target, None, dtype="float64")
        drafting = ft.load(target, spec, dtype="float64", controller="constant")
        assert f"{method} drafts chains" in caplog.text and "trees: refused" in caplog.text
        for options in ({}, {"temperature": 1.0, "seed": [3, 4]}):
            expected = [out.token_ids for out in plain.generate(PROMPTS, max_new_tokens=12, **options)]
            outputs = drafting.generate(PROMPTS, max_new_tokens=12, **options)
            assert [out.token_ids for out in outputs] == expected
            assert all(out.stats.num_draft_tokens > 0 for out in outputs)


def test_a_tree_that_was_asked_for_is_refused_with_the_cure(tmp_path: Path) -> None:
    target = save(hybrid("lfm2"), tmp_path / "target")
    folder = save_net("dflash", tmp_path / "drafter", target, vocab_size=VOCAB)
    with pytest.raises(CapabilityError, match=r"needs a target with tree_mask: .*; width=1 drafts chains"):
        ft.load(target, f"dflash:{folder},width=4").generate(PROMPTS[0], max_new_tokens=4)


@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle", "eagle3", "peagle", "medusa", "hydra"])
@pytest.mark.parametrize("name", TARGETS)
def test_training_measures_chains(name: str, method: str) -> None:
    """The drafter that a recipe measures with must run on the target, as the stored one does."""
    target = wrap(hybrid(name, dtype=torch.float32))
    settings = {"layers": "0,1,2"} if method in ("eagle3", "peagle") else {}
    recipe = find_recipe(method)(target, TargetParts(target), settings)
    llm = assemble(target, recipe.drafter({}), "auto", "constant", None)
    plain = assemble(target, None, "auto", "auto", None)
    output = llm.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True)
    assert output.stats.num_draft_tokens > 0
    assert output.token_ids == plain.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True).token_ids


@pytest.mark.parametrize("name, norm", [("lfm2", "embedding_norm"), ("mamba2", "norm_f"), ("qwen3_5_text", "norm")])
def test_the_final_norm_of_hybrids(name: str, norm: str) -> None:
    """Training starts from it, and `jump` reads through it."""
    network = hybrid(name)
    decoder = network.model if hasattr(network, "model") else network.backbone
    assert TargetParts(wrap(network)).final_norm is getattr(decoder, norm)
