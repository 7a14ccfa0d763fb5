"""``foretoken tune MODEL --minutes 3``: the best drafter for these prompts and this machine, within a time limit."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.ending import terminable
from foretoken.cli.options import Common, Json, refuse_options_before, with_common
from foretoken.cli.output import check_out, json_only, place_of, print_json, progress_bar, screen
from foretoken.cli.settings import FromOptions
from foretoken.cli.tune import MAX_PROMPTS
from foretoken.core.io.hub_ids import expanded
from foretoken.core.outside import names_code
from foretoken.core.settings import setting
from foretoken.options import FILTERS

if TYPE_CHECKING:
    from foretoken.lab.tune.tuned import Outcome, TunedRow, TuneJob


@dataclass(frozen=True)
class TuneOptions:
    """Candidates, workload and time limit of a search."""

    out: Path | None = setting(None, "File for the profile, which --profile FILE reads [MODEL.profile.json, here].")
    drafters: str = setting("", "Try only these drafters, as model,k=8,ngram [all, the likely ones first].")
    draft: list[Path] | None = setting(
        None, "Folder or file with draft models or trained drafters to try, too; may be given again."
    )
    prompts: Path | None = setting(
        None, "Text (one prompt a line), JSONL with prompt, turns or messages; built-in ones if none."
    )
    new_tokens: int = setting(64, "Most tokens of an answer.", 24)  # fewer leave no room for drafts
    max_prompts: int = setting(16, MAX_PROMPTS, 1)
    minutes: float = setting(3.0, "Time for everything, loading included.")


@with_common(omit=("drafter", "verifier", "controller", "max_new_tokens", *FILTERS, "allow_lossy"), model="group")
@terminable()
def tune_command(
    ctx: typer.Context, *, options: Annotated[TuneOptions, FromOptions()], as_json: Json = False, common: Common
) -> None:
    """Find the drafter and its length that are fastest for a target on this machine, within --minutes.

    Likely winners come first, each in turns with plain decoding; the best ones then race each other.  The answer goes
    into a profile.  Ctrl-C and SIGTERM print and keep the answer so far, in a file of its own beside the profile of an
    earlier, complete search.  A drafter from outside that fails is left out, and the exit code is 1.  The subcommands
    search for settings of single drafters.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options_before(ctx)
        return
    began_s = perf_counter()
    with json_only(as_json):
        out = options.out or Path(f"{Path(common.target).name or 'model'}.profile.json")
        check_out(out, new_folders=True)
        job = _job(common, options, began_s)
        outcome = _tuned(job)
        out = _written(outcome, out)
        if not as_json:
            _print(outcome, out, common.target)
    if as_json:
        print_json({**_public(outcome), "out": str(out)})
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.failed:
        raise typer.Exit(1)


def _job(common: Common, options: TuneOptions, began_s: float) -> TuneJob:
    if not options.minutes > 0:
        raise ValueError(f"--minutes must be above 0, not {options.minutes:g}")
    from foretoken.core.sampling import SamplingParams
    from foretoken.lab.prompts import load_prompts, prompts_of_kind
    from foretoken.lab.tune.choices import parse_names
    from foretoken.lab.tune.tuned import TuneJob
    from foretoken.lab.workload import Workload, fitting_prompts
    from foretoken.loading.measured.busy import settle_threads

    common.check()
    SamplingParams(common.temperature)
    chosen = parse_names(options.drafters) if options.drafters else []
    prompts = None if options.prompts is None else load_prompts(options.prompts)
    offers = _offers(common, options.draft or (), from_model=not chosen)
    subject = common.subject()
    target = subject.target
    if (message := settle_threads(target)) is not None:
        print(f"warning: {message}", file=sys.stderr)
    prompts = prompts or prompts_of_kind(subject.tokenizer)
    ids = fitting_prompts(subject, prompts, options.new_tokens, options.max_prompts)
    work = Workload(subject, ids, options.new_tokens, common.temperature, common.seed or 0)
    return TuneJob(work, chosen, offers, options.minutes, perf_counter, began_s)


