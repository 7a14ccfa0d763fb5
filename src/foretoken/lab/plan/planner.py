"""Plans: the best draft length, its speed-up and its sensitivity, from :mod:`foretoken.lab.plan.speedup`.

Section 3.5 of Leviathan et al., https://arxiv.org/abs/2211.17192; batches: SmartSpec, 2406.14066.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

from foretoken.core.costs import speedup
from foretoken.lab.plan import speedup as theory
from foretoken.lab.plan.assumptions import Assumptions, CallCost, Flat, Measured
from foretoken.lab.plan.roofline import Roofline
from foretoken.lab.plan.speedup import tree_tokens, trial_acceptance


@dataclass(frozen=True)
class PlanRow:
    """Drafts of k tokens.

    Attributes:
        k: draft levels; 0 is plain decoding.
        nodes: tokens that the target scores per request, including the root.
        tokens: per round.
        speedups: by batch size.
        operations: arithmetic per token over plain decoding's.
        target_reads: reads of the target's weights per token over plain decoding's.
        break_even_alpha: lowest acceptance at which it pays at the first batch size; ``None``: never, or k = 0.
        break_even_c: highest draft cost at which it pays there; ``None``: not even for free, or k = 0.
    """

    k: int
    nodes: int
    tokens: float
    speedups: dict[int, float]
    operations: float
    target_reads: float
    break_even_alpha: float | None
    break_even_c: float | None


@dataclass(frozen=True)
class TreeRow:
    """A tree, with the fields of :class:`PlanRow`; ``shape`` has its child counts per level."""

    shape: str
    nodes: int
    depth: int
    tokens: float
    speedups: dict[int, float]


@dataclass(frozen=True)
class Change:
    """Effect of a changed assumption on the speed-up of the plan's k (or the nearest k if none pays) and the best k."""

    what: str
    speedup: float
    best_k: int
    best_speedup: float


@dataclass(frozen=True)
class BreakEven:
    """Break-even limits of the plan's k, each with everything else as assumed.

    ``None`` for limits that do not exist; ``batch`` is the smallest power of two beyond the limit.
    """

    alpha: float | None
    c: float | None
    overhead: float | None
    batch: int | None


@dataclass(frozen=True)
class Plan:
    """A plan for the requested batch sizes.

    Attributes:
        rows: by k, plain decoding first.
        best: the row to use at the first batch size.
        changes, limits: sensitivity and break-even of ``best``, or of ``nearest`` if ``best`` is plain decoding.
        notes: caveats of the numbers.
    """

    assumptions: Assumptions
    batches: tuple[int, ...]
    rows: tuple[PlanRow, ...]
    best: PlanRow
    best_by_batch: dict[int, int]
    trees: tuple[TreeRow, ...]
    changes: tuple[Change, ...]
    limits: BreakEven | None
    notes: tuple[str, ...]

    def row(self, k: int) -> PlanRow:
        return next(row for row in self.rows if row.k == k)

    @property
    def nearest(self) -> PlanRow | None:
        """The best row with k > 0."""
        drafting = [row for row in self.rows if row.k]
        return max(drafting, key=lambda row: row.speedups[self.batches[0]], default=None)

    def public(self) -> dict[str, Any]:
        """Fields of the ``--json`` output."""
        assumptions = self.assumptions
        rate = isinstance(assumptions.acceptance, float | int)
        return {
            "alpha": assumptions.acceptance if rate else None,
            "survival": None if rate else list(assumptions.acceptance),  # type: ignore[arg-type]
            "c": assumptions.c,
            "overhead": assumptions.overhead,
            "guesses": assumptions.guesses,
            "batches": list(self.batches),
            "rows": [asdict(row) for row in self.rows],
            "best": asdict(self.best),
            "best_by_batch": self.best_by_batch,
            "trees": [asdict(tree) for tree in self.trees],
            "sensitivity": [asdict(change) for change in self.changes],
            "break_even": None if self.limits is None else asdict(self.limits),
            "notes": list(self.notes),
        }


