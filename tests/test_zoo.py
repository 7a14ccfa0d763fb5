"""The built-in models: complete, small, safe to load, and better the bigger."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import foretoken as ft
from foretoken.loading import ZOO, build_drafter, check_folder, load_model, load_tokenizer
from foretoken.loading.controllers import build_controller
from foretoken.loading.drafters import drafter_folder, has_drafter
from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.eight_bits import SCALES
from foretoken.methods.drafters.nets.store import load_weights
from foretoken.models.base import Feed
from foretoken.registry import rows

TRAINED = [row.name for row in rows("drafter") if row.needs_training]
CODE = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push("
PROSE = "It was a cold evening in November, and the old house "


def test_zoo_is_small_and_holds_no_pickles() -> None:
    files = [p for p in ZOO.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files if p.suffix == ".safetensors") < 90_000_000
    assert sum(p.stat().st_size for p in files if p.suffix != ".safetensors") < 5_000_000
    assert not [p for p in files if p.suffix in (".bin", ".pt", ".pth", ".pkl")]
    for name in ("target", "draft", "hybrid"):
        check_folder(ZOO / name)
    assert (ZOO / "hybrid/model.safetensors").stat().st_size < 8_000_000


def test_cards_say_what_is_stored_in_8_bits() -> None:
    small = []
    for file in ZOO.rglob("model.safetensors"):
        with safe_open(file, "pt") as stored:
            names = list(stored.keys())
        if any(name.endswith(SCALES) for name in names):
            small.append(file.parent)
    assert len(small) == 7
    for folder in small:
        assert "Weights are stored in 8 bits" in (folder / "README.md").read_text(encoding="utf-8"), folder


def test_cards_state_data_tokens_loss_and_command() -> None:
    for name in ("target", "draft", "hybrid"):
        card = (ZOO / name / "README.md").read_text()
        for word in ("tokens seen", "held-out loss per token", "held-out loss per byte", "foretoken train lm", "Data"):
            assert word in card, (name, word)


def test_target_is_clearly_better_than_its_draft() -> None:
    def report(folder: Path) -> dict[str, float]:
        return json.loads((folder / "training.json").read_text())  # type: ignore[no-any-return]

    target, draft = report(ZOO / "target"), report(ZOO / "draft")
    for key in ("held_loss_nats_per_token", "held_bits_per_byte"):
        assert target[key] < 0.95 * draft[key]


def test_built_in_pair_speculates_and_keeps_the_output() -> None:
    llm = ft.load(dtype="float32", controller="constant")  # the default one may decode plainly on a busy machine
    for prompt in (CODE, PROSE):
        out = llm.generate(prompt, max_new_tokens=48)
        assert out.token_ids == llm.plain.generate(prompt, max_new_tokens=48).token_ids
        assert out.stats.mean_acceptance_length > 1.2


def test_loading_what_is_trained_draws_no_random_numbers() -> None:
    """A seed that was set before it gives the numbers that it gives without it."""
    target = load_model("builtin", dtype="float32")
    loaded = {name: partial(build_drafter, name, target) for name in TRAINED if has_drafter(name, "builtin")}
    loaded["specdec_pp"] = partial(build_controller, "specdec_pp")
    assert len(loaded) > 10
    state = torch.get_rng_state()
    for name, load in loaded.items():
        load()
        assert torch.equal(torch.get_rng_state(), state), name


@pytest.mark.parametrize(
    ("method", "made_of", "network"), [("eagle3", Eagle3Config, Eagle3Net), ("dflash2", Dflash2Config, Dflash2Net)]
)
def test_the_drafters_for_smollm2_come_with_their_cards(
    method: str, made_of: type[Any], network: type[nn.Module]
) -> None:
    assert has_drafter(method, "smollm2") and not has_drafter("medusa", "smollm2")
    folder = drafter_folder(method, "smollm2", "smollm2.gguf")
    card, description = (folder / "README.md").read_text(), json.loads((folder / "drafter.json").read_text())
    for word in ("apache-2.0", f"foretoken train {method}", "Held-out acceptance", "## Data", "## Speed"):
        assert word in card, word
    assert (description["target"]["hidden_size"], description["target"]["num_layers"]) == (576, 30)
    load_weights(folder, network(made_of(**description["config"])))


def test_the_draft_model_for_smollm2_writes_frequent_words_as_its_target_does() -> None:
    """A vocabulary of its own, of tokens that SmolLM2 has, too; what is not among them is spelled by smaller ones."""
    folder = ZOO / "smollm2" / "draft"
    card = (folder / "README.md").read_text()
    for word in ("apache-2.0", "foretoken train lm", "shared_vocab", "## Data", "## Acceptance"):
        assert word in card, word
    check_folder(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None and len(tokenizer) == 8192
    for text in ("The capital of France is Paris.", "def add(a, b):\n    return a + b\n", "quixotic zeugmas ⊕"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("The capital of France is")) == 5
    draft = load_model(folder, role="draft", dtype="float32")
    turn = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(f"{turn}Hello! How can I help you today?")
    rows = draft.forward([Feed(draft.open(), ids)])[0]
    begin = len(tokenizer.encode(turn))
    surprise = torch.nn.functional.cross_entropy(rows.logits[begin - 1 : -1].float(), torch.tensor(ids[begin:]))
    assert draft.vocab_size == 8192 and float(surprise) < 4  # 9.0 if it knew nothing


@pytest.mark.parametrize("name", TRAINED)
def test_trained_drafters_state_their_acceptance_and_how_they_were_made(name: str) -> None:
    card, report = (ZOO / name / "README.md").read_text(), json.loads((ZOO / name / "training.json").read_text())
    for word in (f"foretoken train {name}", "Held-out acceptance", "position 1", "T=1", "tokens seen", "Data"):
        assert word in card, word
    assert report["method"] == name and report["acceptance"]["mean_acceptance_length"] > 1
    assert report["corpus"]["held"]["documents"] > 0


@pytest.mark.parametrize("name", TRAINED)
def test_trained_drafters_guess_for_the_built_in_target(name: str) -> None:
    llm = ft.load(dtype="float32", drafter=name, controller="constant")  # the default one may decode plainly
    drafted = accepted = 0
    for prompt in (CODE, PROSE):
        out = llm.generate(prompt, max_new_tokens=40)
        assert out.token_ids == llm.plain.generate(prompt, max_new_tokens=40).token_ids
        drafted, accepted = drafted + out.stats.num_draft_tokens, accepted + out.stats.num_accepted_tokens
    assert drafted > 0 and accepted > 2


def test_the_target_that_was_trained_for_early_exits() -> None:
    """Its exits guess better than those of the built-in target, whose draft model still fits it."""
    accepted = {}
    for source in ("builtin", "builtin:early_exit"):
        llm = ft.load(source, dtype="float32", drafter="early_exit,layer=2,k=4", controller="constant")
        outputs = [llm.generate(prompt, max_new_tokens=40) for prompt in (CODE, PROSE)]
        assert [out.token_ids for out in outputs] == [
            llm.plain.generate(prompt, max_new_tokens=40).token_ids for prompt in (CODE, PROSE)
        ]
        accepted[source] = sum(out.stats.num_accepted_tokens for out in outputs)
    assert accepted["builtin:early_exit"] > accepted["builtin"]
    with_draft = ft.load("builtin:early_exit", dtype="float32", drafter="model,k=4", controller="constant")
    out = with_draft.generate(CODE, max_new_tokens=40)
    assert out.token_ids == with_draft.plain.generate(CODE, max_new_tokens=40).token_ids
    assert out.stats.num_accepted_tokens > 0


def test_its_card_states_how_it_was_made() -> None:
    card, report = ((ZOO / "early_exit" / name).read_text() for name in ("README.md", "training.json"))
    for word in (
        "foretoken train early_exit",
        "rank=32",
        "builtin:early_exit",
        "before",
        "after",
        "position 1",
        "Data",
    ):
        assert word in card, word
    assert json.loads(report)["target_loss_nats"]["after"] < 1.1 * json.loads(report)["target_loss_nats"]["before"]


@pytest.mark.parametrize("name", TRAINED)
def test_trained_drafters_are_refused_by_the_updated_target(name: str) -> None:
    with pytest.raises(ValueError, match="another target: the shapes agree, but the weights differ"):
        build_drafter(f"{name}:{ZOO / name}", load_model("builtin:early_exit"))


def test_the_hybrid_drafts_with_the_head_in_its_own_checkpoint() -> None:
    """Text as of plain decoding; the tokenizer is the built-in target's."""
    llm = ft.load("builtin:hybrid", dtype="float32", drafter="mtp", controller="constant")
    drafts = accepted = 0
    for prompt in (CODE, PROSE):
        out = llm.generate(prompt, max_new_tokens=40)
        assert out.token_ids == llm.plain.generate(prompt, max_new_tokens=40).token_ids
        drafts, accepted = drafts + out.stats.num_drafts, accepted + out.stats.num_accepted_tokens
    assert accepted > 0.2 * drafts
    with pytest.raises(ValueError, match="linear_attention"):
        ft.load("builtin:hybrid", dtype="float32", drafter="mtp,width=2")


def test_the_hybrid_is_clearly_better_than_its_untrained_start() -> None:
    report = json.loads((ZOO / "hybrid/training.json").read_text())
    assert report["held_loss_nats_per_token"] < report["held_loss_nats_per_token_untrained"] - 0.05


def test_an_unknown_built_in_target() -> None:
    with pytest.raises(
        ValueError, match="unknown built-in model 'builtin:hydra': choose one of builtin, builtin:early"
    ):
        ft.load("builtin:hydra")
