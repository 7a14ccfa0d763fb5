"""Cards: what is written is read back, what was changed is refused by name, and the page shows and filters them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from foretoken.core.io.stamped import checksum_of
from foretoken.lab.bench.arms import ArmSetup
from foretoken.lab.bench.run import BenchSettings, run_bench
from foretoken.lab.bench.serving import OwnArm
from foretoken.lab.bench.summary import BenchResult
from foretoken.lab.parity.weights import drafter_checksums
from foretoken.lab.report.cards.card import STAMP, Card, fault_of, read_card, read_cards
from foretoken.lab.report.cards.page import equality, matrix_name, render, write_page
from foretoken.lab.report.cards.written import Origin, card_of, fingerprint, markdown_card, origin, without_folders
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.table import TableModel
from named_models import register, wheel
from toys import llama


def figure(method: str = "ngram", speedup: float = 1.5, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "drafter": f"{method},k=4", "controller": "auto", "verifier": "auto", "fingerprint": None,
        "temperature": 0.0, "batch": 1, "plain_tokens_per_s": 20.0, "tokens_per_s": 20.0 * speedup,
        "speedup": speedup, "speedup_ci95": [speedup - 0.1, speedup + 0.1], "tokens_per_round": 2.5,
        "prefill_s": 0.05, "ttft_s": None, "equality": {"identical": 4, "ties": 0, "differences": 0}, **more,
    }  # fmt: skip


def card(cpu: str = "A <CPU>", model: str = "tiny", *figures: dict[str, Any]) -> Card:
    return Card(
        "2026-11-26",
        {"name": model, "kind": "gguf", "fingerprint": "sha256:0", "weights": "4 bits", "forward": "native",
         "exactness": "bitwise", "quantize": None, "inflate": None,
         "backend": "auto"},
        {"cpu": cpu, "cores": 2, "threads": 2, "matrix": ["avx2", "avx512f", "avx512_bf16"], "gpus": [],
         "kernels": "compiled", "load": 0.1},
        {"foretoken": "1", "torch": "2", "transformers": "5"},
        {"prompts_sha256": "0", "categories": {"code": 4}, "max_new_tokens": 8, "repeat": 1, "seed": 0},
        list(figures) or [figure()],
    )  # fmt: skip


def put(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.json"
    file.write_text(text, encoding="utf-8")
    return file


def signed(body: dict[str, Any]) -> str:
    """A body with a right checksum: what another program could have written."""
    body = {key: value for key, value in body.items() if key != "checksum"}
    return json.dumps({**body, "checksum": checksum_of(body)})


def test_a_card_is_read_back_however_it_is_laid_out(tmp_path: Path) -> None:
    text = STAMP.to_json(card())
    assert read_card(put(tmp_path, "a", text)) == card()
    assert read_card(put(tmp_path, "b", json.dumps(json.loads(text), indent=8, sort_keys=True))) == card()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"speedup": 1.5', '"speedup": 9.5', "was changed after it was written"),
        ('"cpu": "A <CPU>"', '"cpu": "another"', "was changed after it was written"),
        ('"version": 1,', '"version": 2,', "is a foretoken benchmark card of version 2, and this foretoken reads 1"),
        ('"kind": "foretoken benchmark card"', '"kind": "a letter"', "is not a foretoken benchmark card"),
        ('"speedup": 1.5', '"speedup": NaN', "is not JSON, so not a foretoken benchmark card"),
        ('"speedup": 1.5,', '"speedup": 1.5', "is not JSON (line "),
    ],
)
def test_changed_and_broken_cards_are_one_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = STAMP.to_json(card())
    assert old in text
    file = put(tmp_path, "mine", text.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        read_card(file)
    assert str(error.value).startswith(f"{file} ") and "\n" not in str(error.value)


def change(body: dict[str, Any], where: str, value: Any) -> dict[str, Any]:
    *path, last = where.split("/")
    place: Any = body
    for key in path:
        place = place[int(key) if isinstance(place, list) else key]
    place[last] = value
    return body


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("figures", [], "a list of 'figures'"),
        ("model/fingerprint", None, "model has no valid 'fingerprint'"),
        ("machine/matrix", [3], "'matrix' and 'gpus' are lists of names"),
        ("machine/cores", True, "machine has no valid 'cores'"),
        ("figures/0/speedup", "fast", "figure 1 has no valid 'speedup'"),
        ("figures/0/tokens_per_s", -1, "figure 1 has a speed that is not above 0"),
        ("figures/0/speedup_ci95", [1.0], "'speedup_ci95' is two numbers"),
        ("figures/0/equality", {"identical": 3}, "'equality' counts identical, ties, differences"),
        ("more", 1, "its parts must be"),
    ],
)
def test_a_card_that_lacks_something_says_what(tmp_path: Path, where: str, value: Any, words: str) -> None:
    """With a right checksum, as another program may write it."""
    file = put(tmp_path, "theirs", signed(change(json.loads(STAMP.to_json(card())), where, value)))
    with pytest.raises(ValueError, match=re.escape(words)):
        read_card(file)


def test_our_own_cards_have_nothing_wrong() -> None:
    body = json.loads(STAMP.to_json(card()))
    for name in ("kind", "version", "checksum"):
        del body[name]
    assert fault_of(body) is None


def test_bad_cards_are_left_out_by_name_and_said(tmp_path: Path) -> None:
    put(tmp_path, "good", STAMP.to_json(card()))
    put(tmp_path, "edited", STAMP.to_json(card()).replace("1.5", "2.5"))
    put(tmp_path, "broken", "{")
    cards, faults = read_cards(tmp_path)
    assert [name for name, _ in cards] == ["good"]
    assert ["broken.json" in faults[0], "edited.json was changed" in faults[1]] == [True, True]
    out = tmp_path / "page.html"
    assert write_page(tmp_path, out) == (1, 1, faults)
    text = out.read_text()
    assert "left out: edited.json was changed" in text and str(tmp_path) not in text
    with pytest.raises(ValueError, match="no such folder of cards"):
        read_cards(tmp_path / "no")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no cards"):
        read_cards(tmp_path / "empty")
    put(tmp_path / "empty", "one", "[]")
    with pytest.raises(ValueError, match=r"one\.json is not a foretoken benchmark card"):
        write_page(tmp_path / "empty", out)


def test_the_page_loads_nothing_and_shows_every_figure() -> None:
    cards = [("one", card("A <CPU>", "m1", figure("ngram", 1.5), figure("eagle3", 0.8))), ("two", card("B", "m2"))]
    text = render(cards)
    assert not re.search(r"https?://|src=|url\(|@import|<link", text)
    body = text.split("<body>")[1].split("<script")[0]
    root = ElementTree.fromstring(body)
    lines = root.findall(".//tbody/tr")
    assert [line.findall("td")[2].text for line in lines] == ["1.50", "1.50", "0.80"]
    assert {line.attrib["data-method"] for line in lines} == {"ngram", "eagle3"}
    assert len(root.findall(".//ul[@class='bars']/li")) == 3
    assert [len(select.findall("option")) for select in root.findall(".//select")] == [3, 3, 3]
    assert "A <CPU> (AVX512-BF16)" in {line.attrib["data-cpu"] for line in lines}


def test_words() -> None:
    assert [matrix_name(flags) for flags in (["avx2", "amx_bf16"], ["avx512f"], [])] == [
        "AMX-BF16",
        "AVX512",
        "no AVX2",
    ]
    assert equality(None) == "need not be"
    assert equality({"identical": 2, "ties": 1, "differences": 0}) == "2 of 3, 1 numerical tie"
    assert equality({"identical": 2, "ties": 0, "differences": 1}) == "2 of 3, 1 DIFFER"


def test_a_card_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    assert without_folders("/home/me/models/a.gguf") == "a.gguf"
    assert without_folders("model:./drafts/d,k=3") == "model:d,k=3"
    assert without_folders("cascade:/x/d,inner=(eagle3:~/heads/e,k=2)") == "cascade:d,inner=(eagle3:e,k=2)"
    assert without_folders("eagle3:org/head-1") == "eagle3:org/head-1"
    assert without_folders("model:/home/John Doe/models/my draft,k=3") == "model:my draft,k=3"
    assert without_folders("router,drafters=(model:/John Doe/d|ngram)") == "router,drafters=(model:d|ngram)"
    (tmp_path / "w").write_text("1")
    with pytest.raises(ValueError, match="give --drafter"):
        origin(str(tmp_path), {}, ["none"])
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"x": "2", "y": "1"}) != fingerprint({"a": "1"})


@pytest.mark.parametrize(
    "folder", ["John Doe", "John Doe/models", "models (old)", "a, b"], ids=["blank", "above", "brackets", "comma"]
)
@pytest.mark.parametrize("name", ["a.gguf", "a.GGUF", "weights"])
def test_a_card_names_a_gguf_file_as_such_and_without_its_folder(tmp_path: Path, folder: str, name: str) -> None:
    file = tmp_path / folder / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF and more")
    model = origin(str(file), {}, ["ngram"]).model
    assert (model["name"], model["kind"]) == (name.removesuffix(".gguf"), "gguf")


def test_a_named_model_is_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF and weights"
    entry = register(monkeypatch, tmp_path / "cache", wheel(tmp_path, content), content)
    entry.path.parent.mkdir(parents=True)
    entry.path.write_bytes(content)
    model = origin(entry.name, {}, ["ngram"]).model
    assert (model["name"], model["kind"]) == (entry.name, "gguf")


def a_summary(arms: dict[str, float], controller: str = "auto", profile: str | None = None) -> dict[str, Any]:
    """A run's summary with the tokens per second of its arms."""

    def cell(arm: str, speed: float) -> dict[str, Any]:
        return {"arm": arm, "temperature": 0.0, "batch": 1, "tokens_per_s": speed, "speedup": speed / 10,
                "speedup_ci95": [1.0, 2.123456], "mean_acceptance_length": None}  # fmt: skip

    return {
        "ran": {},
        "runs_as": {"forward": "native", "weights": "4 bits", "exactness": "bitwise"},
        "machine": {
            "hardware": {"cpu": "c", "cores": 1, "cpu_flags": [], "gpus": [], "kernels": "no compiler"},
            "threads": {"torch_threads": 1, "load": None}, "versions": {}, "dtype": "float32",
        },
        "settings": {"prompts": {"sha256": "0", "categories": {}}, "controller": controller, "verifier": "auto",
                     "max_new_tokens": 1, "ignore_eos": True, "repeat": 1, "seed": 0, "filters": {},
                     "allow_lossy": False, "profile": profile},
        "overall": [cell(arm, speed) for arm, speed in arms.items()],
        "prefill": [{"arm": arm, "temperature": 0.0, "batch": 1, "prefill_s": 0.25} for arm in arms],
        "equality": [
            {"arm": "ngram@constant,k=2", "temperature": 0.0, "batch": 1, "identical": n, "ties": 1, "differences": 0}
            for n in (3, 4)
        ],
    }  # fmt: skip


