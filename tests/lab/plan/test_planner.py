"""Plans: their numbers are those of the formulas and of measured costs, and their words follow from them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.lab.plan.assumptions import Assumptions, Flat, Measured, shifted
from foretoken.lab.plan.planner import plan, summary
from foretoken.lab.plan.plots import plot
from foretoken.lab.plan.roofline import Roofline
from foretoken.lab.plan.speedup import expected_tokens, tree_tokens

V = Measured(TargetCost({1: 1.0, 8: 1.1, 32: 2.0}))
COSTS = RoundCosts(
    TargetCost({1: 0.10, 4: 0.11, 16: 0.14, 64: 0.40}),
    {
        "model,k=5": DrafterCost(0.002, 0.012, (0.8, 0.6, 0.45, 0.3, 0.2)),
        "ngram": DrafterCost(0.0005, 0.0, (0.3, 0.25, 0.2), proposes=0.4),
        "medusa": DrafterCost(0.004, 0.0, (0.7, 0.4, 0.2), nodes_per_depth=8.0),
        "useless": DrafterCost(0.01, 0.05, (0.1,)),
    },
    rest_s=0.004,
)


def test_rows_are_the_formulas() -> None:
    planned = plan(Assumptions(0.7, 0.1, 0.05, V), range(1, 9))
    assert [row.k for row in planned.rows] == list(range(9))
    for row in planned.rows[1:]:
        v = V(row.k + 1)
        tokens = sum(0.7**i for i in range(row.k + 1))
        assert row.tokens == pytest.approx(tokens)
        assert row.speedups[1] == pytest.approx(tokens / (v + 0.1 * row.k + 0.05))  # theorem 3.8, with v and o
        assert row.operations == pytest.approx((row.k * 0.1 + row.k + 1) / tokens)  # theorem 3.11
        assert row.target_reads == pytest.approx(1 / tokens)
        assert row.break_even_c == pytest.approx((tokens - v - 0.05) / row.k)
        assert row.break_even_alpha is not None
        assert expected_tokens(row.break_even_alpha, row.k) == pytest.approx(v + 0.1 * row.k + 0.05)
    plain = planned.rows[0]
    assert (plain.tokens, plain.speedups[1], plain.operations, plain.break_even_c) == (1.0, 1.0, 1.0, None)
    assert planned.best is max(planned.rows, key=lambda row: row.speedups[1])


@pytest.mark.parametrize("spec", list(COSTS.drafters))
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_a_profile_is_planned_as_controllers_plan(spec: str, batch: int) -> None:
    planned = plan(Assumptions.measured(COSTS, spec), range(1, 8), (batch,))
    for row in planned.rows:
        assert row.speedups[batch] == pytest.approx(COSTS.speedup(spec, row.k, batch))


def test_batches_use_up_the_flat_part() -> None:
    planned = plan(Assumptions(0.7, 0.1, v=V), range(1, 9), (1, 4, 16, 64))
    best = list(planned.best_by_batch.values())
    assert best == sorted(best, reverse=True) and best[0] > best[-1] == 0
    for row in planned.rows[1:]:
        assert row.speedups[4] == pytest.approx(row.tokens * V(4) / (V(4 * (row.k + 1)) + 0.1 * V(4) * row.k))
    ratio = planned.row(4).speedups
    assert planned.limits is not None and planned.limits.batch is not None
    assert ratio[4] > 1 > ratio[16] and 4 < planned.limits.batch <= 16


def test_limits_are_where_the_speed_up_is_one() -> None:
    for assumptions in (
        Assumptions(0.7, 0.1, 0.05, V),
        Assumptions(0.3, 0.4),
        Assumptions.measured(COSTS, "model,k=5"),
    ):
        for batch in (1, 4):
            planned = plan(assumptions, range(1, 7), (batch,))
            limits, near = planned.limits, planned.best if planned.best.k else planned.nearest
            assert limits is not None and near is not None and limits.alpha is not None
            at_alpha = Assumptions(
                limits.alpha, assumptions.c, assumptions.overhead, assumptions.v, assumptions.drafter_grows
            )
            assert at_alpha.speedup(near.k, batch) == pytest.approx(1.0)
            assert limits.c is not None
            assert Assumptions(
                assumptions.acceptance, limits.c, assumptions.overhead, assumptions.v, assumptions.drafter_grows
            ).speedup(near.k, batch) == pytest.approx(1.0)
            if limits.overhead is not None:
                at_overhead = Assumptions(
                    assumptions.acceptance, assumptions.c, limits.overhead, assumptions.v, assumptions.drafter_grows
                )
                assert at_overhead.speedup(near.k, batch) == pytest.approx(1.0)


def test_trees_of_a_plan() -> None:
    assumptions = Assumptions(0.6, 0.1, v=V)
    planned = plan(assumptions, [4], trees=[(3, 2, 1), (1, 1, 1, 1)], positions=[0.6, 0.15, 0.05])
    tokens = tree_tokens([3, 2, 1], [[0.6, 0.15, 0.05]] * 3)
    assert planned.trees[0].tokens == pytest.approx(tokens)
    assert planned.trees[0].speedups[1] == pytest.approx(tokens / (V(16) + 3 * 0.1))
    assert planned.trees[1].speedups[1] == pytest.approx(planned.row(4).speedups[1])
    assert (planned.trees[0].shape, planned.trees[0].nodes, planned.trees[0].depth) == ("3x2x1", 15, 3)
    guessed = plan(assumptions, [4], trees=[(2,)])
    assert guessed.trees[0].tokens == pytest.approx(1 + 0.6 + 0.4 * 0.6)
    assert any("upper estimate" in note for note in guessed.notes) and not any("upper" in n for n in planned.notes)
    chain = plan(Assumptions((0.8, 0.4), v=V), [2], trees=[(1, 1)])
    assert chain.trees[0].tokens == pytest.approx(chain.row(2).tokens)


def test_a_shift_changes_every_step() -> None:
    assert shifted(0.7, 0.1) == pytest.approx(0.8)
    assert (shifted(0.95, 0.1), shifted(0.05, -0.1)) == (1.0, 0.0)
    assert shifted((0.8, 0.4), -0.1) == pytest.approx((0.7, 0.28))
    assert shifted((0.8, 0.0), 0.5) == pytest.approx((1.0, 0.5))
    assert shifted((0.0, 0.0), 0.5) == pytest.approx((0.5, 0.25))


def test_sensitivity_is_the_plan_made_again() -> None:
    assumptions = Assumptions(0.7, 0.1, v=V)
    changes = {change.what: change for change in plan(assumptions, range(1, 9)).changes}
    worse = changes["acceptance 0.1 lower"]
    assert worse.speedup == pytest.approx(Assumptions(0.6, 0.1, v=V).speedup(4))
    assert worse.best_k == plan(Assumptions(0.6, 0.1, v=V), range(1, 9)).best.k
    assert changes["draft step twice as slow"].best_k < 4 < changes["draft step twice as fast"].best_k
    assert changes["scoring more tokens twice as expensive"].speedup == pytest.approx(
        expected_tokens(0.7, 4) / (2 * V(5) - 1 + 4 * 0.1)
    )
    assert "draft step twice as slow" not in {c.what for c in plan(Assumptions(0.7), [4]).changes}
    assert all(change.best_speedup >= max(change.speedup, 1.0) for change in changes.values())


def test_the_words() -> None:
    pays = summary(plan(Assumptions(0.7, 0.1, v=V), range(1, 11), trees=[(2, 2)]))
    assert pays.startswith("Draft k=4 tokens a round: 2.77 tokens a round, 1.90x plain decoding.")
    for words in (
        "falls below 32%",
        "more than 43% of a target step",
        "the batch reaches 16 (estimated: v(n) is known up to n = 32)",
        "The tree 2x2 is faster",
    ):
        assert words in pays
    assert "estimated" not in summary(plan(Assumptions(0.4, 0.1, v=V), [2]))
    lost = summary(plan(Assumptions(0.3, 0.4), range(1, 5)))
    for words in ("Do not draft", "nearest is k=1 with 0.93x", "rises above 40%", "less than 30% of a target step"):
        assert words in lost
    hopeless = summary(plan(Assumptions(0.0, 0.4, overhead=0.7), [1]))
    assert "rises above" not in hopeless and "less than" not in hopeless and "would change that" in hopeless
    assert "longest draft considered" in summary(plan(Assumptions(0.9), range(1, 4)))
    assert summary(plan(Assumptions(0.9), [0])) == "Only plain decoding was requested."
    assert "at batch 8" in summary(plan(Assumptions(0.7, 0.1, v=V), [2], (8,)))


def test_notes_say_what_is_not_known() -> None:
    def notes(assumptions: Assumptions, batch: int = 1) -> str:
        return " | ".join(plan(assumptions, range(1, 9), (batch,)).notes)

    assert "same" in notes(Assumptions(0.7, 0.1)) and "free" not in notes(Assumptions(0.7, 0.1))
    assert "free" in notes(Assumptions(0.7))
    assert notes(Assumptions(0.7, 0.1, v=V)) == ""
    assert "known up to n = 32 and continued along its last slope up to 72" in notes(Assumptions(0.7, 0.1, v=V), 8)
    assert "known up to position 2" in notes(Assumptions((0.8, 0.5), 0.1, v=V))
    assert "peak figures" in notes(Assumptions(0.7, 0.1, v=Roofline(7e9, 1e12, 1e14)))


def test_public_form_is_json() -> None:
    planned = plan(Assumptions((0.8, 0.5), 0.1), range(1, 4), (1, 2), [(2, 2)])
    public = json.loads(json.dumps(planned.public(), allow_nan=False))
    assert public["survival"] == [0.8, 0.5] and public["alpha"] is None
    assert public["best"]["k"] == planned.best.k and len(public["rows"]) == 4
    assert public["best_by_batch"] == {"1": planned.best.k, "2": planned.best_by_batch[2]}


def test_bad_assumptions() -> None:
    for wrong, words in (
        (lambda: Assumptions(1.2), "alpha"),
        (lambda: Assumptions((0.5, 0.6)), "survival"),
        (lambda: Assumptions(0.5, -1), "c must be"),
        (lambda: Assumptions(0.5, overhead=math.nan), "overhead"),
        (lambda: Assumptions(0.5, c_hat=-1), "c must be"),
        (lambda: Assumptions.measured(COSTS, "nosuch"), "model,k=5"),
        (lambda: plan(Assumptions(0.5), [-1]), "k >= 0"),
        (lambda: plan(Assumptions(0.5), [1], ()), "batch sizes"),
        (lambda: plan(Assumptions(0.5), [1], (0,)), "batch sizes"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


@pytest.mark.parametrize(
    "assumptions",
    [Assumptions(0.7, 0.1, v=V), Assumptions((0.8, 0.5), v=Flat()), Assumptions(0.3, 0.4), Assumptions(1.0)],
    ids=["usual", "survival", "never-pays", "certain"],
)
def test_pictures_of_all_sorts(assumptions: Assumptions, tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    plot(plan(assumptions, [4] if assumptions.c else range(1, 9), (1, 4), [(2, 2)] if assumptions.c else []), file)
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000
    assert list(tmp_path.iterdir()) == [file]


def test_a_picture_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    with pytest.raises(OSError):
        plot(plan(Assumptions(0.7), [2]), tmp_path / "none" / "plan.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"foretoken\[bench\]"):
        plot(plan(Assumptions(0.7), [2]), tmp_path / "plan.png")
    assert list(tmp_path.iterdir()) == []
