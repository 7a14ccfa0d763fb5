"""``foretoken train METHOD`` for every method that has a recipe: one command, one loop, one progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.memory import keep_freed_memory
from foretoken.cli.model_argument import Model, Target, existing_model
from foretoken.cli.output import print_json, screen
from foretoken.cli.train_options import (
    Blocks,
    Context,
    Corpus,
    Data,
    Every,
    Optimizer,
    Precision,
    Report,
    Steps,
    Text,
    WrittenBlocks,
    WrittenTemperature,
    key_values,
    load_target,
    training_bar,
)

if TYPE_CHECKING:
    from foretoken.controllers.base import Controller
    from foretoken.drafters.base import Drafter
    from foretoken.models.base import LanguageModel
    from foretoken.training.recipes.base import Recipe

HELD_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 6, 48, 40
"""Held-out texts that a drafter is run on while it trains."""


def make_command(method: str) -> Callable[..., None]:
    """The command of one method."""

    def command(
        *,
        model: Model = None,
        data: Data,
        out: Annotated[Path, typer.Option(help="Folder for the drafter, its checkpoints and curves.")],
        target: Target = None,
        steps: Steps = 500,
        batch_size: Blocks = 4,
        context: Context = 512,
        lr: Annotated[float | None, typer.Option(min=0.0, help="Peak learning rate; the method's by default.")] = None,
        seed: int = 0,
        setting: Annotated[
            list[str] | None, typer.Option("--set", help="key=value of the network or its loss.")
        ] = None,
        corpus: Corpus = None,
        features: Annotated[
            Path | None, typer.Option(help="Keep the target's hidden states here; share them by runs of one target.")
        ] = None,
        text: Text = "fixed",
        written_blocks: WrittenBlocks = 256,
        written_temperature: WrittenTemperature = 1.0,
        optimizer: Optimizer = "muon",
        precision: Precision = "bfloat16",
        save_every: Every = 100,
        eval_every: Every = 100,
        device: str | None = None,
        as_json: Report = False,
    ) -> None:
        report = train(
            method, data, out, existing_model(model, target), key_values(setting), corpus, features, device,
            save_every, eval_every,
            steps=steps, batch_size=batch_size, context=context, seed=seed, **({} if lr is None else {"lr": lr}),
            text=text, written_blocks=written_blocks, written_temperature=written_temperature,
            optimizer=optimizer, precision=precision,
        )  # fmt: skip
        if as_json:
            print_json(report)

    command.__doc__ = f"Train a drafter of the method '{method}'; resumes by itself from OUT/checkpoints."
    return command


def train(
    method: str,
    data: Sequence[Path],
    out: Path,
    target: str,
    settings: Mapping[str, str],
    corpus: Path | None,
    features: Path | None,
    device: str | None,
    save_every: int,
    eval_every: int,
    **run: Any,
) -> dict[str, Any]:
    """Load the target, train, show it, write the card; returns the report."""
    from foretoken.models.parts import TargetParts
    from foretoken.training.cards.drafter import write_drafter_card
    from foretoken.training.joint import load_trainable
    from foretoken.training.recipes import find_recipe
    from foretoken.training.trainer import TrainConfig, Trainer

    keep_freed_memory()
    model, tokenizer = load_target(target, device)
    kind = find_recipe(method)
    dtype = TargetParts(model).head.weight.dtype
    recipe = kind(model, TargetParts(model), settings, run["seed"])
    config = TrainConfig(**{"lr": kind.lr, **run})
    if recipe.trains_target or config.precision == "float32":
        model = load_trainable(target, device) if recipe.trains_target else load_target(target, device, "float32")[0]
        recipe = kind(model, TargetParts(model), settings, run["seed"])
    with training_bar(config.steps, describe) as (on_written, on_step):
        trainer = Trainer(recipe, data, out, config, tokenizer, corpus, features, dtype, on_written)
        size = min(PROMPT_TOKENS, model.context_length // 2)
        prompts = [tokens[0, :size].tolist() for tokens in trainer.held_tokens[:HELD_PROMPTS]]
        report = trainer.run(
            save_every=save_every,
            eval_every=eval_every,
            evaluate=(lambda drafter, served: held_out(served, drafter, prompts)) if prompts else None,
            on_step=on_step,
        )
    write_drafter_card(out, report, data, target)
    _tell(report, out, recipe)
    return report


def _tell(report: Mapping[str, Any], out: Path, recipe: Recipe) -> None:
    """Say on stderr what was made."""
    from foretoken.training.joint import FOLDER

    length = describe(report["acceptance"]) if report["acceptance"] else "nothing held out"
    console = screen(stderr=True)
    console.print(f"{report['parameters']:,} parameters, {length} -> {out}", soft_wrap=True)
    if recipe.trains_target:
        before, after = report["target_loss_nats"]["before"], report["target_loss_nats"]["after"]
        change = "" if before is None else f" (held-out loss {before:.3f} -> {after:.3f} nats per token)"
        use = f"--target {out / FOLDER} --drafter {recipe.spec(out)}"
        console.print(f"the target was trained too{change}: {use}", soft_wrap=True)


def held_out(
    model: LanguageModel, drafter: Drafter, prompts: Sequence[list[int]], controller: str | Controller = "constant"
) -> dict[str, Any]:
    """Acceptance of a drafter on held-out prompts, through the real engine: greedy, and ``"sampled"`` at T=1."""
    sampled = _held_out(model, drafter, prompts, controller, 1.0)
    return {**_held_out(model, drafter, prompts, controller, 0.0), "sampled": sampled}


def _held_out(
    model: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    controller: str | Controller,
    temperature: float,
) -> dict[str, Any]:
    from foretoken.engine.stats import SpecStats
    from foretoken.llm import assemble

    llm = assemble(model, drafter, "auto", controller, None)
    total = SpecStats()
    room = model.context_length - max(map(len, prompts))
    asked: dict[str, Any] = {"temperature": temperature, "seed": 0, "ignore_eos": True}
    for out in llm.generate(list(prompts), max_new_tokens=min(NEW_TOKENS, room), **asked):
        total.merge(out.stats)
    rounds, reached = max(1, total.num_drafts), total.num_accepted_tokens_per_pos
    reached = [*reached, *[0] * (drafter.max_depth - len(reached))]
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "acceptance_rate": total.acceptance_rate,
        "per_position": [count / rounds for count in reached],
    }


def describe(acceptance: Mapping[str, Any]) -> str:
    """One line: mean acceptance length, and the share of rounds that reach each position."""
    shares = " ".join(f"{share:.0%}" for share in acceptance["per_position"])
    return f"mean acceptance length {acceptance['mean_acceptance_length']:.2f} on held-out text (by position {shares})"
