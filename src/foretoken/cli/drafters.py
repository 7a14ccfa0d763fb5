"""``foretoken drafters``: which drafters work for a target on this machine, which do not and why, what they bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.model_argument import HELP
from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json, progress_bar, screen

if TYPE_CHECKING:
    from rich.table import Table

    from foretoken.bench.fitting import Fit, Subject
    from foretoken.bench.gains import Workload
    from foretoken.bench.run import OnProgress
    from foretoken.measure.prompts import BenchPrompt


@with_common(omit=("drafter", "profile"), model="own", max_new_tokens=32)
def drafters_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [FOLDER]...",
            help=f"MODEL: {HELP} FOLDER: where to look for draft models, trained drafters, datastores and GGUF files; "
            "subfolders too. With --target, all are folders.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Let what works decode a few prompts, in turns with plain decoding.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(help="To measure: text (one prompt a line) or JSONL; built-in prompts if none."),
    ] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Most prompts to use, spread over the file.")] = 4,
    repeat: Annotated[int, typer.Option(min=1, help="Runs per prompt; the one of median time counts.")] = 1,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """List the drafters that work for a target without a download, what fits in folders, and what is refused and why.

    Ctrl-C while it measures prints what was measured.
    """
    with json_only(as_json):
        common, folders = _common_and_folders(common, words or ())
        listing = _listing(common, folders, measure, prompts, max_prompts, repeat)
        if not as_json:
            _print(listing)
    if as_json:
        print_json({"drafters": [fit.public for fit in listing.fits]})
    if listing.interrupted:
        raise KeyboardInterrupt


def _common_and_folders(common: Common, words: Sequence[str]) -> tuple[Common, list[Path]]:
    """The options with their MODEL, and the folders behind it: with ``--target``, all words that are not the same."""
    if "target" not in common.given:
        return common.of(next(iter(words), None)), [Path(word) for word in words[1:]]
    repeated = words[:1] == [common.target]
    return common.of(None), [Path(word) for word in words[repeated:]]


@dataclass(frozen=True)
class _Listing:
    """What is printed: the drafters in order, what ``auto`` means, and how gains were measured if they were."""

    fits: Sequence[Fit]
    default: str | None
    measured: str = ""
    interrupted: bool = False


def _listing(
    common: Common, folders: Sequence[Path], measure: bool, prompts: Path | None, most: int, repeat: int
) -> _Listing:
    from foretoken.bench.fitting import fits, ordered, places
    from foretoken.loading import default_drafter
    from foretoken.measure.prompts import load_prompts

    common.check()
    for folder in folders:
        places(folder)
    texts = load_prompts(prompts)
    subject = _subject(common)
    default = default_drafter(subject.target, common.target)
    with progress_bar() as on_progress:
        work = _workload(common, subject, texts, most, repeat) if measure else None
        found = fits(subject, folders, on_progress)
        if work is None:
            return _Listing(ordered(found), default)
        done = _measure(found, work, on_progress)
    return _Listing(ordered(found), default, _how(work), not done)


def _subject(common: Common) -> Subject:
    from foretoken.bench.fitting import Subject
    from foretoken.loading import load_tokenizer
    from foretoken.sampling import SamplingParams

    SamplingParams(common.temperature, common.top_k, common.top_p, common.min_p)
    return Subject(
        common.load_target(),
        common.target,
        load_tokenizer(common.target),
        common.verifier,
        common.controller,
        None if common.device == "auto" else common.device,
        common.allow_lossy,
    )


def _workload(common: Common, subject: Subject, texts: Sequence[BenchPrompt], most: int, repeat: int) -> Workload:
    from foretoken.bench.gains import Workload, few
    from foretoken.bench.serving import Shared

    shared = Shared(
        subject.target,
        subject.source,
        subject.tokenizer,
        subject.verifier,
        subject.controller,
        device=subject.device,
        allow_lossy=subject.allow_lossy,
        max_new_tokens=common.max_new_tokens,
        filters={"top_k": common.top_k, "top_p": common.top_p, "min_p": common.min_p},
        inflate=common.inflate,
    )
    work = Workload(shared, few(texts, most), common.temperature, repeat, common.seed or 0)
    work.check()
    return work


def _measure(found: list[Fit], work: Workload, on_progress: OnProgress) -> bool:
    """Put gains into ``found``; whether all were measured."""
    from foretoken.bench.gains import gains

    try:
        for number, fit in gains(found, work, on_progress):
            found[number] = fit
    except KeyboardInterrupt:
        return False
    return True


# -- for people ------------------------------------------------------------------------------------------------------


def _how(work: Workload) -> str:
    """What the figures depend on."""
    from foretoken.bench.summary import dtype_of, machine

    where = machine(work.shared)
    count = sum(map(len, work.prompts.values()))
    parts = [
        f"{count} prompt" + "s" * (count > 1),
        f"{work.shared.max_new_tokens} new tokens each",
        f"T={work.temperature:g}",
    ]
    flags = where["hardware"]["gpus"] or [" ".join(where["hardware"]["cpu_flags"]) or where["hardware"]["cpu"]]
    return ", ".join([*parts, dtype_of(work.shared), *flags])


def _print(listing: _Listing) -> None:
    """What works, then what does not: the reason takes what the terminal has room for."""
    console = screen()
    working, refused = ([fit for fit in listing.fits if fit.works is works] for works in (True, False))
    if working:
        console.print(_working(working, bool(listing.measured)))
    if refused:
        console.print(_refused(refused))
    if listing.measured:
        console.print(f"gain over plain decoding: {listing.measured}", soft_wrap=True)
    counts = [sum(getattr(fit, name) or 0 for fit in working) for name in ("identical", "ties", "differences")]
    if counts[1]:
        text = f"{counts[1]} of {sum(counts)} outputs differ from plain decoding's by a numerical tie"
        console.print(text, style="dim", soft_wrap=True)
    different = [fit.spec for fit in working if fit.differences]
    if different:
        console.print(f"outputs really differ from plain decoding's: {', '.join(different)}", style="red")
    console.print(f"drafter=auto means here: {listing.default or 'plain decoding'}", soft_wrap=True)


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _working(fits: Sequence[Fit], measured: bool) -> Table:
    table = _table("works")
    table.add_column("--drafter", overflow="fold", max_width=36, style="bold cyan")
    if measured:
        table.add_column("gain", justify="right", no_wrap=True)
        table.add_column("tokens/round", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for fit in fits:
        length = fit.mean_acceptance_length
        gain = "" if fit.gain is None else f"{fit.gain:.2f}"
        figures = (gain, "" if length is None else f"{length:.2f}") if measured else ()
        table.add_row(fit.spec, *figures, fit.why)
    return table


def _refused(fits: Sequence[Fit]) -> Table:
    table = _table("does not work")
    table.add_column("drafter", overflow="fold", max_width=30, style="bold")
    table.add_column("why", overflow="fold")
    for fit in fits:
        table.add_row(fit.spec, fit.why)
    return table
