"""An imported drafter is tried on text: another numbering of layers, another target or a wrong figure is noticed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from telling_layers import save_telling_drafter, save_telling_target
from test_bad_checkpoints import change
from tiny_nets import BLOCKS, save_net, save_target

from engine.tiny_tokenizer import tokenizer
from foretoken.cli.main import main
from foretoken.lab import acceptance
from foretoken.lab.acceptance import DEPTHS, AcceptanceCheck, stated
from foretoken.training.formats import export_drafter, import_drafter


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_telling_target(tmp_path_factory.mktemp("telling") / "target")


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "PROMPTS", 3)
    monkeypatch.setattr(acceptance, "NEW_TOKENS", 24)


@pytest.fixture
def hub(telling: Path, tmp_path: Path) -> Path:
    """The drafter in z-lab's layout, without a note on its target."""
    export_drafter(f"dflash:{save_telling_drafter(tmp_path / 'mine', telling)}", tmp_path / "hub", None, telling)
    (tmp_path / "hub" / "foretoken.json").unlink()
    return tmp_path / "hub"


def renumbered(hub: Path, by: int) -> Path:
    section = json.loads((hub / "config.json").read_text())["dflash_config"]
    change(hub, None, dflash_config={**section, "target_layer_ids": [i + by for i in section["target_layer_ids"]]})
    return hub


def test_what_is_expected_is_reached(hub: Path, telling: Path, tmp_path: Path) -> None:
    report = import_drafter(hub, tmp_path / "out", telling, check=AcceptanceCheck(2.0))
    measured = report["acceptance"]
    assert measured["tokens_a_round"] == pytest.approx(1 + 11 / 13)  # the prompt is no part of the cycle
    assert measured["by_position"] == pytest.approx([measured["tokens_a_round"] - 1])
    assert measured["expected"] == 2.0 and report["warnings"] == []


@pytest.mark.parametrize(("by", "words"), [(1, "one lower"), (-1, "one higher")])
def test_layer_ids_that_are_off_by_one(by: int, words: str, hub: Path, telling: Path, tmp_path: Path) -> None:
    renumbered(hub, by)
    with pytest.raises(ValueError, match=rf"off by one: with ids {words} it gives 1\.85 .*config.json") as caught:
        import_drafter(hub, tmp_path / "out", telling, check=AcceptanceCheck(2.0))
    assert "\n" not in str(caught.value) and "gives 1.0" in str(caught.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    (warning,) = import_drafter(hub, tmp_path / "out", telling, check=AcceptanceCheck())["warnings"]
    assert f"with ids {words}" in warning  # without a figure it is imported as it is


def test_a_figure_that_is_not_reached(hub: Path, telling: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"1\.85 tokens a round .* of the expected 2\.4.*another target.*mask_token_id"
    ):
        import_drafter(hub, tmp_path / "out", telling, check=AcceptanceCheck(2.4))
    assert import_drafter(
        hub, tmp_path / "out", telling, check=AcceptanceCheck(2.3)
    )  # .8 of it are 1.84, which it reaches
    (hub / "README.md").write_text("# A drafter\n\n| accepted length | 3.4 |\nIt gives 3.1 tokens per round.\n")
    with pytest.raises(ValueError, match=r"of the expected 3\.1"):
        import_drafter(hub, tmp_path / "other", telling, check=AcceptanceCheck())
    assert import_drafter(hub, tmp_path / "other", telling)["drafter"].startswith("dflash:")


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "peagle", *BLOCKS])
def test_every_kind(method: str, tmp_path: Path) -> None:
    """For a random drafter of every kind, the message names the causes that fit that kind."""
    words = {} if method == "eagle" else {"vocab_size": len(tokenizer())}
    target = save_target(tmp_path / "target", vocab_size=len(tokenizer()))
    tokenizer().save_pretrained(target)
    export_drafter(f"{method}:{save_net(method, tmp_path / 'mine', target, **words)}", tmp_path / "hub", None, target)
    with pytest.raises(ValueError, match="of the expected 3") as caught:
        import_drafter(tmp_path / "hub", tmp_path / "out", target, check=AcceptanceCheck(3.0))
    assert "likely causes are another target" in str(caught.value)
    assert ("layer ids" in str(caught.value)) == (method in DEPTHS)
    assert ("mask_token_id" in str(caught.value)) == (method in (*BLOCKS, "peagle"))