def test_the_figures_are_those_of_the_run() -> None:
    """Another engine's first time holds its first token; equality is counted over categories."""
    arms = {"plain": 10.0, "ngram@constant,k=2": 15.0, "llama.cpp": 20.0}
    summary = a_summary(arms)
    summary["ran"] = {"ngram@constant,k=2": {"drafter": "ngram", "controller": "constant,k=2", "verifier": "auto"}}
    about = origin("builtin", {"quantize": None, "inflate": None, "backend": "auto"}, list(arms)[1:])
    ngram, llama = card_of(BenchResult([], summary), about).figures
    assert (ngram["method"], ngram["drafter"], ngram["controller"]) == ("ngram", "ngram", "constant,k=2")
    assert (ngram["plain_tokens_per_s"], ngram["tokens_per_s"], ngram["speedup_ci95"]) == (10.0, 15.0, [1.0, 2.123])
    assert ngram["equality"] == {"identical": 7, "ties": 2, "differences": 0} and llama["equality"] is None
    assert (ngram["prefill_s"], ngram["ttft_s"], llama["prefill_s"], llama["ttft_s"]) == (0.25, None, None, 0.25)
    assert card_of(BenchResult([], summary), about).model["forward"] == "native"
    assert llama["method"] == "llama.cpp" and about.model["kind"] == "built-in"


