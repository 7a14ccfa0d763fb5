"""``foretoken tune --target X --out profile.json``: what it writes and who reads it, an interrupt, bad input."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model
from transformers import AutoTokenizer

import foretoken as ft
from foretoken.cli.options import Common
from foretoken.lab.tune import race, search
from foretoken.lab.tune.tuned import TuneJob
from foretoken.models.other.table import TableModel

SHORT = ("--new-tokens", "24", "--max-prompts", "3", "--minutes", "5", "--drafters", "ngram,jacobi,m=4")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Prompts with categories, as a benchmark has them."""
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text, "category": "code"} for text in ("for item in items", "def add(a, b):", "print(a, a, a")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few timed calls: the figures do not matter here."""
    monkeypatch.setattr(search, "COUNTS", ((1, 4, 16),))
    monkeypatch.setattr(search, "REPEATS", 1)
    monkeypatch.setattr(search, "CURVE", 1e9)
    monkeypatch.setattr(race, "TOLERANCE", 1e9)  # the machine may be as busy as it likes


def check(result: Any, *words: str) -> None:
    assert result.code == 2
    assert result.out == ""
    assert result.err.splitlines()[-1].startswith("error: ") and "Traceback" not in result.err
    for word in words:
        assert word in result.err.splitlines()[-1], result.err


@pytest.mark.usefixtures("quick")
def test_the_profile_is_read_by_other_commands(
    run: Any, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "PAYS", 0.0)  # whatever is fastest on a busy machine, it is a drafter
    out = tmp_path / "new" / "profile.json"
    result = run("tune", "--target", target, "--prompts", prompts, "--out", str(out), *SHORT, "--json")
    assert result.code == 0, result.err
    report = result.json
    assert set(report) == {
        "drafter", "verifier", "controller", "temperature", "speedup", "plain_tokens_per_s", "table", "skipped", "out",
        "prompts", "new_tokens", "complete", "spent_s", "loading_s",
    }  # fmt: skip
    stored = json.loads(out.read_text())
    assert stored["target"]["source"] == target and stored["drafter"] == report["drafter"]
    assert all(row["texts"] > 0 and row["differing"] == 0 for row in report["table"])
    drafters = {row["drafter"].split(",")[0] for row in report["table"]}
    assert {"ngram", "jacobi"} <= drafters <= {"ngram", "jacobi", "router"}
    assert set(report["table"][0]) == {
        "drafter", "controller", "speedup", "tokens_per_round", "tokens", "compared", "why", "texts", "differing",
    }  # fmt: skip
    assert set(stored["costs"]["target_s"]) == {"1", "4", "16"}
    command = ("generate", "for item", "--target", target, "--max-new-tokens", "16", "--json")
    tuned = run(*command, "--profile", str(out))
    assert tuned.code == 0 and "warning" not in tuned.err, tuned.err
    assert tuned.json["token_ids"] == run(*command, "--drafter", "none").json["token_ids"]


LAST_TIME = """
from foretoken import Drafter, TokenTree


class LastTime(Drafter):
    name = "last_time"

    def __init__(self, k: int = 4, until: int = 1000) -> None:
        self.max_depth, self.until = k, until

    def propose(self, context, budget):
        tokens = context.tokens
        if len(tokens) - context.prompt_length > self.until:
            raise KeyError("lost")
        return TokenTree.chain(context.root, tokens[-2:][: budget.max_depth])
"""


@pytest.mark.usefixtures("quick")
def test_the_command_for_a_drafter_in_a_file_works(
    run: Any, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile runs no code: the file must be named, too."""
    monkeypatch.setattr(search, "PAYS", 0.0)
    (tmp_path / "own.py").write_text(LAST_TIME)
    out, spec = tmp_path / "profile.json", f"{tmp_path / 'own.py'}:LastTime,k=3"
    options = (*SHORT[:-1], spec)
    result = run("tune", "--target", target, "--prompts", prompts, "--out", str(out), *options)
    assert result.code == 0, result.err
    command = result.out[result.out.index("foretoken generate") :]
    words = shlex.split(command)[1:]
    assert words[-4:] == ["--profile", str(out), "--drafter", spec]
    assert run(*words[:2], "for item", *words[2:], "--max-new-tokens", "4").code == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("until", [0, 12])
def test_a_drafter_whose_code_fails_costs_no_other(
    run: Any, target: str, prompts: str, tmp_path: Path, until: int
) -> None:
    (tmp_path / "own.py").write_text(LAST_TIME)
    out, spec = tmp_path / "profile.json", f"{tmp_path / 'own.py'}:LastTime,until={until}"
    options = (*SHORT[:-1], f"ngram,{spec}")
    result = run("tune", "--target", target, "--prompts", prompts, "--out", str(out), *options)
    assert result.code == 1 and "LastTime.propose (own.py, line " in result.out, result.err
    assert {row["drafter"].split(",")[0] for row in json.loads(out.read_text())["table"]} == {"ngram"}


@pytest.mark.usefixtures("quick")
def test_elsewhere_a_profile_warns_and_works(
    run: Any, target: str, prompts: str, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "profile.json"
    result = run("tune", "--target", target, "--prompts", prompts, "--out", str(out), *SHORT)
    assert result.code == 0 and "plain decoding" in result.out and "tokens/round" in result.out, result.err
    stored = json.loads(out.read_text())
    out.write_text(json.dumps({**stored, "drafter": "ngram", "controller": "auto"}))
    other = str(save_model(tmp_path / "other", tokenizer, seed=3))
    command = ("generate", "for item", "--max-new-tokens", "16", "--json")
    generated = run(*command, "--target", other, "--profile", str(out))
    assert generated.code == 0
    (line,) = [line for line in generated.err.splitlines() if line.startswith("warning: ")]
    assert "another target" in line and "foretoken tune" in line
    assert generated.json["token_ids"] == run(*command, "--target", other, "--drafter", "none").json["token_ids"]
    stored["machine"]["torch_threads"] = 77
    out.write_text(json.dumps({**stored, "drafter": "ngram", "controller": "auto"}))
    moved = run(*command, "--target", target, "--profile", str(out))
    assert moved.code == 0 and "torch_threads was 77" in moved.err and "measured again" in moved.err


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("by_signal", [False, True])
def test_an_early_end_prints_and_keeps_the_answer_so_far(
    run: Any, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_signal: bool
) -> None:
    out = tmp_path / "profile.json"
    original = TuneJob.build

    def ended(job: TuneJob, spec: str) -> Any:
        if spec.startswith("jacobi"):
            if by_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise KeyboardInterrupt
        return original(job, spec)

    monkeypatch.setattr(TuneJob, "build", ended)
    before = signal.getsignal(signal.SIGTERM)
    result = run("tune", "--target", target, "--prompts", prompts, "--out", str(out), *SHORT)
    assert result.code == (143 if by_signal else 130), result.err
    assert result.err.splitlines()[-1] == ("terminated" if by_signal else "interrupted")
    assert "ngram,k=16" in result.out and "ended early" in result.out
    stored = json.loads(out.read_text())
    assert stored["complete"] is False and [row["drafter"] for row in stored["table"]] == ["ngram,k=16"]
    assert signal.getsignal(signal.SIGTERM) == before
    assert run("generate", "for item", "--target", target, "--profile", str(out), "--max-new-tokens", "4").code == 0


@pytest.mark.usefixtures("quick")
def test_an_interrupted_search_keeps_the_profile_of_a_complete_one(
    run: Any, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, beside = tmp_path / "profile.json", tmp_path / "profile.interrupted.json"
    build = TuneJob.build

    def ended(job: TuneJob, spec: str) -> Any:
        if spec.startswith("jacobi"):
            raise KeyboardInterrupt
        return build(job, spec)

    monkeypatch.setattr(TuneJob, "build", ended)
    command = ("tune", "--target", target, "--prompts", prompts, "--out", str(out), *SHORT)
    for kept in ('{"drafter": "recycling"}', '{"drafter": "recycling", "complete": true}'):  # by hand, and complete
        out.write_text(kept)
        beside.unlink(missing_ok=True)
        result = run(*command)
        assert (result.code, out.read_text()) == (130, kept), result.err
        assert f"{out} is kept" in result.err and f"its results so far are in {beside}" in result.err
        assert json.loads(beside.read_text())["complete"] is False and str(beside) in result.out
    assert run(*command, "--json").json["out"] == str(beside)
    out.write_text(beside.read_text())  # of an interrupted search, too
    beside.unlink()
    assert run(*command, "--json").json["out"] == str(out) and not beside.exists()


@pytest.mark.usefixtures("quick")
def test_without_out_the_profile_has_the_models_name(
    run: Any, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("tune", target, "--prompts", prompts, *SHORT[:-1], "ngram", "--json")
    assert result.code == 0 and result.json["out"] == f"{Path(target).name}.profile.json"
    assert (tmp_path / result.json["out"]).exists()


@pytest.mark.usefixtures("quick")
def test_folders_and_a_profile_offer_drafters(
    run: Any, tokenizer: Any, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model that the user names, one inside the model's own folder, and what a profile says."""
    monkeypatch.setattr(search, "further", lambda *args: [])
    model = save_model(tmp_path / "model", tokenizer)
    save_model(model / "inside", tokenizer, noise=0.02)
    named = save_model(tmp_path / "named", tokenizer, noise=0.02)
    profile = tmp_path / "old.json"
    profile.write_text('{"drafter": "recycling"}')
    options = ("--draft", str(named), "--profile", str(profile), *SHORT[:-2], "--out", str(tmp_path / "new.json"))
    result = run("tune", str(model), "--prompts", prompts, *options, "--json")
    assert result.code == 0, result.err
    tried = {row["drafter"] for row in result.json["table"]} | set(result.json["skipped"])
    assert {f"model:{named},k=8", f"model:{model / 'inside'},k=8", "recycling"} <= tried, tried
    result = run("tune", str(model), "--prompts", prompts, *options, "--drafters", "ngram,k=8", "--json")
    tried = {row["drafter"] for row in result.json["table"]} | set(result.json["skipped"])
    assert {f"model:{named},k=8", "recycling", "ngram,k=8"} <= tried, tried
    assert not any("inside" in spec for spec in tried), "only these and what was named"
    empty = tmp_path / "empty"
    empty.mkdir()
    check(run("tune", str(model), "--draft", str(empty), *SHORT), "contains no drafter", "foretoken drafters")


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--drafters", "nosuch"), ("nosuch", "choose one of", "ngram")),
        (("--drafters", "ngram,z=3"), ("valid ones",)),
        (("--drafters", "model"), ("needs a path",)),
        (("--drafters", "ngram,,suffix"), ("empty item",)),
        (("--prompts", "no/such/prompts.txt"), ("no/such/prompts.txt",)),
        (("--temperature", "-1"), ("temperature",)),
        (("--minutes", "0"), ("minutes",)),
        (("--minutes", "0.0001"), ("too little to measure anything", "give --minutes")),
        (("--draft", "./no/such/folder"), ("no such folder or file",)),
        (("--new-tokens", "8"), ("--new-tokens",)),
        (("--new-tokens", "160"), ("no prompt fits with",)),
        (("--target", "./no/such/folder"), ("no/such/folder",)),
        (("--no-such-option",), ("--no-such-option",)),
    ],
)
def test_bad_options(run: Any, target: str, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check(run("tune", "--target", target, "--out", str(tmp_path / "p.json"), *arguments), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content"),
    [("p.txt", b"\n\n"), ("p.jsonl", b""), ("p.jsonl", b'{"a": 1}\n'), ("p.jsonl", b"{\n"), ("p.txt", b"\xff\xfe")],
)
def test_prompt_files_of_the_wrong_shape(run: Any, target: str, tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    check(run("tune", "--target", target, "--out", str(tmp_path / "o.json"), "--prompts", str(file)), name)


def test_files_and_places(run: Any, target: str, prompts: str, tmp_path: Path) -> None:
    command = ("tune", "--target", target, "--prompts", prompts)
    check(run(*command, "--out", str(tmp_path)), "is a folder")
    check(run(*command, "--out", f"{prompts}/x.json", "--drafters", "ngram"), "choose another folder")
    check(run(*command, "--out", str(tmp_path / "new" / "x.json"), "--drafters", "nosuch"), "nosuch")
    assert not (tmp_path / "new").exists()
    check(run("tune", "--target", target, "layer-skip", "--out", "x.json"), "--target", "after the subcommand")


def test_the_group_alone_shows_help(run: Any) -> None:
    result = run("tune")
    assert result.code == 2
    for word in ("layer-skip", "tree", "--drafters"):
        assert word in result.out + result.err


def test_the_backend_reads_the_tokenizer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are encoded as the model that is measured encodes them."""
    asked: list[tuple[str, str]] = []

    def model(source: str, **options: Any) -> TableModel:
        asked.append((source, options["backend"]))
        return TableModel(lambda _: torch.ones(4, dtype=torch.float64), 4)

    monkeypatch.setattr("foretoken.loading.load_model", model)
    monkeypatch.setattr(
        "foretoken.loading.load_tokenizer", lambda source, backend="auto": asked.append((source, backend))
    )
    subject = Common(target="x.gguf", backend="llama.cpp").subject()
    assert asked == [("x.gguf", "llama.cpp")] * 2 and subject.tokenizer is None


def test_a_measured_chat_model_ends_with_its_turns(target: str, tmp_path: Path) -> None:
    """As when it is loaded for generation: the end of a turn need not be the checkpoint's end of text."""
    folder = tmp_path / "chat"
    shutil.copytree(target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn_end>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<turn_end>{% endfor %}"
    tokenizer.save_pretrained(folder)
    ends = Common(target=str(folder)).subject().target.eos_token_ids
    assert tokenizer.convert_tokens_to_ids("<turn_end>") in ends
    assert ends == ft.load(str(folder), None).target.eos_token_ids
