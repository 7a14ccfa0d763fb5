"""Bad input: one line on stderr that says what to do, exit code 2, no traceback."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONTEXT, TEXT, save_model
from transformers import AutoTokenizer

from foretoken.__main__ import main as run_command
from foretoken.cli.options import Common
from foretoken.cli.variables import known_variables
from foretoken.training.corpus import train_tokenizer


def check(result: Any, *words: str) -> None:
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1 and "Traceback" not in result.err
    for word in words:
        assert word in result.err, result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "x", "--drafter", "nosuch"), ("unknown drafter 'nosuch'", "model", "ngram")),
        (("generate", "x", "--verifier", "nosuch"), ("unknown verifier 'nosuch'", "traversal")),
        (("generate", "x", "--controller", "nosuch"), ("unknown controller 'nosuch'", "constant")),
        (("chat", "--drafter", "nosuch"), ("unknown drafter", "ngram")),
        (("doctor", "--drafter", "nosuch"), ("unknown drafter", "ngram")),
        (("parity", "--drafter", "nosuch"), ("unknown drafter", "ngram")),
        (("generate", "x", "--drafter", "ngram,k"), ("key=value",)),
        (("generate", "x", "--no-such-option"), ("--no-such-option",)),
        (("generate", "x", "--max-new-tokens", "many"), ("--max-new-tokens", "integer")),
        (("nosuch",), ("nosuch",)),
        (("methods", "--role", "nosuch"), ("drafter", "controller")),
        (("generate", "x", "--compare", "--repeat", "0"), ("--repeat",)),
        (("parity", "--samples", "-1"), ("--samples",)),
        (("doctor", "--repeat", "0"), ("--repeat",)),
        (("generate", "x", "--prompt-file", "y"), ("not both",)),
        (("generate", "--prompt-file", "no/such/file"), ("no/such/file",)),
        (("generate", "x", "--target", "./no/such/folder"), ("no/such/folder", "not a folder")),
        (("generate", "x", "--profile", "no/such/profile.json"), ("no/such/profile.json",)),
        (("generate", "x", "--temperature", "-1"), ("temperature", ">= 0")),
        (("generate", "x", "--temperature", "nan"), ("temperature",)),
        (("generate", "x", "--top-p", "0"), ("top_p", "(0, 1]")),
        (("generate", "x", "--top-p", "1.5"), ("top_p", "(0, 1]")),
        (("generate", "x", "--top-k", "-1"), ("top_k",)),
        (("generate", "x", "--min-p", "2"), ("min_p", "[0, 1]")),
        (("generate", "x", "--seed", "-1"), ("seed", "0 to 2**64 - 1", "-1")),
        (("generate", "x", "--seed", str(2**64)), ("seed", "0 to 2**64 - 1")),
        (("chat", "--seed", "-1"), ("seed", "0 to 2**64 - 1")),
        (("parity", "--seed", "-1"), ("seed", "0 to 2**64 - 1")),
        (("bench", "--seed", "-1"), ("seed", "0 to 2**64 - 1")),
        (("tune", "--seed", "-1", "--out", "x.json"), ("seed", "0 to 2**64 - 1")),
        (("parity", "--prompts", "no/such/prompts.txt"), ("no/such/prompts.txt",)),
    ],
)
def test_bad_options(run: Any, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check(run(*arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), ("prompt is empty",)),
        (("x" * 4 * CONTEXT,), ("context", str(CONTEXT), "shorten")),
        (("x", "--max-new-tokens", "0"), ("max_new_tokens must be at least 1",)),
        (("x", "--max-new-tokens", "100000"), ("max_new_tokens=100000", str(CONTEXT))),
        (("x", "--drafter", "ngram,zzz=1"), ("unknown option 'zzz'", "min_n")),
        (("x", "--drafter", "ngram,k=two"), ("k='two'", "int")),
        (("x", "--drafter", "model"), ("model:PATH",)),
        (("x", "--drafter", "ngram", "--verifier", "typical"), ("allow_lossy",)),
        (("x", "--dtype", "float7"), ("float7", "bfloat16")),
        (("x", "--device", "nosuch"), ("nosuch",)),
        (("x", "--compare", "--drafter", "none"), ("needs a drafter",)),
        (("x", "--stop", ""), ("stop string",)),
    ],
)
def test_bad_requests(run: Any, target: str, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check(run("generate", "--target", target, *arguments), *words)
    check(run("generate", "--target", target, *arguments, "--json"), *words)


def test_python_m_exits_with_the_same_code() -> None:
    for arguments, code in ((("generate", "x", "--drafter", "nosuch"), 2), (("nosuch",), 2), (("--help",), 0)):
        done = subprocess.run([sys.executable, "-m", "foretoken", *arguments], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("error: ") == (code == 2)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def garble_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file at all")


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    remove_weights(folder)


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def spoil_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def contradict_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 5}))


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove_weights, ("no *.safetensors", "incomplete")),
        (cut_weights, ("half-written",)),
        (garble_weights, ("not a safetensors file",)),
        (pickle_weights, ("pickled", "safe_serialization")),
        (drop_a_tensor, ("lacks 1 weights", "model.norm.weight")),
        (spoil_a_tensor, ("NaN",)),
        (remove_config, ("config.json",)),
        (spoil_config, ("cannot load",)),
        (contradict_config, ("cannot load",)),
        (lose_a_shard, ("model-00002-of-00002.safetensors",)),
    ],
)
def test_damaged_checkpoints(
    run: Any, target: str, tmp_path: Path, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(target, folder)
    damage(folder)
    check(run("generate", "x", "--target", str(folder), "--drafter", "none"), *words)
    if damage is not spoil_a_tensor:  # a draft model of NaN is found when it drafts, see below
        check(run("generate", "x", "--target", target, "--drafter", f"model:{folder}"), *words)


def test_a_draft_model_with_another_tokenizer(run: Any, target: str, tmp_path: Path) -> None:
    train_tokenizer([TEXT.replace("item", "thing")], 300, tmp_path / "tokenizer")
    other = save_model(tmp_path / "other", AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    check(run("generate", "x", "--target", target, "--drafter", f"model:{other}"), "another tokenizer", "ngram")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"drafter": 3}', '{"verifier": null}', '{"drafter": "nosuch"}', "\x00\xff"]
)
def test_bad_profiles(run: Any, target: str, tmp_path: Path, text: str) -> None:
    profile = tmp_path / "profile.json"
    profile.write_bytes(text.encode("latin-1"))
    words = ("is not UTF-8 text",) if text.endswith("\xff") else ()
    check(run("generate", "x", "--target", target, "--profile", str(profile)), *words)


@pytest.mark.parametrize(
    ("name", "content"), [("p.txt", b""), ("p.txt", b"\xff\xfe\xff"), ("p.jsonl", b'{"a": 1}\n'), ("p.jsonl", b"{\n")]
)
def test_bad_prompt_files(run: Any, target: str, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    check(run("parity", "--target", target, "--prompts", str(tmp_path / name)), name)


def test_an_empty_stdin_that_was_asked_for_is_an_empty_prompt(
    run: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    check(run("generate", "-", "--target", target), "standard input is empty")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_stdin_that_is_not_utf_8(run: Any, target: str, monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    for arguments in (("-",), ()):
        stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", stdin)
        check(run("generate", *arguments, "--target", target), "standard input is not UTF-8 text")


def test_sampling_and_empty_prompts_are_checked_before_the_model_is_loaded(
    run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Common, "load", lambda *_, **__: pytest.fail("the model is loaded first"))
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.setattr("sys.stdin", None)
    for more in (
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "2"),
        ("--top-k", "-3"),
        ("--min-p", "3"),
    ):
        for command in ("generate", "show", "chat"):
            check(run(command, "--target", target, *more), more[0][2:].replace("-", "_"))
    for command in ("generate", "show"):
        check(run(command, target, ""), "prompt is empty")
        check(run(command, "--target", target, "--prompt-file", str(tmp_path / "empty.txt")), "prompt is empty")


# -- what is not an error of the user --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "error: No space left on device\n"),
        (OSError(28, "No space left on device", "a/b"), "error: No space left on device: a/b\n"),
        (OSError("it is gone"), "error: it is gone\n"),
    ],
)
def test_errors_of_the_system_have_no_number(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    def fails(self: Common) -> None:
        raise error

    monkeypatch.setattr(Common, "check", fails)
    assert run("generate", "x").err == message


def test_debug_shows_the_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown drafter"):
        run("generate", "x", "--drafter", "nosuch")


def test_our_own_bugs_keep_their_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("foretoken.llm.load", broken)
    with pytest.raises(TypeError, match="a bug"):
        run("generate", "x")


def test_ctrl_c_is_one_line_and_exit_code_130(run: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foretoken.llm.Llm.generate", interrupted)
    result = run("generate", "x", "--target", target, "--json")
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def test_ctrl_c_before_the_command_line_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing Typer takes half a second in which ``main`` does not exist yet."""

    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "foretoken.cli.main", Interrupted("foretoken.cli.main"))
    assert run_command() == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_no_arguments_show_the_help(run: Any) -> None:
    result = run()
    assert result.code == 2
    assert "generate" in result.out + result.err and "Traceback" not in result.err


