"""``foretoken train METHOD``: training of language models, drafters and stop heads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.train_distill import boost_command, distill_command
from foretoken.cli.train_drafter import make_command
from foretoken.cli.train_options import Blocks, Data, Every, Optimizer, Precision, SaveMinutes, Steps, keep_freed_memory
from foretoken.cli.train_progress import stop_on_signals, training_bar
from foretoken.cli.train_specdec_pp import specdec_pp_command
from foretoken.registry import rows

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
def train_lm_command(
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
        float, typer.Option(min=0.0, max=1.0, help="Share of the teacher in the loss; the text has the rest.")
    ] = 0.7,
    steps: Steps = 2000,
    hidden: Annotated[int, typer.Option(min=8)] = 384,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    heads: Annotated[int, typer.Option(min=1)] = 6,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    ffn: Annotated[int, typer.Option(min=8)] = 1024,
    context: Annotated[int, typer.Option(min=8, help="Tokens per block and the model's context.")] = 1024,
    vocab: Annotated[int, typer.Option(min=300, help="Size of a newly trained tokenizer.")] = 8192,
    batch_size: Blocks = 8,
    lr: Annotated[float, typer.Option(min=0.0)] = 4e-3,
    warmup: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the steps in which the rate rises.")] = 0.02,
    decay: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share in which it falls to zero.")] = 0.35,
    seed: int = 0,
    hybrid: Annotated[
        bool, typer.Option(help="Qwen3.5's layers, every second one recurrent; --init-from a Llama with half of them.")
    ] = False,
    optimizer: Optimizer = "muon",
    precision: Precision = "bfloat16",
    compile: Annotated[bool, typer.Option(help="torch.compile the loss (needs a C++ compiler on CPU).")] = False,
    save_every: Every = 100,
    save_minutes: SaveMinutes = 5.0,
    device: str = "cpu",
    data_note: Annotated[str, typer.Option(help="Where the text comes from, for the model card.")] = "",
    licence: Annotated[str, typer.Option(help="SPDX name of the weights' licence, for the model card.")] = "",
) -> None:
    """Train a small Llama-architecture language model on text; resumes by itself from OUT/checkpoints."""
    from transformers.utils import logging as hf_logging

    from foretoken.training import lm
    from foretoken.training.cards import CardInfo
    from foretoken.training.loop import Saving

    config = lm.LmConfig(
        hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, ffn=ffn, context=context, vocab=vocab,
        steps=steps, batch_size=batch_size, lr=lr, warmup=warmup, decay=decay, seed=seed,
        hybrid=hybrid, optimizer=optimizer, precision=precision,
    )  # fmt: skip
    keep_freed_memory()
    hf_logging.disable_progress_bar()  # ours is the one to look at
    with stop_on_signals() as stop, training_bar(steps, _describe) as bar, stop.in_steps(bar.say, out):
        report = lm.train_lm(
            data, out, config, tokenizer_from=tokenizer_from, init_from=init_from, teacher=teacher,
            teacher_weight=teacher_weight, device=device, save_every=save_every, compiled=compile, on_step=bar.on_step,
            saving=Saving(save_minutes, stop.asked),
            card=CardInfo(data_note=data_note, licence=licence),
        )  # fmt: skip
    held, per_byte = report["held_loss_nats_per_token"], report["held_bits_per_byte"]
    loss = "nothing held out" if held is None else f"held out {held:.4f} nats per token, {per_byte:.4f} bits per byte"
    typer.echo(f"{report['parameters']:,} parameters, {loss} -> {out}")
    if not (out / "losses.png").exists():
        typer.echo("no losses.png (losses.csv is there): pip install 'foretoken[train]' for the plot", err=True)


def _describe(measured: Mapping[str, Any]) -> str:
    return f"held out {measured['held_loss']:.4f} nats per token"
