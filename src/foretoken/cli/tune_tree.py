"""``foretoken tune tree``: the fixed tree that heads or a draft model should fill on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json, screen
from foretoken.cli.tune import workload_of
from foretoken.options import FILTERS

if TYPE_CHECKING:
    from foretoken.lab.tune.tree import TunedTree
    from foretoken.methods.drafters.base import Drafter
    from foretoken.methods.drafters.heads import HeadsDrafter
    from foretoken.methods.drafters.model import ModelDrafter

DEFAULT = "medusa"


@with_common(omit=("drafter", "verifier", "controller", "profile", "max_new_tokens", *FILTERS, "seed", "allow_lossy"))
def tree_command(
    out: Annotated[Path, typer.Option(help="File for the tree, which loads as NAME,tree=FILE.")],
    drafter: Annotated[
        str, typer.Option(help="What fills the tree: heads (medusa[:FOLDER], hydra[:FOLDER]) or model[:PATH].")
    ] = DEFAULT,
    shape: Annotated[
        str, typer.Option(help="How it is built: medusa (greedily) or sequoia (for draft models, their default).")
    ] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file (one prompt a line) or JSONL with prompt, text or turns; built-in ones if none."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens that the target writes per prompt.")] = 64,
    max_prompts: Annotated[int, typer.Option(min=1, help="Most prompts to use, spread over the file.")] = 8,
    max_nodes: Annotated[int, typer.Option(min=1, help="Largest tree to try.")] = 64,
    max_depth: Annotated[int, typer.Option(min=1, help="Deepest tree of a draft model to try.")] = 8,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Choose a tree from how often its places are right, and from what nodes and levels cost on this machine."""
    with json_only(as_json):
        outcome = _tuned(common, drafter, shape, prompts, new_tokens, max_prompts, max_nodes, max_depth)
        outcome.save(out)
        if not as_json:
            _print(outcome, out)
    if as_json:
        print_json({**outcome.public(), "out": str(out)})


def _tuned(
    common: Common,
    spec: str,
    shape: str,
    prompts: Path | None,
    new_tokens: int,
    most: int,
    max_nodes: int,
    max_depth: int,
) -> TunedTree:
    from foretoken.lab.tune import positional, tree
    from foretoken.methods.drafters.heads import HeadsDrafter

    work = workload_of(common, prompts, new_tokens, most)
    filler, chosen = _checked(spec, work.subject.drafter(spec), shape, common.temperature)
    sizes = [size for size in tree.SIZES if size <= max_nodes]
    with screen(stderr=True).status("starting") as status:
        if isinstance(filler, HeadsDrafter):
            return tree.tune(work, filler, sizes, status.update)
        return positional.tune(work, filler, sizes, chosen, max_depth, status.update)


def _checked(
    spec: str, drafter: Drafter | None, shape: str, temperature: float
) -> tuple[HeadsDrafter | ModelDrafter, str]:
    """What fills a tree, and the shape to build for it.

    Raises:
        ValueError: a drafter that fills no fixed tree, or a shape or temperature that it cannot be measured for.
    """
    from foretoken.methods.drafters.heads import HeadsDrafter
    from foretoken.methods.drafters.model import ModelDrafter
    from foretoken.registry import rows

    # Drafters that run the target's own layers look at a request's states, which a tuner does not have.
    classes = {row.name: row.load() for row in rows("drafter")}
    able = [
        name
        for name, cls in classes.items()
        if issubclass(cls, HeadsDrafter | ModelDrafter) and not cls.traits.runs_target
    ]
    if not isinstance(drafter, HeadsDrafter | ModelDrafter) or drafter.name not in able:
        raise ValueError(f"{spec!r} fills no tree of fixed shape: choose one of {', '.join(able)}")
    heads = isinstance(drafter, HeadsDrafter)
    known = ("medusa",) if heads else ("sequoia", "medusa")
    if shape and shape not in known:
        raise ValueError(f"unknown shape {shape!r} for {drafter.name}: choose one of {', '.join(known)}")
    if heads and temperature:
        raise ValueError("heads are measured greedily: leave out --temperature, or tune a draft model")
    return drafter, shape or known[0]


def _print(outcome: TunedTree, out: Path) -> None:
    from rich import box
    from rich.table import Table

    console = screen()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="what trees promise")
    for name in ("nodes", "ms a round", "tokens a round", "tokens/s"):
        table.add_column(name, justify="right")
    for size, (ms, length) in outcome.sizes.items():
        chosen = "bold" if size == len(outcome.choices) else None
        table.add_row(str(size), f"{ms:.2f}", f"{length:.2f}", f"{1e3 * length / ms:.0f}", style=chosen)
    console.print(table)
    plain = outcome.speeds["plain"].tokens_per_s
    for name, speed in outcome.speeds.items():
        console.print(
            f"{name:8} {speed.tokens_per_s:7.1f} tokens/s  {speed.tokens_per_s / plain:.2f}x plain  "
            f"{speed.mean_acceptance_length:.2f} tokens a round"
        )
    console.print(
        f"{len(outcome.choices)} nodes, {max(map(len, outcome.choices))} deep: --drafter {outcome.method},tree={out}",
        soft_wrap=True,
    )
