"""``foretoken generate``: text, JSON, comparison, colours."""

from __future__ import annotations

import io
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import foretoken as ft
from foretoken.cli import generate
from foretoken.cli.explain import explained, legend, stream_explained
from foretoken.cli.generate import DEFAULT_PROMPT
from foretoken.lab.report.show.texts import token_texts

STATS = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "acceptance_rate",
    "mean_acceptance_length",
    "draft_s",
    "target_s",
    "verify_s",
    "overhead_s",
    "prefill_s",
    "total_s",
    "tokens_per_s",
}
PROMPT = "for item in"


def expected(target: str, prompt: str = PROMPT, **options: Any) -> ft.Output:
    return ft.load(target, drafter=None).generate(prompt, max_new_tokens=12, **options)


def test_the_text_is_streamed_to_stdout_and_counts_go_to_stderr(run: Any, target: str) -> None:
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "12")
    assert result.code == 0
    assert result.out == expected(target).text + "\n"
    assert "12 tokens" in result.err and "tokens/s" in result.err


def test_json_is_the_only_line_and_has_the_fields_of_the_contract(run: Any, target: str, draft: str) -> None:
    drafter = ("--drafter", f"model:{draft},k=3", "--controller", "constant")
    result = run("generate", PROMPT, "--target", target, *drafter, "--max-new-tokens", "12", "--json")
    want = expected(target)
    assert set(result.json) == {"text", "token_ids", "finish_reason", "stats"}
    assert (result.json["text"], result.json["token_ids"]) == (want.text, want.token_ids)
    assert result.json["finish_reason"] == want.finish_reason
    assert set(result.json["stats"]) >= STATS
    assert result.json["stats"]["num_draft_tokens"] > 0


@pytest.mark.parametrize("source", ["file", "stdin", "dash"])
def test_the_prompt_comes_from_a_file_or_stdin(
    run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8-sig")  # with a byte order mark, which is no part of the prompt
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT if source != "file" else ""))
    arguments = {"file": ["--prompt-file", str(file)], "stdin": [], "dash": ["-"]}[source]
    result = run("generate", *arguments, "--target", target, "--max-new-tokens", "12", "--json")
    assert result.json["token_ids"] == expected(target).token_ids


