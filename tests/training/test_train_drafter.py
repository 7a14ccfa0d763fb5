"""``foretoken train METHOD``: from text to a drafter that loads, for every recipe, and what can go wrong."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import foretoken as ft
from foretoken.cli.main import main
from foretoken.cli.train_drafter import _loaded, needs
from foretoken.loading import build_drafter, load_model
from foretoken.models.base import CapabilityError
from foretoken.models.forward.parts import TargetParts
from foretoken.registry import rows
from foretoken.training.config import LmConfig, TrainConfig
from foretoken.training.corpus import build_corpus
from foretoken.training.joint import as_served, load_trainable
from foretoken.training.lm import build_model, train_lm
from foretoken.training.loop import Progress
from foretoken.training.recipes import RECIPES, find_recipe
from foretoken.training.trainer import Trainer

TARGET = LmConfig(
    hidden=32, layers=4, heads=2, kv_heads=1, ffn=48, context=64, vocab=300, batch_size=2, steps=80, lr=1e-2
)
TRAINS_TARGET = {"early_exit", "jacobi"}
RUN = {"batch_size": 2, "context": 48, "seed": 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Regular text: what comes next is easy to guess."""
    folder = tmp_path_factory.mktemp("data")
    rows_ = [{"text": f"one two three four five {i % 7} six seven eight nine ten\n" * 6} for i in range(150)]
    (folder / "a.jsonl").write_text(
        "\n".join(json.dumps(row | {"text": row["text"] + f"line {i}"}) for i, row in enumerate(rows_))
    )
    return folder


