"""``foretoken bench serve URL``: load an OpenAI-compatible server and measure it from the client side."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foretoken.cli.ending import terminable
from foretoken.cli.output import check_out, json_only, place_of, print_table, progress_bar, screen, table
from foretoken.cli.settings import FromOptions, with_settings
from foretoken.lab.bench.load.settings import Level, LoadSettings

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.lab.bench.load.run import LoadResult
    from foretoken.lab.prompts import BenchPrompt

Number = TypeVar("Number", int, float)
PROMPTS = "File or folder of prompts, may be given several times; built-in prompts by default."
FORMAT = "Format of the prompts: auto, jsonl, spec_bench, mt_bench, humaneval, mbpp, gsm8k, chat, sharegpt, text."
CATEGORY = "Only these categories; may be given several times."
Lines = Annotated[
    bool, typer.Option("--json", help="Print cells and, as the last line, the summary; the rest goes to stderr.")
]


@with_settings
@terminable()
def serve_command(
    *,
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL...",
            help="http://HOST:PORT or NAME=http://HOST:PORT; with several, the first is what others are compared with.",
        ),
    ],
    concurrency: Annotated[
        list[str] | None, typer.Option(help="Clients at a time, joined by commas or given several times [1,8].")
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(help="Requests per second (Poisson arrivals); joined by commas or given several times."),
    ] = None,
    burst: Annotated[int, typer.Option(min=1, help="With --rate: requests that arrive together.")] = 1,
    load: Annotated[LoadSettings, FromOptions()],
    repeat: Annotated[int | None, typer.Option(min=1, help="Passes of each level [1; 2 where arms compare].")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Plain decoding against speculation on one server, and equal texts.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Chat completions instead of completions.")] = False,
    prompts: Annotated[list[Path] | None, typer.Option(help=PROMPTS)] = None,
    format: Annotated[str, typer.Option(help=FORMAT)] = "auto",
    category: Annotated[list[str] | None, typer.Option(help=CATEGORY)] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Most prompts per category.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length (vLLM, SGLang, foretoken).")
    ] = False,
    extra_body: Annotated[str, typer.Option(help="JSON object that is added to every request.")] = "{}",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model name in requests, one for all servers or one each; as listed by default."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="OPENAI_API_KEY", help="One for all servers or one for each.", show_envvar=True),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which a request has failed.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="File for the run (JSON lines), for foretoken bench report.")] = None,
    as_json: Lines = False,
) -> None:
    """Send requests to a server and report latency, throughput and acceptance as clients see them.

    Ctrl-C and SIGTERM end it early and report the measurements so far.
    """
    passes = 2 if compare or len(urls) > 1 else 1
    lines_out = as_json or (out is None and not sys.stdout.isatty())
    with json_only(lines_out):
        settings = replace(
            load, levels=_levels(concurrency, rate, burst), passes=repeat or passes, chat=chat, ignore_eos=ignore_eos,
            extra=_object(extra_body), timeout_s=timeout,
        )  # fmt: skip
        chosen = chosen_prompts(prompts, format, category, max_prompts)
        result = _measured(urls, compare, api_key or [], model or [], chosen, out, settings)
        if not as_json:
            show(screen(), result)
    if lines_out:
        sys.stdout.write("".join(line + "\n" for line in result.lines))
        sys.stdout.flush()
    if out is not None and result.cells:  # after the results, which a full disk must not cost
        _write(result, out, screen(stderr=as_json))
    if result.stopped_by is not None:
        signal.raise_signal(result.stopped_by)  # deferred until now; the default action ends the process
    if not any(cell["completed"] for cell in result.cells):
        raise ValueError("no request was answered: " + "; ".join(result.summary["notes"]))


def _levels(concurrency: Sequence[str] | None, rate: Sequence[str] | None, burst: int) -> list[Level]:
    """Concurrency levels, then rate levels; only rates have bursts."""
    if burst > 1 and not rate:
        raise ValueError("--burst says how many requests of a --rate arrive together: give --rate too")
    if not concurrency and not rate:
        concurrency = ["1,8"]
    levels = [Level("concurrency", value) for value in dict.fromkeys(numbers("concurrency", concurrency, int))]
    return [*levels, *(Level("rate", value, burst) for value in dict.fromkeys(numbers("rate", rate, float)))]


def numbers(name: str, texts: Sequence[str] | None, kind: Callable[[str], Number]) -> list[Number]:
    """Numbers from comma-joined or repeated options.  Raises ``ValueError`` for anything else."""
    parts = [part.strip() for text in texts or () for part in text.split(",")]
    try:
        return [kind(part) for part in parts]
    except ValueError:
        word = "numbers" if kind is float else "whole numbers"
        raise ValueError(f"--{name} takes {word} joined by commas, not {','.join(parts)!r}") from None


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra-body must be a JSON object: {error.msg} at character {error.pos}") from None
    if not isinstance(body, dict):
        raise ValueError(f"--extra-body must be a JSON object, not {text[:40]}")
    return body


def chosen_prompts(
    files: Sequence[Path] | None, format: str, category: Sequence[str] | None, most: int | None
) -> dict[str, list[BenchPrompt]]:
    """Prompts by category, from files or the built-in set."""
    from foretoken.lab.prompts import load_prompts, select

    loaded = [prompt for source in (files or [None]) for prompt in load_prompts(source, format)]  # type: ignore[list-item]
    return select(loaded, category or (), most)


def _measured(
    urls: Sequence[str],
    compare: bool,
    keys: Sequence[str],
    models: Sequence[str],
    prompts: Mapping[str, Any],
    out: Path | None,
    settings: LoadSettings,
) -> LoadResult:
    """Run the load test, after a check of its file."""
    try:
        from foretoken.lab.bench.load.run import parse_addresses, run_load
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise ValueError("a load test needs httpx: pip install 'foretoken[bench]'") from None

    if out is not None and not out.parent.is_dir():
        raise ValueError(f"the folder {out.parent} of --out does not exist")
    if out is not None:
        check_out(out)
    addresses = parse_addresses(urls, compare, keys, models)
    with progress_bar() as tell:
        return run_load(addresses, prompts, settings, compare, tell)


def _write(result: LoadResult, out: Path, console: Console) -> None:
    file = place_of(out, result.stopped_by is not None, _is_interrupted)
    result.write(file)
    console.print(f"written to {file}: foretoken bench report {file} --out report.html")


def _is_interrupted(text: str) -> bool:
    """Whether a file's text is that of an interrupted load test."""
    summary = json.loads(text.splitlines()[-1])
    return summary["kind"] == "load" and summary["interrupted"] is True