def plan(
    assumptions: Assumptions,
    ks: Sequence[int],
    batches: Sequence[int] = (1,),
    trees: Sequence[Sequence[int]] = (),
    positions: Sequence[float] | None = None,
) -> Plan:
    """Compute a plan.  Raises ``ValueError`` for no batch sizes, a negative k, a batch size below 1 or an invalid tree.

    Args:
        ks: draft lengths to consider; 0 (plain decoding) is always included.
        batches: requests per round; the first one decides ``best``.
        trees: shapes, child counts per level.
        positions: probability that the first, second, ... sibling is accepted; defaults to independent trials at the
            rate of the first position (an upper estimate).
    """
    ks = sorted({0, *ks})
    if ks[0] < 0 or not batches or min(batches) < 1:
        raise ValueError(f"a plan needs k >= 0 and batch sizes >= 1, not {list(ks)} and {list(batches)}")
    rows = tuple(_row(assumptions, k, batches) for k in ks)
    best_by_batch = {batch: assumptions.best_k(ks, batch) for batch in batches}
    best = rows[ks.index(best_by_batch[batches[0]])]
    tree_rows = tuple(_tree(assumptions, shape, positions, batches) for shape in trees)
    result = Plan(assumptions, tuple(batches), rows, best, best_by_batch, tree_rows, (), None, ())
    nearest = best if best.k else result.nearest
    return replace(
        result,
        changes=() if nearest is None else tuple(_changes(assumptions, nearest.k, ks, batches[0])),
        limits=None if nearest is None else _limits(assumptions, nearest.k, batches[0]),
        notes=tuple(_notes(result, positions)),
    )


def _row(assumptions: Assumptions, k: int, batches: Sequence[int]) -> PlanRow:
    nodes, tokens = assumptions.nodes(k), assumptions.tokens(k)
    c_hat = assumptions.c if assumptions.c_hat is None else assumptions.c_hat
    limits = _limits(assumptions, k, batches[0], search=False) if k else BreakEven(None, None, None, None)
    speedups = {batch: assumptions.speedup(k, batch) for batch in batches}
    return PlanRow(k, nodes, tokens, speedups, (nodes + k * c_hat) / tokens, 1.0 / tokens, limits.alpha, limits.c)


def _tree(
    assumptions: Assumptions, widths: Sequence[int], positions: Sequence[float] | None, batches: Sequence[int]
) -> TreeRow:
    table: list[Sequence[float]] = []
    before = 1.0
    for depth, s in enumerate(theory.reached(assumptions.acceptance, len(widths))):
        # At depth d the first sibling is accepted as often as a chain's d-th token; the others scale with it.
        rate, before = (s / before if before > 0 else 0.0), s
        table.append(trial_acceptance(rate, widths[depth]) if positions is None else positions)
    tokens, depth, nodes = tree_tokens(widths, table), len(widths), sum(accumulate(widths, mul))
    speedups = {batch: speedup(tokens, assumptions.cost(depth, 1 + nodes, batch), 1.0) for batch in batches}
    return TreeRow("x".join(map(str, widths)), nodes, depth, tokens, speedups)


def _limits(assumptions: Assumptions, k: int, batch: int, search: bool = True) -> BreakEven:
    tokens, nodes = assumptions.tokens(k), assumptions.nodes(k)
    plain = assumptions.v(1, batch)
    spare = tokens - assumptions.cost(k, nodes, batch)  # in plain rounds of the batch
    per_step = k * (1.0 if assumptions.drafter_grows else 1.0 / plain)
    c, overhead = assumptions.c + spare / per_step, assumptions.overhead + spare * plain
    too_many = None
    if search and spare > 0:
        sizes = (2**i for i in range(13))  # up to a batch of 4096
        too_many = next((size for size in sizes if size > batch and assumptions.speedup(k, size) < 1.0), None)
    alpha = theory.alpha_for_tokens(assumptions.cost(k, nodes, batch), k, assumptions.guesses)
    return BreakEven(alpha, c if c >= 0 else None, overhead if overhead >= 0 else None, too_many)


def _changes(assumptions: Assumptions, k: int, ks: Sequence[int], batch: int) -> list[Change]:
    cases = [
        ("acceptance 0.1 lower", assumptions.shifted(-0.1)),
        ("acceptance 0.1 higher", assumptions.shifted(0.1)),
        ("draft step twice as slow", replace(assumptions, c=2 * assumptions.c)),
        ("draft step twice as fast", replace(assumptions, c=assumptions.c / 2)),
        ("overhead 0.1 higher", replace(assumptions, overhead=assumptions.overhead + 0.1)),
    ]
    if not isinstance(assumptions.v, Flat):  # which a higher slope leaves as it is
        cases.append(("scoring more tokens twice as expensive", replace(assumptions, v=_Steeper(assumptions.v))))
    changes = []
    for name, case in cases:
        if case == assumptions:
            continue
        best = case.best_k(ks, batch)
        changes.append(Change(name, case.speedup(k, batch), best, case.speedup(best, batch)))
    return changes


