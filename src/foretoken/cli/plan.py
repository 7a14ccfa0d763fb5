"""``foretoken plan``: estimate the gain of speculation without running a model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from foretoken.cli.options import Json
from foretoken.cli.output import check_out, json_only, print_json, print_table, screen, table
from foretoken.cli.settings import FromOptions, with_settings
from foretoken.core.costs import RoundCosts, TargetCost
from foretoken.core.io.hub_ids import expanded
from foretoken.core.settings import setting
from foretoken.lab.plan.ahead import AheadRow, ahead_row, ahead_summary
from foretoken.lab.plan.assumptions import Assumptions, CallCost, Flat, Measured
from foretoken.lab.plan.planner import Plan, plan, summary
from foretoken.lab.plan.roofline import Roofline
from foretoken.registry import parse_spec


@dataclass(frozen=True)
class PlanOptions:
    """Assumptions and queries of a plan; costs are in target steps."""

    alpha: float | None = setting(None, "Acceptance rate of a draft token, in [0, 1].")
    survival: str | None = setting(None, "Instead: shares of rounds accepted at least 1, 2, ... far, e.g. 0.8,0.6,0.5.")
    c: float | None = setting(None, "Cost of a draft step over that of a target step; 0: free.")
    k: str = setting("1-16", "Draft lengths: one, or a range such as 1-16.")
    guesses: int = setting(1, "Chains that guess the same k tokens in a round (lookahead's G).", 1)
    overhead: float | None = setting(None, "Further cost of a speculative round, in target steps.")
    v: str | None = setting(
        None,
        "Cost of scoring n tokens: 'flat', points such as 1:1,8:1.1,32:2, or "
        "roofline,parameters=7e9,bandwidth=3.35e12,flops=989e12[,bytes=2,context=..,kv_bytes=..,experts=..,active=..].",
    )
    operations: float | None = setting(
        None, "Arithmetic of a draft token over that of a target token; as --c if not given."
    )
    profile: Path | None = setting(None, "Costs and acceptance from a file of `foretoken tune`; options replace them.")
    drafter: str | None = setting(None, "Drafter in the profile [the profile's choice].")
    batch: str = setting("1", "Batch sizes, e.g. 1,4,16; the first one decides the plan.")
    tree: list[str] | None = setting(None, "A tree to compare, children per level: 3x2x1.")
    positions: str | None = setting(
        None, "For trees: probability of the first, second, ... sibling, e.g. 0.6,0.15,0.05."
    )
    ahead: int | None = setting(None, "Draft during verification for so many tokens after each accepted length.", 1)
    contention: float = setting(
        1.0, "With --ahead: how much slower each is while both run; 1: two devices, 2: all is shared."
    )
    plot: Path | None = setting(None, "PNG file: speed-up against k, c and batch size.")


@with_settings
def plan_command(*, options: Annotated[PlanOptions, FromOptions()], as_json: Json = False) -> None:
    """Work out the best draft length, its speed-up, and the limits at which it stops paying.  No model is loaded."""
    lengths, batches = parse_lengths(options.k), parse_batches(options.batch)
    shapes = [parse_widths(text) for text in options.tree or ()]
    siblings = None if options.positions is None else parse_probabilities(options.positions, "--positions")
    plot = options.plot
    if plot is not None:
        if plot.suffix.lower() != ".png":
            raise ValueError(f"--plot writes a PNG file: {plot} should end in .png")
        check_out(plot, "--plot", new_folders=True)

    if siblings is not None and not shapes and options.ahead is None:
        raise ValueError(
            "--positions are the probabilities of siblings in a tree: give --tree or --ahead, or leave it out"
        )
    assumptions, name, note = _assumptions(options, lengths, batches[0])
    ahead_rows = _ahead_rows(options, assumptions, lengths, batches, siblings)
    with json_only(as_json):
        result = plan(assumptions, lengths, batches, shapes, siblings)
        if note:
            result = replace(result, notes=(note, *result.notes))
        if plot is not None:
            from foretoken.lab.plan.plots import plot as draw

            plot.parent.mkdir(parents=True, exist_ok=True)
            draw(result, plot)
        if not as_json:
            _print(result, name, plot)
            _print_ahead(ahead_rows, options.contention)
    if as_json:
        answer = {
            "drafter": name,
            **result.public(),
            "summary": summary(result),
            "plot": None if plot is None else str(plot),
            "ahead": [row.public() for row in ahead_rows],
        }
        print_json(answer)


# -- reading options -------------------------------------------------------------------------------------------------


def _assumptions(options: PlanOptions, lengths: list[int], batch: int) -> tuple[Assumptions, str | None, str]:
    """The assumptions, the profile's drafter behind them, and a note if the profile chooses another."""
    if options.alpha is not None and options.survival is not None:
        raise ValueError("give --alpha or --survival, not both")
    if options.alpha is not None and not 0 <= options.alpha <= 1:
        raise ValueError(f"--alpha must be in [0, 1], not {options.alpha:g}")
    acceptance = (
        options.alpha if options.survival is None else tuple(parse_probabilities(options.survival, "--survival"))
    )
    assumptions, name, note = Assumptions(0.0), None, ""
    if options.profile is not None:
        profile = _read(options.profile)
        costs = _costs_of(profile, options.profile)
        if options.drafter is None:
            name, note = _drafter_of(profile, costs, lengths, batch)
        else:
            name = options.drafter
        assumptions = Assumptions.measured(costs, name)
    elif options.drafter is not None:
        raise ValueError("--drafter chooses from a profile: give --profile too, or --alpha and --c")
    elif acceptance is None:
        raise ValueError("give --alpha, --survival, or a --profile with measured acceptance")
    changes: dict[str, Any] = {
        "acceptance": acceptance,
        "c": checked_cost(options.c, "--c"),
        "overhead": checked_cost(options.overhead, "--overhead"),
        "v": None if options.v is None else parse_curve(options.v),
        "c_hat": checked_cost(options.operations, "--operations"),
        "guesses": options.guesses,
        # A rate applies to every round: drafts have the requested length
        "nodes_per_depth": None if acceptance is None else 1.0,
    }
    assumptions = replace(assumptions, **{key: value for key, value in changes.items() if value is not None})
    return assumptions, name, note