def show(console: Console, result: LoadResult) -> None:
    """Print a table of all levels, the equality of texts, and notes."""
    print_table(console, _table(result))
    for cell in result.cells:
        if cell["errors"]:
            kinds = ", ".join(f"{count} {kind}" for kind, count in cell["errors"].items())
            console.print(f"{cell['arm']}, {cell['load']} {cell['level']:g}: {kinds}", style="red")
    for row in result.summary["equality"]:
        _show_equality(console, row)
    for note in result.summary["notes"]:
        console.print(note, style="dim")
    if result.stopped_by is not None:
        console.print("interrupted: these are the requests that had ended by then", style="yellow")


def _table(result: LoadResult) -> Any:
    ratios = any(cell["ratios"] for cell in result.cells)
    heads = ["req/s", "tok/s", "TTFT", "TPOT", "latency", "tok/rd", *(["tok/s x", "TPOT x"] if ratios else [])]
    grid = table(None, ["load", "arm"])
    grid.padding = (0, 0, 0, 0)
    for name in heads:
        grid.add_column(name, justify="right")
    for cell in result.cells:
        grid.add_row(*_row(cell, ratios))
    grid.caption = (
        "c: concurrency. TTFT, TPOT (time per output token), latency: ms, median|99th percentile. x: over the first"
    )
    grid.caption_justify = "left"
    return grid


def _row(cell: Mapping[str, Any], ratios: bool) -> list[str]:
    load = f"c={cell['level']:g}" if cell["load"] == "concurrency" else f"{cell['level']:g}/s"
    row = [
        load + (f" by {cell['burst']}" if cell["burst"] > 1 else ""),
        cell["arm"],
        f"{cell['requests_per_s']:.2f}",
        f"{cell['tokens_per_s']:.1f}",
        *(_spread(cell[name]) for name in ("ttft_ms", "tpot_ms", "e2e_ms")),
        _or_empty(cell["mean_acceptance_length"], ".2f"),
    ]
    if ratios:
        row += [_or_empty((cell["ratios"] or {}).get(name), ".2f") for name in ("tokens_per_s", "tpot")]
    return row


def _spread(percentiles: Mapping[str, float] | None) -> str:
    if percentiles is None:
        return ""
    return "|".join(f"{percentiles[name]:.{1 if percentiles['p50'] < 100 else 0}f}" for name in ("p50", "p99"))


def _or_empty(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _show_equality(console: Console, row: Mapping[str, Any]) -> None:
    level = f"{row['arm']}, {row['load']} {row['level']:g}"
    compared, different = row["compared"], row["different"]
    if not different:
        console.print(f"{level}: texts are equal, {compared} of {compared}", style="green")
        return
    if different == row["ties"]:
        words = f"{level}: {different} of {compared} texts differ, all by numerical ties (bfloat16 rounds by batch)"
        console.print(words)
        return
    first, unknown = row["examples"][0], row["ties_unknown"]
    texts = " became ".join(map(repr, first["texts"]))
    parts = [] if different == unknown else [f"{row['ties']} of them by numerical ties"]
    parts += [f"ties unknown for {unknown}"] if unknown else []
    console.print(
        f"{level}: {different} of {compared} texts differ, {', '.join(parts)}; "
        f"request {first['request']} from character {first['character']}: {texts}",
        style="red" if different > row["ties"] + unknown else None,
    )
