"""``foretoken tune --target X --out profile.json``: the drafter that pays, on these prompts and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import Common, Json, given_options, with_common
from foretoken.cli.output import check_out, json_only, print_json, screen

if TYPE_CHECKING:
    from foretoken.tune.tuned import Job, Outcome


@with_common(
    omit=(
        "drafter", "verifier", "controller", "profile", "max_new_tokens", "top_k", "top_p", "min_p", "allow_lossy",
    ),
    model="group",
)  # fmt: skip
def tune_command(
    ctx: typer.Context,
    out: Annotated[Path | None, typer.Option(help="File for the profile, which --profile FILE reads.")] = None,
    drafters: Annotated[
        str, typer.Option(help="Drafters to try, as model,k=8,ngram; all that the target has if none.")
    ] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text (one prompt a line), JSONL with prompt, turns or messages; built-in ones if none."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=24, help="Most tokens to generate per prompt.")] = 64,
    max_prompts: Annotated[int, typer.Option(min=1, help="Most prompts to use, spread over the file.")] = 16,
    minutes: Annotated[float, typer.Option(help="Time to spend; less time takes fewer prompts.")] = 4.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Find the drafter, its length and its tree that are fastest for a target on this machine and these prompts.

    Measures what target calls and drafters cost and how many draft tokens are accepted, runs the best ones against
    plain decoding, and writes a profile.  Ctrl-C keeps what was measured.  The subcommands search for settings of
    single drafters.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    if out is None:
        raise ValueError("Missing option '--out': name a file for the profile")
    check_out(out)
    with json_only(as_json):
        job = _job(common, drafters, prompts, new_tokens, max_prompts, minutes)
        outcome = _tuned(job, out, resume)
        if not as_json:
            _print(outcome, out)
    if as_json:
        print_json({**_public(outcome), "out": str(out)})


def _refuse_options(ctx: typer.Context) -> None:
    """Options in front of a subcommand would be lost."""
    given = [name for name in ctx.params if name in given_options(ctx)]
    if given:
        option = "--" + given[0].replace("_", "-").replace("as-json", "json")
        if given[0] == "model":
            option = str(ctx.params["model"])
        raise ValueError(f"put {option} behind the subcommand: foretoken tune {ctx.invoked_subcommand} {option} ...")


def _job(common: Common, names: str, prompts: Path | None, new_tokens: int, most: int, minutes: float) -> Job:
    from foretoken.loading import load_tokenizer
    from foretoken.measure.prompts import load_prompts
    from foretoken.sampling import SamplingParams
    from foretoken.tune.choices import parse_names
    from foretoken.tune.probe import Workload
    from foretoken.tune.tuned import Job

    common.check()
    SamplingParams(common.temperature)
    chosen = parse_names(names) if names else []
    loaded = load_prompts(prompts)
    device = None if common.device == "auto" else common.device
    target = common.load_target()
    tokenizer = load_tokenizer(common.target)
    if tokenizer is None:
        raise ValueError("the target has no tokenizer beside it: tuning needs one to read the prompts")
    ids = _fitting([prompt.encode(tokenizer) for prompt in loaded], target.context_length, new_tokens)
    work = Workload(target, ids, new_tokens, common.temperature, common.seed or 0).cut(most, new_tokens)
    return Job(work, common.target, tokenizer, device, chosen, minutes)


def _fitting(encoded: list[list[int]], context: int, new_tokens: int) -> list[list[int]]:
    """The prompts that leave room for what is generated."""
    found = [ids for ids in encoded if 0 < len(ids) <= context - new_tokens]
    if not found:
        raise ValueError(f"no prompt leaves room for {new_tokens} new tokens in a context of {context}")
    return found


def _tuned(job: Job, out: Path, resume: bool) -> Outcome:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from foretoken.tune.tuner import partial_file, tune

    console = screen(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between measurements only: an animated bar would take time from what is being measured.
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)

        def on_progress(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total, refresh=True)

        try:
            return tune(job, out, resume, on_progress)
        except KeyboardInterrupt:
            if partial_file(out).exists():
                console.print(
                    f"what was measured is in {partial_file(out)}; --resume goes on from here", soft_wrap=True
                )
            raise


def _public(outcome: Outcome) -> dict[str, Any]:
    """As ``--json`` prints it."""
    found = outcome.profile()
    keys = (
        "drafter", "verifier", "controller", "temperature", "prompts", "new_tokens", "speedup", "plain_tokens_per_s",
        "table",
    )  # fmt: skip
    return {**{key: found[key] for key in keys}, "skipped": outcome.skipped}


def _print(outcome: Outcome, out: Path) -> None:
    from rich import box
    from rich.table import Table

    console = screen()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", justify="right")
    table.add_column("controller", overflow="fold")
    for name in ("tokens/round", "predicted", "measured"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not", overflow="fold")
    tokens = {one.drafter: one.cost.expected_tokens(one.depth) for one in outcome.candidates}
    for number, row in enumerate(outcome.table(), 1):
        console.print(f"{number}: {row['drafter']}", soft_wrap=True)
        measured, chosen = row["measured_speedup"], (row["drafter"], row["controller"]) == outcome.chosen
        table.add_row(
            str(number),
            row["controller"],
            f"{tokens[row['drafter']]:.2f}",
            f"{row['predicted_speedup']:.2f}x",
            "" if measured is None else f"{measured:.2f}x",
            row["why"],
            style="bold" if chosen else None,
        )
    console.print(table)
    for name, reason in outcome.skipped.items():
        console.print(f"not measured: {name}: {reason}", style="dim", soft_wrap=True)
    console.print(f"measured on {len(outcome.work.prompts)} prompts, {outcome.work.new_tokens} new tokens each")
    rate = f"plain decoding: {outcome.plain_tokens_per_s:.1f} tokens/s"
    if outcome.chosen is None:
        console.print(f"{rate}; nothing is faster here: the profile {out} asks for plain decoding", soft_wrap=True)
    else:
        console.print(
            f"{rate}; {outcome.chosen[0]} with {outcome.chosen[1]}: {outcome.speedup:.2f}x; --profile {out} uses it",
            soft_wrap=True,
        )
