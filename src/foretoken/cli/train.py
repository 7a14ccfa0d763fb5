"""``foretoken train METHOD``: training of language models, drafters and stop heads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.settings import FromOptions, with_settings
from foretoken.cli.train_distill import boost_command, distill_command
from foretoken.cli.train_drafter import make_command
from foretoken.cli.train_options import Data, keep_freed_memory
from foretoken.cli.train_progress import training_run
from foretoken.cli.train_specdec_pp import specdec_pp_command
from foretoken.registry import rows
from foretoken.training.config import TEACHER_WEIGHT, Intervals, LmConfig

app = typer.Typer(help="Train a language model or a drafter.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Train a language model or a drafter."""


for _row in rows("drafter"):
    if _row.needs_training or _row.improves_by_training:
        app.command(_row.name)(make_command(_row.name))

app.command("distill")(distill_command)
app.command("boost")(boost_command)
app.command("specdec_pp")(specdec_pp_command)


@app.command("lm")
@with_settings
def train_lm_command(
    *,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the model, its checkpoints and curves.")],
    tokenizer_from: Annotated[
        Path | None, typer.Option(help="Share the tokenizer (and encoded corpus) of this run.")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Start from this model's weights and tokenizer (continued training).")
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="Learn this model's distribution (for a draft model, with --tokenizer-from it).")
    ] = None,
    teacher_weight: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the teacher in the loss; the rest is the text's.")
    ] = TEACHER_WEIGHT,
    config: Annotated[LmConfig, FromOptions()],
    compile: Annotated[bool, typer.Option(help="torch.compile the loss (needs a C++ compiler on CPU).")] = False,
    intervals: Annotated[Intervals, FromOptions(omit=("eval_every",))],
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or mps.")] = "cpu",
    data_note: Annotated[str, typer.Option(help="Source of the text, for the model card.")] = "",
    licence: Annotated[str, typer.Option(help="SPDX name of the weights' licence, for the model card.")] = "",
) -> None:
    """Train a small Llama-architecture language model on text; resumes by itself from OUT/checkpoints."""
    from foretoken.training import lm
    from foretoken.training.cards import CardInfo
    from foretoken.training.loop import Saving

    keep_freed_memory()
    with training_run(out, config.steps, _describe) as (bar, stop):
        report = lm.train_lm(
            data, out, config, tokenizer_from=tokenizer_from, init_from=init_from, teacher=teacher,
            teacher_weight=teacher_weight, device=device, save_every=intervals.save_every, compiled=compile,
            on_read=bar.on_read, on_step=bar.on_step, saving=Saving(intervals.save_minutes, stop.requested),
            card=CardInfo(data_note=data_note, licence=licence),
        )  # fmt: skip
    held_loss, per_byte = report["held_loss_nats_per_token"], report["held_bits_per_byte"]
    figures = "" if held_loss is None else f"{held_loss:.4f} nats per token, {per_byte:.4f} bits per byte"
    loss = f"held out {figures}" if figures else "nothing held out"
    typer.echo(
        f'{report["parameters"]:,} parameters, {loss} -> {out}, for use as --target {out} or as drafter "model:{out}"'
    )
    if not (out / "losses.png").exists():
        typer.echo("no losses.png (losses.csv is there): pip install 'foretoken[train]' for the plot", err=True)


def _describe(measured: Mapping[str, Any]) -> str:
    return f"held out {measured['held_loss']:.4f} nats per token"
