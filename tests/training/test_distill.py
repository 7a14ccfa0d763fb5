"""``foretoken train distill``: divergences, the texts that are learned from, resuming, and what can go wrong."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

import foretoken as ft
from foretoken.cli.main import main
from foretoken.lab.bench.alignment import Alignment
from foretoken.loading import load_model
from foretoken.methods.drafters.learning.divergences import divergence, log_distribution
from foretoken.methods.drafters.learning.losses import LOSSES
from foretoken.training import workshop
from foretoken.training.config import TEXTS, DistillConfig, LmConfig
from foretoken.training.distill import Distiller
from foretoken.training.lm import build_model, train_lm
from foretoken.training.loop import Progress
from foretoken.training.text_sources import written_text
from foretoken.training.workshop import Workshop, load_student
from foretoken.training.written import stored_continuations, write_continuations

SHAPE = {"heads": 2, "kv_heads": 1, "context": 64, "vocab": 300, "batch_size": 2, "lr": 1e-2}
RUN = DistillConfig(steps=6, batch_size=2, context=32, written=12, refresh=4, lr=3e-3, seed=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = (f"one two three four five {i % 7} six seven eight nine ten\n" * 6 + f"line {i}" for i in range(200))
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


@pytest.fixture(scope="module")
def target(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small target that knows that text."""
    out = tmp_path_factory.mktemp("target") / "target"
    train_lm([data], out, LmConfig(hidden=32, layers=2, ffn=48, steps=80, **SHAPE))
    return out