def _drafter_of(profile: dict[str, Any], costs: RoundCosts, lengths: list[int], batch: int) -> tuple[str, str]:
    """The profile's drafter, as in ``generate`` and ``serve``.  If it has no costs, the drafter with the highest
    predicted speed-up, and the reason."""
    drafter = profile.get("drafter", "auto")
    if drafter in costs.drafters:
        return drafter, ""
    best = max(
        costs.drafters, key=lambda spec: max(Assumptions.measured(costs, spec).speedup(k, batch) for k in lengths)
    )
    if drafter == "auto":
        return best, ""
    reason = (
        "the profile chooses plain decoding"
        if drafter is None
        else f"the profile has no costs of its drafter {drafter}"
    )
    return best, f"{reason}: this plan is for {best}, which promises most"


def _ahead_rows(
    options: PlanOptions, assumptions: Assumptions, lengths: list[int], batches: list[int], siblings: list[float] | None
) -> list[AheadRow]:
    """Estimates for drafting during verification; empty unless requested."""
    if options.ahead is None:
        if options.contention != 1.0:
            raise ValueError("--contention goes with --ahead")
        return []
    if batches[0] != 1 or assumptions.guesses != 1:
        raise ValueError("--ahead supports one request with one chain: leave out --batch and --guesses")
    if not any(lengths):
        raise ValueError("--ahead guesses what follows a draft: give a --k above 0")
    return [ahead_row(assumptions, k, options.ahead, options.contention, siblings) for k in lengths if k]


# -- showing ---------------------------------------------------------------------------------------------------------


