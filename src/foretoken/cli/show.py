"""``foretoken show``: a picture of a run, or of an existing trace, in one file."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.generate import PromptFile, Task, common_and_prompt
from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import check_out, has_colour, json_only, print_json, print_table, print_text, screen, table
from foretoken.cli.turns import Raw, System, check_system, check_turn, prompt_for, tell_defaults, tell_empty
from foretoken.core.io.hub_ids import expanded

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.lab.prompts import BenchPrompt
    from foretoken.lab.report.show.run import Shown, Total
    from foretoken.lab.report.show.trace_file import Trace
    from foretoken.llm import Llm, Output

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] [PROMPT] | TRACE.jsonl",
        help="MODEL and PROMPT as of `foretoken generate`; or a trace of any engine.",
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
        int | None,
        typer.Option(
            "--round", help="Round to draw as .svg (by default the most telling) or to print (the first), from 1."
        ),
    ] = None,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Answer or complete a prompt and draw its rounds: token trees, and the reason for each rejection.

    With TRACE.jsonl nothing is run: the file is shown in the terminal, or with --out as a page.
    """
    trace = trace_file(words, common.explicit)
    kinds = (".html", ".svg", ".jsonl") if trace is None else (".html", ".svg")
    if out is not None and out.suffix.lower() not in kinds:
        raise ValueError(f"--out {out} must end in {', '.join(kinds[:-1])} or {kinds[-1]}")
    if trace is not None:
        show_trace(trace, out, request, number, as_json)
        return
    if request is not None:
        raise ValueError("--request chooses from a trace: give TRACE.jsonl")
    check_turn(system, raw)
    out = Path("show.html") if out is None else out
    _check_round(out, number)
    check_out(out)
    row = _row_of(prompt_file, system, raw)
    common, text = common_and_prompt(common, words, prompt_file, None if row is None else row.text)
    with json_only(as_json):
        llm = common.load(own_sampling=True)
        tell_defaults(llm)
        options = {**llm.defaults.sampling, **common.request_options}
        prompt = _prompt_of(llm, row, text, system, raw, common.target)
        output = llm.generate(prompt, **options, explain=True)
        tell_empty(llm, output.note, raw)
        from foretoken.lab.report.show.run import shown_run

        about = facts(llm, output, common.target, options.get("temperature", 0.0))
        run = shown_run(output, llm.tokenizer, _prompt_in_words(llm, text, prompt, row), about)
    write_whole(out, _drawn(run, out, number))
    _tell_plain_rounds(llm, output)
    if as_json:
        print_json({"out": str(out), "rounds": len(run.rounds), "stats": output.stats.as_dict()})
    else:
        print(f"{len(run.rounds)} rounds, {len(output.token_ids)} tokens -> {out}", file=sys.stderr)


def _prompt_of(
    llm: Llm, row: BenchPrompt | None, text: str, system: str | None, raw: bool, target: str
) -> str | list[int]:
    """The prompt of a row of a file, or the typed one."""
    if row is None:
        return prompt_for(llm, text, system, raw, target)
    check_system(llm, system, target)
    return row.encode(llm.tokenizer)


def _prompt_in_words(llm: Llm, text: str, prompt: str | list[int], row: BenchPrompt | None) -> str:
    """Text before the answer: the typed prompt, or the text of a row of a prompt file."""
    if row is None:
        return Task(llm, text, prompt).echo
    if not row.messages:
        return row.text
    return str(prompt if llm.tokenizer is None else llm.tokenizer.decode(prompt))


def _row_of(file: Path | None, system: str | None, raw: bool) -> BenchPrompt | None:
    """The only row of a JSONL prompt file, possibly a conversation; ``None`` for other files or no file.

    Behind a ``system`` message, text is a user's turn; a ``raw`` conversation is completed as text.  Raises
    ``ValueError`` for several rows, and for a second system message.
    """
    if file is None or ".jsonl" not in file.suffixes:
        return None
    from foretoken.lab.prompts import load_prompts

    rows = load_prompts(file)
    if len(rows) > 1:
        raise ValueError(f"{file} has {len(rows)} prompts: give a file with one row")
    (row,) = rows
    if system is None:
        return replace(row, messages=()) if raw else row
    messages = row.messages or ({"role": "user", "content": row.text},)
    if messages[0].get("role") == "system":
        raise ValueError(f"{file} has a system message: leave out --system, or the one in the file")
    return replace(row, messages=({"role": "system", "content": system}, *messages))


def _drawn(run: Shown, out: Path, number: int | None, totals: Sequence[Total] = ()) -> str:
    """File contents by suffix.  ``number``: the round of an .svg, from 1; defaults to the most informative one."""
    from foretoken import __version__
    from foretoken.lab.report.show import page, picture
    from foretoken.lab.report.show.trace_file import to_lines

    kind = out.suffix.lower()
    if kind == ".jsonl":
        return "\n".join(to_lines(run, f"foretoken {__version__}")) + "\n"
    if kind == ".html":
        return page.render(run, totals)
    if not run.rounds:
        raise ValueError(f"{out}: the trace has only totals and no rounds to draw")
    return picture.render(run, run.best() if number is None else number - 1)


