"""``foretoken train specdec_pp``: the stop head of a draft model and a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.model_argument import Model, Target, existing_model
from foretoken.cli.output import print_json
from foretoken.cli.settings import FromOptions, with_settings
from foretoken.cli.train_drafter import HELD_PROMPTS, PROMPT_TOKENS, corpus_line, held_out
from foretoken.cli.train_options import (
    Corpus,
    Data,
    Device,
    Report,
    Setting,
    keep_freed_memory,
    key_values,
    load_target,
)
from foretoken.cli.train_progress import training_run
from foretoken.training.config import Intervals, TrainConfig, check_context

if TYPE_CHECKING:
    from foretoken.methods.drafters.base import Drafter
    from foretoken.models.base import LanguageModel
    from foretoken.training.recipes.specdec_pp import SpecdecPpRecipe
    from foretoken.training.trainer import Trainer


@with_settings
def specdec_pp_command(
    *,
    model: Model = None,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the head, its checkpoints and curves.")],
    target: Target = None,
    draft: Annotated[str, typer.Option(help="Draft model whose hidden states are read: a folder, or builtin.")] = (
        "builtin"
    ),
    config: Annotated[TrainConfig, FromOptions(omit=("optimizer", "precision"))],
    setting: Setting = None,
    corpus: Corpus = None,
    intervals: Annotated[Intervals, FromOptions()],
    device: Device = None,
    as_json: Report = False,
) -> None:
    """Train a head that stops drafts before a rejection (SpecDec++); resumes by itself from OUT/checkpoints."""
    chosen, settings = existing_model(model, target), key_values(setting)
    from foretoken.training.cards import write_drafter_card
    from foretoken.training.corpus import check_text
    from foretoken.training.recipes.specdec_pp import SpecdecPpRecipe
    from foretoken.training.trainer import Trainer

    SpecdecPpRecipe.read_settings(settings)  # wrong ones are refused before a model is loaded
    check_text(data)
    keep_freed_memory()
    with training_run(out, config.steps, describe, as_json) as (bar, stop):
        bar.say(f"loading {chosen} and its draft model {draft}")
        judge, guesser, tokenizer = load_pair(chosen, draft, device)
        check_context(config.context, min(judge.context_length, guesser.context_length), "models'")
        recipe = SpecdecPpRecipe(judge, guesser, settings, config.seed)
        trainer = Trainer(recipe, data, out, config, tokenizer, corpus, on_written=bar.on_written, on_read=bar.on_read)
        bar.say(corpus_line(trainer.corpus))
        report = trainer.run(evaluate=_trial(trainer, recipe), on_step=bar.on_step, **stop.saving(intervals))
        write_drafter_card(out, report, data, {"target": chosen, "draft": draft})
        bar.say(
            f"{report['parameters']:,} parameters, {describe(report['acceptance'])} -> {out}, for use as "
            f'controller "specdec_pp:{out}"'
        )
    if as_json:
        print_json(report)


def load_pair(target: str, draft: str, device: str | None = None) -> tuple[LanguageModel, LanguageModel, Any]:
    """The target, its draft model in float32, and their shared tokenizer."""
    from foretoken.training.workshop import load_draft_model

    judge, tokenizer = load_target(target, device)
    return judge, load_draft_model(draft, judge, tokenizer, device), tokenizer


def _trial(trainer: Trainer, recipe: SpecdecPpRecipe) -> Callable[[Drafter, LanguageModel], Mapping[str, Any]] | None:
    """Evaluation of the current head with both models on held-out text, and of the draft model without it."""
    from foretoken.methods.controllers.constant import ConstantController
    from foretoken.methods.controllers.specdec_pp import SpecdecPpController

    prompts = trainer.held_prompts(HELD_PROMPTS, min(PROMPT_TOKENS, recipe.judge.context_length // 2))
    if not prompts:
        return None

    def evaluate(drafter: Drafter, draft: LanguageModel) -> dict[str, Any]:
        head = SpecdecPpController(recipe.net, recipe.parts.fingerprint())
        measured = held_out(recipe.judge, drafter, prompts, head)
        return {**measured, "without": held_out(recipe.judge, drafter, prompts, ConstantController())}

    return evaluate


def describe(acceptance: Mapping[str, Any]) -> str:
    """One line: tokens per round and acceptance rate at T=1, with and without the head."""
    if not acceptance:
        return "nothing held out"
    sides = {"with the head": acceptance["sampled"], "without": acceptance["without"]["sampled"]}
    figures = ", ".join(
        f"{name} {side['mean_acceptance_length']:.2f} tokens a round and {side['acceptance_rate']:.0%} accepted"
        for name, side in sides.items()
    )
    return f"T=1: {figures}"
