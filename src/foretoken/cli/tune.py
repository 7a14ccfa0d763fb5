"""``foretoken tune``: find settings that are fast for a target on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.ending import terminable
from foretoken.cli.model_argument import ModelGroup
from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import check_out, json_only, print_json, print_table, progress_bar, screen, status_line, table
from foretoken.cli.settings import FromOptions
from foretoken.core.settings import setting

if TYPE_CHECKING:
    from foretoken.lab.tune.layer_skip import LayerSkipStudy, TunedSkips
    from foretoken.lab.tune.limits import TunedLimits
    from foretoken.lab.tune.tree import TunedTree
    from foretoken.lab.workload import Workload
    from foretoken.methods.drafters.base import Drafter

app = typer.Typer(
    cls=ModelGroup,
    help="Find settings that are fast for a target on this machine.",
    subcommand_metavar="[MODEL] | COMMAND [ARGS]...",
    no_args_is_help=True,
)
OWN = ("drafter", "verifier", "controller", "profile", "max_new_tokens", "top_k", "top_p", "min_p", "allow_lossy")
"""Common options that the subcommands redefine or omit."""
PROMPTS = "Text file (one prompt a line) or JSONL with prompt, text or turns; built-in ones if none."
MAX_PROMPTS = "Most prompts to use, spread over the file."


@app.command("layer-skip")
@with_common(omit=OWN)
@terminable()
def layer_skip_command(
    out: Annotated[Path, typer.Option(help="File for the result, which loads as layer_skip:FILE.")],
    prompts: Annotated[Path | None, typer.Option(help=PROMPTS)] = None,
    trials: Annotated[int, typer.Option(min=1, help="Sets of skipped sublayers to try.")] = 100,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt and trial.")] = 32,
    max_prompts: Annotated[int, typer.Option(min=1, help=MAX_PROMPTS)] = 8,
    k: Annotated[int, typer.Option(min=1, help="Longest draft.")] = 8,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the trials beside --out.")] = False,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Search for the attention and MLP sublayers that the drafter layer_skip should leave out.

    Every trial decodes the prompts speculatively and measures tokens per second.  Ctrl-C and SIGTERM keep the best
    set so far.
    """
    with json_only(as_json):
        from foretoken.methods.drafters.own_layers import num_layers_of

        check_out(out, new_folders=True)
        work = workload_of(common, prompts, new_tokens, max_prompts)
        num_layers_of(work.target)
        outcome = _search(work, k, out, trials, resume)
        if not as_json:
            _print(outcome, work, out)
    if as_json:
        print_json({**outcome.public(), "out": str(out)})


def workload_of(common: Common, prompts: Path | None, new_tokens: int, most: int) -> Workload:
    """Workload of the trials: prompts from a file, or the built-in ones for this kind of model."""
    from foretoken.core.sampling import SamplingParams
    from foretoken.lab.prompts import load_prompts, prompts_of_kind
    from foretoken.lab.workload import Workload, fitting_prompts

    SamplingParams(common.temperature)
    texts = [] if prompts is None else load_prompts(prompts)
    subject = common.subject()
    texts = texts or prompts_of_kind(subject.tokenizer)
    ids = fitting_prompts(subject, texts, new_tokens, most)
    return Workload(subject, ids, new_tokens, common.temperature, common.seed or 0)


def _search(work: Workload, k: int, out: Path, trials: int, resume: bool) -> TunedSkips:
    from foretoken.lab.tune.layer_skip import tune

    console = screen(stderr=True)
    with progress_bar(stays=True) as tell:
        tell(0, trials, "warming up")

        def on_trial(number: int, speed: float, search: LayerSkipStudy) -> None:
            if resume and not number:
                console.print(f"nothing to resume: {search.journal} has no trials; it starts anew")
            text = f"last {speed:.1f}, best {search.best_speed:.1f} tokens/s" if number else "trying the default set"
            tell(min(number, trials), trials, text)

        try:
            return tune(work, k, out, trials, resume, on_trial)
        except KeyboardInterrupt:
            if out.exists():
                console.print(f"the best set so far is in {out}; --resume continues from here")
            raise