@pytest.fixture(scope="module")
def target(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small target that knows that text."""
    out = tmp_path_factory.mktemp("target") / "target"
    train_lm([data], out, TARGET)
    return out


def new_trainer(method: str, target: Path, data: Path, out: Path, steps: int = 6, **run: Any) -> Trainer:
    settings, features = run.pop("settings", {}), run.pop("features", None)
    tokenizer = AutoTokenizer.from_pretrained(run.pop("tokenizer", target))
    kind = find_recipe(method)
    model = load_model(target, dtype=run.pop("dtype", None))
    recipe = kind(model, TargetParts(model), settings, RUN["seed"])
    if recipe.trains_target:
        model = load_trainable(target, None)
        recipe = kind(model, TargetParts(model), settings, RUN["seed"])
    config = TrainConfig(**{"lr": kind.lr, "steps": steps, **RUN, **run})
    return Trainer(recipe, [data], out, config, tokenizer, features=features)


def weights(out: Path) -> dict[str, torch.Tensor]:
    files = [file for file in (out / "model.safetensors", out / "target/model.safetensors") if file.exists()]
    tensors: dict[str, torch.Tensor] = {
        f"{file.parent.name}:{k}": v for file in files for k, v in load_file(file).items()
    }
    return tensors


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    left, right = ({k.partition(":")[2]: v for k, v in side.items()} for side in (first, second))
    return bool(left) and left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_every_trained_row_has_a_recipe() -> None:
    trained = {row.name for row in rows("drafter") if row.needs_training or row.improves_by_training}
    assert trained == set(RECIPES)


@pytest.mark.parametrize("method", RECIPES)
def test_from_text_to_a_drafter(
    method: str, data: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    command = ["train", method, "--target", str(target), "--data", str(data), "--out", str(out), "--steps", "4"]
    assert main([*command, "--batch-size", "2", "--context", "48", "--eval-every", "2", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert report["method"] == method and report["acceptance"]["mean_acceptance_length"] >= 1
    assert "held-out text" in captured.err
    assert ("calibration error" in captured.err) == (method == "dspark") == ("confidence_temperatures" in report)
    result = {"target"} if method in TRAINS_TARGET else {"drafter.json", "model.safetensors"}
    assert {p.name for p in out.iterdir()} >= {"losses.csv", "losses.png", "README.md", "training.json"} | result
    card = (out / "README.md").read_text()
    assert f"foretoken train {method}" in card and "position 1" in card and str(tmp_path) not in card
    stated = dict(word.split("=") for word in card.split("```")[1].split() if "=" in word)
    model = load_model(target)
    assert vars(find_recipe(method)(model, TargetParts(model), stated).config) == report["net"]  # the command works
    served = out / "target" if method in TRAINS_TARGET else target
    head = report["drafter"].replace("FOLDER", str(out))
    assert head in captured.err.splitlines()[-1]
    llm = ft.load(str(served), drafter=head, controller="constant", dtype="float32")
    if method == "dspark":
        assert llm.drafter.temperatures == report["confidence_temperatures"] != []  # type: ignore[union-attr]
    plain = llm.plain.generate("one two three", max_new_tokens=24)
    spec = llm.generate("one two three", max_new_tokens=24)
    assert spec.token_ids == plain.token_ids and spec.stats.num_draft_tokens > 0


@pytest.mark.parametrize("method", sorted(RECIPES.keys() - TRAINS_TARGET))
def test_training_lowers_the_loss_and_guesses_better(method: str, data: Path, target: Path, tmp_path: Path) -> None:
    losses: list[float] = []
    run = new_trainer(method, target, data, tmp_path / "x", steps=60, lr=1e-2)
    run.run(on_step=lambda p: losses.append(p.loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("method", RECIPES)
def test_a_killed_run_resumes_to_the_same_bits(method: str, data: Path, target: Path, tmp_path: Path) -> None:
    def kill_after(step: int) -> Callable[[Progress], None]:
        def on_step(progress: Progress) -> None:
            if progress.step == step:
                raise KeyboardInterrupt

        return on_step

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    new_trainer(method, target, data, whole).run(save_every=2)
    with pytest.raises(KeyboardInterrupt):
        new_trainer(method, target, data, cut).run(save_every=2, on_step=kill_after(3))
    assert not (cut / "model.safetensors").exists()
    new_trainer(method, target, data, cut).run(save_every=2)
    assert same(weights(whole), weights(cut))
    assert (whole / "losses.csv").read_text() == (cut / "losses.csv").read_text()


def test_a_loss_of_nan_stops_and_the_checkpoint_is_intact(data: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "nan"
    run = new_trainer("medusa", target, data, out)
    loss = run.recipe.loss

    def broken(batch: Any, generator: torch.Generator) -> torch.Tensor:
        value = loss(batch, generator)
        return value * float("nan") if (out / "checkpoints/step-0000004").exists() else value

    run.recipe.loss = broken  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="step 4; the last checkpoint is intact"):
        run.run(save_every=2)
    report = new_trainer("medusa", target, data, out).run(save_every=2)
    whole = new_trainer("medusa", target, data, tmp_path / "whole")
    whole.run(save_every=2)
    assert report["run"]["steps"] == 6 and same(weights(out), weights(tmp_path / "whole"))


def test_other_settings_on_resume(data: Path, target: Path, tmp_path: Path) -> None:
    new_trainer("medusa", target, data, tmp_path / "x", steps=2).run()
    with pytest.raises(ValueError, match="other settings"):
        new_trainer("medusa", target, data, tmp_path / "x", steps=4, seed=9).run()
    new_trainer("medusa", target, data, tmp_path / "x", steps=3).run()


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_other_text_on_resume(method: str, data: Path, target: Path, tmp_path: Path) -> None:
    """EAGLE-3's table of tokens would be that of the new text, with weights of the old one."""
    out, other = tmp_path / "x", tmp_path / "other.jsonl"
    new_trainer(method, target, data, out, steps=2).run()
    before = weights(out)
    lines = (data / "a.jsonl").read_text().splitlines()
    other.write_text("\n".join(lines).replace("two", "owt"))  # as many bytes
    for steps in (2, 4):
        with pytest.raises(ValueError, match="was trained on other text; give the same to resume, or another --out"):
            new_trainer(method, target, other, out, steps=steps).run()
    assert same(weights(out), before)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "b.jsonl").write_text("\n".join(lines))  # the same text elsewhere
    new_trainer(method, target, moved, out, steps=3).run()


