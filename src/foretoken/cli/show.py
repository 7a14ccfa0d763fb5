"""``foretoken show``: a picture of a real run, in one file; or of a trace that is there already."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.generate import PromptFile, common_and_prompt
from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import check_out, json_only, print_json
from foretoken.cli.show_trace import Asked, show_trace, trace_file, write_whole
from foretoken.cli.turns import Raw, System, check_turn, prompt_for, tell_defaults, tell_empty

if TYPE_CHECKING:
    from foretoken.lab.prompts import BenchPrompt
    from foretoken.lab.report.show.run import Shown
    from foretoken.llm import Llm, Output

KINDS = (".html", ".svg", ".jsonl")
PAGE = Path("show.html")
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] [PROMPT] | TRACE.jsonl",
        help="MODEL and PROMPT as of `foretoken generate`; or a trace of any engine, which is shown as it was run.",
        show_default=False,
    ),
]


@with_common(model="own", own_sampling=True)
def show_command(
    words: Words = None,
    prompt_file: PromptFile = None,
    system: System = None,
    raw: Raw = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: .html has every round, .svg one of them, .jsonl is a trace.",
            show_default="show.html; a trace is printed",
        ),
    ] = None,
    request: Annotated[str | None, typer.Option(help="Which request of a trace.", show_default="the first")] = None,
    number: Annotated[
        int | None, typer.Option("--round", help="Round that an .svg draws, from 1; the most telling one by default.")
    ] = None,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Answer or complete a prompt and draw what happened: rounds, token trees, and why drafts were rejected.

    With TRACE.jsonl nothing is run: the file is shown in the terminal, or with --out as a page.
    """
    trace = trace_file(words, common.given)
    kinds = KINDS if trace is None else KINDS[:-1]
    if out is not None and out.suffix.lower() not in kinds:
        raise ValueError(f"--out {out} must end in {', '.join(kinds[:-1])} or {kinds[-1]}")
    if trace is not None:
        show_trace(trace, Asked(out, request, number, as_json))
        return
    if request is not None:
        raise ValueError("--request chooses from a trace: give TRACE.jsonl")
    check_turn(system, raw)
    out = PAGE if out is None else out
    kind = out.suffix.lower()
    check_out(out)
    row = _row_of(prompt_file)
    common, text = common_and_prompt(common, words, prompt_file)
    with json_only(as_json):
        llm = common.load(own_sampling=True)
        tell_defaults(llm)
        options = {**llm.defaults.sampling, **common.asked}
        prompt = prompt_for(llm, text, system, raw, common.target) if row is None else row.encode(llm.tokenizer)
        output = llm.generate(prompt, **options, explain=True)
        tell_empty(llm, output.note, raw)
        from foretoken.lab.report.show.run import shown

        text = str(_in_words(llm, prompt)) if row is not None and row.messages else text
        about = facts(llm, output, common.target, options.get("temperature", 0.0))
        page, rounds = _drawn(shown(output, llm.tokenizer, text, about), kind, number)
    write_whole(out, page)
    if as_json:
        print_json({"out": str(out), "rounds": rounds, "stats": output.stats.as_dict()})
    else:
        print(f"{rounds} rounds, {len(output.token_ids)} tokens -> {out}", file=sys.stderr)


def _row_of(file: Path | None) -> BenchPrompt | None:
    """The one row of a file of prompts, which may be a conversation; ``None`` for another file, or none.

    Raises:
        ValueError: several rows, or a broken one.
    """
    if file is None or ".jsonl" not in file.suffixes:
        return None
    from foretoken.lab.prompts import load_prompts

    rows = load_prompts(file)
    if len(rows) > 1:
        raise ValueError(f"{file} holds {len(rows)} prompts, and one is drawn: give a file with one row")
    return rows[0]


def _in_words(llm: Llm, prompt: Any) -> Any:
    return prompt if llm.tokenizer is None else llm.tokenizer.decode(prompt)


def _drawn(run: Shown, kind: str, number: int | None) -> tuple[str, int]:
    from foretoken import __version__
    from foretoken.lab.report.show import page, picture
    from foretoken.lab.report.show.trace_file import to_lines

    if kind == ".jsonl":
        return "\n".join(to_lines(run, f"foretoken {__version__}")) + "\n", len(run.rounds)
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