def _print(outcome: TunedSkips, work: Workload, out: Path) -> None:
    console = screen()
    grid = table(None, ("skipped", "attention", "MLP"), ("tokens/s", "speed-up", "accepted", "tokens/round"))
    grid.add_row("plain", "", "", f"{outcome.plain.tokens_per_s:.1f}", "1.00", "", "1.00")
    for name, skips in outcome.sets.items():
        speed = outcome.speeds[name]
        grid.add_row(
            name,
            *(text.replace("+", " ") for text in skips.options.values()),
            f"{speed.tokens_per_s:.1f}",
            f"{outcome.speedup(name):.2f}",
            f"{speed.acceptance_rate:.0%}",
            f"{speed.mean_acceptance_length:.2f}",
        )
    print_table(console, grid)
    counts = f"{outcome.trials} trials, {len(work.prompts)} prompts of {work.new_tokens} new tokens"
    console.print(f"{counts}; the {outcome.chosen} set is in {out}: --drafter layer_skip:{out}")
    if outcome.speedup(outcome.chosen) <= 1:
        console.print("plain decoding is faster than skipping layers for this target on this machine", style="yellow")


@dataclass(frozen=True)
class TreeOptions:
    """Candidate trees and their workload."""

    drafter: str = setting(
        "medusa",
        "Drafter of the tree: heads (medusa[:FOLDER], hydra[:FOLDER]), model[:PATH], or one whose trees follow its "
        "probabilities (eagle3[:FOLDER], dflash[:FOLDER], ...), for which depth, width and nodes are raced.",
    )
    shape: str = setting("", "Method: medusa (greedy) or sequoia (for draft models, their default).")
    prompts: Path | None = setting(None, PROMPTS)
    new_tokens: int = setting(64, "Tokens that the target writes per prompt.", 8)
    max_prompts: int = setting(8, MAX_PROMPTS, 1)
    max_nodes: int = setting(64, "Largest tree to try.", 1)
    max_depth: int = setting(8, "Deepest tree to try, except of heads.", 1)


@app.command("tree")
@with_common(omit=(*OWN, "seed"))
@terminable()
def tree_command(
    out: Annotated[Path, typer.Option(help="File for the tree, which loads as NAME,tree=FILE.")],
    *,
    options: Annotated[TreeOptions, FromOptions()],
    as_json: Json = False,
    common: Common,
) -> None:
    """Choose a tree by the acceptance of its positions and the cost of nodes and levels on this machine."""
    with json_only(as_json):
        check_out(out, new_folders=True)
        outcome = _tuned_tree(common, options)
        outcome.save(out)
        if not as_json:
            _print_tree(outcome, options.drafter, out)
    if as_json:
        print_json({**outcome.public(), "out": str(out)})


def _tuned_tree(common: Common, options: TreeOptions) -> TunedTree | TunedLimits:
    from foretoken.lab.tune import limits, positional, tree
    from foretoken.methods.drafters.heads import HeadsDrafter
    from foretoken.methods.drafters.model import ModelDrafter

    work = workload_of(common, options.prompts, options.new_tokens, options.max_prompts)
    drafter = work.subject.drafter(options.drafter)
    shape = _checked_shape(options.drafter, drafter, options.shape, common.temperature)
    sizes = [size for size in tree.SIZES if size <= options.max_nodes]
    with status_line() as tell:
        if isinstance(drafter, HeadsDrafter):
            return tree.tune(work, drafter, sizes, tell)
        if isinstance(drafter, ModelDrafter):
            return positional.tune(work, drafter, sizes, shape, options.max_depth, tell)
        return limits.tune(work, options.drafter, options.max_nodes, options.max_depth, tell)


