"""``foretoken train boost``: draft models that complement each other."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import foretoken as ft
from foretoken.cli.main import main
from foretoken.lab.bench.alignment import Alignment
from foretoken.loading import load_model
from foretoken.training.boost import Boost, Stage, best_tokens, matched, ready_spec
from foretoken.training.config import DistillConfig, LmConfig
from foretoken.training.lm import train_lm
from foretoken.training.loop import Progress
from foretoken.training.workshop import Workshop

SHAPE: dict[str, Any] = {"heads": 2, "kv_heads": 1, "context": 64, "vocab": 300, "batch_size": 2, "lr": 1e-2}
RUN = DistillConfig(text="teacher", steps=8, batch_size=2, context=32, written=12, lr=3e-3, seed=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = (f"one two three four five {i % 7} six seven eight nine ten\n" * 6 + f"line {i}" for i in range(200))
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


@pytest.fixture(scope="module")
def target(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("target") / "target"
    train_lm([data], out, LmConfig(hidden=32, layers=2, ffn=48, steps=80, **SHAPE))
    return out


@pytest.fixture(scope="module")
def draft(data: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("draft") / "draft"
    train_lm([data], out, LmConfig(hidden=16, layers=1, ffn=24, steps=12, **SHAPE), tokenizer_from=target)
    return out


def new_boost(target: Path, draft: Path, data: Path, out: Path, length: int = 1, **changes: Any) -> Boost:
    config = DistillConfig(**{**vars(RUN), **changes})
    shop = Workshop(load_model(target), AutoTokenizer.from_pretrained(target), [data], out / "corpus", config)
    prompts = shop.held_prompts(4, 8)
    return Boost(shop, draft, out, length, (Alignment(shop.target, prompts).text, 8))


def weights(out: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(out / "model.safetensors")
    return tensors


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_matched_places() -> None:
    expected = torch.tensor([[1, 2, 3, 4, 5, 6]])
    drafted = torch.tensor([[1, 2, 9, 4, 5, 6]])
    assert matched(expected, drafted, 1).int().tolist() == [[1, 1, 0, 1, 1, 1]]
    assert matched(expected, drafted, 2).int().tolist() == [[1, 0, 0, 1, 1, 1]]
    assert matched(expected, drafted, 3).int().tolist() == [[0, 0, 0, 1, 1, 1]]
    assert matched(expected, drafted, 99).int().tolist() == [[0, 0, 0, 1, 1, 1]]


def test_later_models_learn_what_earlier_ones_miss(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    boost = new_boost(target, draft, data, tmp_path, steps=40, lr=1e-2)
    stages: list[Stage] = boost.run(2)
    first, second = boost.networks
    hits = best_tokens(boost.shop.parts.network, boost.rows) == best_tokens(first, boost.rows)
    counted = boost.weights > 0
    assert stages[0].left == 1.0
    assert stages[1].left == pytest.approx(1 - float(hits[counted].float().mean()))
    assert 0 < stages[1].left < 0.9
    assert stages[0].coverage is not None and stages[1].coverage is not None
    assert stages[1].coverage > stages[0].coverage
    # The second knows more of what the first misses than the first one's own share of it, which is none.
    missed = counted & ~hits
    second_hits = best_tokens(second, boost.rows) == best_tokens(boost.shop.parts.network, boost.rows)
    assert float(second_hits[missed].float().mean()) > 0.05


def test_a_broken_off_stage_goes_on(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    new_boost(target, draft, data, whole).run(2, save_every=3)

    def stop(number: int, progress: Progress) -> None:
        if number == 2 and progress.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        new_boost(target, draft, data, cut).run(2, save_every=3, on_step=stop)
    assert (cut / "1/model.safetensors").exists() and not (cut / "2/model.safetensors").exists()
    draft_file = cut / "1" / f".tmp-{10**20}-training.json"  # no process has such a number
    draft_file.write_text("half")
    os.utime(draft_file, (0, 0))
    ran: list[tuple[int, int]] = []
    stages = new_boost(target, draft, data, cut).run(2, save_every=3, on_step=lambda n, p: ran.append((n, p.step)))
    assert ran == [(2, step) for step in range(4, 9)] and len(stages) == 2
    assert draft_file.exists() == (os.name != "posix")
    for number in ("1", "2"):
        assert same(weights(whole / number), weights(cut / number))
    with pytest.raises(ValueError, match="other settings"):
        new_boost(target, draft, data, cut, seed=4).run(2)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_series_keeps_its_steps(target: Path, draft: Path, data: Path, tmp_path: Path, steps: int) -> None:
    """More would change the first model, which the second one builds on; nothing of the series is touched."""
    new_boost(target, draft, data, tmp_path, steps=1).run(1)
    new_boost(target, draft, data, tmp_path, steps=2).run(2)  # a single model may have more
    before = [weights(tmp_path / number) for number in ("1", "2")]
    with pytest.raises(ValueError, match="with its 2 steps: give --steps 2, or another --out"):
        new_boost(target, draft, data, tmp_path, steps=steps).run(2)
    assert all(same(weights(tmp_path / number), old) for number, old in zip("12", before, strict=True))
    new_boost(target, draft, data, tmp_path, steps=2).run(2)


def test_a_series_of_another_target_is_not_taken_up(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    new_boost(target, draft, data, out, steps=2).run(1)
    shutil.copytree(target, other)
    tensors = weights(target)
    tensors["model.layers.0.mlp.up_proj.weight"] += 0.1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"other settings \(another model\)"):
        new_boost(other, draft, data, out, steps=2).run(1)


def test_conversations_are_sent_to_distill(target: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(target, chat_template=template)
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    with pytest.raises(
        ValueError, match=r"text=teacher continues texts, .* learn those with train distill --text fixed"
    ):
        Workshop(load_model(target), tokenizer, [tmp_path / "chats.jsonl"], tmp_path / "corpus", RUN)


def test_nothing_left_ends_the_series(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    boost = new_boost(target, draft, data, tmp_path, steps=1)
    boost._targets = best_tokens(load_model(draft, dtype="float32").model, boost.rows)  # type: ignore[attr-defined]
    boost._cross_off(load_model(draft, dtype="float32").model)  # type: ignore[attr-defined]
    assert boost.run(2) == []


def test_bad_settings(target: Path, draft: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text=teacher, not fixed"):
        new_boost(target, draft, data, tmp_path, text="fixed")
    with pytest.raises(ValueError, match="length must be at least 1"):
        new_boost(target, draft, data, tmp_path, length=0)


def test_a_draft_model_of_a_short_context_is_refused_before_the_target_writes(
    target: Path, draft: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = shutil.copytree(draft, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    monkeypatch.setattr(Workshop, "written_rows", lambda shop: pytest.fail("the target writes"))
    with pytest.raises(ValueError, match="--context 32 is longer than the draft model's 16"):
        new_boost(target, short, data, tmp_path / "out")


def test_the_command_and_the_ready_spec(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "boost"
    command = ["train", "boost", "--target", str(target), "--draft", str(draft), "--data", str(data), "--out", str(out)]
    options = ["--steps", "4", "--batch-size", "2", "--context", "32", "--written", "12", "--json"]
    assert main([*command, *options]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert report["spec"] == ready_spec([out / "1", out / "2"])
    assert report["spec"] in captured.err.replace("\n", "")
    assert [stage["number"] for stage in report["stages"]] == [1, 2]
    assert report["stages"][1]["coverage"] >= report["stages"][0]["coverage"]
    assert report["stages"][1]["together"]["greedy"]["mean_acceptance_length"] >= 1
    card = (out / "2/README.md").read_text()
    assert "train boost" in card and "--count 2 --length 1" in card and "number 2" in card
    llm = ft.load(str(target), drafter=report["spec"], controller="constant", dtype="float32")
    output = llm.generate("one two three", max_new_tokens=16)
    assert output.token_ids == llm.plain.generate("one two three", max_new_tokens=16).token_ids
    assert output.stats.num_draft_tokens > 0
