"""``foretoken plan``: what speculation would give, worked out before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import plan_options
from foretoken.cli.options import Json
from foretoken.cli.output import json_only, print_json, screen

if TYPE_CHECKING:
    from foretoken.core.costs import RoundCosts
    from foretoken.lab.plan.ahead import AheadRow
    from foretoken.lab.plan.assumptions import Assumptions
    from foretoken.lab.plan.planner import Plan

LEGEND = (
    "tokens: per round; ops and reads: arithmetic, and reads of the target's weights, per token over plain decoding; "
    "from α, up to c: where drafting k tokens pays"
)


def plan_command(
    alpha: Annotated[float | None, typer.Option(help="Acceptance rate of a draft token, in [0, 1].")] = None,
    survival: Annotated[
        str | None, typer.Option(help="Instead: shares of rounds accepted at least 1, 2, ... far, e.g. 0.8,0.6,0.5.")
    ] = None,
    c: Annotated[float | None, typer.Option(help="Cost of a draft step over that of a target step; 0: free.")] = None,
    k: Annotated[str, typer.Option(help="Draft lengths: one, or a range such as 1-16.")] = "1-16",
    guesses: Annotated[
        int, typer.Option(min=1, help="Chains that guess the same k tokens in a round (lookahead's G).")
    ] = 1,
    overhead: Annotated[
        float | None, typer.Option(help="Further cost of a speculative round, in target steps.")
    ] = None,
    v: Annotated[
        str | None,
        typer.Option(
            help="Cost of scoring n tokens: 'flat', points such as 1:1,8:1.1,32:2, or "
            "roofline,parameters=7e9,bandwidth=3.35e12,flops=989e12[,bytes=2,context=..,kv_bytes=..,experts=..,active=..]."
        ),
    ] = None,
    operations: Annotated[
        float | None, typer.Option(help="Arithmetic of a draft token over that of a target token; as --c if not given.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Costs and acceptance from a file of `foretoken tune`; options replace them.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Which drafter of the profile; the best if not given.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, e.g. 1,4,16; the first one decides the plan.")] = "1",
    tree: Annotated[list[str] | None, typer.Option(help="A tree to compare, children per level: 3x2x1.")] = None,
    positions: Annotated[
        str | None, typer.Option(help="For trees: chance of the first, second, ... sibling, e.g. 0.6,0.15,0.05.")
    ] = None,
    ahead: Annotated[
        int | None, typer.Option(min=1, help="Draft during verification for so many tokens after each accepted length.")
    ] = None,
    contention: Annotated[
        float,
        typer.Option(help="With --ahead: how much slower each is while both run; 1: two devices, 2: all is shared."),
    ] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="PNG file: speed-up against k, c and batch size.")] = None,
    as_json: Json = False,
) -> None:
    """Work out how much to draft, how much faster that is, and what would break it.  No model is loaded."""
    lengths, batches = plan_options.lengths(k), plan_options.counts(batch, "--batch")
    shapes = [plan_options.widths(text) for text in tree or ()]
    siblings = None if positions is None else plan_options.chances(positions, "--positions")
    if plot is not None:
        plan_options.check_writable(plot)
    from dataclasses import replace

    from foretoken.lab.plan.planner import plan, summary

    given, name = _assumptions(alpha, survival, c, overhead, v, operations, profile, drafter, lengths, batches[0])
    given = replace(given, guesses=guesses)
    ahead_rows = _ahead_rows(given, lengths, batches, siblings, ahead, contention)
    with json_only(as_json):
        made = plan(given, lengths, batches, shapes, siblings)
        if plot is not None:
            from foretoken.lab.plan.plots import plot as draw

            draw(made, plot)
        if not as_json:
            _print(made, name, plot)
            _print_ahead(ahead_rows, contention)
    if as_json:
        found = {
            "drafter": name,
            **made.public(),
            "summary": summary(made),
            "plot": None if plot is None else str(plot),
            "ahead": [row.public() for row in ahead_rows],
        }
        print_json(found)


# -- reading options -------------------------------------------------------------------------------------------------


def _assumptions(
    alpha: float | None,
    survival: str | None,
    c: float | None,
    overhead: float | None,
    v: str | None,
    operations: float | None,
    profile: Path | None,
    drafter: str | None,
    lengths: list[int],
    batch: int,
) -> tuple[Assumptions, str | None]:
    """What is assumed, and which drafter of a profile that is."""
    from dataclasses import replace

    from foretoken.lab.plan.assumptions import Assumptions

    if alpha is not None and survival is not None:
        raise ValueError("give --alpha or --survival, not both")
    if alpha is not None and not 0 <= alpha <= 1:
        raise ValueError(f"--alpha must be in [0, 1], not {alpha:g}")
    acceptance = alpha if survival is None else tuple(plan_options.chances(survival, "--survival"))
    given, name = Assumptions(0.0), None
    if profile is not None:
        given, name = _measured(plan_options.read_costs(profile), drafter, lengths, batch)
    elif drafter is not None:
        raise ValueError("--drafter chooses from a profile: give --profile too, or --alpha and --c")
    elif acceptance is None:
        raise ValueError("give --alpha, --survival, or a --profile with measured acceptance")
    changes: dict[str, Any] = {
        "acceptance": acceptance,
        "c": plan_options.cost(c, "--c"),
        "overhead": plan_options.cost(overhead, "--overhead"),
        "v": None if v is None else plan_options.curve(v),
        "c_hat": plan_options.cost(operations, "--operations"),
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    if acceptance is not None:  # a rate is that of every round: drafts are as long as asked
        changes["nodes_per_depth"] = 1.0
    return replace(given, **changes), name


def _measured(costs: RoundCosts, drafter: str | None, lengths: list[int], batch: int) -> tuple[Assumptions, str]:
    """The profile's drafter of that name, or the one that promises most."""
    from foretoken.lab.plan.assumptions import Assumptions

    if not costs.drafters:
        raise ValueError("the profile has no measured drafters: run `foretoken tune` again, or give --alpha and --c")
    names = [drafter] if drafter is not None else list(costs.drafters)
    found = {name: Assumptions.measured(costs, name) for name in names}
    best = max(found, key=lambda name: max(found[name].speedup(k, batch) for k in lengths))
    return found[best], best


