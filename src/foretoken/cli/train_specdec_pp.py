"""``foretoken train specdec_pp``: the stop head of a draft model and a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.memory import keep_freed_memory
from foretoken.cli.output import json_only, print_json, screen
from foretoken.cli.train_drafter import HELD_PROMPTS, PROMPT_TOKENS, _key_value, held_out

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter
    from foretoken.models.base import LanguageModel
    from foretoken.training.recipes.specdec_pp import SpecdecPpRecipe
    from foretoken.training.trainer import Progress, Trainer


def specdec_pp_command(
    data: Annotated[list[Path], typer.Option(help="Text folder or JSONL file; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder for the head, its checkpoints and curves.")],
    target: Annotated[str, typer.Option(help="Model whose acceptance is to be foretold.")] = "builtin",
    draft: Annotated[str, typer.Option(help="Draft model whose hidden states are read: a folder, or builtin.")] = (
        "builtin"
    ),
    steps: Annotated[int, typer.Option(min=1)] = 500,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks per step.")] = 4,
    context: Annotated[int, typer.Option(min=16, help="Tokens per block.")] = 512,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-3,
    seed: int = 0,
    setting: Annotated[list[str] | None, typer.Option("--set", help="key=value: blocks, mix or mismatch.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Where the encoded text is kept; share it by runs.")] = None,
    text: Annotated[str, typer.Option(help="fixed (the corpus) or target (what the target writes).")] = "fixed",
    written_blocks: Annotated[int, typer.Option(min=1, help="Blocks that the target writes.")] = 256,
    written_temperature: Annotated[float, typer.Option(min=0.0, help="Temperature at which it writes.")] = 1.0,
    save_every: Annotated[int, typer.Option(min=1)] = 100,
    eval_every: Annotated[int, typer.Option(min=1)] = 100,
    device: str | None = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as the last line.")] = False,
) -> None:
    """Train a head that stops drafts before a rejection (SpecDec++); resumes by itself from OUT/checkpoints."""
    from foretoken.training.recipes.specdec_pp import SpecdecPpRecipe
    from foretoken.training.stop_card import write_stop_card
    from foretoken.training.trainer import TrainConfig, Trainer

    keep_freed_memory()
    config = TrainConfig(
        steps=steps, batch_size=batch_size, context=context, lr=lr, seed=seed, text=text,
        written_blocks=written_blocks, written_temperature=written_temperature,
    )  # fmt: skip
    settings = dict(_key_value(item) for item in setting or ())
    with json_only(as_json):
        judge, model, tokenizer = load_pair(target, draft, device)
        if context > min(judge.context_length, model.context_length):
            longest = min(judge.context_length, model.context_length)
            raise ValueError(f"--context {context} is longer than the models' {longest}: give a smaller one")
        recipe = SpecdecPpRecipe(judge, model, settings, seed)
        with _bar(steps) as (on_written, on_step):
            trainer = Trainer(recipe, data, out, config, tokenizer, corpus, on_written=on_written)
            tried = _trial(trainer, recipe)
            report = trainer.run(save_every=save_every, eval_every=eval_every, evaluate=tried, on_step=on_step)
        write_stop_card(out, report, data, target, draft)
        screen(stderr=True).print(
            f"{report['parameters']:,} parameters, {describe(report['acceptance'])} -> {out}, for use as "
            f'controller "specdec_pp:{out}"',
            soft_wrap=True,
        )
    if as_json:
        print_json(report)


def load_pair(target: str, draft: str, device: str | None = None) -> tuple[LanguageModel, LanguageModel, Any]:
    """The target, its draft model in float32, and their tokenizer.

    Raises:
        ValueError: no tokenizer, or a draft model of another one.
    """
    from foretoken.loading import check_same_tokenizer, check_vocabularies, load_model, load_tokenizer, resolve

    judge, tokenizer = load_model(target, device=device), load_tokenizer(target)
    if tokenizer is None:
        raise ValueError(f"{target} has no tokenizer beside it: training text must be encoded with the target's own")
    model = load_model(draft, role="draft", dtype="float32", device=device, exact="approximate")
    check_vocabularies(judge, model, draft)
    check_same_tokenizer(tokenizer, load_tokenizer(resolve(draft, "draft")), draft)
    return judge, model, tokenizer


def _trial(trainer: Trainer, recipe: SpecdecPpRecipe) -> Callable[[Drafter, LanguageModel], Mapping[str, Any]] | None:
    """Runs the head of the moment with both models on held-out text, and the same draft model without it."""
    from foretoken.controllers.constant import ConstantController
    from foretoken.controllers.specdec_pp import SpecdecPpController

    size = min(PROMPT_TOKENS, recipe.judge.context_length // 2)
    prompts = [tokens[0, :size].tolist() for tokens in trainer.held_tokens[:HELD_PROMPTS]]
    if not prompts:
        return None

    def evaluate(drafter: Drafter, draft: LanguageModel) -> dict[str, Any]:
        head = SpecdecPpController(recipe.net, recipe.parts.fingerprint())
        found = held_out(recipe.judge, drafter, prompts, head)
        return {**found, "without": held_out(recipe.judge, drafter, prompts, ConstantController())}

    return evaluate


def describe(acceptance: Mapping[str, Any]) -> str:
    """One line: tokens a round and the share of the draft tokens that stand, at T=1, with the head and without."""
    if not acceptance:
        return "nothing held out"
    sides = {"with the head": acceptance["sampled"], "without": acceptance["without"]["sampled"]}
    told = ", ".join(
        f"{name} {side['mean_acceptance_length']:.2f} tokens a round and {side['acceptance_rate']:.0%} accepted"
        for name, side in sides.items()
    )
    return f"T=1: {told}"


def _bar(steps: int) -> Any:
    """A progress bar on stderr: gives what to call with written blocks and with steps."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

    @contextmanager
    def shown() -> Any:
        with Bar(*columns, console=screen(stderr=True)) as bar:
            task = bar.add_task("reading text", total=steps, visible=False)

            def on_written(done: int, count: int) -> None:
                bar.update(task, completed=done, total=count, description="the target writes text", visible=True)

            def on_step(step: Progress) -> None:
                text = f"loss {step.loss:.3f}  {step.tokens_per_s:,.0f} tokens/s"
                bar.update(task, completed=step.step, total=step.steps, description=text, visible=True)
                if step.acceptance is not None:
                    said = f"step {step.step}: loss {step.loss:.4f}, {describe(step.acceptance)}"
                    bar.console.print(said, soft_wrap=True)

            yield on_written, on_step

    return shown()