def test_a_tokenizer_without_an_end_of_text_token(data: Path, target: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=f"the tokenizer in {target} has no end-of-text token, which separates docum"):
        build_corpus([data], tokenizer, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(("method", "settings"), [("early_exit", {}), ("early_exit", {"rank": "2"}), ("medusa", {})])
def test_what_is_announced_is_what_is_trained(
    method: str, settings: dict[str, str], data: Path, target: Path, tmp_path: Path
) -> None:
    model = load_trainable(target, None) if method in TRAINS_TARGET else load_model(target)
    recipe = find_recipe(method)(model, TargetParts(model), settings, 0)
    config = TrainConfig(steps=1, **RUN)  # type: ignore[arg-type]
    announcement = needs(recipe, config)
    run = Trainer(recipe, [data], tmp_path, config, AutoTokenizer.from_pretrained(target))
    trained = sum(p.numel() for p in run.trained.parameters() if p.requires_grad)
    assert announcement.startswith(f"{method}: {trained:,} parameters to train")
    assert ("an update of rank 2" in announcement) == bool(settings)


def test_a_gguf_target_is_not_trained(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf_writer import write_model

    file = write_model(tmp_path / "toy.gguf", build_model(replace(TARGET, ffn=64), 0), "Q8_0")
    with pytest.raises(ValueError, match=r"toy.gguf is stored as GGUF .* and cannot be trained: give the model it was"):
        load_trainable(file, None)


def test_a_context_that_the_target_does_not_have(data: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--context 65 is longer than the target's 64"):
        new_trainer("medusa", target, data, tmp_path / "x", context=65)


def test_a_run_in_its_data_folder_goes_on(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own card is no text, and its checkpoints are no reason to encode the text again."""
    shutil.copy(data / "a.jsonl", tmp_path)
    command = ["train", "bpd", "--target", str(target), "--data", str(tmp_path), "--out", str(tmp_path / "heads")]
    command += ["--batch-size", "2", "--context", "48", "--steps"]
    assert main([*command, "1"]) == 0
    encoded = (tmp_path / "heads/corpus/train.bin").stat().st_mtime_ns
    assert main([*command, "2"]) == 0, capsys.readouterr().err
    assert (tmp_path / "heads/corpus/train.bin").stat().st_mtime_ns == encoded
    other = [*command, "1", "--out", str(tmp_path / "others")]
    assert main(other) == 0
    texts = [(tmp_path / name / "corpus/train.bin").read_bytes() for name in ("heads", "others")]
    assert texts[0] == texts[1]


def test_a_drafter_of_another_target_is_refused(data: Path, target: Path, tmp_path: Path) -> None:
    new_trainer("medusa", target, data, tmp_path / "x", steps=1).run()
    with pytest.raises(ValueError, match="another target"):
        build_drafter(f"medusa:{tmp_path / 'x'}", load_model("builtin"))


def test_bad_input(data: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").mkdir()
    (tmp_path / "short/a.txt").write_text("a few words")
    base = ["train", "medusa", "--target", str(target), "--out", str(tmp_path / "out"), "--context", "64"]
    for more, words in (
        (["--data", str(tmp_path / "none")], "no such file"),
        (["--data", str(tmp_path / "empty")], "no text found"),
        (["--data", str(tmp_path / "short")], "too short"),
        (["--data", str(data), "--context", "65"], "longer than the target's 64: give a smaller one"),
        (["--data", str(data), "--set", "layer=2"], "valid ones: heads, layers"),
        (["--data", str(data), "--set", "heads=many"], "of type int"),
        (["--data", str(data), "--set", "heads"], "not key=value"),
        (["--data", str(data), "--set", "labels=none"], "labels must be"),
        (["--data", str(data), "--set", "rank=8"], "rank must be 0, or above 0 in a mode that trains the target"),
        (["--data", str(data), "--set", "mode=joint", "--set", "rank=-1"], "rank must be 0, or above 0"),
        (["--data", str(data), "--target", str(tmp_path / "none")], "not a folder"),
    ):
        assert main([*base, *more]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("error:") == 1
    assert not (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize(
    ("method", "setting", "words"),
    [
        ("medusa", "nope=1", "unknown setting 'nope' of 'medusa'"),
        ("medusa", "heads=many", "must be of type int"),
        ("specdec_pp", "nope=1", "unknown setting 'nope' of 'specdec_pp'"),
        ("specdec_pp", "mix=half", "must be of type float"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(
    method: str, setting: str, words: str, data: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--target", str(target), "--data", str(data), "--out", str(tmp_path / "out"), "--set", setting]
    assert main(["train", method, *more]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and words in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", RECIPES)
def test_no_number_of_a_setting_is_negative_or_not_finite(method: str, target: Path) -> None:
    kind, model = find_recipe(method), load_model(target)
    known = {field.name: field.default for field in fields(kind.config_class) if field.name not in kind.fixed}
    numbers = [(key, text) for key, default in known.items() if type(default) is float for text in ("nan", "inf")]
    numbers += [(key, "-3") for key, default in known.items() if type(default) in (int, float)]
    for key, text in numbers:
        with pytest.raises(ValueError, match=key.rpartition("_")[2]):
            kind(model, TargetParts(model), {key: text})


@pytest.mark.parametrize(
    ("method", "key"),
    [
        *((method, "unroll") for method in ("eagle", "eagle3", "mtp")),
        *((method, "places") for method in ("uno", "peagle")),
        *((method, "heads") for method in ("medusa", "hydra")),
        *((method, "block") for method in ("dflash", "dflash2", "dspark")),
        ("bpd", "k"),
        ("pass_tokens", "k"),
        ("jump", "steps"),
    ],
)
def test_more_tokens_ahead_than_a_block_holds(method: str, key: str, data: Path, target: Path, tmp_path: Path) -> None:
    """Before a network of that size is made, and before the text is read; the longest that fits is trained."""
    kind, model = find_recipe(method), load_model(target)
    with pytest.raises(ValueError, match=rf"{method} would learn \d+ tokens ahead .*: the target's context of 64"):
        kind(model, TargetParts(model), {key: "64" if method == "peagle" else "256"})
    ahead = kind(model, TargetParts(model), {key: "8"}).ahead
    longest = 47 - (ahead - 8)
    with pytest.raises(ValueError, match="would learn 48 tokens ahead with these settings: --context of 48 tokens is"):
        new_trainer(method, target, data, tmp_path / "out", settings={key: str(longest + 1)})
    assert not (tmp_path / "out").exists()
    new_trainer(method, target, data, tmp_path / "out", settings={key: str(longest)}, steps=1).run()


@pytest.mark.parametrize(
    ("method", "module"),
    [("eagle3", "train_drafter"), ("distill", "train_distill"), ("specdec_pp", "train_specdec_pp")],
)
def test_data_without_text_is_found_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, method: str, module: str
) -> None:
    monkeypatch.setattr(f"foretoken.cli.{module}.load_target", lambda *_: pytest.fail("the model is loaded first"))
    empty, bad, folder = tmp_path / "empty.txt", tmp_path / "bad.txt", tmp_path / "folder"
    empty.write_text("")
    bad.write_bytes(b"caf\xe9")
    folder.mkdir()
    base = ["train", method, "builtin", "--out", str(tmp_path / "out")]
    for data, words in (
        ([empty], f"{empty} is empty"),
        ([empty, bad], f"{bad} is not UTF-8 text: line 1 has the byte 0xe9"),
        ([folder], f"no text found in {folder}: give .py, .txt, .md or .jsonl"),
    ):
        assert main([*base, *(part for file in data for part in ("--data", str(file)))]) == 2
        assert capsys.readouterr().err == f"error: {words}\n"


def test_a_second_target_is_loaded_after_the_first_is_freed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 and the stored dtype at once, a big target would not fit."""
    networks: list[weakref.ref[Any]] = []

    def load(source: str, device: str | None, dtype: str | None = None) -> tuple[Any, Any]:
        gc.collect()
        assert not [network for network in networks if network() is not None]
        model: Any = load_model(source, dtype=dtype, pack=False)
        networks.append(weakref.ref(model.model))
        return model, None

    monkeypatch.setattr("foretoken.cli.train_drafter.load_target", load)
    _loaded(print, find_recipe("medusa"), str(target), None, {}, TrainConfig(precision="float32"))
    assert len(networks) == 2


def test_nothing_held_out_is_no_error(target: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four five\n" * 200)
    report = new_trainer("medusa", target, tmp_path / "a.txt", tmp_path / "x", steps=2).run()
    assert report["acceptance"] == {}


def test_a_reduced_vocabulary_is_told_with_what_it_covers(
    data: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "medusa", "--target", str(target), "--data", str(data), "--out", str(tmp_path / "all")]
    command += ["--corpus", str(tmp_path / "text"), "--batch-size", "2", "--context", "48", "--steps", "1"]
    assert main(command) == 0
    assert "medusa drafts" not in capsys.readouterr().err
    monkeypatch.setattr("foretoken.training.recipes.base.LARGE_VOCABULARY", 300)
    monkeypatch.setattr("foretoken.training.recipes.base.FREQUENT", 4)
    monkeypatch.setattr("foretoken.training.recipes.base.COVERED", 0.0)
    assert main([*command, "--out", str(tmp_path / "few")]) == 0
    counts = np.bincount(np.fromfile(tmp_path / "text/train.bin", np.uint16))
    share = np.sort(counts)[-4:].sum() / counts.sum()
    assert f"medusa drafts 4 of 300 tokens, {share:.1%} of the training text" in capsys.readouterr().err


def test_weight_bits_need_a_drafter(
    data: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Early exits are the target itself, which is stored in its usual dtype."""
    words = "early_exit has no drafter to store in 8 bits: leave --weight-bits out"
    command = ["train", "early_exit", "--target", str(target), "--data", str(data), "--out", str(tmp_path / "x")]
    assert main([*command, "--context", "48", "--weight-bits", "8"]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=words):
        new_trainer("early_exit", target, data, tmp_path / "y").run(weight_bits=8)


@pytest.mark.parametrize("method", ["early_exit", "jump", "kangaroo"])
def test_a_target_whose_layers_run_only_together_is_refused_before_any_text_is_read(method: str) -> None:
    model = load_model("builtin:hybrid")
    with pytest.raises(CapabilityError, match=f"{method} needs a target whose layers can be run one by one"):
        find_recipe(method)(model, TargetParts(model), {}, 0)


def test_features_from_disk_are_the_features(data: Path, target: Path, tmp_path: Path) -> None:
    """The same weights with and without a store; a second method adds no shard that is there already."""
    store = tmp_path / "store"
    new_trainer("medusa", target, data, tmp_path / "a", steps=18).run()
    new_trainer("medusa", target, data, tmp_path / "b", steps=18, features=store).run()
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    shards = {p: p.stat().st_mtime_ns for p in store.rglob("*.safetensors")}
    assert len(shards) == 2  # 18 steps of one tap in shards of 16
    new_trainer("mtp", target, data, tmp_path / "c", steps=18, features=store).run()
    assert {p: p.stat().st_mtime_ns for p in store.rglob("*.safetensors")} == shards
    with pytest.raises(
        ValueError, match=r"features of --context 48, not 32 and of --seed 3, not 4: use another folder"
    ):
        new_trainer("medusa", target, data, tmp_path / "d", context=32, seed=4, features=store)
    run: dict[str, Any] = {"text": "target", "written_blocks": 8}
    with pytest.raises(ValueError, match=r"of text of another --text, --written-blocks or --written-temperature: use"):
        new_trainer("medusa", target, data, tmp_path / "d", features=store, **run)
    first = min(shards)
    first.write_bytes(first.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged: delete it"):
        new_trainer("medusa", target, data, tmp_path / "e", features=store).run()


def test_features_of_text_that_the_target_wrote_are_kept_by_row(data: Path, target: Path, tmp_path: Path) -> None:
    """Every pass after the first reads from disk; a folder of an earlier version, by step, is refused."""
    run: dict[str, Any] = {"text": "target", "written_blocks": 6, "steps": 40}
    kept = new_trainer("medusa", target, data, tmp_path / "a", features=tmp_path / "store", **run)
    fresh = new_trainer("medusa", target, data, tmp_path / "b", **run)
    for step in range(40):
        assert torch.equal(kept._batch(step).taps["last"], fresh._batch(step).taps["last"])
    assert len(list((tmp_path / "store" / "last").iterdir())) == 1
    card = tmp_path / "store" / "features.json"
    card.write_text(json.dumps({key: value for key, value in json.loads(card.read_text()).items() if key != "by_row"}))
    with pytest.raises(ValueError, match="contains features of another version: use another folder"):
        new_trainer("medusa", target, data, tmp_path / "a", features=tmp_path / "store", **run)


def test_features_of_other_text_or_another_dtype_are_not_read(data: Path, target: Path, tmp_path: Path) -> None:
    """The same rows in another order have as many documents, bytes and tokens; a float32 run loads its target so."""
    store, other, shuffled = tmp_path / "store", tmp_path / "other", tmp_path / "shuffled"
    new_trainer("medusa", target, data, tmp_path / "a", features=store)
    other.mkdir()
    shutil.copy(data / "a.jsonl", other)
    assert new_trainer("medusa", target, other, tmp_path / "b", features=store).store is not None  # its place is free
    shuffled.mkdir()
    lines = (data / "a.jsonl").read_text().splitlines()
    (shuffled / "a.jsonl").write_text("\n".join(reversed(lines)))
    (other / "a.jsonl").write_text("\n".join(reversed(lines)))  # in place, too
    for folder in (shuffled, other):
        with pytest.raises(ValueError, match="contains features of other text: use another folder"):
            new_trainer("medusa", target, folder, tmp_path / "c", features=store)
    with pytest.raises(ValueError, match=r"contains features of a target of another dtype \(--precision\): use"):
        new_trainer("medusa", target, data, tmp_path / "d", features=store, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_features_are_the_targets_own_in_its_dtype(dtype: str, data: Path, target: Path, tmp_path: Path) -> None:
    """The loss runs under bfloat16 autocast, and the target does not, with a folder of features as without."""
    taps = []
    for features in (tmp_path / "store", None):
        run = new_trainer("medusa", target, data, tmp_path / "a", features=features, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            taps.append(run._batch(0).taps["last"])
    assert taps[0].dtype == taps[1].dtype and torch.equal(*taps)
    card = tmp_path / "store" / "features.json"
    older = {key: value for key, value in json.loads(card.read_text()).items() if key != "autocast"}
    card.write_text(json.dumps(older))  # as a folder of an earlier version, which captured under autocast
    if dtype == "bfloat16":  # which did not change these
        assert new_trainer("medusa", target, data, tmp_path / "b", features=tmp_path / "store", dtype=dtype).store
        return
    with pytest.raises(ValueError, match="contains features of another version: use another folder"):
        new_trainer("medusa", target, data, tmp_path / "b", features=tmp_path / "store", dtype=dtype)


def test_a_full_disk_leaves_no_half_shard(
    data: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(file))

    run = new_trainer("medusa", target, data, tmp_path / "a", features=tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr("foretoken.training.captured.save_file", full)
        with pytest.raises(OSError, match="No space left"):
            run.run()
    assert not list((tmp_path / "store").rglob("*.safetensors"))
    new_trainer("medusa", target, data, tmp_path / "a", features=tmp_path / "store").run()


def test_medusa_2_trains_the_target_too(data: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "joint"
    report = new_trainer("medusa", target, data, out, steps=8, settings={"mode": "joint"}).run()
    losses = report["target_loss_nats"]
    assert losses["after"] != losses["before"] and report["drafter"] == "medusa:FOLDER"
    assert not torch.equal(
        load_file(out / "target/model.safetensors")["model.embed_tokens.weight"],
        load_file(target / "model.safetensors")["model.embed_tokens.weight"],
    )
    llm = ft.load(str(out / "target"), drafter=f"medusa:{out}", dtype="float32")
    spec, plain = (side.generate("one two three", max_new_tokens=24) for side in (llm, llm.plain))
    assert spec.token_ids == plain.token_ids
    with pytest.raises(ValueError, match="another target"):
        build_drafter(f"medusa:{out}", load_model(target))
    with pytest.raises(ValueError, match="leave --features out"):
        new_trainer("medusa", target, data, out, settings={"mode": "joint"}, features=tmp_path / "store")


def test_a_joint_run_resumes_to_the_same_bits(data: Path, target: Path, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    joint = {"settings": {"mode": "joint"}}
    new_trainer("medusa", target, data, tmp_path / "whole", **joint).run(save_every=2)
    with pytest.raises(KeyboardInterrupt):
        new_trainer("medusa", target, data, tmp_path / "cut", **joint).run(save_every=2, on_step=stop)
    new_trainer("medusa", target, data, tmp_path / "cut", **joint).run(save_every=2)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_early_exits_get_better(data: Path, target: Path, tmp_path: Path) -> None:
    @torch.no_grad()
    def exit_loss(folder: Path) -> float:
        parts, total = TargetParts(load_model(folder, dtype="float32")), 0.0
        for block in run.held_tokens:
            state = parts.normed(parts.features(block[:, :-1], ["layer:2"])["layer:2"])
            total += float(torch.nn.functional.cross_entropy(parts.logits(state)[0], block[0, 1:]))
        return total / len(run.held_tokens)

    settings = {"layer": "2", "every": "1", "labels": "target", "dropout": "0.0"}
    run = new_trainer("early_exit", target, data, tmp_path / "x", steps=40, lr=3e-3, settings=settings)
    report = run.run()
    assert report["drafter"] == "early_exit,layer=2" and report["target_loss_nats"]["after"] < 1.0
    assert exit_loss(tmp_path / "x/target") < 0.9 * exit_loss(target)


LOW_RANK = [
    ("early_exit", {"rank": "2", "exits": "layer"}),
    ("jacobi", {"rank": "2"}),
    ("medusa", {"rank": "2", "mode": "joint"}),
    ("bpd", {"rank": "2", "mode": "finetune"}),
]


@pytest.mark.parametrize(("method", "settings"), LOW_RANK, ids=[method for method, _ in LOW_RANK])
def test_a_low_rank_update_of_the_target(
    method: str, settings: dict[str, str], data: Path, target: Path, tmp_path: Path
) -> None:
    """The folder holds the update, which loads as the same model as the merged one beside it."""
    out = tmp_path / "x"
    report = new_trainer(method, target, data, out, steps=8, settings=settings, lr=1e-2).run()
    assert report["target_loss_nats"]["before"] != report["target_loss_nats"]["after"]
    stored, first = (load_file(folder / "model.safetensors") for folder in (out / "target", target))
    assert stored.keys() == first.keys()
    changed = {name for name in stored if not torch.equal(stored[name], first[name])}
    assert len(changed) == 7 * TARGET.layers and all("_proj.weight" in name for name in changed)
    merged, updated = (load_model(folder, exact="approximate") for folder in (out / "target", out))
    updated_state, merged_state = (model.model.state_dict() for model in (updated, merged))  # type: ignore[attr-defined]
    assert all(torch.equal(updated_state[name], merged_state[name]) for name in merged_state)
    drafter = report["drafter"].replace("FOLDER", str(out))
    llm = ft.load(str(out), drafter=drafter, dtype="float32", controller="constant")
    spec, plain = (side.generate("one two three", max_new_tokens=24) for side in (llm, llm.plain))
    assert spec.token_ids == plain.token_ids and spec.stats.num_draft_tokens > 0
    if method not in TRAINS_TARGET:
        with pytest.raises(ValueError, match="another target: the shapes agree, but the weights differ"):
            build_drafter(f"{method}:{out}", load_model(target))
    with pytest.raises(ValueError, match="a low-rank update, which cannot be updated again"):
        new_trainer(method, out, data, tmp_path / "y", settings=settings, tokenizer=target)


def test_an_update_in_training_is_the_one_that_is_measured_and_stored(data: Path, target: Path, tmp_path: Path) -> None:
    """The parametrised network, the copy that acceptance is measured with and the stored files are one model."""
    settings = {"rank": "2", "layer": "1", "dropout": "0"}
    run = new_trainer("early_exit", target, data, tmp_path / "x", steps=6, settings=settings, lr=1e-2)
    run.run()
    served: Any = as_served(run.network, torch.bfloat16)
    stored: Any = load_model(tmp_path / "x", exact="approximate")
    ids = run.held_tokens[0]
    with torch.no_grad():
        training, measured, loaded = (
            net(input_ids=ids).logits.float() for net in (run.network, served.model, stored.model)
        )
    assert torch.equal(measured, loaded)
    assert float((training - measured).square().mean().sqrt()) < 0.05 * float(training.std())
    assert sum(p.numel() for p in run.trained.parameters() if p.requires_grad) == 2 * 4 * sum(
        sum(shape) for shape in ((32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48))
    )


def test_a_checkpoint_of_an_update_holds_only_the_update(data: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    new_trainer("early_exit", target, data, out, steps=2, settings={"rank": "2"}).run()
    names = [key for key in load_file(out / "checkpoints/step-0000002/state.safetensors") if key.startswith("model.")]
    assert len(names) == 2 * 7 * TARGET.layers and all(name.endswith((".a", ".b")) for name in names)


@pytest.mark.parametrize(("method", "settings"), LOW_RANK, ids=[method for method, _ in LOW_RANK])
def test_a_killed_update_resumes_to_the_same_bits(
    method: str, settings: dict[str, str], data: Path, target: Path, tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    new_trainer(method, target, data, tmp_path / "whole", settings=settings).run(save_every=2)
    with pytest.raises(KeyboardInterrupt):
        new_trainer(method, target, data, tmp_path / "cut", settings=settings).run(save_every=2, on_step=stop)
    assert not (tmp_path / "cut/adapter_config.json").exists()
    new_trainer(method, target, data, tmp_path / "cut", settings=settings).run(save_every=2)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    whole, cut = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[key], cut[key]) for key in whole)


def test_text_that_the_target_writes(data: Path, target: Path, tmp_path: Path) -> None:
    written: list[tuple[int, int]] = []
    model = load_model(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    config = TrainConfig(steps=4, text="target", written_blocks=5, **RUN)  # type: ignore[arg-type]

    def run(out: Path) -> Trainer:
        recipe = find_recipe("medusa")(model, TargetParts(model), {}, RUN["seed"])
        return Trainer(
            recipe, [data], out, config, tokenizer, tmp_path / "corpus", on_written=lambda *done: written.append(done)
        )

    trainer = run(tmp_path / "a")
    assert written == [(5, 5)]
    block = trainer.sampler(0)[0]
    assert block.shape == (49,)
    distribution = torch.softmax(model.model(torch.from_numpy(block)[None, :-1]).logits[0].float(), -1)
    chances = distribution[torch.arange(48), torch.from_numpy(block)[1:]]
    assert float(chances[6:].log().mean()) > -1.5  # the target finds its own writing likely
    trainer.run()
    run(tmp_path / "b").run()
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    with pytest.raises(ValueError, match="do not fill a batch"):
        new_trainer("medusa", target, data, tmp_path / "c", text="target", written_blocks=1)
    with pytest.raises(ValueError, match="text must be one of fixed, target"):
        TrainConfig(text="own")