@pytest.fixture(scope="module")
def draft(data: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same tokenizer that has seen little, without a teacher."""
    out = tmp_path_factory.mktemp("draft") / "draft"
    train_lm([data], out, LmConfig(hidden=16, layers=1, ffn=24, steps=12, **SHAPE), tokenizer_from=target)
    return out


def new_shop(target: Path, data: Path, folder: Path, config: DistillConfig) -> Workshop:
    return Workshop(load_model(target), AutoTokenizer.from_pretrained(target), [data], folder, config)


def new_run(target: Path, draft: Path, data: Path, out: Path, config: DistillConfig = RUN, **changes: Any) -> Distiller:
    shop = new_shop(target, data, out / "corpus", replace(config, **changes))
    student = load_student(draft, shop.target, shop.tokenizer)
    return Distiller(shop, student, out, name=str(draft))


def weights(out: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(out / "model.safetensors")
    return tensors


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def kill_after(step: int) -> Callable[[Progress], None]:
    def on_step(progress: Progress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    return on_step


# -- divergences -----------------------------------------------------------------------------------------------------


def of(name: str, p: list[float], q: list[float], beta: float = 0.5) -> float:
    """The divergence of two distributions."""
    rows = torch.tensor([p]).log(), torch.tensor([q]).log()
    return float(divergence(name, *rows, beta))


def test_worked_values() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    assert of("fkl", p, q) == pytest.approx(0.25 * math.log(2))
    assert of("rkl", p, q) == pytest.approx(0.25 * math.log(2))
    assert of("tvd", p, q) == pytest.approx(0.25)
    # m = (0.375, 0.375, 0.25): 0.5 log(4/3) + 0.25 log(2/3)
    assert of("jsd", p, q) == pytest.approx(0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3))
    p, q = [0.8, 0.2], [0.5, 0.5]
    assert of("fkl", p, q) == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4))
    assert of("rkl", p, q) == pytest.approx(0.5 * math.log(0.625) + 0.5 * math.log(2.5))
    # beta 0.9: m = (0.77, 0.23)
    expected = 0.9 * (0.8 * math.log(0.8 / 0.77) + 0.2 * math.log(0.2 / 0.23))
    expected += 0.1 * (0.5 * math.log(0.5 / 0.77) + 0.5 * math.log(0.5 / 0.23))
    assert of("jsd", p, q, 0.9) == pytest.approx(expected, rel=1e-4)


def test_what_holds_for_all_distributions() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(50, 7) * 3, torch.randn(50, 7) * 3
    distributions = p.softmax(-1), q.softmax(-1)
    torch.testing.assert_close(divergence("tvd", p, q), 1 - torch.minimum(*distributions).sum(-1))
    torch.testing.assert_close(divergence("jsd", p, q), divergence("jsd", q, p))
    torch.testing.assert_close(divergence("fkl", p, q), divergence("rkl", q, p))
    for name in LOSSES:
        assert bool((divergence(name, p, q) > 0).all())
        torch.testing.assert_close(divergence(name, p, p + 5), torch.zeros(50), atol=1e-6, rtol=0)
    assert bool((divergence("jsd", p, q) <= math.log(2)).all()) and bool((divergence("tvd", p, q) <= 1).all())
    p, q = p / 6, q / 6
    # For beta near 0 and 1 the slope of the Jensen-Shannon divergence is a Kullback-Leibler one.
    torch.testing.assert_close(divergence("jsd", p, q, 1e-3) / 1e-3, divergence("fkl", p, q), rtol=0.02, atol=1e-3)
    torch.testing.assert_close(divergence("jsd", p, q, 0.999) / 1e-3, divergence("rkl", p, q), rtol=0.02, atol=1e-3)


def test_gradients_are_those_of_the_formulas() -> None:
    """With q = softmax(z): dF/dz_i = q_i (f_i - sum q f), f the derivative of the divergence in q."""
    torch.manual_seed(1)
    p_logits, z = torch.randn(20, 5), torch.randn(20, 5)
    p, q, beta = p_logits.softmax(-1), z.softmax(-1), 0.3
    m = beta * p + (1 - beta) * q
    slopes = {
        "fkl": -p / q,
        "rkl": (q / p).log() + 1,
        "jsd": (1 - beta) * (q / m).log(),
        "tvd": (q - p).sign() / 2,
    }
    for name, f in slopes.items():
        leaf = z.clone().requires_grad_()
        divergence(name, p_logits, leaf, beta).sum().backward()
        torch.testing.assert_close(leaf.grad, q * (f - (q * f).sum(-1, keepdim=True)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_impossible_tokens_give_finite_numbers(name: str) -> None:
    far = torch.tensor([[300.0, 0.0, -300.0]])
    masked = torch.tensor([[0.0, 0.0, -math.inf]])
    for p, q in ((far, -far), (-far, far), (far, far), (masked, far), (far, masked), (masked, masked)):
        leaf = q.clone().requires_grad_()
        value = divergence(name, p, leaf)
        value.sum().backward()
        assert bool(torch.isfinite(value).all()) and leaf.grad is not None
        assert bool(torch.isfinite(leaf.grad).all())
    assert float(divergence("tvd", far, -far)) == pytest.approx(1)
    assert float(divergence("jsd", far, -far)) == pytest.approx(math.log(2))


def test_distributions_are_float32() -> None:
    assert log_distribution(torch.randn(2, 4).bfloat16()).dtype == torch.float32


# -- written text ----------------------------------------------------------------------------------------------------


def test_greedy_writing_is_greedy_decoding(target: Path) -> None:
    model = load_model(target, dtype="float32")
    prompts = torch.tensor([[40, 50, 60], [70, 80, 90]])
    rows = write_continuations(model, prompts, 9, 0.0)
    assert rows.shape == (2, 12) and torch.equal(rows[:, :3], prompts)
    llm = ft.load(str(target), drafter=None, dtype="float32")
    for row in rows.tolist():
        assert llm.generate(row[:3], max_new_tokens=9, ignore_eos=True).token_ids == row[3:]


def test_a_continuation_depends_on_its_number_alone(target: Path) -> None:
    model = load_model(target, dtype="float32")
    prompts = torch.tensor([[40 + i, 50, 60] for i in range(40)])  # more than are written at once
    rows = write_continuations(model, prompts, 6, 1.0, seed=5)
    assert torch.equal(write_continuations(model, prompts[35:37], 6, 1.0, 5, numbers=[35, 36]), rows[35:37])
    assert not torch.equal(write_continuations(model, prompts, 6, 1.0, seed=6), rows)
    assert len(write_continuations(model, prompts[:0], 6)) == 0
    assert not model._sequences  # every row was given back


def test_written_tokens_follow_the_distribution(target: Path) -> None:
    model = load_model(target, dtype="float32")
    rows = write_continuations(model, torch.tensor([[40, 50, 60]]).expand(800, 3), 1, 2.0, seed=0)
    logits = model.model(input_ids=torch.tensor([[40, 50, 60]])).logits[0, -1]  # type: ignore[attr-defined]
    distribution = (logits / 2).softmax(-1).detach()
    counts = torch.bincount(rows[:, 3], minlength=len(distribution)) / 800
    # Expected distance of 800 draws: half the sum of sqrt(2 p (1 - p) / (pi n)).
    noise = float((2 * distribution * (1 - distribution) / (math.pi * 800)).sqrt().sum()) / 2
    assert float((counts - distribution).abs().sum()) / 2 < 1.3 * noise


def test_bad_requests_for_text(target: Path) -> None:
    model = load_model(target)
    for prompts, new, words in (
        (torch.zeros(1, 0, dtype=torch.long), 3, "at least one token"),
        (torch.zeros(1, 3, dtype=torch.long), 0, "at least one new"),
        (torch.zeros(1, 60, dtype=torch.long), 9, "do not fit"),
    ):
        with pytest.raises(ValueError, match=words):
            write_continuations(model, prompts, new)
    with pytest.raises(ValueError, match="temperature"):
        write_continuations(model, torch.zeros(1, 3, dtype=torch.long), 3, -1.0)


def test_stored_text_is_made_once_and_goes_on(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.training import written

    monkeypatch.setattr(written, "ROWS", 4)
    model = load_model(target)
    prompts = torch.tensor([[40 + i, 50, 60] for i in range(10)])
    progress: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        progress.append((done, total))
        if len(progress) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stored_continuations(tmp_path, model, prompts, 5, 1.0, 0, writer="t", on_rows=stop)
    (folder,) = tmp_path.iterdir()
    times = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.bin")}
    assert progress == [(4, 10), (8, 10)] and len(times) == 2
    rows = stored_continuations(tmp_path, model, prompts, 5, 1.0, 0, writer="t")
    assert torch.equal(rows, write_continuations(model, prompts, 5, 1.0, 0))
    assert all((folder / name).stat().st_mtime_ns == at for name, at in times.items())
    assert not list(folder.glob("*.tmp"))
    (folder / "part-00001.bin").write_bytes(b"half")  # damaged: written again
    assert torch.equal(stored_continuations(tmp_path, model, prompts, 5, 1.0, 0, writer="t"), rows)
    stored_continuations(tmp_path, model, prompts, 5, 1.0, 1, writer="t")
    assert len(list(tmp_path.iterdir())) == 2  # other settings, another folder


# -- training --------------------------------------------------------------------------------------------------------


def test_where_the_rows_come_from(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    runs = {text: new_run(target, draft, data, tmp_path / text, text=text, batch_size=8, refresh=2) for text in TEXTS}
    texts = {name: run.text(1) for name, run in runs.items()}
    (fixed, whole), (policy, own_weights), (mixed, weights_) = texts["fixed"], texts["policy"], texts["mixed"]
    prompt = RUN.prompt_tokens
    assert prompt == 8 and bool((whole == 1).all())
    assert torch.equal(policy[:, :prompt], fixed[:, :prompt])
    assert not bool((policy == fixed).all(1).any())
    assert bool((own_weights[:, : prompt - 1] == 0).all()) and bool((own_weights[:, prompt - 1 :] == 1).all())
    own = (mixed == policy).all(1)
    assert 0 < int(own.sum()) < 8
    assert bool(((mixed == fixed).all(1) | own).all())
    assert torch.equal(weights_[own], own_weights[own]) and torch.equal(weights_[~own], whole[~own])
    teacher, teacher_weights = texts["teacher"]
    assert torch.equal(teacher_weights, own_weights)
    written = runs["teacher"].shop.written_rows()
    assert written.shape == (12, 33) and all(bool((written == row).all(1).any()) for row in teacher)
    steps = torch.cat([runs["teacher"].text(step)[0] for step in (0, 1, 2)])
    assert len(steps.unique(dim=0)) == 12  # two passes of twelve rows


def test_the_student_writes_with_the_weights_of_now(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    run = new_run(target, draft, data, tmp_path, text="policy", refresh=2)
    before = [run.text(step)[0] for step in (0, 1, 2)]
    run.source(0)
    with torch.no_grad():
        for parameter in run.student.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert torch.equal(run.text(1)[0], before[1])  # of the same writing
    assert not torch.equal(run.text(2)[0], before[2])


def test_rows_without_weight_are_left_out() -> None:
    rows = torch.arange(12).view(4, 3)
    kept = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    text = written_text(rows, kept, batch=2, seed=0)
    for step in range(3):
        assert sorted(text(step)[:, 0].tolist()) == [3, 9]
        learned = dict(zip(text(step)[:, 0].tolist(), text.learned_of(step).tolist(), strict=True))
        assert learned == {3: [False, True, False], 9: [False, False, True]}
    with pytest.raises(ValueError, match="no generated text is left"):
        written_text(rows, torch.zeros(4, 2), batch=2, seed=0)


def test_the_loss_is_the_weighted_mean(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    run = new_run(target, draft, data, tmp_path, loss="tvd")
    tokens = run.text(0)[0]
    weights_ = torch.zeros(2, 32)
    weights_[0, 3], weights_[1, 30] = 1.0, 3.0
    p = run.shop.parts.network(input_ids=tokens[:, :-1]).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = run.student(input_ids=tokens[:, :-1]).logits
    expected = (divergence("tvd", p[0, 3], q[0, 3]) + 3 * divergence("tvd", p[1, 30], q[1, 30])) / 4
    torch.testing.assert_close(run.loss(tokens, weights_), expected)


@pytest.mark.parametrize(("loss", "text"), [("fkl", "fixed"), ("rkl", "teacher"), ("jsd", "policy"), ("tvd", "mixed")])
def test_alignment_rises(loss: str, text: str, target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    run = new_run(target, draft, data, tmp_path, loss=loss, text=text, steps=60, lr=1e-2)
    measure = Alignment(run.shop.target, run.shop.held_prompts(4, 8))
    report = run.run(evaluate=measure, eval_every=30)
    before, after = report["before"], report["after"]
    assert after["expected_acceptance"] > before["expected_acceptance"] + 0.1
    assert after["sampled"]["mean_acceptance_length"] > before["sampled"]["mean_acceptance_length"]
    assert after["argmax_agreement"] > before["argmax_agreement"]
    lines = (tmp_path / "losses.csv").read_text().splitlines()
    assert lines[0].startswith("step,loss,greedy_length") and len(lines) == 62
    assert [line.split(",")[0] for line in lines[1:] if line.split(",")[2]] == ["0", "30", "60"]
    again = Alignment(run.shop.target, run.shop.held_prompts(4, 8))
    stored = load_student(tmp_path, run.shop.target, run.shop.tokenizer)
    assert again(stored) == after  # what was measured is what was stored


@pytest.mark.parametrize("text", TEXTS)
def test_a_killed_run_resumes_to_the_same_bits(
    text: str, target: Path, draft: Path, data: Path, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    new_run(target, draft, data, whole, text=text).run(save_every=3)
    with pytest.raises(KeyboardInterrupt):
        new_run(target, draft, data, cut, text=text).run(save_every=3, on_step=kill_after(5))
    assert not (cut / "model.safetensors").exists()
    steps: list[int] = []
    new_run(target, draft, data, cut, text=text).run(save_every=3, on_step=lambda p: steps.append(p.step))
    assert steps == [4, 5, 6]
    assert same(weights(whole), weights(cut))
    assert (whole / "losses.csv").read_text() == (cut / "losses.csv").read_text()
    assert not same(weights(whole), weights(draft))


def test_a_loss_of_nan_stops_and_the_checkpoint_is_intact(
    target: Path, draft: Path, data: Path, tmp_path: Path
) -> None:
    run = new_run(target, draft, data, tmp_path / "nan")
    loss = run.loss

    def broken(tokens: Tensor, weights: Tensor) -> Tensor:
        value = loss(tokens, weights)
        return value * float("nan") if (tmp_path / "nan/checkpoints/step-0000004").exists() else value

    run.loss = broken  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="step 4; the last checkpoint is intact"):
        run.run(save_every=2)
    new_run(target, draft, data, tmp_path / "nan").run(save_every=2)
    new_run(target, draft, data, tmp_path / "whole").run(save_every=2)
    assert same(weights(tmp_path / "nan"), weights(tmp_path / "whole"))


def test_other_settings_on_resume(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    new_run(target, draft, data, tmp_path, steps=2).run()
    for change in ({"loss": "tvd"}, {"seed": 9}, {"text": "policy"}):
        with pytest.raises(ValueError, match="other settings"):
            new_run(target, draft, data, tmp_path, steps=4, **change).run()
    new_run(target, draft, data, tmp_path, steps=3).run()


def changed(folder: Path, to: Path) -> Path:
    """A copy of a model with other weights in one layer."""
    shutil.copytree(folder, to)
    tensors = weights(folder)
    tensors["model.layers.0.mlp.up_proj.weight"] += 0.1
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_another_target_draft_model_or_text_on_resume(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    out, moved = tmp_path / "out", tmp_path / "draft"
    shutil.copytree(draft, moved)
    new_run(target, moved, data, out, steps=2).run()
    with pytest.raises(ValueError, match=r"other settings \(another model\)"):
        new_run(changed(target, tmp_path / "target"), moved, data, out, steps=4).run()
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.jsonl").write_text((data / "a.jsonl").read_text().replace("seven", "neves"))
    with pytest.raises(ValueError, match="was trained on other text"):
        new_run(target, moved, other, out, steps=4).run()
    shutil.rmtree(moved)
    changed(draft, moved)  # another one by the same name
    with pytest.raises(ValueError, match=r"other settings \(another draft model\)"):
        new_run(target, moved, data, out, steps=4).run()


def test_a_run_with_a_new_mask_goes_on(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    """The mask's row is drawn anew in every process, and is not what tells draft models apart."""
    new_run(target, draft, data, tmp_path, steps=2, places=2).run()
    torch.manual_seed(99)
    new_run(target, draft, data, tmp_path, steps=3, places=2).run()


def test_before_a_mask_is_taught_the_draft_model_is_measured_as_it_was(
    target: Path, data: Path, tmp_path: Path
) -> None:
    """Not by the masks, which are untrained.  The target as its own draft model drafts well without them."""
    run = new_run(target, target, data, tmp_path, steps=1, places=3)
    measure = Alignment(run.shop.target, run.shop.held_prompts(3, 16))
    report = run.run(evaluate=measure)
    before, after = (report[when]["greedy"]["mean_acceptance_length"] for when in ("before", "after"))
    assert report["before"] == measure(load_student(target, run.shop.target, run.shop.tokenizer))
    assert before > after + 1


@pytest.mark.parametrize("places", [1, 3])
def test_a_batch_without_any_weight_teaches_nothing(
    places: int, target: Path, draft: Path, data: Path, tmp_path: Path
) -> None:
    run = new_run(target, draft, data, tmp_path, places=places)
    tokens = run.text(0)[0]
    run.text = lambda step: (tokens, torch.zeros(2, 32))  # type: ignore[method-assign]
    loss = run._loss(0)
    loss.backward()
    assert float(loss.detach()) == 0
    gradients = [p.grad for p in run.student.parameters() if p.grad is not None]
    assert gradients and all(not bool(gradient.any()) for gradient in gradients)


# -- the command -----------------------------------------------------------------------------------------------------


def test_from_a_draft_model_to_a_better_one(
    target: Path,
    draft: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(workshop, "load_model", lambda path, **more: loaded.append(path) or load_model(path, **more))
    out = tmp_path / "aligned"
    command = ["train", "distill", "--target", str(target), "--draft", str(draft), "--data", str(data)]
    options = ["--loss", "jsd", "--beta", "0.9", "--text", "mixed", "--steps", "4", "--batch-size", "2"]
    more = ["--context", "32", "--out", str(out), "--eval-every", "2", "--corpus", str(tmp_path / "text"), "--json"]
    assert main([*command, *options, *more]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert loaded == [str(draft)]  # once: to check that it fits, and to train it
    assert report["run"]["beta"] == 0.9 and report["before"]["expected_acceptance"] > 0
    order = [captured.err.index(words) for words in ("loading", "documents read", "are held out", "1/4")]
    assert order == sorted(order) and captured.err.count("loss") == 3  # two lines of progress, one of a measurement
    assert f'"model:{out},k=4"' in captured.err
    assert "before:" in captured.err and "step 2: loss" in captured.err and "4/4" in captured.err
    names = {p.name for p in out.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "README.md", "losses.csv", "losses.png"}
    assert not (out / "corpus").exists() and not list(out.glob(".tmp*"))
    card = (out / "README.md").read_text()
    assert "--loss jsd" in card and "--mix" not in card and "| before | after |" in card
    assert "sampled per position 4" in card and str(tmp_path) not in card
    assert "- The limits of the model that it started from apply." in card and "base model" not in card
    llm = ft.load(str(target), drafter=f"model:{out},k=4", dtype="float32", controller="constant")
    output = llm.generate("one two three", max_new_tokens=24)
    assert output.stats.num_draft_tokens > 0
    assert output.token_ids == llm.plain.generate("one two three", max_new_tokens=24).token_ids


def test_bad_input(target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("a few words")
    broken = tmp_path / "nan"
    broken.mkdir()
    for file in draft.iterdir():
        if file.is_file():
            (broken / file.name).write_bytes(file.read_bytes())
    tensors = {n: torch.full_like(t, math.nan) if "norm" in n else t for n, t in weights(draft).items()}
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    base = ["train", "distill", "--target", str(target), "--draft", str(draft), "--context", "32"]
    base += ["--corpus", str(tmp_path / "text"), "--out", str(tmp_path / "out"), "--steps", "2"]
    good = ["--data", str(data)]
    for more, words in (
        (["--data", str(tmp_path / "none")], "no such file"),
        (["--data", str(tmp_path / "empty")], "no text found"),
        (["--data", str(tmp_path / "short.txt")], "too short"),
        ([*good, "--draft", "builtin"], "vocabulary of 8192"),
        ([*good, "--draft", str(tmp_path / "none")], "not a folder"),
        ([*good, "--loss", "kl"], "choose one of fkl, rkl, jsd, tvd"),
        ([*good, "--text", "own"], "choose one of fixed, teacher, policy, mixed"),
        ([*good, "--loss", "jsd", "--beta", "1"], "beta must be between 0 and 1"),
        ([*good, "--context", "65"], "longer than the target's 64"),
        ([*good, "--prompt", "32"], "must leave room"),
        ([*good, "--draft", str(broken)], "NaN"),
    ):
        assert main([*base, *more]) == 2, more
        error = capsys.readouterr().err
        assert words in error and error.count("error:") == 1, error
    assert not (tmp_path / "out/model.safetensors").exists()


def test_another_tokenizer_is_refused(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (tmp_path / "b.txt").write_text("quite different words are accepted here\n" * 400)
    train_lm([tmp_path / "b.txt"], other, LmConfig(hidden=16, layers=1, ffn=24, steps=1, **SHAPE))
    with pytest.raises(ValueError, match="another tokenizer"):
        load_student(other, load_model(target), AutoTokenizer.from_pretrained(target))


def test_a_quantised_draft_model_is_refused(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices are no parameters: only the norms would be trained and written."""
    pytest.importorskip("gguf")
    from gguf_writer import write_model

    network = build_model(LmConfig(hidden=32, layers=1, ffn=64, **SHAPE), 0)
    file = write_model(tmp_path / "toy.gguf", network, "Q8_0")
    tokenizer = AutoTokenizer.from_pretrained(target)
    monkeypatch.setattr(workshop, "load_tokenizer", lambda source: tokenizer)  # the file has none
    with pytest.raises(ValueError, match=r"toy.gguf is stored as GGUF .* and cannot be trained: give the model it was"):
        load_student(file, load_model(target), tokenizer)


def test_nothing_held_out_is_no_error(target: Path, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four five\n" * 200)
    out = tmp_path / "x"
    command = ["train", "distill", "--target", str(target), "--draft", str(draft), "--data", str(tmp_path / "a.txt")]
    assert main([*command, "--out", str(out), "--steps", "1", "--batch-size", "2", "--context", "32"]) == 0
    assert "nothing was measured" in (out / "README.md").read_text()
    assert asdict(DistillConfig())["written"] == 1024


def test_a_few_conversations_are_enough(target: Path, draft: Path, tmp_path: Path) -> None:
    """Each fills a row, however short it is; the same number of tokens of plain text would be too few."""
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    chats = [[{"role": "user", "content": f"one {i}"}, {"role": "assistant", "content": "two three"}] for i in range(3)]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = (tmp_path / "template.jinja").read_text()
    config = replace(RUN, context=64, batch_size=1, steps=2)
    shop = Workshop(load_model(target), tokenizer, [data], tmp_path / "corpus", config)
    assert shop.blocks.num_blocks * 64 > shop.corpus["train"]["tokens"]
    assert shop.blocks(0).shape == (1, 65)


def test_the_benchmark_compares_losses_and_texts(
    target: Path, draft: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parents[2] / "benchmarks"
    command = f"x --target {target} --draft {draft} --data {data} --loss tvd --text fixed teacher"
    command += " --steps 1 --batch-size 2 --context 32 --written 2 --prompts 1 --json"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", command.split())
    runpy.run_path(str(folder / "distillation.py"), run_name="__main__")
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["loss"], row["text"]) for row in rows] == [("tvd", "fixed"), ("tvd", "teacher")]