@dataclass(frozen=True)
class _Steeper:
    """1 + 2 (v - 1), with unchanged plain rounds of a batch."""

    v: CallCost

    def __call__(self, nodes: int, batch: int = 1) -> float:
        plain, full = self.v(1, batch), self.v(nodes, batch)
        return plain + 2.0 * max(full - plain, 0.0)


def _notes(result: Plan, positions: Sequence[float] | None) -> list[str]:
    assumptions, notes = result.assumptions, []
    most = max([row.nodes for row in result.rows] + [tree.nodes + 1 for tree in result.trees]) * max(result.batches)
    if assumptions.c == 0 and assumptions.overhead == 0:
        notes.append("drafting is taken to be free (c = 0)")
    if isinstance(assumptions.v, Roofline):
        notes.append("v(n) is estimated from the device's peak figures; measured costs are better")
    if isinstance(assumptions.v, Flat):
        notes.append("scoring any number of tokens is taken to cost the same; give v(n) for trees, batches and CPUs")
    elif isinstance(assumptions.v, Measured) and most > assumptions.v.known_to:
        notes.append(
            f"v(n) is known up to n = {assumptions.v.known_to} and continued along its last slope up to {most}"
        )
    positions_known = None if isinstance(assumptions.acceptance, float | int) else len(assumptions.acceptance)
    if positions_known is not None and result.rows[-1].k > positions_known:
        notes.append(
            f"acceptance is known up to position {positions_known}; further ones are taken to be like the last"
        )
    if assumptions.guesses > 1:
        notes.append(f"the {assumptions.guesses} guesses are taken to be independent, an upper estimate")
    if positions is None and any(tree.nodes > tree.depth for tree in result.trees):
        notes.append("siblings are taken to be independent trials, an upper estimate; give measured positions")
    return notes


def summary(result: Plan) -> str:
    """The plan in a few sentences."""
    assumptions, batch, best, near = result.assumptions, result.batches[0], result.best, result.nearest
    where = "" if batch == 1 else f" at batch {batch}"
    if best.k:
        text = (
            f"Draft k={best.k} tokens a round{where}: {best.tokens:.2f} tokens a round, {best.speedups[batch]:.2f}x "
            f"plain decoding.{_conditions(result, best, pays=True)}"
        )
        if best is result.rows[-1] and len(result.rows) > 2:
            text += " It is the longest draft considered: try longer ones."
    elif near is None:
        text = "Only plain decoding was requested."
    else:
        text = (
            f"Do not draft chains{where}: no length pays. The nearest is k={near.k} with {near.speedups[batch]:.2f}x "
            f"plain decoding: {near.tokens:.2f} tokens a round where "
            f"{assumptions.cost(near.k, near.nodes, batch):.2f} are needed.{_conditions(result, near, pays=False)}"
        )
    tree = max(result.trees, key=lambda tree: tree.speedups[batch], default=None)
    if tree is not None and tree.speedups[batch] > best.speedups[batch]:
        text += f" The tree {tree.shape} is faster: {tree.tokens:.2f} tokens a round, {tree.speedups[batch]:.2f}x."
    return text


def _conditions(result: Plan, row: PlanRow, pays: bool) -> str:
    """Conditions under which a row starts or stops paying."""
    limits, v = result.limits, result.assumptions.v
    if limits is None:
        return ""
    parts = []
    if limits.alpha is not None and (limits.alpha > 0 or not pays):
        parts.append(f"acceptance {'falls below' if pays else 'rises above'} {limits.alpha:.0%}")
    if limits.c is not None:
        parts.append(f"a draft step costs {'more' if pays else 'less'} than {limits.c:.0%} of a target step")
    if pays and limits.overhead is not None:
        parts.append(f"the overhead of a round exceeds {limits.overhead:.0%} of a target step")
    if pays and limits.batch is not None:
        beyond = ""
        if isinstance(v, Measured) and limits.batch * row.nodes > v.known_to:
            beyond = f" (estimated: v(n) is known up to n = {v.known_to})"
        parts.append(f"the batch reaches {limits.batch}{beyond}")
    if not parts:
        return "" if pays else " Neither higher acceptance nor a faster drafter would change that."
    return f" k={row.k} {'stops paying' if pays else 'would pay'} when {', or when '.join(parts)}."