def test_without_a_prompt_the_built_in_one_is_completed(run: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    result = run("generate", "--target", target, "--max-new-tokens", "12", "--json")
    assert result.json["token_ids"] == expected(target, DEFAULT_PROMPT).token_ids


def test_a_slow_pipe_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as slow:
        monkeypatch.setattr("sys.stdin", slow)
        later = threading.Timer(0.3, lambda: (os.write(writer, PROMPT.encode()), os.close(writer)))
        later.start()
        assert generate.read_prompt(None, None) == PROMPT
        later.join()


def test_a_silent_pipe_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the answer to another prompt, nor never; with ``-`` it is waited for."""
    reader, writer = os.pipe()
    monkeypatch.setattr(generate, "STDIN_WAIT_S", 0.01)
    with os.fdopen(reader) as silent, os.fdopen(writer, "w") as other:
        monkeypatch.setattr("sys.stdin", silent)
        with pytest.raises(ValueError, match=r"^nothing came on stdin in 0.01 s: give a prompt, or - to wait for it$"):
            generate.read_prompt(None, None)
        other.write(PROMPT)
        other.close()
        assert generate.read_prompt("-", None) == PROMPT


def test_a_pipe_or_file_without_text_is_no_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    (tmp_path / "empty").touch()
    for empty in (os.fdopen(reader), (tmp_path / "empty").open(encoding="utf-8")):
        with empty:
            monkeypatch.setattr("sys.stdin", empty)
            for prompt in (None, "-"):
                with pytest.raises(ValueError, match=r"^standard input is empty: give at least one character$"):
                    generate.read_prompt(prompt, None)


def test_nothing_connected_means_the_built_in_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert generate.read_prompt(None, None) == DEFAULT_PROMPT


def test_a_prompt_in_another_encoding_is_named_as_such() -> None:
    with pytest.raises(ValueError, match=r"^the prompt is not UTF-8 text$"):
        generate.read_prompt(os.fsdecode(b"caf\xe9"), None)


def test_a_stop_string_ends_the_text(run: Any, target: str) -> None:
    whole = expected(target).text
    stop = whole[3:6]
    result = run("generate", PROMPT, "--target", target, "--max-new-tokens", "12", "--stop", stop, "--json")
    assert result.json["text"] == whole[: whole.index(stop)]
    assert result.json["finish_reason"] == "stop"
    streamed = run("generate", PROMPT, "--target", target, "--max-new-tokens", "12", "--stop", stop)
    assert streamed.out == whole[: whole.index(stop)] + "\n"


def test_a_seed_fixes_sampled_text(run: Any, target: str) -> None:
    common = ("generate", PROMPT, "--target", target, "--max-new-tokens", "12", "--temperature", "1.0", "--json")
    texts = [run(*common, "--seed", seed).json["token_ids"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_a_profile_fills_what_is_left_at_auto(run: Any, target: str, draft: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(f'{{"drafter": "model:{draft},k=2", "controller": "constant,k=2", "measured": [1]}}')
    common = ("generate", PROMPT, "--target", target, "--max-new-tokens", "12", "--json", "--profile", str(profile))
    from_profile = run(*common).json["stats"]
    assert from_profile["num_draft_tokens"] > 0
    chosen = run(*common, "--drafter", "none").json["stats"]
    assert chosen["num_draft_tokens"] == 0


# -- comparison ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["model:{draft},k=3", "ngram"])
def test_compare_at_temperature_1_says_the_same_with_a_seed(run: Any, target: str, draft: str, drafter: str) -> None:
    common = ("generate", PROMPT, "--target", target, "--max-new-tokens", "24", "--compare", "--temperature", "1",
              "--seed", "3", "--drafter", drafter.format(draft=draft), "--repeat", "1")  # fmt: skip
    assert "output identical: yes" in run(*common).out
    with_own_draws = run(*common, "--verifier", "match")
    assert "only coupled sampling, --verifier auto, keeps the text of a seed" in with_own_draws.out
    assert run(*common, "--verifier", "match", "--json").json["first_difference"]["logit_gap"] is None


def test_the_seed_of_an_output_is_told(run: Any, target: str) -> None:
    common = (
        "generate",
        PROMPT,
        "--target",
        target,
        "--max-new-tokens",
        "12",
        "--temperature",
        "1",
        "--verifier",
        "coupled",
    )
    first = run(*common, "--json").json
    assert run(*common, "--seed", str(first["seed"]), "--json").json["token_ids"] == first["token_ids"]
    assert "seed 3" in run(*common, "--seed", "3").err
    assert "seed" not in run("generate", PROMPT, "--target", target, "--json").json


def test_compare_json(run: Any, target: str, draft: str) -> None:
    result = run(
        "generate", PROMPT, "--target", target, "--drafter", f"model:{draft},k=3", "--max-new-tokens", "12",
        "--compare", "--repeat", "2", "--json", "--controller", "constant",
    ).json  # fmt: skip
    assert set(result) == {"plain", "speculative", "speedup", "identical", "first_difference"}
    for arm in ("plain", "speculative"):
        assert set(result[arm]) == {"text", "token_ids", "stats"}
        assert set(result[arm]["stats"]) >= STATS
        assert result[arm]["token_ids"] == expected(target).token_ids
    ratio = result["speculative"]["stats"]["tokens_per_s"] / result["plain"]["stats"]["tokens_per_s"]
    assert result["speedup"] == pytest.approx(ratio)
    assert result["plain"]["stats"]["num_draft_tokens"] == 0 < result["speculative"]["stats"]["num_draft_tokens"]
    assert result["identical"] is True and result["first_difference"] is None


def test_compare_reports_where_a_lossy_rule_parts_from_plain_decoding(run: Any, target: str, draft: str) -> None:
    result = run(
        "generate", PROMPT, "--target", target, "--drafter", f"model:{draft},k=3", "--verifier",
        "min_block,min_accepted=3", "--allow-lossy", "--controller", "constant", "--max-new-tokens", "40",
        "--compare", "--repeat", "1", "--json",
    ).json  # fmt: skip
    position = result["first_difference"]["position"]
    plain_ids, speculative_ids = result["plain"]["token_ids"], result["speculative"]["token_ids"]
    assert result["identical"] is False
    assert plain_ids[:position] == speculative_ids[:position] and plain_ids[position] != speculative_ids[position]
    assert result["first_difference"]["logit_gap"] > 0


def test_compare_for_people(run: Any, target: str, draft: str) -> None:
    result = run(
        "generate", PROMPT, "--target", target, "--drafter", f"model:{draft}", "--max-new-tokens", "12", "--compare",
        "--repeat", "1", "--explain",
    )  # fmt: skip
    for words in ("plain", "speculative", "speed-up", "output identical: yes", "mean acceptance length", "draft "):
        assert words in result.out
    assert "accepted draft token" in result.out


def test_tabs_stay_tabs(run: Any, tmp_path: Path) -> None:
    """Code with tabs can be copied from the terminal, from each command that colours text."""
    only_tabs = ft.load("builtin", "ngram", controller="constant")
    [tab] = only_tabs.encode("\t")[-1:]
    options: dict[str, Any] = {"max_new_tokens": 6, "allowed_token_ids": [tab], "ignore_eos": True}
    written = io.StringIO()
    stream_explained(Console(file=written, force_terminal=True, color_system=None), only_tabs, "x\ty", options)
    assert "\t" * 6 in written.getvalue()
    assert "x\ty" in run("generate", "x\ty", "--compare", "--repeat", "1", "--max-new-tokens", "2").out
    lines = (
        '{"foretoken_trace": 1}',
        '{"type": "round", "draft": ["\\tif", " x"], "accepted": [1, 2], "next": ":\\n\\t\\t"}',
    )
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    assert "[\tif| x]{:\n\t\t}" in run("show", str(tmp_path / "run.jsonl")).out


# -- colours ---------------------------------------------------------------------------------------------------------


def test_explain_marks_tokens_without_colour_and_colours_them_with_it(
    run: Any, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = (
        "generate",
        PROMPT,
        "--target",
        target,
        "--drafter",
        f"model:{draft}",
        "--controller",
        "constant",
        "--max-new-tokens",
        "16",
        "--explain",
    )
    marked = run(*common).out
    assert "[text]" in marked and "\x1b[" not in marked
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run(*common).out
    assert "\x1b[32m" in coloured and "[text]" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[text]" in run(*common).out


def test_explained_tokens_spell_the_text(target: str, draft: str) -> None:
    llm = ft.load(target, drafter=f"model:{draft},k=3", controller="constant")
    output = llm.generate(PROMPT, max_new_tokens=40)
    assert {"accepted", "recovered"} <= set(output.origins)
    assert "".join(token_texts(llm.tokenizer, output.token_ids, output.text)) == output.text
    assert explained(output, llm.tokenizer, colour=True).plain == output.text
    stop = output.text[5:8]
    cut = llm.generate(PROMPT, max_new_tokens=40, stop=stop)
    assert explained(cut, llm.tokenizer, colour=True).plain == cut.text == output.text[: output.text.index(stop)]


@pytest.mark.parametrize("stop", [None, "stop"])
def test_colours_are_streamed_and_spell_the_text(target: str, draft: str, stop: str | None) -> None:
    llm = ft.load(target, drafter=f"model:{draft},k=3", controller="constant")
    options: dict[str, Any] = {"max_new_tokens": 40}
    whole = llm.generate(PROMPT, **options)
    if stop:
        options["stop"] = whole.text[12:15]
    want = llm.generate(PROMPT, explain=True, **options)
    written = Writes()
    console = Console(file=written, force_terminal=True, color_system="standard", markup=False, highlight=False)
    output = stream_explained(console, llm, PROMPT, options)
    assert (output.text, output.token_ids, output.origins) == (want.text, want.token_ids, want.origins)
    assert [round_.next_token for round_ in output.rounds] == [round_.next_token for round_ in want.rounds]
    plain = re.sub(r"\x1b\[[\d;]*m", "", written.getvalue())
    assert want.text in plain.replace(legend(colour=True).plain, "") and "round 1:" in plain
    assert written.count >= len(want.rounds)  # not all at once
    greens = "".join(re.findall(r"\x1b\[32m([^\x1b]*)", written.getvalue().split("round 1:")[0]))
    texts = zip(token_texts(llm.tokenizer, want.token_ids, want.text), want.origins, strict=True)
    assert greens == "text" + "".join(text for text, origin in texts if origin == "accepted")


class Writes(io.StringIO):
    """Counts how often something is written."""

    count = 0

    def write(self, text: str) -> int:
        self.count += 1
        return super().write(text)


def test_prediction_file_is_drafted_and_counted(run: Any, target: str, tmp_path: Path) -> None:
    file = tmp_path / "expected.txt"
    file.write_text(expected(target).text)
    drafter = ("--drafter", "prediction", "--controller", "constant")
    command = ("generate", PROMPT, "--target", target, *drafter, "--max-new-tokens", "12", "--json")
    result = run(*command, "--prediction", str(file))
    assert result.json["token_ids"] == expected(target).token_ids
    assert result.json["stats"]["num_accepted_prediction_tokens"] > 0
    assert run(*command).json["stats"]["num_prediction_tokens"] == 0
    missing = run(*command, "--prediction", str(tmp_path / "none.txt"))
    assert missing.code == 2 and missing.err.startswith("error: ")


def test_options_that_do_nothing_are_told(run: Any, target: str, tmp_path: Path) -> None:
    file, empty = tmp_path / "expected.txt", tmp_path / "empty.txt"
    file.write_text("text")
    empty.write_text("")
    for more, message in (
        (("--drafter", "ngram", "--prediction", str(file)), "--prediction is ignored: drafter ngram does not use it"),
        (("--drafter", "none", "--prediction", str(file)), "--prediction is ignored: drafter none does not use it"),
        (("--drafter", "prediction"), "drafts nothing without --prediction FILE"),
        (("--drafter", "prediction", "--prediction", str(empty)), "drafts nothing from an empty file"),
        (("--repeat", "5"), "--repeat is ignored"),
        (("--drafter", "none", "--controller", "constant,k=3"), "--controller is ignored: without a drafter"),
        (("--drafter", "none", "--verifier", "block"), "--verifier is ignored: without a drafter"),
        (("--drafter", "prediction", "--prediction", str(file)), None),
        (("--drafter", "known,inner=ngram", "--prediction", str(file)), None),
        (("--drafter", "known,inner=ngram", "--controller", "constant"), None),
    ):
        err = run("generate", PROMPT, "--target", target, "--max-new-tokens", "2", "--json", *more).err
        assert err.count("\n") == 1 and message in err if message else err == "", (more, err)


def test_a_busy_machine_is_told_once_and_changes_no_text(
    run: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("generate", "for item", "--target", target, "--max-new-tokens", "4", "--json")
    quiet_result = run(*command)
    monkeypatch.setattr("foretoken.loading.measured.busy.settle_threads", lambda target: "two threads are slower here")
    busy_result = run(*command)
    assert busy_result.err.splitlines().count("warning: two threads are slower here") == 1
    assert busy_result.json["token_ids"] == quiet_result.json["token_ids"] and "threads" not in quiet_result.err


def test_explain_tells_json_origins_and_rounds(run: Any, target: str, draft: str) -> None:
    drafts = ("--drafter", f"model:{draft},k=3", "--controller", "constant", "--max-new-tokens", "12")
    command = ("generate", PROMPT, "--target", target, *drafts, "--json", "--explain")
    report = run(*command).json
    assert len(report["origins"]) == len(report["token_ids"]) == 12
    assert len(report["rounds"]) == report["stats"]["num_drafts"]
    first = report["rounds"][0]
    assert len(first["texts"]) == len(first["tokens"]) == 4 and first["drafter"] == "model" and first["next_text"]
    compared = run(*command, "--compare", "--repeat", "1").json
    assert len(compared["speculative"]["origins"]) == 12


def test_a_terminal_is_told_what_takes_long(run: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ("generate", "def", "--target", target, "--drafter", "none", "--max-new-tokens", "2")
    assert "loading" not in run(*ask).err
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    assert f"loading {target} ..." in run(*ask).err
