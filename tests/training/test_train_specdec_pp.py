"""``foretoken train specdec_pp``: from two models and text to a head that loads, and what can go wrong."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import foretoken as ft
from foretoken.cli.main import main
from foretoken.cli.train_specdec_pp import load_pair
from foretoken.loading import load_model
from foretoken.models import wrap
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.training.config import LmConfig, TrainConfig
from foretoken.training.lm import train_lm
from foretoken.training.loop import Progress
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.specdec_pp import SpecdecPpRecipe
from foretoken.training.trainer import Trainer

SMALL = {"heads": 2, "kv_heads": 1, "ffn": 48, "context": 64, "vocab": 300, "batch_size": 2, "lr": 1e-2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that is easy to guess but for one token in ten."""
    folder = tmp_path_factory.mktemp("data")
    line = "one two three four five {} six seven eight nine ten\n"
    rows = [{"text": line.format(i * i % 7) * 6 + f"line {i}"} for i in range(150)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def pair(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that knows that text, and a draft model of the same tokenizer that knows half of it."""
    out = tmp_path_factory.mktemp("pair")
    train_lm([data], out / "target", LmConfig(hidden=32, layers=2, steps=60, **SMALL))  # type: ignore[arg-type]
    small = LmConfig(hidden=16, layers=1, steps=40, **SMALL)  # type: ignore[arg-type]
    train_lm([data], out / "draft", small, tokenizer_from=out / "target")
    return out / "target", out / "draft"


def trainer(
    pair: tuple[Path, Path], data: Path, out: Path, steps: int = 6, mix: float = 0.3, dtype: str = "", **run: object
) -> Trainer:
    judge, draft, tokenizer = load_pair(str(pair[0]), str(pair[1]))
    if dtype:
        judge = load_model(str(pair[0]), dtype=dtype)
    recipe = SpecdecPpRecipe(judge, draft, {"mix": str(mix)}, 3)
    run = {"batch_size": 2, "context": 48, "seed": 3, "lr": 5e-3, **run}
    return Trainer(recipe, [data], out, TrainConfig(steps=steps, **run), tokenizer)  # type: ignore[arg-type]


def command(pair: tuple[Path, Path], data: Path, out: Path) -> list[str]:
    return ["train", "specdec_pp", "--target", str(pair[0]), "--draft", str(pair[1]), "--data", str(data),
            "--out", str(out)]  # fmt: skip


def test_from_two_models_to_a_controller(
    pair: tuple[Path, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    more = ["--steps", "4", "--batch-size", "2", "--context", "48", "--eval-every", "2", "--set", "blocks=2", "--json"]
    assert main([*command(pair, data, out), *more]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["method"] == "specdec_pp" and report["net"]["blocks"] == 2
    assert report["acceptance"]["without"]["sampled"]["mean_acceptance_length"] >= 1 and "with the head" in captured.err
    names = {"losses.csv", "losses.png", "README.md", "training.json", "drafter.json", "model.safetensors"}
    assert {p.name for p in out.iterdir()} >= names
    card = (out / "README.md").read_text()
    assert (
        "--draft draft" in card
        and "blocks=2" in card
        and "constant loss" in card
        and "accepted |" in card
        and str(tmp_path) not in card
    )
    llm = ft.load(str(pair[0]), f"model:{pair[1]},k=6", controller=f"specdec_pp:{out}", dtype="float32")
    spec, plain = (side.generate("one two three", max_new_tokens=24) for side in (llm, llm.plain))
    assert spec.token_ids == plain.token_ids and spec.stats.num_draft_tokens > 0
    with pytest.raises(ValueError, match="another draft model"):
        ft.load(str(pair[0]), f"model:{pair[0]}", controller=f"specdec_pp:{out}")


def test_the_loss_reads_the_states_that_drafting_reads(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    """The loss runs under bfloat16 autocast; the float32 draft model and target do not."""
    run = trainer(pair, data, tmp_path / "x", dtype="float32")
    recipe, tokens = run.recipe, run.held_tokens[0]
    assert isinstance(recipe, SpecdecPpRecipe)
    batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], ("last",)), recipe.parts)
    ids: list[torch.Tensor] = []
    plain = recipe.parts.features
    recipe.parts.features = lambda tokens, taps: ids.append(tokens) or plain(tokens, taps)  # type: ignore
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, _ = recipe.samples(batch, torch.Generator().manual_seed(5), 0.4)
    own = plain(ids[0], ("last",))["last"]
    places = (torch.rand(1, tokens.shape[1] - 2, generator=torch.Generator().manual_seed(5)) < 0.4)[0].nonzero()[:, 0]
    assert torch.equal(states, own[0, places + 1])


def test_the_labels_are_the_chances_of_the_guesses(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    """min(1, p/q) of the mixed text, from whole distributions in float32; unmixed places are not learnt from.

    The target is loaded in float32: the states of a bfloat16 one change with the length of the text by up to some
    hundredths of p, how much depends on the CPU.
    """
    run = trainer(pair, data, tmp_path / "x", dtype="float32")
    recipe = run.recipe
    assert isinstance(recipe, SpecdecPpRecipe)
    tokens = run.held_tokens[0]
    batch = Batch(tokens, recipe.parts.features(tokens[:, :-1], ("last",)), recipe.parts)
    states, chances = recipe.samples(batch, torch.Generator().manual_seed(5), 0.4)
    chosen = torch.rand(1, tokens.shape[1] - 2, generator=torch.Generator().manual_seed(5)) < 0.4
    places = chosen[0].nonzero()[:, 0] + 1
    assert len(states) == len(chances) == len(places) > 10
    assert float(chances.min()) < 0.9 and float(chances.max()) <= 1
    # Find the mixed text again from the states: behind each place is accepted the token that gives exactly this state.
    mixed = tokens[0, :-1].clone()
    for i, place in enumerate(places.tolist()):
        tried = mixed[None, : place + 1].repeat(recipe.width, 1)
        tried[:, place] = torch.arange(recipe.width)
        far = (recipe.parts.features(tried, ("last",))["last"][:, -1] - states[i]).abs().amax(-1)
        assert float(far.min()) < 1e-4
        mixed[place] = far.argmin()
        distributions = [
            torch.softmax(parts.logits(parts.features(mixed[None, :place], ("last",))["last"][0, -1]).float(), -1)
            for parts in (recipe.judge_parts, TargetParts(recipe.target))
        ]
        p, q = (float(distribution[mixed[place]]) for distribution in distributions)
        assert float(chances[i]) == pytest.approx(min(1.0, p / q), rel=1e-3)


def test_training_lowers_the_loss(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    losses: list[float] = []
    report = trainer(pair, data, tmp_path / "x", steps=60).run(on_step=lambda step: losses.append(step.loss))
    measured = json.loads((tmp_path / "x/drafter.json").read_text())["measured"]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert report["acceptance"] == {} and measured["guesses"] > 50 and len(measured["calibration"]) == 5


def plain_network(shunned: int, told_apart: bool = True) -> LanguageModel:
    """A network whose distribution is the same everywhere, with odds e^-3 for its first tokens.

    The state behind a token says which one it is, unless they are not ``told_apart``.
    """
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=64, tie_word_embeddings=False)  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).sign()
    rows[:, 0] = 1  # what the odds are read from
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(rows if told_apart else torch.ones_like(rows))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:shunned, 0] = -3
    return wrap(model, lean=False)


@pytest.mark.parametrize("seed", range(3))
def test_a_trained_head_beats_the_best_constant(seed: int) -> None:
    """Half of what the draft model guesses, the target shuns: the state says which half; 8 seeds gave 0.17-0.23."""
    recipe = SpecdecPpRecipe(plain_network(16), plain_network(0), {}, seed)
    _, chances = recipe.samples(text_of(recipe, 0), torch.Generator().manual_seed(0))
    odds = math.exp(-3)
    expected = odds * 32 / (16 + 16 * odds)  # p/q of a shunned token, 0.095; the others are accepted
    assert sorted(set(chances.round(decimals=3).tolist())) == pytest.approx([expected, 1.0], abs=1e-3)
    assert against_constant(recipe, seed) < 0.5


def test_a_head_that_cannot_tell_tokens_apart_is_a_constant() -> None:
    recipe = SpecdecPpRecipe(plain_network(16), plain_network(0, told_apart=False), {}, 0)
    assert against_constant(recipe, 0) > 0.98


def text_of(recipe: SpecdecPpRecipe, seed: int) -> Batch:
    tokens = torch.randint(32, (4, 49), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens, recipe.parts.features(tokens[:, :-1], ("last",)), recipe.parts)


def against_constant(recipe: SpecdecPpRecipe, seed: int) -> float:
    """Held-out loss of a head after 100 steps, in parts of the best constant's."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(recipe.net.parameters(), lr=5e-3)
    for step in range(100):
        recipe.loss(text_of(recipe, 1000 * seed + step), generator).backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = recipe.measure([text_of(recipe, 10**6 + i) for i in range(2)])
    return float(measured["loss"] / measured["constant_loss"])


def test_a_killed_run_resumes_to_the_same_bits(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    def kill(progress: Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    trainer(pair, data, whole).run(save_every=2)
    with pytest.raises(KeyboardInterrupt):
        trainer(pair, data, cut).run(save_every=2, on_step=kill)
    assert not (cut / "model.safetensors").exists()
    trainer(pair, data, cut).run(save_every=2)
    first, second = (load_file(side / "model.safetensors") for side in (whole, cut))
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
    assert (whole / "losses.csv").read_text() == (cut / "losses.csv").read_text()
    with pytest.raises(ValueError, match="other settings"):
        trainer((pair[0], pair[0]), data, cut).run()  # another draft model


def test_a_run_goes_on_with_its_own_target_only(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    """Another target of the same embedding, as a low-rank update of the layers makes one, is another run's."""
    tuned = Path(shutil.copytree(pair[0], tmp_path / "tuned"))
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] += 0.5
    save_file(weights, tuned / "model.safetensors", metadata={"format": "pt"})
    trainer(pair, data, tmp_path / "head", steps=2).run()
    with pytest.raises(ValueError, match="other settings"):
        trainer((tuned, pair[1]), data, tmp_path / "head", steps=4).run()
    trainer(pair, data, tmp_path / "head", steps=4).run()
    learned = {name: TargetParts(load_pair(str(name), str(pair[1]))[0]).fingerprint() for name in (pair[0], tuned)}
    assert learned[pair[0]].weights == learned[tuned].weights
    config = json.loads((tmp_path / "head/drafter.json").read_text())["config"]
    assert config["judge_layers"] == learned[pair[0]].layers != learned[tuned].layers


def test_text_is_written_by_the_target(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    written: list[int] = []
    judge, draft, tokenizer = load_pair(str(pair[0]), str(pair[1]))
    recipe = SpecdecPpRecipe(judge, draft, {}, 3)
    config = TrainConfig(steps=2, batch_size=2, context=48, text="target", written_blocks=4)
    run = Trainer(
        recipe, [data], tmp_path / "x", config, tokenizer, on_written=lambda done, count: written.append(done)
    )
    assert recipe.writer is judge and written[-1] == 4
    run.run()


def test_bad_input(pair: tuple[Path, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    base = [*command(pair, data, tmp_path / "out"), "--context", "48"]
    for more, words in (
        (["--data", str(tmp_path / "empty"), "--data", str(tmp_path / "none")], "no such file"),
        (["--set", "layers=2"], "valid ones: blocks, mix, mismatch"),
        (["--set", "mix=2"], "a share mix in"),
        (["--set", "mix=half"], "of type float"),
        (["--context", "100"], "longer than the models' 64"),
        (["--draft", str(tmp_path / "none")], "not a folder"),
        (["--draft", "builtin"], "do not share a tokenizer"),
        (["--text", "mine"], "text must be one of"),
    ):
        assert main([*base, *more]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("error:") == 1, error
    assert not (tmp_path / "out/model.safetensors").exists()


def test_nothing_held_out_is_no_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four five\n" * 200)
    more = ["--steps", "2", "--batch-size", "2", "--context", "48"]
    assert main([*command(pair, tmp_path / "a.txt", tmp_path / "x"), *more]) == 0
    assert "No document was held out" in (tmp_path / "x/README.md").read_text()