ARMS = ["plain", "ngram", "auto", "ngram@heuristic", "auto@constant", "transformers:plain"]


@pytest.mark.parametrize("controller", ["auto", "goodput"])
def test_a_card_names_the_controller_that_ran(controller: str) -> None:
    target = HuggingFaceModel(llama())
    setup = ArmSetup(target, "a toy", controller=controller)
    summary = a_summary(dict.fromkeys(ARMS, 10.0), controller)
    summary["ran"] = {arm: OwnArm(arm, setup).ran for arm in ARMS[:-1]}
    figures = card_of(BenchResult([], summary), origin("builtin", {}, ARMS[1:])).figures
    ran = [OwnArm(arm, setup).controller for arm in ARMS[1:-1]]
    assert [figure["controller"] for figure in figures] == [*ran, "none"]
    assert ran == (["constant", "auto"] if controller == "auto" else ["goodput"] * 2) + ["heuristic", "constant"]


def test_a_card_names_what_auto_was(tmp_path: Path) -> None:
    """By its name alone the figure could not be attributed: another release or profile means something else by it."""
    profile, out = tmp_path / "p.json", tmp_path / "run.jsonl"
    profile.write_text('{"drafter": "ngram,n=2,k=3", "controller": "constant,k=2", "verifier": "greedy"}')
    target = TableModel.random(4, seed=1)

    def card_with(profile: Path | None, drafter: str = "auto") -> tuple[dict[str, Any], str]:
        setup = ArmSetup(target, "toy", None, max_new_tokens=6, profile=profile)
        result = run_bench(setup, {"a": [[1, 2, 3, 1, 2]]}, BenchSettings((drafter,)), out)
        assert json.loads(out.read_text().splitlines()[-1])["ran"] == result.summary["ran"]
        (figure,) = card_of(result, Origin("toy", {}, {})).figures
        named = {"drafter": figure["drafter"], "controller": figure["controller"], "verifier": figure["verifier"]}
        assert result.summary["ran"][drafter] == named and figure["method"] == drafter.partition("@")[0]
        return named, markdown_card(result.cells, result.summary)

    tuned, text = card_with(profile)
    assert tuned == json.loads(profile.read_text())
    assert "- `auto` ran with drafter `ngram,n=2,k=3`, controller `constant,k=2`, verifier `greedy`\n" in text
    assert card_with(profile, "auto@heuristic")[0] == {**tuned, "controller": "heuristic"}
    usual, _ = card_with(None)
    assert usual["drafter"] not in ("auto", tuned["drafter"]) and usual["controller"] == "auto"
    profile.write_text('{"drafter": null}')
    assert set(card_with(profile)[0].values()) == {"none"}


