"""``foretoken export`` and ``foretoken import`` as a user types them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_nets import save_net

from foretoken.cli.main import main
from foretoken.registry import rows
from foretoken.training.formats.catalogue import LAYOUTS, find_layout


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(scope="module")
def folders(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One drafter per method."""
    base = tmp_path_factory.mktemp("drafters")
    read = {"layers": "1,2,3"}  # SGLang reads no output of the last layer
    return {
        method: save_net(method, base / method, target, **more)
        for method, more in (("medusa", {}), ("eagle", {}), ("eagle3", read))
    }


def test_people_read_two_lines(
    folders: dict[str, Path], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, out = f"eagle3:{folders['eagle3']}", tmp_path / "out"
    code, text, error = run(capsys, "export", spec, "--out", out, "--target", target, "--engine", "vllm")
    assert (code, error) == (0, "")
    first, second = text.splitlines()
    assert re.fullmatch(rf"eagle3 in the format plain: 3 files, \d+\.\d MB -> {out}", first)
    chosen = f'{{"method": "eagle3", "model": "{out}", "num_speculative_tokens": 5}}'
    assert second == f"vllm: --speculative-config '{chosen}'" and json.loads(chosen)
    code, text, error = run(capsys, "import", out, "--out", tmp_path / "back", "--target", target)
    assert (code, error) == (0, "")
    assert text.splitlines()[0].startswith("eagle3 from the format plain: 2 files")
    assert text.splitlines()[1] == f"use it with --drafter eagle3:{tmp_path / 'back'}"
    assert text.splitlines()[2].startswith("its acceptance was not measured: --check does")


def test_programs_read_one_object(
    folders: dict[str, Path], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, out = f"medusa:{folders['medusa']}", tmp_path / "out"
    arguments = ("--out", out, "--target", target, "--engine", "vllm", "--json")
    code, text, error = run(capsys, "export", spec, *arguments)
    assert code == 0 and text.count("\n") == 1
    report = json.loads(text)
    assert (report["method"], report["format"], report["engine"]) == ("medusa", "vllm", "vllm")
    assert report["warnings"] == ["vLLM 0.33 and later cannot load Medusa: this needs vLLM 0.32 or older"]
    assert error == f"warning: {report['warnings'][0]}\n"
    assert '"num_speculative_tokens": 3' in report["ready"]  # one per head
    code, text, _ = run(capsys, "import", out, "--out", tmp_path / "back", "--target", target, "--json")
    assert code == 0 and json.loads(text)["drafter"] == f"medusa:{tmp_path / 'back'}"


READY = {
    ("vllm", "eagle"): ("vllm", '"method": "eagle"'),
    ("sglang", "eagle"): ("plain", "--speculative-algorithm EAGLE --speculative-draft-model-path"),
    ("sglang", "eagle3"): (
        "plain",
        "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
    ),
}


@pytest.mark.parametrize(("engine", "method"), READY)
def test_an_engine_chooses_the_layout(
    engine: str,
    method: str,
    folders: dict[str, Path],
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout, ready = READY[engine, method]
    spec = f"{method}:{folders[method]}"
    code, text, _ = run(
        capsys, "export", spec, "--out", tmp_path / "x", "--target", target, "--engine", engine, "--json"
    )
    report = json.loads(text)
    assert code == 0 and report["format"] == layout and ready in report["ready"]


BAD = [
    (
        ("ngram",),
        "no other project supports drafters of the method 'ngram': choose one of eagle3, peagle, dflash, dflash2, "
        "dspark, mtp, eagle, "
        "medusa, pard, uno, model",
    ),
    (("nosuch",), "unknown drafter 'nosuch'"),
    (("medusa", "--format", "speculators"), "medusa has no format 'speculators': choose one of original, vllm"),
    (("medusa", "--engine", "tgi"), "unknown engine 'tgi': choose one of vllm, sglang, huggingface"),
    (("medusa", "--engine", "sglang"), "sglang cannot load a drafter 'medusa' in any format"),
    (("medusa", "--engine", "huggingface"), "huggingface cannot load a drafter 'medusa'"),
    (("early_exit", "--engine", "vllm"), "vllm cannot load a drafter 'early_exit'"),
    (("medusa", "--engine", "vllm", "--format", "original"), "vllm cannot load medusa in the format 'original'"),
    (("eagle", "--engine", "sglang", "--format", "vllm"), "in the format 'vllm': choose plain"),
    (("eagle3", "--engine", "sglang", "--format", "speculators"), "choose plain"),
    (("medusa:no/such/folder",), "no/such/folder is not a folder with a trained drafter"),
    (("medusa,nodes=4",), "options of medusa are not exported: leave out nodes"),
    (("medusa", "--target", "./no/such/target"), "no/such/target is not a folder with a model"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_errors_are_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, error = run(capsys, "export", *arguments, "--out", tmp_path / "out")
    assert (code, text) == (2, "")
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error
    assert list(tmp_path.iterdir()) == []


def test_errors_of_import(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, words in (
        ((tmp_path / "none",), "no such folder"),
        ((empty,), "in no layout that can be imported"),
        ((empty, "--method", "nosuch"), "no other project supports drafters of the method 'nosuch'"),
    ):
        code, text, error = run(capsys, "import", *arguments, "--out", tmp_path / "out", "--target", target)
        assert (code, text) == (2, "") and error.count("\n") == 1 and words in error
    (empty / "generation_config.json").write_text('{"assistant_early_exit": 2}')
    code, _, error = run(capsys, "import", empty, "--out", tmp_path / "a,b", "--target", target)
    assert code == 2 and "comma" in error
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


def test_an_interrupt_is_one_line(
    folders: dict[str, Path],
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foretoken.training.formats.base.write_tensors", interrupt)
    code, _, error = run(capsys, "export", f"eagle:{folders['eagle']}", "--out", tmp_path / "x", "--target", target)
    assert (code, error) == (130, "interrupted\n") and list(tmp_path.iterdir()) == []


def test_an_existing_folder(
    folders: dict[str, Path], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("export", f"eagle:{folders['eagle']}", "--out", tmp_path / "x", "--target", target)
    assert run(capsys, *arguments)[0] == 0
    code, _, error = run(capsys, *arguments)
    assert code == 2 and "is not empty: give another --out, or --force to replace it" in error
    assert run(capsys, *arguments, "--force", "--format", "vllm")[0] == 0
    assert json.loads((tmp_path / "x" / "config.json").read_text())["architectures"] == ["EagleLlamaForCausalLM"]


def test_the_catalogue_names_drafters_and_classes_that_exist() -> None:
    drafters = {row.name for row in rows("drafter")}
    for layout in LAYOUTS:
        assert layout.method in drafters
        assert layout.load().method == layout.method
        assert find_layout(layout.method, layout.name, None) == layout


def test_help_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from foretoken.cli.main import main\n"
        "assert main(['export', '--help']) == 0 and main(['import', '--help']) == 0\n"
        "print(sorted({'torch', 'transformers', 'safetensors', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr
