"""``foretoken train lm``: from text to a model that loads, and what happens when things go wrong."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import foretoken as ft
from foretoken.cli.main import main
from foretoken.training import checkpoint, lm
from foretoken.training.checkpoint import latest_checkpoint, load_checkpoint
from foretoken.training.config import LmConfig
from foretoken.training.lm import train_lm
from foretoken.training.loop import Progress

SHAPE: dict[str, Any] = {
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "ffn": 24,
    "context": 32,
    "vocab": 300,
    "batch_size": 2,
}
TINY = LmConfig(**SHAPE, steps=6, lr=1e-2)
OPTIONS = [word for key, value in SHAPE.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text file, a JSONL file, a compressed file, and files that are no text."""
    folder = tmp_path_factory.mktemp("data")
    words = ["alpha", "beta", "gamma", "delta", "print", "return", "import", "value"]
    (folder / "a.py").write_text("\n".join(f"{w} = {w}({i})" for i in range(60) for w in words))
    rows = [{"text": f"{words[i % 8]} {words[i % 5]} number {i}\n" * 3} for i in range(150)]
    (folder / "b.jsonl").write_text(
        "\n".join(json.dumps(row) for row in [*rows, {"other": 1}, ["no", "object"]]) + "\n\n"
    )
    text = "It was a bright cold day, and the clocks were striking.\n" * 40
    (folder / "c.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    (folder / "d.bin").write_bytes(b"\x00\x01")
    (folder / "e.txt").write_bytes(b"\xff\xfe\xff not UTF-8")
    return folder


def weights(out: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(out / "model.safetensors")
    return tensors


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def kill_after(step: int) -> Callable[[Progress], None]:
    def on_step(progress: Progress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    return on_step


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of six steps."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train_lm([data], out, TINY, save_every=2, eval_every=3)
    return out


# -- the command -----------------------------------------------------------------------------------------------------


def test_from_text_to_a_model_that_generates(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "run"
    code = main(["train", "lm", "--data", str(data), "--out", str(out), "--steps", "4", "--licence", "mit", *OPTIONS])
    captured = capsys.readouterr()
    assert code == 0
    assert "parameters" in captured.out and "bits per byte" in captured.out and f"model:{out}" in captured.out
    assert "documents read" in captured.err
    assert "4/4" in captured.err and "loss" in captured.err  # the progress bar
    rows = list(csv.DictReader((out / "losses.csv").open()))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert all(math.isfinite(float(row["train_loss"])) for row in rows) and rows[-1]["held_loss"]
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    output = ft.load(str(out), drafter="ngram").generate("alpha = ", max_new_tokens=5)
    assert output.token_ids == ft.load(str(out), drafter=None).generate("alpha = ", max_new_tokens=5).token_ids
    card = (out / "README.md").read_text()
    for words in ("license: mit", "Held-out", "perplexity", "foretoken train lm --data", "--hidden 16", data.name):
        assert words.lower() in card.lower()
    assert str(tmp_path) not in card and str(data) not in card and "follows no instructions" in card
    assert not list(out.glob(".tmp*"))


def test_the_report_counts_what_was_seen(whole: Path) -> None:
    report = json.loads((whole / "training.json").read_text())
    assert report["tokens"] == 6 * 2 * 32
    assert report["corpus"]["train"]["documents"] + report["corpus"]["held"]["documents"] == 152
    held = report["held_loss_nats_per_token"]
    bytes_per_token = report["corpus"]["held"]["bytes"] / report["corpus"]["held"]["tokens"]
    assert report["held_bits_per_byte"] == pytest.approx(held / math.log(2) / bytes_per_token)
    assert report["parameters"] == sum(t.numel() for t in weights(whole).values())


def test_training_lowers_the_loss(data: Path, tmp_path: Path) -> None:
    losses: list[float] = []
    train_lm([data], tmp_path, LmConfig(**SHAPE, steps=40, lr=1e-2), on_step=lambda p: losses.append(p.loss))
    assert sum(losses[-5:]) / 5 < 0.8 * sum(losses[:5]) / 5


def test_a_draft_model_shares_the_tokenizer_and_the_corpus(data: Path, whole: Path, tmp_path: Path) -> None:
    before = (whole / "corpus" / "corpus.json").stat().st_mtime_ns
    train_lm([data], tmp_path / "draft", TINY, tokenizer_from=whole, teacher=whole)
    assert not (tmp_path / "draft" / "corpus").exists()
    llm = ft.load(str(whole), drafter=f"model:{tmp_path / 'draft'}", controller="constant")
    assert llm.generate("alpha", max_new_tokens=4).stats.num_draft_tokens > 0
    train_lm([data / "a.py"], tmp_path / "other", TINY, tokenizer_from=whole)
    assert (tmp_path / "other" / "corpus" / "corpus.json").exists()
    assert (whole / "corpus" / "corpus.json").stat().st_mtime_ns == before


# -- resuming --------------------------------------------------------------------------------------------------------


def test_training_goes_on_from_another_models_weights(data: Path, whole: Path, tmp_path: Path) -> None:
    """One step at a vanishing learning rate leaves the weights, the tokenizer and the loss where they were."""
    report = train_lm([data], tmp_path / "more", replace(TINY, steps=1, lr=1e-13, seed=5), init_from=whole)
    assert same(weights(tmp_path / "more"), weights(whole))
    assert (tmp_path / "more/tokenizer.json").read_text() == (whole / "tokenizer.json").read_text()
    before = json.loads((whole / "training.json").read_text())["held_loss_nats_per_token"]
    assert report["held_loss_nats_per_token"] == pytest.approx(before, abs=2e-2)
    assert "--init-from whole" in (tmp_path / "more/README.md").read_text()


def test_weights_of_another_architecture(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "lm", "--data", str(data), "--out", str(tmp_path / "x"), *OPTIONS]
    assert main([*command, "--init-from", str(whole), "--layers", "2"]) == 2
    error = capsys.readouterr().err
    assert "another architecture" in error and "--layers" in error and error.count("error:") == 1
    assert main([*command, "--init-from", str(tmp_path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    assert not (tmp_path / "x/model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05, and the model to train rms_norm_eps=1e-06"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False, and the model to train tie_word_embeddings=True"),
        ({"head_dim": 4}, "head_dim=4, and the model to train head_dim=8"),
        ({"model_type": "mistral"}, "model_type=mistral, and the model to train model_type=llama"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters={.*500000.*rope_para"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters={.*2.0.*rope_"),
    ],
)
def test_weights_of_another_function(whole: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """The shapes agree, so a model would start from them, and compute something else."""
    folder = with_config(whole, tmp_path / "other", changes)
    with pytest.raises(ValueError, match=f"{folder} has {words}"):
        lm._load_weights(lm.build_model(TINY, 0), folder)


def test_an_older_configuration_of_the_same_function_is_a_start(whole: Path, tmp_path: Path) -> None:
    model = lm.build_model(TINY, 0)
    folder = with_config(whole, tmp_path, {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None})
    with torch.no_grad():
        lm._load_weights(model, folder)
    assert torch.equal(model.model.embed_tokens.weight.bfloat16(), weights(whole)["model.embed_tokens.weight"])


def with_config(source: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """A copy of a model with other values in its configuration; ``None`` leaves a key out."""
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "model.safetensors", folder)
    config = {**json.loads((source / "config.json").read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("family", ["gemma2", "cohere", "gpt2"])
@torch.no_grad()
def test_the_teacher_is_learned_as_it_runs(family: str) -> None:
    """Gemma 2 caps its logits, Cohere scales them, and GPT-2 has no ``model``.  The loss is that of the definition."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    options: dict[str, dict[str, Any]] = {
        "gemma2": {**small, "num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 0.5},
        "cohere": {**small, "num_key_value_heads": 1, "logit_scale": 0.1},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    }
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, vocab_size=300, initializer_range=0.5, **special, **options[family])
    ).eval()
    model = lm.build_model(TINY, 0)
    blocks = torch.randint(300, (3, 501))
    p = teacher(input_ids=blocks[:, :-1]).logits.softmax(-1)
    log_q = model(input_ids=blocks[:, :-1]).logits.log_softmax(-1)
    text = torch.nn.functional.cross_entropy(log_q.flatten(0, 1), blocks[:, 1:].flatten())
    expected = 0.75 * (p * (p.log() - log_q)).sum(-1).mean() + 0.25 * text
    torch.testing.assert_close(lm.distillation_loss(model, teacher, blocks, 0.75), expected, rtol=1e-4, atol=1e-5)


def test_an_encoder_decoder_teacher_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("t5", vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is an encoder-decoder model: give one that continues texts"):
        lm._load_teacher(lm.build_model(TINY, 0), tmp_path, torch.device("cpu"))


def test_a_teacher_of_another_tokenizer(whole: Path, tmp_path: Path) -> None:
    """Its vocabulary has as many tokens, and they are others."""
    other = tmp_path / "other.txt"
    other.write_text("zebra xylophone quixotic " * 400)
    with pytest.raises(ValueError, match=f"the teacher {whole} has another tokenizer: use --tokenizer-from"):
        train_lm([other], tmp_path / "out", TINY, teacher=whole)
    assert not (tmp_path / "out/corpus").exists()


@pytest.mark.parametrize("killed_at", [1, 2, 3, 5])
def test_a_killed_run_resumes_to_the_same_bits(data: Path, whole: Path, tmp_path: Path, killed_at: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_lm([data], tmp_path, TINY, save_every=2, eval_every=3, on_step=kill_after(killed_at))
    assert not (tmp_path / "model.safetensors").exists()
    steps: list[int] = []
    train_lm([data], tmp_path, TINY, save_every=2, eval_every=3, on_step=lambda p: steps.append(p.step))
    assert steps == list(range(killed_at // 2 * 2 + 1, 7))
    assert same(weights(tmp_path), weights(whole))
    assert (tmp_path / "losses.csv").read_text() == (whole / "losses.csv").read_text()


def test_another_teacher_start_or_text_on_resume(data: Path, whole: Path, tmp_path: Path) -> None:
    """The teacher and the start of a run do not change in the middle of it."""
    options: dict[str, Any] = {"tokenizer_from": whole, "teacher": whole, "teacher_weight": 0.5, "init_from": whole}
    out = tmp_path / "out"
    train_lm([data], out, replace(TINY, steps=2), **options)
    assert "--teacher-weight 0.5" in (out / "README.md").read_text()
    other = tmp_path / "other"
    train_lm([data], other, replace(TINY, steps=1, seed=5), tokenizer_from=whole)
    assert "--teacher-weight" not in (other / "README.md").read_text()
    for change, words in (
        ({"teacher": other}, r"other settings \(teacher.weights=\w+, now \w+\)"),
        ({"teacher": None}, "teacher.weight=0.5, now nothing"),
        ({"teacher_weight": 0.7}, r"other settings \(teacher.weight=0.5, now 0.7\)"),
        ({"init_from": other}, r"other settings \(init_from=\w+, now \w+\)"),
    ):
        with pytest.raises(ValueError, match=words):
            train_lm([data], out, TINY, **{**options, **change})
    with pytest.raises(ValueError, match="was trained on other text"):
        train_lm([data / "a.py"], out, TINY, **options)
    train_lm([data], out, replace(TINY, steps=3), **options)


def test_a_finished_run_is_not_trained_again(data: Path, whole: Path) -> None:
    before = weights(whole)
    steps: list[int] = []
    train_lm([data], whole, TINY, save_every=2, eval_every=3, on_step=lambda p: steps.append(p.step))
    assert steps == []
    assert same(weights(whole), before)


def test_ctrl_c_keeps_the_last_checkpoint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = lm.next_token_loss, []

    def interrupted(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(lm, "next_token_loss", interrupted)
    arguments = [
        "train",
        "lm",
        "--data",
        str(data),
        "--out",
        str(tmp_path / "run"),
        "--steps",
        "6",
        "--save-every",
        "2",
    ]
    assert main([*arguments, *OPTIONS]) == 130
    assert "interrupted" in capsys.readouterr().err
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.name == "step-0000002"


def test_an_interrupted_save_leaves_the_checkpoint_before_it(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = checkpoint.save_file, []

    def full_disk(tensors: Any, file: Path) -> None:
        calls.append(1)
        if len(calls) == 2:
            Path(file).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        real(tensors, file)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            train_lm([data], tmp_path, TINY, save_every=2, eval_every=3)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-0000002"]
    train_lm([data], tmp_path, TINY, save_every=2, eval_every=3)
    assert same(weights(tmp_path), weights(whole))


def test_an_interrupted_final_save_leaves_nothing_half_written(
    data: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    real = LlamaForCausalLM.save_pretrained

    def dies(self: Any, folder: Path, **more: Any) -> None:
        real(self, folder, **more)
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", dies)
        with pytest.raises(KeyboardInterrupt):
            train_lm([data], tmp_path, TINY, save_every=2, eval_every=3)
    assert not (tmp_path / "model.safetensors").exists()
    train_lm([data], tmp_path, TINY, save_every=2, eval_every=3)
    assert same(weights(tmp_path), weights(whole))


# -- bad input -------------------------------------------------------------------------------------------------------


def test_a_loss_of_nan_stops_and_the_checkpoint_is_intact(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = lm.next_token_loss, []

    def spoiled(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return real(*arguments) * (float("nan") if len(calls) == 4 else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(lm, "next_token_loss", spoiled)
        with pytest.raises(FloatingPointError, match=r"nan .* step 3.*intact"):
            train_lm([data], tmp_path, TINY, save_every=2, eval_every=100)
    check_intact(tmp_path)


def test_a_gradient_of_nan_does_not_reach_the_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finite loss with an infinite slope: the next checkpoint must not hold NaN."""
    real, calls = lm.next_token_loss, []

    def steep(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        loss = real(*arguments)
        return loss + (loss - loss.detach()).sqrt() if len(calls) == 4 else loss

    with monkeypatch.context() as patch:
        patch.setattr(lm, "next_token_loss", steep)
        with pytest.raises(FloatingPointError, match="step 3"):
            train_lm([data], tmp_path, TINY, save_every=4, eval_every=100)
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def check_intact(out: Path) -> None:
    checkpoint = latest_checkpoint(out / "checkpoints")
    assert checkpoint is not None
    model = lm.build_model(TINY, 0)
    meta = load_checkpoint(checkpoint, model, lm.make_optimizers(model, TINY))
    assert meta["step"] == 2
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"hybrid": True, "layers": 4}])
def test_a_model_is_made_from_its_seed_and_leaves_the_generator_of_the_process(changes: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    config = replace(TINY, **changes)
    first, second = lm.build_model(config, 0), lm.build_model(config, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def command(capsys: pytest.CaptureFixture[str], data: Path, out: Path, *more: str) -> str:
    capsys.readouterr()
    assert main(["train", "lm", "--data", str(data), "--out", str(out), "--steps", "6", *OPTIONS, *more]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(err) == 1
    return err[0]


def test_no_text_and_too_little_text(tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, short, broken = tmp_path / "empty", tmp_path / "short", tmp_path / "broken"
    for folder in (empty, short, broken):
        folder.mkdir()
    (short / "a.txt").write_text("too short")
    (broken / "a.jsonl").write_text('{"text": "fine"}\n{"text": ')
    (broken / "b.txt.zst").write_bytes(b"no zstandard frame")
    assert "no text found" in command(capsys, empty, tmp_path / "out1")
    assert "no text found" in command(capsys, empty, tmp_path / "out6", "--tokenizer-from", str(whole))
    assert "too short" in command(capsys, short, tmp_path / "out2")
    assert "a.jsonl, line 2" in command(capsys, broken, tmp_path / "out3")
    assert "b.txt.zst is damaged" in command(capsys, broken / "b.txt.zst", tmp_path / "out4")
    assert "no such file" in command(capsys, tmp_path / "nosuch", tmp_path / "out5")


def test_another_architecture_on_resume(data: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = weights(whole)
    message = command(capsys, data, whole, "--hidden", "32")
    assert "hidden=16" in message and "another --out" in message
    assert same(weights(whole), before)


def test_shapes_that_do_not_fit(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "multiple of heads" in command(capsys, data, tmp_path, "--hidden", "18", "--heads", "4")
    assert "multiple of kv_heads" in command(capsys, data, tmp_path, "--heads", "2", "--kv-heads", "8")


def test_what_cannot_be_loaded_is_found_before_anything_is_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, nowhere = tmp_path / "out", str(tmp_path / "nosuch")
    assert f"{nowhere} is not a folder with a model" in command(capsys, data, out, "--teacher", nowhere)
    assert f"{nowhere} holds no tokenizer.json" in command(capsys, data, out, "--init-from", nowhere)
    assert "device 'nosuch' cannot be used here" in command(capsys, data, out, "--device", "nosuch")
    assert not out.exists()


def test_the_tokenizer_of_a_run_without_a_checkpoint_is_not_taken_for_other_text(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("zebra xylophone " * 400)
    with pytest.raises(ValueError, match="too short"):  # behind its tokenizer
        train_lm([other], tmp_path / "out", LmConfig(**{**SHAPE, "batch_size": 10**6}, steps=1))
    train_lm([data], tmp_path / "out", LmConfig(**SHAPE, steps=1))
    train_lm([data], tmp_path / "fresh", LmConfig(**SHAPE, steps=1))
    ours, fresh = ((tmp_path / name / "tokenizer.json").read_text() for name in ("out", "fresh"))
    assert ours == fresh


def test_a_tokenizer_that_does_not_fit(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no tokenizer.json" in command(capsys, data, tmp_path / "a", "--tokenizer-from", str(tmp_path / "nosuch"))
    train_lm([data], tmp_path / "large", LmConfig(**{**SHAPE, "vocab": 400}, steps=1))
    assert "--vocab 300 is too small" in command(
        capsys, data, tmp_path / "b", "--tokenizer-from", str(tmp_path / "large")
    )


def test_a_run_whose_tokenizer_is_gone(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train_lm([data], out, replace(TINY, steps=2), save_every=1)
    shutil.rmtree(out / "tokenizer")
    with pytest.raises(ValueError, match=f"{out} holds a checkpoint and no tokenizer: copy its folder back"):
        train_lm([data], out, replace(TINY, steps=3))


def test_a_damaged_checkpoint(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_lm([data], tmp_path, LmConfig(**SHAPE, steps=6), save_every=3)
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    state = checkpoint / "state.safetensors"
    state.write_bytes(state.read_bytes()[:500])
    message = command(capsys, data, tmp_path, "--lr", "4e-3")
    assert "step-0000006 is damaged" in message and "one before it" in message


def test_few_documents_leave_nothing_to_hold_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("the only document there is, said again and again. " * 40)
    arguments = ["train", "lm", "--data", str(tmp_path / "one.txt"), "--out", str(tmp_path / "out"), "--steps", "2"]
    assert main([*arguments, *OPTIONS]) == 0
    assert "nothing held out" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "training.json").read_text())["held_loss_nats_per_token"] is None
    assert "No document was held out" in (tmp_path / "out" / "README.md").read_text()


# -- missing extras --------------------------------------------------------------------------------------------------


def test_without_matplotlib_the_numbers_are_still_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "run"
    assert main(["train", "lm", "--data", str(data), "--out", str(out), "--steps", "2", *OPTIONS]) == 0
    assert "pip install 'foretoken[train]'" in capsys.readouterr().err
    assert (out / "losses.csv").exists() and not (out / "losses.png").exists()
    assert ft.load(str(out), drafter=None).generate("alpha", max_new_tokens=2).token_ids


def test_without_zstandard_compressed_text_is_an_error_that_names_the_extra(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "pip install 'foretoken[train]'" in command(capsys, data, tmp_path / "run")