def _print(result: Plan, name: str | None, plot: Path | None) -> None:
    console = screen()
    grid = table(None, (), ["k", "tokens", *_heads(result), "ops", "reads", "from α", "up to c"])
    for row in result.rows:
        grid.add_row(
            str(row.k),
            f"{row.tokens:.2f}",
            *(f"{x:.2f}x" for x in row.speedups.values()),
            f"{row.operations:.2f}x",
            f"{row.target_reads:.2f}x",
            _or_never(row.break_even_alpha, row.k),
            _or_never(row.break_even_c, row.k),
            style="bold" if row is result.best else None,
        )
    print_table(console, grid)
    console.print(
        "tokens: per round; ops and reads: arithmetic, and reads of the target's weights, per token over plain "
        "decoding; from α, up to c: where drafting k tokens pays",
        style="dim",
    )
    if result.trees:
        grid = table(None, (), ["tree", "nodes", "tokens", *_heads(result)])
        for tree in result.trees:
            speedups = (f"{x:.2f}x" for x in tree.speedups.values())
            grid.add_row(tree.shape, str(tree.nodes), f"{tree.tokens:.2f}", *speedups)
        print_table(console, grid)
    _print_changes(result)
    if len(result.batches) > 1:
        best = ", ".join(f"k={k} at {batch}" for batch, k in result.best_by_batch.items())
        console.print(f"best by batch: {best}")
    if name is not None:
        console.print(f"measured drafter: {name}")
    for note in result.notes:
        console.print(f"note: {note}", style="dim")
    if plot is not None:
        console.print(f"picture: {plot}")
    console.print(summary(result), style="bold")


def _print_changes(result: Plan) -> None:
    near = result.best if result.best.k else result.nearest
    if near is None:
        return
    grid = table(None, ["if"], [f"speed-up of k={near.k}", "best k then", "its speed-up"])
    for change in result.changes:
        grid.add_row(change.what, f"{change.speedup:.2f}x", str(change.best_k), f"{change.best_speedup:.2f}x")
    print_table(screen(), grid)


def _print_ahead(rows: list[AheadRow], contention: float) -> None:
    if not rows:
        return
    heads = ("k", "outcomes", "guessed", "work", "ahead", "between rounds", "contention up to")
    grid = table(None, (), heads)
    for row in rows:
        most = "never" if row.contention is None else f"{row.contention:.2f}"
        speeds = (f"{row.speedup:.2f}x", f"{row.without:.2f}x")
        grid.add_row(str(row.k), str(row.rows), f"{row.hits:.0%}", f"{row.work:.2f}", *speeds, most)
    print_table(screen(), grid)
    screen().print(ahead_summary(rows, contention), style="bold")


def _heads(result: Plan) -> list[str]:
    return ["speed-up"] if result.batches == (1,) else [f"B={batch}" for batch in result.batches]


def _or_never(value: float | None, k: int) -> str:
    if not k:
        return ""
    return "never" if value is None else f"{value:.2f}"


# -- parsing option values ---------------------------------------------------------------------------------------------


def _read(file: Path) -> dict[str, Any]:
    """A profile with measured costs."""
    try:
        text = expanded(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the profile {file}: {getattr(error, 'strerror', None) or 'no text'}") from None
    try:
        profile: dict[str, Any] = json.loads(text)
        profile["costs"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file} contains no measured costs: make it with `foretoken tune --out {file.name}`"
        ) from None
    drafter = profile.get("drafter")
    if not isinstance(drafter, str | None):
        raise ValueError(f"drafter in the profile {file} must be a spec string, not {json.dumps(drafter)}")
    return profile


def _costs_of(profile: dict[str, Any], file: Path) -> RoundCosts:
    """The costs in a profile, for at least one drafter."""
    try:
        costs = RoundCosts.from_dict(profile["costs"])
        for spec in costs.drafters:
            Assumptions.measured(costs, spec)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the costs in {file} cannot be used: {error}") from None
    if not costs.drafters:
        raise ValueError("the profile has no measured drafters: run `foretoken tune` again, or give --alpha and --c")
    return costs


