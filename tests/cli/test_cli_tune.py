"""``foretoken tune layer-skip``: the search, its result, an interrupt, going on, and bad input."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONTEXT
from transformers import BloomConfig, BloomForCausalLM

from foretoken.lab.tune import layer_skip
from foretoken.lab.tune.layer_skip import first_sets, tune
from foretoken.lab.workload import Speed, Subject, Workload
from foretoken.methods.drafters.skip_sets import SkipSet, load_skips
from foretoken.models.huggingface import HuggingFaceModel
from models.checkpoints import new_model
from toys import llama

SHORT = ("--trials", "3", "--new-tokens", "4", "--max-prompts", "2", "--seed", "0")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Three prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("for item in", "def add(a,", "print(")))
    return str(file)


def check(result: Any, *words: str) -> None:
    assert result.code == 2
    assert result.out == ""
    assert result.err.splitlines()[-1].startswith("error: ") and "Traceback" not in result.err
    for word in words:
        assert word in result.err.splitlines()[-1], result.err


def test_the_result_loads_as_a_drafter(run: Any, target: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "skips.json"
    result = run("tune", "layer-skip", "--target", target, "--prompts", prompts, "--out", str(out), *SHORT, "--json")
    assert result.code == 0, result.err
    report = result.json
    assert set(report) == {"trials", "chosen", "plain", "default", "best", "out"}
    assert (report["trials"], report["out"]) == (3, str(out)) and report["chosen"] in ("default", "best")
    for name in ("default", "best"):
        assert report[name]["speedup"] == pytest.approx(report[name]["tokens_per_s"] / report["plain"]["tokens_per_s"])
    saved = json.loads(out.read_text())
    chosen = report[report["chosen"]]
    assert {key: saved[key] for key in ("attention", "mlp", "tokens_per_s", "speedup")} == {
        key: chosen[key] for key in ("attention", "mlp", "tokens_per_s", "speedup")
    }
    assert saved["target"]["layers"] == 2 and (saved["new_tokens"], saved["k"]) == (4, 8)
    outputs = [
        run("generate", "for", "--target", target, "--drafter", spec, *more, "--max-new-tokens", "12", "--json").json
        for spec, more in (("none", ()), (f"layer_skip:{out},k=3", ("--controller", "constant")))
    ]
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]
    assert outputs[1]["stats"]["num_draft_tokens"] > 0


def test_sets_are_queued_silently(
    run: Any, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed search wrote a line of a library's log over the progress bar for every set that was queued already."""
    optuna = pytest.importorskip("optuna")
    levels: list[int] = []
    monkeypatch.setattr(optuna.Study, "enqueue_trial", lambda *_, **more: levels.append(optuna.logging.get_verbosity()))
    out = tmp_path / "skips.json"
    assert run("tune", "layer-skip", "--target", target, "--prompts", prompts, "--out", str(out), *SHORT).code == 0
    assert levels and set(levels) == {optuna.logging.ERROR}
    assert optuna.logging.get_verbosity() != optuna.logging.ERROR


