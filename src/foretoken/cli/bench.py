"""``foretoken bench``: speed-ups on your prompts and machine; ``bench report`` makes a page of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.bench_serve import CATEGORY, FORMAT, PROMPTS, Lines, chosen_prompts, numbers, serve_command
from foretoken.cli.ending import terminable
from foretoken.cli.model_argument import ModelGroup
from foretoken.cli.options import DRAFTER_HELP, Common, Json, refuse_options_before, with_common
from foretoken.cli.output import check_out, json_only, print_json, print_table, progress_bar, screen, table
from foretoken.cli.settings import FromOptions
from foretoken.core.settings import flag, setting
from foretoken.lab.bench.specs import OTHER_ENGINES, check_arm, is_foreign, split_arm

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.lab.bench.run import BenchSettings
    from foretoken.lab.bench.summary import BenchResult
    from foretoken.lab.report.cards.written import Origin


app = typer.Typer(
    cls=ModelGroup,
    help="Measure the gain from speculative decoding on your prompts and machine.",
    subcommand_metavar="[MODEL] | COMMAND [ARGS]...",
    no_args_is_help=False,
)


@dataclass(frozen=True)
class BenchOptions:
    """Workload and output files of a benchmark."""

    prompts: list[Path] | None = setting(None, PROMPTS)
    format: str = setting("auto", FORMAT)
    category: list[str] | None = setting(None, CATEGORY)
    max_prompts: int | None = setting(None, "Most prompts per category, spread over the file.", 1)
    temperature: list[str] | None = setting(None, "Temperatures, joined by commas or given several times; 0 is greedy.")
    batch: list[str] | None = setting(None, "Batch sizes, joined by commas or given several times.")
    inflate: str | None = setting(
        None, "Inflate the target to this size, with the same outputs: 300m, 1b, 3b, 7b or a number."
    )
    repeat: int = setting(1, "Runs per prompt; the one with the median time counts.", 1)
    stop_at_eos: bool = flag("Let outputs end early; by default all have the same length.")
    no_chat_template: bool = flag("Complete conversations as plain text.")
    out: Path | None = setting(None, "File for the run (JSON lines); OUT.partial while it runs.")
    resume: bool = flag("Go on with OUT.partial.")
    card: list[Path] | None = setting(
        None, "File for a card: .json for `foretoken bench cards`, .md to read; may be given twice."
    )


@app.callback(invoke_without_command=True)
@with_common(omit=("drafter", "temperature", "inflate"), model="group", max_new_tokens=128)
@terminable()
def bench_command(
    context: typer.Context,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "--arm",
            help=f"May be given several times. {DRAFTER_HELP} @CONTROLLER after it sets a controller. Other engines: "
            f"{OTHER_ENGINES}. Plain decoding is always measured.",
        ),
    ] = None,
    *,
    options: Annotated[BenchOptions, FromOptions()],
    as_json: Lines = False,
    common: Common,
) -> None:
    """Measure drafters against plain decoding: by category, temperature and batch size, interleaved, with proof.

    After Ctrl-C and SIGTERM --resume goes on with what is in OUT.partial, on the same machine and versions.  Arms that
    remember earlier answers begin an unfinished setting anew.  An arm whose code from outside fails is left out, and
    the exit code is 1.
    """
    if context.invoked_subcommand is not None:
        refuse_options_before(context)
        return
    arms, out = drafter or ["auto"], options.out
    common.check_rules()
    for arm in arms:
        check_arm(arm)
    if common.profile is not None and all(split_arm(arm)[0] != "auto" for arm in arms):
        raise ValueError("--profile is used by the arm auto only: add --drafter auto, or leave --profile out")
    temperatures = tuple(numbers("temperature", options.temperature, float)) or (0.0,)
    batches = tuple(numbers("batch", options.batch, int)) or (1,)
    if options.resume and out is None:
        raise ValueError("--resume continues OUT.partial: give --out too")
    cards = _cards(options.card or ())
    lines_out = as_json or (out is None and not sys.stdout.isatty())
    with json_only(lines_out):
        from foretoken.lab.bench.partial import check_run_out, partial_of
        from foretoken.lab.bench.run import BenchSettings

        if out is not None and not check_run_out(out, options.resume) and options.resume:
            print(f"nothing to resume: {partial_of(out)} does not exist; the run starts anew", file=sys.stderr)
        about = None
        if ".json" in cards:
            from foretoken.lab.report.cards.written import origin

            loading = {"quantize": common.quantize, "inflate": options.inflate, "backend": common.backend}
            about = origin(common.target, loading, arms)
        chat = not options.no_chat_template
        settings = BenchSettings(arms, temperatures, batches, options.repeat, common.seed or 0, chat)
        result = _run(common, options, settings)
        if not as_json:
            _print(screen(), result, out)
    if lines_out:
        sys.stdout.write("".join(line + "\n" for line in result.lines))
        sys.stdout.flush()
    with json_only(lines_out):  # last, so that a card that cannot be written costs no results
        for kind, file in cards.items():
            _write_card(result, kind, file, about)
    if result.failed:
        raise typer.Exit(1)


def _run(common: Common, options: BenchOptions, settings: BenchSettings) -> BenchResult:
    from foretoken.core.sampling import SamplingParams
    from foretoken.lab.bench.arms import ArmSetup
    from foretoken.lab.bench.partial import partial_of
    from foretoken.lab.bench.run import run_bench

    prompts = chosen_prompts(options.prompts, options.format, options.category, options.max_prompts)
    SamplingParams(max(settings.temperatures), **common.filters)
    shared = ArmSetup(
        **vars(replace(common, inflate=options.inflate).subject(is_told=False)),
        profile=common.profile,
        max_new_tokens=common.max_new_tokens,
        ignore_eos=not options.stop_at_eos,
        filters=common.filters,
        inflate=options.inflate,
        quantize=common.quantize,
        backend=common.backend,
    )
    with progress_bar() as on_progress:
        try:
            return run_bench(shared, prompts, settings, options.out, options.resume, on_progress)
        except KeyboardInterrupt:
            if options.out is not None and partial_of(options.out).exists():
                print(f"finished parts are in {partial_of(options.out)}; --resume continues from here", file=sys.stderr)
            raise


# -- terminal output -------------------------------------------------------------------------------------------------


def _print(console: Console, result: BenchResult, out: Path | None) -> None:
    everything = [*result.cells, *result.summary["overall"]]
    for key in dict.fromkeys((c["temperature"], c["batch"]) for c in everything):
        at_key = [c for c in everything if (c["temperature"], c["batch"]) == key]
        prefill = {
            row["arm"]: f"{1000 * row['prefill_s']:.1f}"
            for row in result.summary["prefill"]
            if (row["temperature"], row["batch"]) == key
        }
        _print_setting(console, at_key, prefill)
    ties = sum(row["ties"] for row in result.summary["equality"])
    differences = sum(row["differences"] for row in result.summary["equality"])
    if ties:
        console.print(f"outputs that differ from plain decoding's by a numerical tie: {ties}")
    if differences:
        console.print(f"outputs that really differ from plain decoding's: {differences}", style="red")
    for skipped in result.summary["skipped"]:
        console.print(f"left out: {skipped}", style="dim")
    if cut := result.summary["settings"]["cut_prompts"]:
        console.print(f"{cut} prompts were too long for the context and lost their beginning", style="dim")
    if out is not None:
        console.print(f"written to {out}: foretoken bench report {out} --out report.html")


def _print_setting(console: Console, cells: Sequence[Mapping[str, Any]], prefill: Mapping[str, str]) -> None:
    """Print speed-ups by category (rows) and arm (columns), then details of each arm."""
    arms = list(dict.fromkeys(c["arm"] for c in cells))
    title = f"speed-up, T={cells[0]['temperature']:g}, batch {cells[0]['batch']}"
    grid = table(title, ["category"])
    for arm in arms:
        grid.add_column(arm, justify="right", overflow="fold")
    for category in dict.fromkeys(c["category"] for c in cells):
        of_category = {c["arm"]: c for c in cells if c["category"] == category}
        grid.add_row(category, *(_speed(of_category[arm]) for arm in arms))
    overall = {c["arm"]: c for c in cells if c["category"] == "overall"}
    grid.add_section()
    for label, show in _DETAILS.items():
        grid.add_row(label, *(show(overall[arm]) for arm in arms), style="dim")
    grid.add_row("prefill, ms", *(prefill[arm] for arm in arms), style="dim")
    print_table(console, grid)
    if any(map(is_foreign, arms)):
        console.print("the prefill of other engines includes the first token", style="dim")


def _speed(cell: Mapping[str, Any]) -> str:
    return f"{cell['tokens_per_s']:.1f} tok/s" if cell["arm"] == "plain" else f"{cell['speedup']:.2f}"


def _number(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda cell: "" if cell[name] is None else format(cell[name], form)


def _interval(cell: Mapping[str, Any]) -> str:
    from foretoken.lab.bench.results import interval

    return "" if cell["arm"] == "plain" else interval(cell)


def _same(cell: Mapping[str, Any]) -> str:
    return "" if cell["identical"] is None else "yes" if cell["identical"] else "no"


def _share(name: str) -> Callable[[Mapping[str, Any]], str]:
    def show(cell: Mapping[str, Any]) -> str:
        parts = [cell[part] for part in ("draft_s", "target_s", "overhead_s")]
        return "" if None in parts or not sum(parts) else f"{cell[name] / sum(parts):.0%}"

    return show


_DETAILS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "95 % interval": _interval,
    "predicted": _number("predicted_speedup", ".2f"),
    "tokens/round": _number("mean_acceptance_length", ".2f"),
    "accepted": _number("acceptance_rate", ".0%"),
    "drafting": _share("draft_s"),
    "target": _share("target_s"),
    "overhead": _share("overhead_s"),
    "same as plain": _same,
}


# -- cards -----------------------------------------------------------------------------------------------------------


def _cards(paths: Sequence[Path]) -> dict[str, Path]:
    """Card files by suffix, at most one of each."""
    files: dict[str, Path] = {}
    for file in paths:
        kind = file.suffix.lower()
        if kind not in (".json", ".md"):
            raise ValueError(f"--card {file} must end in .json or .md")
        if kind in files:
            raise ValueError(f"--card names two {kind} files, {files[kind]} and {file}: give one of each kind")
        if file.is_dir() or not file.parent.is_dir():
            raise ValueError(
                f"--card {file} cannot be written: {'it is a folder' if file.is_dir() else 'no such folder'}"
            )
        check_out(file, "--card")
        files[kind] = file
    return files


def _write_card(result: BenchResult, kind: str, file: Path, about: Origin | None) -> None:
    from foretoken.core.io.files import write_text
    from foretoken.lab.report.cards.card import STAMP
    from foretoken.lab.report.cards.written import card_of, markdown_card

    text = (
        markdown_card(result.cells, result.summary)
        if about is None or kind == ".md"
        else STAMP.to_json(card_of(result, about))
    )
    try:
        write_text(file, text)
    except OSError as error:
        raise ValueError(f"--card {file} cannot be written: {error.strerror}") from None
    screen().print(f"card written to {file}")


@app.command("cards")
def cards_command(
    folder: Annotated[Path, typer.Argument(help="Folder of cards that `foretoken bench --card FILE.json` wrote.")],
    out: Annotated[Path, typer.Option(help="HTML file, self-contained.")],
    as_json: Json = False,
) -> None:
    """Make one page of a folder of cards, with filters by CPU, model and method."""
    from foretoken.lab.report.cards.page import write_page

    check_out(out)
    cards, rows, faults = write_page(folder, out)
    for line in faults:
        print(f"warning: left out: {line}", file=sys.stderr)
    if as_json:
        print_json({"folder": str(folder), "out": str(out), "cards": cards, "rows": rows, "left_out": faults})
    else:
        screen().print(f"{cards} cards, {rows} measurements -> {out}")


# -- report ----------------------------------------------------------------------------------------------------------


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="File that `foretoken bench --out` wrote.")],
    out: Annotated[Path, typer.Option(help="HTML file, self-contained.")],
    plots: Annotated[Path | None, typer.Option(help="Folder for the charts as PNG files, 300 dpi.")] = None,
    as_json: Json = False,
) -> None:
    """Make a self-contained HTML page of a benchmark: bars, curves, and token trees round by round."""
    from foretoken.lab.report.embed import MISSING, can_draw
    from foretoken.lab.report.page import write_report
    from foretoken.lab.report.plots import write_plots

    with json_only(as_json):
        write_report(run, out)
        if not can_draw():
            print(f"warning: the page has no charts: {MISSING}", file=sys.stderr)
        pictures = [] if plots is None else write_plots(run, plots)
    if as_json:
        print_json({"run": str(run), "out": str(out), "plots": [str(file) for file in pictures]})
        return
    screen().print(f"report written to {out}")
    if pictures:
        screen().print(f"{len(pictures)} plots written to {plots}")


app.command("serve")(serve_command)