def _tell_plain_rounds(llm: Llm, output: Output) -> None:
    """Report on stderr if the controller chose plain decoding for most rounds."""
    controller, stats = llm.engine.controller, output.stats
    if controller is not None and controller.weighs_costs and 2 * stats.num_drafted_rounds < stats.num_drafts:
        print(
            f"drafted in {stats.num_drafted_rounds} of {stats.num_drafts} rounds: plain decoding may be faster here; "
            "--controller constant drafts wherever the drafter can",
            file=sys.stderr,
        )


def facts(llm: Llm, output: Output, target: Any, temperature: float) -> list[tuple[str, str]]:
    """Heading of the page: target, drafter, verifier, sampling and result."""
    stats = output.stats
    rules = sorted({trace.verifier for trace in output.rounds})
    sampling = "greedy" if not temperature else f"T = {temperature:g}"
    if output.seed is not None:
        sampling += f", seed {output.seed}"
    length = f"{stats.mean_acceptance_length:.2f} a round"
    return [
        ("target", str(target)),
        ("drafter", "none" if llm.drafter is None else llm.drafter.name),
        ("verifier", ", ".join(rules)),
        ("sampling", sampling),
        ("result", f"{len(output.token_ids)} tokens in {stats.num_drafts} rounds: {length}"),
    ]


def trace_file(words: Sequence[str] | None, names: Collection[str]) -> Path | None:
    """Path of the trace if it is the only argument, else ``None``.

    ``names`` are the options on the command line.  Raises ``ValueError`` for a missing file, and for options that need
    a run.
    """
    if words is None or len(words) != 1 or not words[0].endswith(".jsonl") or len(words[0].split()) != 1:
        return None
    file = expanded(words[0])
    if not file.is_file():
        raise ValueError(f"no such trace: {file}")
    if wrong := sorted(set(names) - {"words", "out", "request", "number", "as_json"}):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"{file} is a trace of a finished run: leave out {options}")
    return file


def _check_round(out: Path, number: int | None) -> None:
    if number is not None and out.suffix.lower() != ".svg":
        raise ValueError(f"--round is for .svg files, and {out} has all rounds: leave it out")


def show_trace(file: Path, out: Path | None, request: str | None, number: int | None, as_json: bool) -> None:
    """Show a trace in the terminal or write it to ``out``.

    ``request``: ``None`` for the first.  ``number``: round from 1; ``None`` for the first rounds, or for the most
    informative one in a picture.
    """
    from foretoken.lab.report.show.trace_file import read_trace

    if out is not None:
        check_out(out)
        _check_round(out, number)
    elif as_json and (number is not None or request is not None):
        raise ValueError("--json prints the totals of the whole trace: leave out --round and --request")
    trace = read_trace(file)
    run = trace.choose(request)
    if number is not None and not 1 <= number <= len(run.rounds):
        raise ValueError(f"round {number} does not exist: the request has {len(run.rounds)}")
    if out is not None:
        # Only totals that add to the rounds below them
        totals = trace.totals if trace.other_totals or len(trace.requests) > 1 else []
        write_whole(out, _drawn(run, out, number, totals))
    if as_json:
        whole = [dict(vars(total.whole())) for total in trace.totals]
        print_json({"out": None if out is None else str(out), "facts": dict(trace.facts), "totals": whole})
    elif out is None:
        _print_trace(screen(), trace, run, number)
    else:
        counts = {"request": len(trace.requests), "round": len(run.rounds)}
        words = ", ".join(f"{count} {noun}{'s' * (count != 1)}" for noun, count in counts.items())
        print(f"{words} drawn -> {out}", file=sys.stderr)


def write_whole(out: Path, text: str) -> None:
    """Write a file atomically.  Raises ``ValueError`` if it cannot be written."""
    from foretoken.core.io.files import write_text

    try:
        write_text(out, text)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror}") from None


def _print_trace(console: Console, trace: Trace, run: Shown, number: int | None, most_rows: int = 40) -> None:
    from rich.text import Text

    from foretoken.cli.explain import coloured, legend, print_rounds
    from foretoken.lab.report.show.run import HEADS

    colour = has_colour(console)
    for name, value in run.facts:
        console.print(Text(f"{name}: ", "dim").append(value, ""))
    grid = table()
    totals = trace.totals
    rows = [total.cells for total in totals[:most_rows]]
    columns = [i for i in range(len(HEADS)) if any(row[i] for row in rows)]
    for i in columns:
        grid.add_column(HEADS[i], justify="left" if i in (0, len(HEADS) - 1) else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(row[i] for i in columns))
    print_table(console, grid)
    if len(totals) > most_rows:
        console.print(f"{len(totals) - most_rows} more rows: --out page.html shows them", style="dim")
    if not run.rounds:
        console.print("the engine recorded totals, not rounds: there is no tree to draw", style="dim")
        return
    console.print(legend(colour), end="")
    words = [(word.origin, word.text) for round_ in run.rounds for word in round_.words]
    print_text(console, Text(run.prompt, "dim").append_text(coloured(words, colour)))
    print_rounds(console, run.rounds, colour, "--round N, or --out page.html", (number or 1) - 1)
