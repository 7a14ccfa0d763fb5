"""``foretoken train METHOD`` for every method with a recipe: one command, one loop, one progress bar."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.model_argument import Model, Target, existing_model
from foretoken.cli.output import check_inputs, json_only, print_json, screen
from foretoken.cli.settings import FromOptions, with_settings
from foretoken.cli.train_options import (
    Answers,
    Corpus,
    Data,
    Device,
    Features,
    Report,
    Setting,
    WeightBits,
    keep_freed_memory,
    key_values,
    load_target,
)
from foretoken.cli.train_progress import Stop, TrainingBar, stop_on_signals, training_bar
from foretoken.training.config import AnswerConfig, Intervals, TrainConfig
from foretoken.training.run_folder import run_folder

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from foretoken.methods.controllers.base import Controller
    from foretoken.methods.drafters.base import Drafter
    from foretoken.models.base import LanguageModel
    from foretoken.training.answers import AnswerFile
    from foretoken.training.recipes.base import Recipe
    from foretoken.training.trainer import Trainer

HELD_PROMPTS, PROMPT_TOKENS = 6, 48
"""Held-out texts for evaluating a drafter during training."""


def make_command(method: str) -> Callable[..., None]:
    def command(
        *,
        model: Model = None,
        data: Data,
        out: Annotated[Path, typer.Option(help="Folder for the drafter, its checkpoints and curves.")],
        target: Target = None,
        config: Annotated[TrainConfig, FromOptions(omit=("lr",))],
        lr: Annotated[float | None, typer.Option(min=0.0, help="Peak learning rate; the method's by default.")] = None,
        setting: Setting = None,
        corpus: Corpus = None,
        features: Features = None,
        answers: Answers = "data",
        answer: Annotated[AnswerConfig, FromOptions("answer_")],
        intervals: Annotated[Intervals, FromOptions()],
        weight_bits: WeightBits = 16,
        device: Device = None,
        as_json: Report = False,
    ) -> None:
        check_inputs(data)
        chosen, settings = existing_model(model, target), key_values(setting)
        from foretoken.training.cards import write_drafter_card
        from foretoken.training.recipes import find_recipe
        from foretoken.training.trainer import Trainer, check_run

        _check_options(answers, data, config.text, weight_bits)
        kind = find_recipe(method)
        kind.read_settings(settings)  # wrong ones are refused before a model is loaded
        with json_only(as_json), stop_on_signals() as stop, run_folder(out):
            read = data
            keep_freed_memory()
            config, answer = replace(config, lr=kind.lr if lr is None else lr), replace(answer, seed=config.seed)
            with training_bar(config.steps, describe, brief) as bar:
                load = partial(_loaded, bar.say, kind, chosen, device, settings, config)
                recipe, served, tokenizer, dtype = load()
                check_run(recipe, config, features, weight_bits)  # before the target writes text
                bar.say(needs(recipe, config))
                if answers != "data":
                    file = _answer_file(answer, data, out, recipe)
                    if not file.is_complete:
                        del recipe, served  # memory for one target is enough
                        _write_answers(file, answer, out, chosen, device, bar, stop)
                        recipe, served, tokenizer, dtype = load()
                    read = [file.file]
                trainer = Trainer(
                    recipe, read, out, config, tokenizer, corpus, features, dtype, bar.on_written, bar.on_read
                )
                bar.say(corpus_line(trainer.corpus))
                if recipe.frequent is not None:
                    bar.say(vocabulary_line(recipe, recipe.frequent, trainer.sampler.learned_ids))
                evaluate = _trial(trainer, served)
                with stop.in_steps(bar.say, out):
                    report = trainer.run(evaluate, bar.on_step, weight_bits, **stop.saving(intervals))
            write_drafter_card(out, report, data, {"target": chosen}, _as_options(answers, answer))
            _tell(report, out, recipe)
        if as_json:
            print_json(report)

    command.__doc__ = f"Train a drafter of the method '{method}'; resumes by itself from OUT/checkpoints."
    return with_settings(command)


def _loaded(
    say: Callable[[str], None],
    kind: type[Recipe],
    target: str,
    device: str | None,
    settings: Mapping[str, str],
    config: TrainConfig,
) -> tuple[Recipe, LanguageModel, Any, torch.dtype]:
    """The recipe, the target in its training dtype, its tokenizer, and the target's stored dtype."""
    from foretoken.models.forward.parts import TargetParts
    from foretoken.training.joint import load_trainable

    say(f"loading {target}")
    gc.collect()  # a target that was loaded before is in reference cycles
    model, tokenizer = load_target(target, device)
    dtype = TargetParts(model).head.weight.dtype
    recipe = kind(model, TargetParts(model), settings, config.seed)
    if recipe.trains_target or config.precision == "float32":
        is_trained = recipe.trains_target
        del recipe, model  # memory for one target is enough
        gc.collect()
        model = load_trainable(target, device) if is_trained else load_target(target, device, "float32")[0]
        recipe = kind(model, TargetParts(model), settings, config.seed)
    return recipe, model, tokenizer, dtype