def test_the_table_and_going_on(run: Any, target: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "skips.json"
    command = ("tune", "layer-skip", "--target", target, "--prompts", prompts, "--out", str(out), *SHORT)
    result = run(*command, "--resume")
    assert result.code == 0, result.err
    assert result.err.count(f"nothing to resume: {out}.study has no trials; it starts anew") == 1
    for word in ("plain", "default", "best", "tokens/s", "speed-up", f"layer_skip:{out}"):
        assert word in result.out
    check(run(*command), "holds 3 trials", "--resume")
    going_on = run(*command, "--trials", "4", "--resume").err
    assert "4/4" in going_on and "nothing to resume" not in going_on
    more = run(*command, "--trials", "5", "--resume", "--json")
    assert more.json["trials"] == 5
    assert run(*command, "--resume", "--json").json["trials"] == 5  # nothing left to try: the comparison alone
    check(run(*command, "--new-tokens", "5", "--resume"), "other prompts or other options")
    study = Path(f"{out}.study")
    study.write_text("{]\n")
    check(run(*command, "--resume"), "damaged", "delete it")


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_keeps_the_best_so_far(
    run: Any,
    target: str,
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
    line: str,
) -> None:
    out, calls = tmp_path / "skips.json", []
    original = layer_skip.measured

    def interrupted(work: Workload, k: int, skips: SkipSet | None) -> Speed:
        calls.append(skips)
        if len(calls) == 5:  # two warm-ups, two trials
            os.kill(os.getpid(), number)
        return original(work, k, skips)

    command = ("tune", "layer-skip", "--target", target, "--prompts", prompts, "--out", str(out), *SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(layer_skip, "measured", interrupted)
        result = run(*command)
    assert (result.code, result.out) == (code, "")
    assert str(out) in result.err and "--resume" in result.err and result.err.splitlines()[-1] == line
    saved = json.loads(out.read_text())
    assert SkipSet(frozenset(saved["attention"]), frozenset(saved["mlp"])) in calls[2:4]
    assert not list(tmp_path.glob(".*.tmp"))
    assert run(*command, "--resume", "--json").json["trials"] == 3


def test_built_in_prompts(run: Any, target: str, tmp_path: Path) -> None:
    out = str(tmp_path / "skips.json")
    short = ("--trials", "1", "--new-tokens", "2", "--max-prompts", "1")
    result = run("tune", "layer-skip", "--target", target, "--out", out, *short)
    assert result.code == 0, result.err
    assert "1 trials, 1 prompts of 2 new tokens" in result.out


# -- the search itself -----------------------------------------------------------------------------------------------


def test_the_search_finds_a_planted_optimum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a made-up clock that likes one of 4096 sets, 80 trials find it or a neighbour (80 random ones: 22 %)."""
    work = Workload(Subject(HuggingFaceModel(new_model("llama", num_hidden_layers=6))), [[1, 2, 3]])
    optimum = {("attention", 2), ("attention", 4), ("attention", 5), ("mlp", 0), ("mlp", 4)}
    measured: list[SkipSet | None] = []

    def distance(skips: SkipSet) -> int:
        return len({(kind, layer) for kind in ("attention", "mlp") for layer in getattr(skips, kind)} ^ optimum)

    def speed(work: Workload, k: int, skips: SkipSet | None) -> Speed:
        measured.append(skips)
        return Speed(10.0 if skips is None else 20.0 - distance(skips))

    monkeypatch.setattr(layer_skip, "measured", speed)
    seen: list[tuple[int, float]] = []
    file = tmp_path / "skips.json"
    outcome = tune(work, 8, file, 80, on_trial=lambda number, last, search: seen.append((number, search.best_speed)))
    assert measured[2:6] == first_sets(6)  # before anything random
    assert [number for number, _ in seen] == list(range(81))
    best = [speed for _, speed in seen]
    assert best == sorted(best) and best[-1] >= 19.0
    assert outcome.chosen == "best" and outcome.speedup("best") >= 1.9
    assert load_skips(file, work.target) == outcome.sets["best"]


def test_luck_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A set that was fast once and is slow in the last comparison is not written; ties go to the default set."""
    work = Workload(Subject(HuggingFaceModel(llama())), [[1, 2, 3]])
    lucky = SkipSet(attention=frozenset({0, 1}))
    monkeypatch.setattr(layer_skip, "first_sets", lambda layers: [SkipSet.odd(layers), lucky])
    clock = iter(range(100))

    def speed(work: Workload, k: int, skips: SkipSet | None) -> Speed:
        return Speed(50.0 if skips == lucky and next(clock) == 0 else 10.0)

    monkeypatch.setattr(layer_skip, "measured", speed)
    outcome = tune(work, 8, tmp_path / "skips.json", 2)
    assert outcome.sets["best"] == lucky and outcome.chosen == "default"
    assert json.loads((tmp_path / "skips.json").read_text())["attention"] == []


def test_what_is_tried_first() -> None:
    sets = first_sets(8)
    assert sets[0] == SkipSet.odd(8) and len(sets) == len(set(sets)) == 4
    assert sets[3].options == {"attention": "1+2+3+4+5+6", "mlp": "none"}


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--trials", "0"), ("--trials",)),
        (("--new-tokens", "1"), ("--new-tokens",)),
        (("--prompts", "no/such/prompts.txt"), ("no/such/prompts.txt",)),
        (("--temperature", "-1"), ("temperature",)),
        (("--target", "./no/such/folder"), ("no/such/folder",)),
        (("--new-tokens", str(CONTEXT)), ("no prompt fits with",)),
        (("--no-such-option",), ("--no-such-option",)),
    ],
)
def test_bad_options(run: Any, target: str, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    out = tmp_path / "skips.json"
    check(run("tune", "layer-skip", "--target", target, "--out", str(out), *arguments), *words)
    assert not out.exists()


def test_bad_files(run: Any, target: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    command = ("tune", "layer-skip", "--target", target, "--out")
    check(run(*command, str(tmp_path / "x.json"), "--prompts", str(empty)), "empty.txt")
    check(run(*command, str(tmp_path), "--prompts", "none.txt"), "is a folder")  # before anything is read
    check(run("tune", "layer-skip"), "--out")


def test_a_target_that_cannot(run: Any, tokenizer: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=320, hidden_size=16, n_layer=2, n_head=2))
    bloom.save_pretrained(tmp_path / "bloom")
    tokenizer.save_pretrained(tmp_path / "bloom")
    command = ("tune", "layer-skip", "--target", str(tmp_path / "bloom"), "--out", str(tmp_path / "x.json"))
    check(run(*command), "self-speculation", "ALiBi")


def test_without_optuna(run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    command = ("tune", "layer-skip", "--target", target, "--out", str(tmp_path / "x.json"), *SHORT)
    check(run(*command), "foretoken[tune]")


def test_the_group_shows_its_commands(run: Any) -> None:
    result = run("tune", "--help")
    assert result.code == 0 and "layer-skip" in result.out