def test_a_card_names_the_drafters_with_files_that_auto_had(tmp_path: Path) -> None:
    def of_auto(source: str, drafter: str | None = "", written: bool = True) -> tuple[str | None, Any]:
        profile = None if drafter == "" else tmp_path / f"{written}.json"
        if profile is not None and written:
            profile.write_text(json.dumps({"drafter": drafter}))
        summary = a_summary({"plain": 10.0, "auto": 15.0}, profile=None if profile is None else str(profile))
        (figure,) = card_of(BenchResult([], summary), origin(source, {}, ["auto"])).figures
        return figure["fingerprint"], figure.get("drafters")

    draft, medusa = (fingerprint(drafter_checksums(spec, "builtin")) for spec in ("model", "medusa"))
    assert of_auto("builtin") == (draft, {"model": draft})
    assert of_auto("builtin:hybrid") == (None, None)  # it drafts with heads of its own
    assert of_auto("builtin", "medusa") == (medusa, {"medusa": medusa})
    assert of_auto("builtin", None) == of_auto("builtin", "ngram") == (None, None)
    assert of_auto("builtin", "medusa", written=False) == (None, None)  # a profile that is gone
    both = fingerprint({**drafter_checksums("model", "builtin"), **drafter_checksums("medusa", "builtin")})
    assert of_auto("builtin", "router,drafters=(model|medusa)") == (both, {"model": draft, "medusa": medusa})