def test_the_version_is_the_packages(run: Any) -> None:
    import foretoken

    result = run("--version")
    assert (result.code, result.out, result.err) == (0, f"foretoken {foretoken.__version__}\n", "")


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes them")
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_lead_nowhere(closed: str) -> None:
    command = [sys.executable, "-m", "foretoken", "methods", "--json"]
    done = subprocess.run(["sh", "-c", f"{shlex.join(command)} {closed}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_misspelt_variable_is_named_with_the_closest_name(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_CPUU", "avx2")
    monkeypatch.setenv("FORETOKEN_MAX_RUNING", "4")
    result = run("methods", "--json")
    text = "warning: the environment variable {} is ignored: foretoken has no variable of that name; closest: {}\n"
    pairs = (("FORETOKEN_CPUU", "FORETOKEN_CPU"), ("FORETOKEN_MAX_RUNING", "FORETOKEN_MAX_RUNNING"))
    assert (result.code, result.err) == (0, "".join(text.format(*pair) for pair in pairs))


def test_known_variables_and_those_of_kubernetes_are_not_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_RUNNING", "API_KEYS", "SAMPLES", "SERVICE_HOST", "PORT_8000_TCP_ADDR", "WEB_SERVICE_PORT_HTTP"):
        monkeypatch.setenv(f"FORETOKEN_{name}", "1")
    monkeypatch.setenv("FORETOKEN_WEB_PORT", "tcp://10.0.0.1:80")
    assert run("methods", "--json").err == ""


def test_every_variable_that_is_read_is_known() -> None:
    """In the package, the build and the tests; but for those that the tests of misspelt names make up."""
    root = Path(__file__).resolve().parents[2]
    files = [root / "setup.py", *(root / "src").rglob("*.py"), *(root / "tests").rglob("*.py")]
    pattern = re.compile(r"\bFORETOKEN_[A-Z_]*[A-Z]\b")
    read = {name for file in files if file != Path(__file__) for name in pattern.findall(file.read_text("utf-8"))}
    assert {"FORETOKEN_CPU", "FORETOKEN_FAKE_CUDA", "FORETOKEN_WHEEL_KERNELS"} <= read
    assert read <= known_variables()