def _checked_shape(spec: str, drafter: Drafter | None, shape: str, temperature: float) -> str:
    """The shape to build, by default the first one for the drafter.  Raises ``ValueError`` for a drafter without trees
    to tune, and for a shape or temperature that cannot be measured."""
    from foretoken.lab.tune.limits import limits_of
    from foretoken.methods.drafters.heads import HeadsDrafter
    from foretoken.methods.drafters.model import ModelDrafter
    from foretoken.registry import options_of, rows

    # Draft models that run the target's own layers need a request's states, which a tuner of shapes does not have.
    classes = {row.name: row.load() for row in rows("drafter")}
    fixed = [
        name
        for name, cls in classes.items()
        if issubclass(cls, HeadsDrafter | ModelDrafter) and "tree" in options_of(cls) and not cls.traits.runs_target
    ]
    limited = [name for name, cls in classes.items() if name not in fixed and limits_of(cls)]
    name = None if drafter is None else drafter.name
    if name not in (*fixed, *limited):
        raise ValueError(f"{spec!r} has no tree to tune: choose one of {', '.join((*fixed, *limited))}")
    if name in limited:
        if shape:
            raise ValueError(f"the tree of {name} follows its probabilities: leave out --shape")
        return ""
    heads = isinstance(drafter, HeadsDrafter)
    shapes = ("medusa",) if heads else ("sequoia", "medusa")
    if shape and shape not in shapes:
        raise ValueError(f"unknown shape {shape!r} for {name}: choose one of {', '.join(shapes)}")
    if heads and temperature:
        raise ValueError("heads are measured greedily: leave out --temperature, or tune a draft model")
    return shape or shapes[0]


def _print_tree(outcome: TunedTree | TunedLimits, drafter: str, out: Path) -> None:
    from foretoken.lab.tune.choices import with_option, with_tree
    from foretoken.lab.tune.limits import TunedLimits

    console = screen()
    _print_races(outcome) if isinstance(outcome, TunedLimits) else _print_promises(outcome)
    plain = outcome.speeds["plain"].tokens_per_s
    for name, speed in outcome.speeds.items():
        console.print(
            f"{name:8} {speed.tokens_per_s:7.1f} tokens/s  {speed.tokens_per_s / plain:.2f}x plain  "
            f"{speed.mean_acceptance_length:.2f} tokens a round"
        )
    if (fastest := max(outcome.speeds, key=lambda name: outcome.speeds[name].tokens_per_s)) != "tuned":
        faster = "plain decoding" if fastest == "plain" else "the default tree"
        console.print(f"{faster} is faster than this tree for this target on this machine", style="yellow")
    if isinstance(outcome, TunedLimits):
        limits = ", ".join(f"{name}={value}" for name, value in outcome.limits.items())
        console.print(f"{limits or 'the default limits'}: --drafter {with_option(drafter, 'tree', out)}")
        return
    size = f"{len(outcome.choices)} nodes, {max(map(len, outcome.choices))} deep"
    console.print(f"{size}: --drafter {with_tree(drafter, out)}")


def _print_promises(outcome: TunedTree) -> None:
    grid = table("what trees promise", (), ("nodes", "ms a round", "tokens a round", "tokens/s"))
    for size, (ms, length) in outcome.sizes.items():
        chosen = "bold" if size == len(outcome.choices) else None
        grid.add_row(str(size), f"{ms:.2f}", f"{length:.2f}", f"{1e3 * length / ms:.0f}", style=chosen)
    print_table(screen(), grid)


def _print_races(outcome: TunedLimits) -> None:
    grid = table("raced on the same text", ("limit", "drafter"), ("prompts", "nodes", "tokens a round", "tokens/s"))
    for row in outcome.raced:
        figures = str(row.prompts), f"{row.nodes:.1f}", f"{row.mean_acceptance_length:.2f}", f"{row.tokens_per_s:.1f}"
        grid.add_row(row.limit, row.drafter, *figures)
    print_table(screen(), grid)