def _offers(common: Common, folders: Sequence[Path], from_model: bool) -> list[str]:
    """The drafter of a profile, and specs from ``--draft`` folders and with ``from_model`` the model's own folder."""
    from foretoken.lab.bench.fitting import candidates_in, offered
    from foretoken.loading import read_profile

    drafter = None if common.profile is None else read_profile(common.profile).get("drafter")
    beside = expanded(common.target)
    inside = [path for path in candidates_in(beside) if path != beside] if from_model and beside.is_dir() else []
    specs = [] if drafter is None else [drafter]
    for folder in folders:
        usable = [spec for path in candidates_in(folder) if (spec := offered(path)) is not None]
        if not usable:
            raise ValueError(f"--draft {folder} contains no drafter: `foretoken drafters MODEL {folder}` says why")
        specs += usable
    specs += [spec for path in inside if (spec := offered(path)) is not None]
    return list(dict.fromkeys(specs))


def _tuned(job: TuneJob) -> Outcome:
    """Run the search."""
    from foretoken.lab.tune.search import tune

    def on_row(row: TunedRow) -> None:
        text = f"{row.speedup:5.2f}x  {row.tokens_per_round:4.2f} tokens a round  {row.way.drafter}"
        screen(stderr=True).print(text, style="dim")

    with progress_bar() as tell:  # in per cent of the time limit
        return tune(job, lambda text, share: tell(round(100 * share), 100, text), on_row)


def _written(outcome: Outcome, out: Path) -> Path:
    """Write the profile and return its file."""
    from foretoken.core.io.files import write_json

    file = place_of(out, outcome.interrupted, lambda text: json.loads(text)["complete"] is False)
    write_json(file, outcome.profile())
    return file


def _public(outcome: Outcome) -> dict[str, Any]:
    """Fields of the ``--json`` output."""
    profile = outcome.profile()
    keys = (
        "drafter", "verifier", "controller", "temperature", "prompts", "new_tokens", "speedup", "plain_tokens_per_s",
        "complete", "table",
    )  # fmt: skip
    spent = {"spent_s": outcome.spent_s, "loading_s": outcome.before_s}
    return {**{key: profile[key] for key in keys}, **spent, "skipped": outcome.skipped}


def _print(outcome: Outcome, out: Path, model: str) -> None:
    console = screen()
    for compared, title in ((True, "raced against each other"), (False, "tried briefly")):
        rows = [row for row in outcome.rows if row.compared is compared]
        if rows:
            console.print(f"{'of plain':>9} {'tokens/round':>13} {'tokens':>7}  {title}", style="bold")
        for row in rows:
            console.print(_line(row), style="bold" if row.way == outcome.chosen else None)
    if outcome.job.work.temperature == 0:
        for row in [row for row in outcome.rows if row.differing]:
            text = f"{row.differing} of {row.texts} texts of {row.way.drafter} differ from plain decoding's"
            console.print(f"{text}: `foretoken parity` says whether by numerical ties", style="dim")
    reasons: dict[str, list[str]] = {}
    for name, reason in outcome.skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        console.print(f"not measured: {'; '.join(names)}: {reason}", style="dim")
    spent = f"{outcome.spent_s:.0f} s, {outcome.before_s:.0f} of them loading; {outcome.prompts} prompts"
    console.print(f"{spent}{'; ended early' * outcome.interrupted}")
    rate = f"plain decoding: {outcome.plain_tokens_per_s:.1f} tokens/s"
    if outcome.chosen is None:
        console.print(f"{rate}; nothing is faster here: the profile {out} asks for plain decoding")
        return
    drafter, controller = outcome.chosen
    console.print(f"{rate}; {drafter} with {controller}: {outcome.speedup:.2f}x", style="bold")
    # A profile runs no code: a drafter in a file must be named, too.
    named = f" --drafter {quote(drafter)}" if names_code(drafter) else ""
    console.print(f"foretoken generate {model} --profile {out}{named}")


def _line(row: TunedRow) -> str:
    figures = f"{row.speedup:8.2f}x {row.tokens_per_round:13.2f} {row.tokens:7}"
    return f"{figures}  {row.way.drafter} with {row.way.controller}{': ' * bool(row.why)}{row.why}"