@pytest.mark.parametrize(
    ("card", "figure"),
    [
        ("mean acceptance length | 1.88 | 2.00", 1.88),
        ("**Acceptance length**: 4.31 on GSM8K\nacceptance length of 2.9 on MT-Bench", 2.9),
        ("2.4 tokens a round, 71% at position 1", 2.4),
        ("acceptance rate 71%; trained for 3 epochs; accepted length in %: 71%", None),
        ("", None),
    ],
)
def test_figures_of_cards(card: str, figure: float | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card)
    assert stated(tmp_path) == figure
    assert stated(tmp_path / "nothing") is None


def test_figures_that_are_none() -> None:
    for wrong in (1.0, 0.0, -2.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 1"):
            AcceptanceCheck(wrong)


def test_a_target_without_a_tokenizer(target: Path, tmp_path: Path) -> None:
    export_drafter(f"dflash:{save_net('dflash', tmp_path / 'mine', target)}", tmp_path / "theirs", None, target)
    with pytest.raises(ValueError, match="has no tokenizer"):
        import_drafter(tmp_path / "theirs", tmp_path / "out", target, check=AcceptanceCheck())


def test_drafts_that_fail_in_long_texts(
    hub: Path, telling: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three lengths at the same places; a collapse is refused where a figure is expected, else it is a warning."""
    monkeypatch.setattr(acceptance, "LENGTHS", (16, 64, 128))
    report = import_drafter(hub, tmp_path / "out", telling, check=AcceptanceCheck(2.0))
    by_length = report["acceptance"]["by_length"]
    assert list(by_length) == [16, 64, 128] and min(by_length.values()) > 1.5 and report["warnings"] == []
    lengths, measured = list[list[int]](), acceptance.measure_acceptance

    def blind_behind_64(target: Any, drafter: Any, prompts: Any) -> acceptance.MeasuredAcceptance:
        lengths.append([len(prompt) for prompt in prompts])
        right = measured(target, drafter, prompts)
        return right if len(prompts[0]) <= 64 else acceptance.MeasuredAcceptance(1.2, (0.2,), 9)

    monkeypatch.setattr(acceptance, "measure_acceptance", blind_behind_64)
    with pytest.raises(ValueError, match=r"gives 1\.20 tokens a round after 128 .* after 16: .*config\.json.*window=N"):
        import_drafter(hub, tmp_path / "bad", telling, check=AcceptanceCheck(1.5))
    assert lengths[1:] == [[16, 16], [64, 64], [128, 128]] and not (tmp_path / "bad").exists()
    (warning,) = import_drafter(hub, tmp_path / "bad", telling, check=AcceptanceCheck())["warnings"]
    assert warning.startswith("it gives 1.20 tokens a round after 128")
    monkeypatch.setattr(acceptance, "LENGTHS", (64, 1 << 20))
    assert import_drafter(hub, tmp_path / "one", telling, check=AcceptanceCheck(1.5))["acceptance"]["by_length"] == {}


def test_the_command(hub: Path, telling: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["import", str(telling), str(hub), *map(str, arguments)])
        return (code, *capsys.readouterr())

    code, out, err = run("--out", tmp_path / "out", "--expect", 2)
    assert (code, err) == (0, "") and re.search(
        r"1\.85 tokens a round as a chain \(accepted by position 85%\); 2 expected", out
    )
    code, out, err = run("--out", tmp_path / "again", "--check", "--json")
    assert code == 0 and json.loads(out)["acceptance"]["expected"] is None
    renumbered(hub, 1)
    code, out, err = run("--out", tmp_path / "third", "--expect", 2)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and "off by one" in err
    assert not (tmp_path / "third").exists()