def _ahead_rows(
    given: Assumptions,
    lengths: list[int],
    batches: list[int],
    siblings: list[float] | None,
    ahead: int | None,
    contention: float,
) -> list[AheadRow]:
    """What drafting during verification gives; empty where nobody asks."""
    from foretoken.lab.plan.ahead import ahead_rows

    if ahead is None:
        if contention != 1.0:
            raise ValueError("--contention goes with --ahead")
        return []
    if batches[0] != 1 or given.guesses != 1:
        raise ValueError("--ahead is worked out for one request with one chain: leave out --batch and --guesses")
    return ahead_rows(given, lengths, ahead, contention, siblings)


# -- showing ---------------------------------------------------------------------------------------------------------


def _print(made: Plan, name: str | None, plot: Path | None) -> None:
    from rich import box
    from rich.table import Table

    from foretoken.lab.plan.planner import summary

    console = screen()
    style = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = Table(**style)  # type: ignore[arg-type]
    heads = ["k", "tokens", *_heads(made), "ops", "reads", "from α", "up to c"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in made.rows:
        table.add_row(
            str(row.k),
            f"{row.tokens:.2f}",
            *(f"{x:.2f}x" for x in row.speedups.values()),
            f"{row.operations:.2f}x",
            f"{row.target_reads:.2f}x",
            _or_never(row.break_even_alpha, row.k),
            _or_never(row.break_even_c, row.k),
            style="bold" if row is made.best else None,
        )
    console.print(table)
    console.print(LEGEND, style="dim", soft_wrap=True)
    if made.trees:
        table = Table(**style)  # type: ignore[arg-type]
        for head in ("tree", "nodes", "tokens", *_heads(made)):
            table.add_column(head, justify="right")
        for tree in made.trees:
            speedups = (f"{x:.2f}x" for x in tree.speedups.values())
            table.add_row(tree.shape, str(tree.nodes), f"{tree.tokens:.2f}", *speedups)
        console.print(table)
    _print_changes(made)
    if len(made.batches) > 1:
        best = ", ".join(f"k={k} at {batch}" for batch, k in made.best_by_batch.items())
        console.print(f"best by batch: {best}", soft_wrap=True)
    if name is not None:
        console.print(f"measured drafter: {name}", soft_wrap=True)
    for note in made.notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)
    if plot is not None:
        console.print(f"picture: {plot}", soft_wrap=True)
    console.print(summary(made), style="bold", soft_wrap=True)


def _print_changes(made: Plan) -> None:
    from rich import box
    from rich.table import Table

    near = made.best if made.best.k else made.nearest
    if near is None:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("if")
    for head in (f"speed-up of k={near.k}", "best k then", "its speed-up"):
        table.add_column(head, justify="right")
    for change in made.changes:
        table.add_row(change.what, f"{change.speedup:.2f}x", str(change.best_k), f"{change.best_speedup:.2f}x")
    screen().print(table)


def _print_ahead(rows: list[AheadRow], contention: float) -> None:
    from rich import box
    from rich.table import Table

    from foretoken.lab.plan.ahead import ahead_summary

    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in ("k", "outcomes", "guessed", "work", "ahead", "between rounds", "contention up to"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        most = "never" if row.contention is None else f"{row.contention:.2f}"
        speeds = (f"{row.speedup:.2f}x", f"{row.without:.2f}x")
        table.add_row(str(row.k), str(row.rows), f"{row.hits:.0%}", f"{row.work:.2f}", *speeds, most)
    screen().print(table)
    screen().print(ahead_summary(rows, contention), style="bold", soft_wrap=True)


def _heads(made: Plan) -> list[str]:
    return ["speed-up"] if made.batches == (1,) else [f"B={batch}" for batch in made.batches]


def _or_never(value: float | None, k: int) -> str:
    if not k:
        return ""
    return "never" if value is None else f"{value:.2f}"