def _as_options(answers: str, config: AnswerConfig) -> dict[str, Any]:
    """The answer settings by option name; empty if the data has the answers."""
    if answers == "data":
        return {}
    values = {f"answer_{name}": value for name, value in asdict(config).items() if name != "seed"}
    return {"answers": answers, **values}


def _trial(trainer: Trainer, model: LanguageModel) -> Callable[[Drafter, LanguageModel], Mapping[str, Any]] | None:
    """Evaluation of the current drafter on held-out text; ``None`` if nothing is held out."""
    prompts = trainer.held_prompts(HELD_PROMPTS, min(PROMPT_TOKENS, model.context_length // 2))
    return (lambda drafter, served: held_out(served, drafter, prompts)) if prompts else None


def _check_options(answers: str, data: Sequence[Path], text: str, weight_bits: int) -> None:
    """Raise ``ValueError`` for wrong options, and for data without text, before a model is loaded."""
    from foretoken.methods.drafters.nets.eight_bits import check_bits
    from foretoken.training.corpus import check_text

    if answers not in ("data", "target"):
        raise ValueError(f"--answers must be data or target, not {answers!r}")
    if answers == text == "target":
        raise ValueError("--answers target gives conversations, and --text target continues texts: leave one out")
    check_bits(weight_bits)
    if answers == "data":  # "target" accepts questions, which are not yet training text
        check_text(data)


def _answer_file(config: AnswerConfig, data: Sequence[Path], out: Path, recipe: Recipe) -> AnswerFile:
    """The file of conversations that the target answers."""
    from foretoken.training.answers import AnswerFile, read_questions

    return AnswerFile(out, asdict(recipe.parts.fingerprint()), config, read_questions(data))


def _write_answers(
    file: AnswerFile,
    config: AnswerConfig,
    out: Path,
    target: str,
    device: str | None,
    bar: TrainingBar,
    stop: Stop,
) -> None:
    """Let the target answer what is missing in a file of conversations.  Exits if stopped before the end."""
    from foretoken.llm import load

    gc.collect()  # as in _loaded
    count = len(file.dialogues)
    if len(file.rows()) < count:
        bar.say(f"{count:,} conversations for the target to answer -> {file.file}")
    llm = load(target, drafter=None, device=device)
    with stop.in_steps(bar.say, out):
        path = file.write(llm, config, bar.on_answers, stop.requested)
    if path is None:
        bar.say(f"stopped; finished answers are in {file.part}: the same command continues from there")
        raise typer.Exit(stop.exit_code)


def needs(recipe: Recipe, config: TrainConfig) -> str:
    """One line: number of trained parameters and their minimum memory."""
    from foretoken.models.linear.packing import num_parameters, weight_bytes

    shapes = trained_shapes(recipe)
    count, frozen = sum(map(math.prod, shapes)), num_parameters(recipe.parts.network)
    # Weights, gradients and optimizer states are float32: Muon keeps one number per weight, AdamW two.
    numbers = sum(math.prod(shape) * (3 if len(shape) == 2 and config.optimizer == "muon" else 4) for shape in shapes)
    states = 4 * numbers / 2**20
    target = weight_bytes(recipe.parts.network) / 2**20
    # 256 positions of a block have their logits computed at once.
    logits = 3 * 4 * 256 * config.batch_size * recipe.parts.vocab_size / 2**20
    kind = "frozen"
    if recipe.trains_target:
        kind = f"frozen but for an update of rank {recipe.update_rank}" if recipe.update_rank else "trained"
    return (
        f"{recipe.method}: {count:,} parameters to train, the target has {frozen:,} ({kind}); memory: "
        f"{target:,.0f} MiB for the target, {states:,.0f} for weights, gradients and optimizer states, about "
        f"{logits:,.0f} for a step's logits"
    )


def trained_shapes(recipe: Recipe) -> list[Sequence[int]]:
    """Shapes of the trained parameters; a low-rank update counts as its factors."""
    from foretoken.models.network.low_rank import factor_shapes

    shapes: list[Sequence[int]] = [p.shape for p in recipe.net.parameters() if p.requires_grad]
    if recipe.update_rank:
        shapes += factor_shapes(recipe.parts.network, recipe.update_rank)
    elif recipe.trains_target:
        shapes += [p.shape for p in recipe.parts.network.parameters()]
    return shapes


def corpus_line(corpus: Mapping[str, Any]) -> str:
    """One line: size of the training data and of the held-out part."""
    train, held_part = corpus["train"], corpus["held"]
    learned = f", {train['learned']:,} of them learned" if "learned" in train else ""
    text = f"{train['documents']:,} documents, {train['tokens']:,} tokens{learned}"
    if not held_part["documents"]:
        return f"{text}; nothing is held out, because the data is one document: acceptance is not measured"
    return f"{text}; {held_part['documents']:,} documents of {held_part['tokens']:,} tokens are held out"


def vocabulary_line(recipe: Recipe, frequent: Tensor, tokens: NDArray[Any]) -> str:
    """One line: the number of ``frequent`` tokens, which are drafted, and their share of the training text."""
    from foretoken.training.recipes.base import token_counts

    counts, total = token_counts(tokens, recipe.parts.vocab_size), recipe.parts.vocab_size
    share = counts[frequent.cpu().numpy()].sum() / counts.sum()
    return f"{recipe.method} drafts {len(frequent):,} of {total:,} tokens, {share:.1%} of the training text"


def brief(acceptance: Mapping[str, Any]) -> str:
    """Short summary for each progress line."""
    return f"acceptance {acceptance['acceptance_rate']:.0%}, {acceptance['mean_acceptance_length']:.2f} tokens a round"


def _tell(report: Mapping[str, Any], out: Path, recipe: Recipe) -> None:
    """Print the trained drafter and its use on stderr."""
    from foretoken.training.joint import FOLDER

    length = describe(report["acceptance"]) if report["acceptance"] else "nothing held out"
    console = screen(stderr=True)
    if calibration := report.get("calibration"):
        errors = (sum(calibration[when]) / len(calibration[when]) for when in ("before", "after"))
        console.print("calibration error of the confidence head: {:.1%}, after calibration {:.1%}".format(*errors))
    line = f"{report['parameters']:,} parameters, {length} -> {out}"
    if not recipe.trains_target:
        console.print(f'{line}, for use as drafter "{recipe.spec(out)}"')
    else:
        console.print(line)
        before, after = report["target_loss_nats"]["before"], report["target_loss_nats"]["after"]
        change = "" if before is None else f" (held-out loss {before:.3f} -> {after:.3f} nats per token)"
        use = f"--target {out / FOLDER} --drafter {recipe.spec(out)}"
        console.print(f"the target was trained too{change}: {use}")


def held_out(
    model: LanguageModel, drafter: Drafter, prompts: Sequence[list[int]], controller: str | Controller = "constant"
) -> dict[str, Any]:
    """Acceptance of a drafter on held-out prompts through the engine: greedy, and ``"sampled"`` at T=1."""
    sampled = _held_out(model, drafter, prompts, controller, 1.0)
    return {**_held_out(model, drafter, prompts, controller, 0.0), "sampled": sampled}


def _held_out(
    model: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    controller: str | Controller,
    temperature: float,
) -> dict[str, Any]:
    from foretoken.lab.acceptance import MeasuredAcceptance, drafted

    total = drafted(model, drafter, prompts, 40, controller, temperature=temperature, seed=0)
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "acceptance_rate": total.acceptance_rate,
        "per_position": list(MeasuredAcceptance.of(total, drafter.max_depth).by_position),
    }


def describe(acceptance: Mapping[str, Any]) -> str:
    """One line: mean acceptance length, and the share of rounds that reach each position."""
    shares = " ".join(f"{share:.0%}" for share in acceptance["per_position"])
    return f"mean acceptance length {acceptance['mean_acceptance_length']:.2f} on held-out text (by position {shares})"
