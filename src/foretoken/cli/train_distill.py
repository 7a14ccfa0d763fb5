"""``foretoken train distill`` and ``train boost``: draft models trained on their target's distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.model_argument import Model, Target, existing_model
from foretoken.cli.options import Json
from foretoken.cli.output import print_json
from foretoken.cli.settings import FromOptions, with_settings
from foretoken.cli.train_drafter import corpus_line
from foretoken.cli.train_options import Data, Device, keep_freed_memory, load_target
from foretoken.cli.train_progress import TrainingBar, training_run
from foretoken.training.config import DistillConfig, Intervals

if TYPE_CHECKING:
    from foretoken.lab.bench.alignment import Alignment
    from foretoken.training.workshop import Workshop

Draft = Annotated[str, typer.Option(help="Draft model to start from: a folder, or builtin.")]
Corpus = Annotated[Path | None, typer.Option(help="Folder of encoded and written text; runs can share it.")]


@with_settings
def distill_command(
    *,
    model: Model = None,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the model, its checkpoints and curves.")],
    target: Target = None,
    draft: Draft = "builtin",
    config: Annotated[DistillConfig, FromOptions()],
    corpus: Corpus = None,
    intervals: Annotated[Intervals, FromOptions()],
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Align a draft model with its target (DistillSpec); resumes by itself from OUT/checkpoints."""
    chosen = existing_model(model, target)
    from foretoken.training.distill import Distiller

    with training_run(out, config.steps, _describe, as_json) as (bar, stop):
        shop, student = open_shop(chosen, draft, data, corpus or out / "corpus", config, device, bar)
        worker = Distiller(shop, student, out, name=draft)
        report = worker.run(evaluate=measure_of(shop), on_step=bar.on_step, **stop.saving(intervals))
        _write_card(out, report, data, chosen, config)
        bar.say(f"before: {_describe(report['before'])}")
        bar.say(f"after:  {_describe(report['after'])}")
        bar.say(
            f'{report["parameters"]:,} parameters -> {out}, for use as drafter "model:{out},k={max(config.places, 4)}"'
        )
    if as_json:
        print_json(report)


@with_settings
def boost_command(
    *,
    model: Model = None,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder; the models are OUT/1, OUT/2, ...")],
    target: Target = None,
    draft: Draft = "builtin",
    count: Annotated[int, typer.Option(min=1, help="Number of draft models, --steps each.")] = 2,
    length: Annotated[
        int, typer.Option(min=1, help="Consecutive equal tokens that make a position count as matched.")
    ] = 1,
    # Omitted: settings of student-written text and of masks
    config: Annotated[
        DistillConfig,
        FromOptions(
            omit=("mix", "refresh", "places", "mask_token", "distinct_masks", "taps"), fixed={"text": "teacher"}
        ),
    ],
    corpus: Corpus = None,
    intervals: Annotated[Intervals, FromOptions()],
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train draft models one after another, each on what the earlier ones miss (SpecInfer's boost-tuning)."""
    chosen = existing_model(model, target)
    from foretoken.training.boost import Boost, Stage, ready_spec

    with training_run(out, config.steps, _describe, as_json) as (bar, stop):
        shop = open_shop(chosen, draft, data, corpus or out / "corpus", config, device, bar)[0]  # each starts anew
        measure = measure_of(shop)
        held_texts = None if measure is None else (measure.text, measure.prompts.shape[1])
        boost = Boost(shop, draft, out, length, held_texts)

        def on_stage(stage: Stage) -> None:
            _write_card(out / str(stage.number), stage.report, data, chosen, config, count)
            bar.say(f"model {stage.number}: learned from {stage.left:.0%} of what the target wrote")
            bar.say(_describe(stage.report["after"]))
            if stage.coverage is not None and stage.together is not None:
                lengths = " and ".join(f"{value['mean_acceptance_length']:.2f}" for value in stage.together.values())
                bar.say(f"all so far: {stage.coverage:.1%} of held-out places matched, ensemble {lengths} (T=0 and 1)")

        stages = boost.run(
            count, evaluate=measure, together=measure.together if measure is not None else None,
            on_step=lambda number, step: bar.on_step(step, f"model {number}  "), on_stage=on_stage,
            **stop.saving(intervals),
        )  # fmt: skip
        if len(stages) < count:
            bar.say(f"{len(stages)} draft models match everything: no more were trained")
        spec = ready_spec([out / str(stage.number) for stage in stages])
        bar.say(f"for use as drafter: {spec}")
    if as_json:
        print_json({"method": "boost", "spec": spec, "stages": [asdict(stage) for stage in stages]})


def open_shop(
    target: str,
    draft: str,
    data: Sequence[Path],
    folder: Path,
    config: DistillConfig,
    device: str | None,
    bar: TrainingBar,
) -> tuple[Workshop, Any]:
    """Load the target with its text, and the network of a draft model that fits it."""
    from foretoken.training.corpus import check_text
    from foretoken.training.workshop import Workshop, load_student

    check_text(data)
    keep_freed_memory()
    bar.say(f"loading {target} and its draft model {draft}")
    model, tokenizer = load_target(target, device)
    student = load_student(draft, model, tokenizer, device)  # before the text, which takes longer
    shop = Workshop(model, tokenizer, data, folder, config, bar.on_written, bar.on_read)
    bar.say(corpus_line(shop.corpus))
    return shop, student


def measure_of(shop: Workshop) -> Alignment | None:
    """Evaluation of students on held-out text; ``None`` if nothing is held out."""
    from foretoken.lab.bench.alignment import PROMPT_TOKENS, PROMPTS, Alignment

    prompts = shop.held_prompts(PROMPTS, min(PROMPT_TOKENS, shop.target.context_length // 2))
    return Alignment(shop.target, prompts, shop.config.seed) if len(prompts) else None


def _describe(measured: Mapping[str, Any] | None) -> str:
    from foretoken.lab.bench.alignment import describe

    return describe(dict(measured)) if measured else "nothing held out"


def _write_card(
    out: Path, report: Any, data: Sequence[Path], target: str, config: DistillConfig, count: int | None = None
) -> None:
    """Write the card, with a command that reproduces the model: non-default options, and last parts of paths."""
    from foretoken.training.cards import BIAS, CardInfo, command, write_card

    method, folder, note = ("distill", out, "") if count is None else ("boost", out.parent, _boost_note(report))
    usual = asdict(DistillConfig(text="fixed" if count is None else "teacher"))
    options = {} if count is None else {"count": count, "length": report["length"]}
    options |= {k: v for k, v in asdict(config).items() if v != usual[k] and k not in ("warmup", "decay")}
    command_line = command(method, data, folder, options, {"target": target, "draft": report["draft"]})
    name, sides = Path(target).name, ("before", "after")
    acceptance = {side: report[side] for side in sides if report[side]}
    figures = {**report, "draft": Path(report["draft"]).name, "acceptance": acceptance, **dict.fromkeys(sides)}
    title, use = f"{out.resolve().name}: a draft model aligned to `{name}`", f"beside `{name}`. {note}".rstrip()
    limits = ["The limits of the model that it started from apply.", BIAS]
    write_card(out, title, f'Loads as `drafter="model:FOLDER"` {use}', figures, data, command_line, CardInfo(), limits)


def _boost_note(report: Any) -> str:
    return (
        f"It is number {report['stage']} of a series made to draft together as an ensemble; it learned from "
        f"{report['left']:.0%} of what the target wrote, the rest being matched by the earlier ones."
    )