def parse_curve(text: str) -> CallCost:
    """v(n): ``flat``, ``1:1,8:1.1,...`` or ``roofline,key=value,...``."""
    if text.strip() == "flat":
        return Flat()
    if text.partition(",")[0].strip() == "roofline":
        return _roofline(text)
    try:
        pairs = [part.split(":") for part in text.split(",")]
        points = {int(n): float(x) for n, x in pairs}
        right = len(pairs) == len(points) >= 2 and 1 in points and all(0 < x < math.inf for x in points.values())
        right = right and min(points) >= 1
    except ValueError:
        right = False
    if not right:
        raise ValueError(
            f"--v {text!r} must be 'flat', roofline,key=value,... or two or more points n:cost that start at 1, "
            "for example 1:1,8:1.1,32:2"
        )
    return Measured(TargetCost(points))


def _roofline(text: str) -> CallCost:
    names = [f.name for f in fields(Roofline)]
    counts = [f.name for f in fields(Roofline) if f.type == "int"]
    needed, options = ("parameters", "bandwidth", "flops"), parse_spec(text).options
    if not set(needed) <= set(options) <= set(names):
        raise ValueError(f"--v roofline needs {', '.join(needed)} and takes {', '.join(names)}; not {text!r}")
    try:
        values: dict[str, Any] = {name: float(value) for name, value in options.items()}
        whole = {name: int(values[name]) for name in counts if name in values}
    except (ValueError, OverflowError):
        raise ValueError(f"--v {text!r}: every option is a number, for example parameters=7e9") from None
    if broken := [name for name in whole if whole[name] != values[name]]:
        raise ValueError(f"--v {text!r}: {broken[0]} must be a whole number, not {options[broken[0]]}")
    return Roofline(**values | whole)


def checked_cost(value: float | None, name: str) -> float | None:
    """The cost, a finite number >= 0 or ``None``."""
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, not {value:g}")
    return value


def parse_probabilities(text: str, name: str) -> list[float]:
    """Parse probabilities such as ``0.8,0.6,0.5``."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be numbers joined by commas, for example 0.8,0.6,0.5; not {text!r}") from None
    if not all(0 <= value <= 1 for value in values):
        raise ValueError(f"{name} must be probabilities in [0, 1], not {text!r}")
    return values


def parse_batches(text: str) -> list[int]:
    """Parse distinct batch sizes such as ``1,4,16``."""
    rule = "--batch must be whole numbers > 0 joined by commas, for example 1,4,16"
    return list(dict.fromkeys(_counts(text, ",", rule)))


def parse_lengths(text: str, longest: int = 512) -> list[int]:
    """Parse draft lengths such as ``4`` or ``1-16``."""
    low, dash, high = text.partition("-")
    parts = [low, high] if dash else [low, low]
    if not all(part.strip().isdecimal() for part in parts) or int(parts[0]) > int(parts[1]):
        raise ValueError(f"--k must be a length or a range of lengths, for example 4 or 1-16; not {text!r}")
    if int(parts[1]) > longest:
        raise ValueError(f"--k goes up to {longest}, not {text!r}")
    return list(range(int(parts[0]), int(parts[1]) + 1))


def parse_widths(text: str, most_leaves: int = 4096) -> list[int]:
    """Parse tree widths such as ``3x2x1``."""
    widths = _counts(text, "x", "--tree must be positive child counts per level, for example 3x2x1")
    if math.prod(widths) > most_leaves:
        raise ValueError(f"--tree {text!r} has too many nodes: at most {most_leaves} leaves")
    return widths


def _counts(text: str, separator: str, rule: str) -> list[int]:
    parts = text.lower().split(separator)
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{rule}; not {text!r}")
    return [int(part) for part in parts]
