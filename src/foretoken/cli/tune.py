"""``foretoken tune``: find settings that are fast for a target on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.model_argument import ModelGroup
from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json, screen
from foretoken.options import FILTERS

if TYPE_CHECKING:
    from foretoken.lab.tune.layer_skip import SkipSearch, TunedSkips
    from foretoken.lab.workload import Workload

app = typer.Typer(
    cls=ModelGroup,
    help="Find settings that are fast for a target on this machine.",
    subcommand_metavar="[MODEL] | COMMAND [ARGS]...",
    no_args_is_help=True,
)


@app.command("layer-skip")
@with_common(omit=("drafter", "verifier", "controller", "profile", "max_new_tokens", *FILTERS, "allow_lossy"))
def layer_skip_command(
    out: Annotated[Path, typer.Option(help="File for the result, which loads as layer_skip:FILE.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file (one prompt a line) or JSONL with prompt, text or turns; built-in ones if none."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Sets of skipped sublayers to try.")] = 100,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt and trial.")] = 32,
    max_prompts: Annotated[int, typer.Option(min=1, help="Most prompts to use, spread over the file.")] = 8,
    k: Annotated[int, typer.Option(min=1, help="Longest draft.")] = 8,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the trials beside --out.")] = False,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Search for the attention and MLP sublayers that the drafter layer_skip should leave out.

    Every trial decodes the prompts speculatively and measures tokens per second.  Ctrl-C keeps the best set so far.
    """
    with json_only(as_json):
        from foretoken.methods.drafters.own_layers import num_layers_of

        work = workload_of(common, prompts, new_tokens, max_prompts)
        num_layers_of(work.target)
        outcome = _search(work, k, out, trials, resume)
        if not as_json:
            _print(outcome, work, out)
    if as_json:
        print_json({**outcome.public(), "out": str(out)})


def workload_of(common: Common, prompts: Path | None, new_tokens: int, most: int) -> Workload:
    """What trials decode: prompts of a file, or our own.

    Raises:
        ValueError: no prompt that fits, a target without a tokenizer, or a bad option.
    """
    from foretoken.core.sampling import SamplingParams
    from foretoken.lab.prompts import read_prompts
    from foretoken.lab.workload import Workload, fitting_prompts

    SamplingParams(common.temperature)
    texts = read_prompts(prompts)
    subject = common.subject()
    ids = fitting_prompts(subject, texts, new_tokens, most)
    return Workload(subject, ids, new_tokens, common.temperature, common.seed or 0)


def _search(work: Workload, k: int, out: Path, trials: int, resume: bool) -> TunedSkips:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from foretoken.lab.tune.layer_skip import tune

    console = screen(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between trials only: an animated bar would take time from what is being measured.
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("warming up", total=trials)

        def on_trial(number: int, speed: float, search: SkipSearch) -> None:
            text = f"last {speed:.1f}, best {search.best_speed:.1f} tokens/s" if number else "trying the default set"
            bar.update(task, completed=min(number, trials), description=text, refresh=True)

        try:
            return tune(work, k, out, trials, resume, on_trial)
        except KeyboardInterrupt:
            if out.exists():
                console.print(f"the best set so far is in {out}; --resume goes on from here", soft_wrap=True)
            raise


def _print(outcome: TunedSkips, work: Workload, out: Path) -> None:
    from rich import box
    from rich.table import Table

    console = screen()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("skipped", "attention", "MLP"):
        table.add_column(name, overflow="fold")
    for name in ("tokens/s", "speed-up", "accepted", "tokens/round"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("plain", "", "", f"{outcome.plain.tokens_per_s:.1f}", "1.00", "", "1.00")
    for name, skips in outcome.sets.items():
        speed = outcome.speeds[name]
        table.add_row(
            name,
            *(text.replace("+", " ") for text in skips.options.values()),
            f"{speed.tokens_per_s:.1f}",
            f"{outcome.speedup(name):.2f}",
            f"{speed.acceptance_rate:.0%}",
            f"{speed.mean_acceptance_length:.2f}",
        )
    console.print(table)
    counts = f"{outcome.trials} trials, {len(work.prompts)} prompts of {work.new_tokens} new tokens"
    console.print(f"{counts}; the {outcome.chosen} set is in {out}: --drafter layer_skip:{out}", soft_wrap=True)
    if outcome.speedup(outcome.chosen) <= 1:
        console.print("plain decoding is faster than skipping layers for this target on this machine", style="yellow")
