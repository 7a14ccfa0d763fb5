"""``foretoken show``: a picture of a real run, in one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.generate import read_prompt
from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json

if TYPE_CHECKING:
    from foretoken.llm import Llm, Output
    from foretoken.measure.prompts import BenchPrompt

KINDS = (".html", ".svg")


@with_common()
def show_command(
    prompt: Annotated[str | None, typer.Argument(help="Text to complete; - reads stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the text to complete; .jsonl: one row.")] = None,
    out: Annotated[Path, typer.Option(help="File to write: .html has every round, .svg one of them.")] = Path(
        "show.html"
    ),
    number: Annotated[
        int | None, typer.Option("--round", help="Round that an .svg draws, from 1; the most telling one by default.")
    ] = None,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Complete a prompt and draw what happened: rounds, token trees, and why drafts were rejected."""
    common.check()
    kind = out.suffix.lower()
    if kind not in KINDS:
        raise ValueError(f"--out {out} must end in {' or '.join(KINDS)}")
    asked = _asked(prompt, prompt_file)
    with json_only(as_json):
        llm = common.load()
        ids = asked.encode(llm.tokenizer)
        text = llm.tokenizer.decode(ids) if asked.messages else asked.text  # type: ignore[union-attr]
        output = llm.generate(ids, **common.sampling, explain=True)
        page, rounds = _drawn(llm, output, text, kind, number, common)
    _write(out, page)
    if as_json:
        print_json({"out": str(out), "rounds": rounds, "stats": output.stats.as_dict()})
    else:
        print(f"{rounds} rounds, {len(output.token_ids)} tokens -> {out}", file=sys.stderr)


def _asked(prompt: str | None, file: Path | None) -> BenchPrompt:
    """The text to complete, or the one row of a file of prompts, which may be a conversation.

    Raises:
        ValueError: several rows, or a broken one.
    """
    from foretoken.measure.prompts import BenchPrompt, load_prompts

    if prompt is not None or file is None or ".jsonl" not in file.suffixes:
        return BenchPrompt("text", read_prompt(prompt, file))
    rows = load_prompts(file)
    if len(rows) > 1:
        raise ValueError(f"{file} holds {len(rows)} prompts, and one is drawn: give a file with one row")
    return rows[0]


def _drawn(llm: Llm, output: Output, text: str, kind: str, number: int | None, common: Common) -> tuple[str, int]:
    from foretoken.show import page, picture
    from foretoken.show.run import shown

    run = shown(output, llm.tokenizer, text, facts(llm, output, common.target, common.temperature))
    if kind == ".html":
        return page.render(run), len(run.rounds)
    return picture.render(run, run.best() if number is None else number - 1), len(run.rounds)


def facts(llm: Llm, output: Output, target: Any, temperature: float) -> list[tuple[str, str]]:
    """What made the run, for its heading."""
    stats = output.stats
    rules = sorted({trace.verifier for trace in output.rounds})
    sampling = "greedy" if not temperature else f"T = {temperature:g}"
    if output.seed is not None:
        sampling += f", seed {output.seed}"
    return [
        ("target", str(target)),
        ("drafter", "none" if llm.drafter is None else llm.drafter.name),
        ("verifier", ", ".join(rules)),
        ("sampling", sampling),
        (
            "result",
            f"{len(output.token_ids)} tokens in {stats.num_drafts} rounds: {stats.mean_acceptance_length:.2f} a round",
        ),
    ]


def _write(out: Path, page: str) -> None:
    """The file, whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    from foretoken.io.files import write_text

    try:
        write_text(out, page)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror}") from None
