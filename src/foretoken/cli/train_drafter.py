"""``foretoken train METHOD`` for every method that has a recipe: one command, one loop, one progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.output import print_json, screen

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter
    from foretoken.models.base import LanguageModel

HELD_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 6, 48, 40
"""Held-out texts that a drafter is run on while it trains."""


def make_command(method: str) -> Callable[..., None]:
    """The command of one method."""

    def command(
        data: Annotated[list[Path], typer.Option(help="Text folder or JSONL file; may be given several times.")],
        out: Annotated[Path, typer.Option(help="Folder for the drafter, its checkpoints and curves.")],
        target: Annotated[str, typer.Option(help="Model whose tokens are to be guessed.")] = "builtin",
        steps: Annotated[int, typer.Option(min=1)] = 500,
        batch_size: Annotated[int, typer.Option(min=1, help="Blocks per step.")] = 4,
        context: Annotated[int, typer.Option(min=16, help="Tokens per block.")] = 512,
        lr: Annotated[float | None, typer.Option(min=0.0, help="Peak learning rate; the method's by default.")] = None,
        seed: int = 0,
        setting: Annotated[
            list[str] | None, typer.Option("--set", help="key=value of the network or its loss.")
        ] = None,
        corpus: Annotated[Path | None, typer.Option(help="Where the encoded text is kept; share it by runs.")] = None,
        save_every: Annotated[int, typer.Option(min=1)] = 100,
        eval_every: Annotated[int, typer.Option(min=1)] = 100,
        device: str | None = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the report as the last line.")] = False,
    ) -> None:
        settings = dict(_key_value(item) for item in setting or ())
        report = train(
            method, data, out, target, settings, corpus, device, save_every, eval_every,
            steps=steps, batch_size=batch_size, context=context, seed=seed, **({} if lr is None else {"lr": lr}),
        )  # fmt: skip
        if as_json:
            print_json(report)

    command.__doc__ = f"Train a drafter of the method '{method}'; resumes by itself from OUT/checkpoints."
    return command


def _key_value(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {item!r} is not key=value")
    return key, value


def train(
    method: str,
    data: Sequence[Path],
    out: Path,
    target: str,
    settings: Mapping[str, str],
    corpus: Path | None,
    device: str | None,
    save_every: int,
    eval_every: int,
    **run: Any,
) -> dict[str, Any]:
    """Load the target, train, show it, write the card; returns the report."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from foretoken.loading import load_model, load_tokenizer
    from foretoken.models.parts import TargetParts
    from foretoken.training.drafter_card import write_drafter_card
    from foretoken.training.recipes import find_recipe
    from foretoken.training.trainer import Progress as Step
    from foretoken.training.trainer import TrainConfig, Trainer

    model = load_model(target, device=device)
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise ValueError(f"{target} has no tokenizer beside it: training text must be encoded with the target's own")
    kind = find_recipe(method)
    recipe = kind(model, TargetParts(model), settings, run["seed"])
    config = TrainConfig(**{"lr": kind.lr, **run})
    trainer = Trainer(recipe, data, out, config, tokenizer, corpus)
    prompts = [
        batch.tokens[0, : min(PROMPT_TOKENS, model.context_length // 2)].tolist()
        for batch in trainer.held[:HELD_PROMPTS]
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen(stderr=True)) as bar:
        task = bar.add_task("training", total=config.steps)

        def on_step(step: Step) -> None:
            text = f"loss {step.loss:.3f}  {step.tokens_per_s:,.0f} tokens/s"
            bar.update(task, completed=step.step, description=text)
            if step.acceptance is not None:
                bar.console.print(f"step {step.step}: loss {step.loss:.4f}, {describe(step.acceptance)}")

        report = trainer.run(
            save_every=save_every,
            eval_every=eval_every,
            evaluate=(lambda drafter: held_out(model, drafter, prompts)) if prompts else None,
            on_step=on_step,
        )
    write_drafter_card(out, report, data, target)
    length = describe(report["acceptance"]) if report["acceptance"] else "nothing held out"
    screen(stderr=True).print(f"{report['parameters']:,} parameters, {length} -> {out}")
    return report


def held_out(model: LanguageModel, drafter: Drafter, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Greedy acceptance of a drafter on held-out prompts, through the real engine."""
    from foretoken.engine.stats import SpecStats
    from foretoken.llm import assemble

    llm = assemble(model, drafter, "auto", "auto", None)
    total = SpecStats()
    room = model.context_length - max(map(len, prompts))
    for out in llm.generate(list(prompts), max_new_tokens=min(NEW_TOKENS, room), ignore_eos=True):
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
