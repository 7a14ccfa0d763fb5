"""Which drafters a search tries, and what their rounds say: costs, the best length, why one loses."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.core.costs import RoundCosts, TargetCost
from foretoken.lab.tune.candidates import Scouted, best_candidate, cost_of, survival_of, why_not
from foretoken.lab.tune.choices import (
    default_specs,
    further,
    generous,
    likely,
    parse_names,
    router_spec,
    sizes,
    with_option,
)
from foretoken.lab.tune.positional import can_fill, measured_shape, sequoia_spec
from foretoken.lab.tune.race import RaceRound, Standing
from foretoken.lab.workload import Subject, Workload
from foretoken.loading import build_drafter, load_model
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.registry import find, rows
from toys import fixed_tables, llama

V = TargetCost({1: 0.010, 2: 0.011, 256: 0.265})
"""10 ms for one node and 1 ms for every further one."""
REST = 0.002


def rounds_of(alpha: float, step_s: float, depth: int = 8, nodes: int = 0, asks: float = 1.0) -> list[RaceRound]:
    """A thousand rounds with drafts of ``depth``, each token of which is accepted with chance ``alpha``."""
    rounds = []
    for i in range(1000):
        if i >= 1000 * asks:
            rounds.append(RaceRound(1, 1, 0, 0, 0.0, V.of(1) + REST))
            continue
        accepted = next((d for d in range(depth) if alpha ** (d + 1) <= (i + 0.5) / (1000 * asks)), depth)
        rows = 1 + (nodes or depth)
        rounds.append(
            RaceRound(1 + accepted, rows, depth, accepted, step_s * depth, V.of(rows) + REST + step_s * depth)
        )
    return rounds


PLAIN = [RaceRound(1, 1, 0, 0, 0.0, V.of(1) + REST)] * 100


def scouted(rounds: list[RaceRound], depth: int = 8, trees: bool = False, copies: bool = False) -> Scouted:
    return Scouted("model,k=8", depth, trees, copies, Standing(list(rounds), list(PLAIN)))


# -- what rounds say -------------------------------------------------------------------------------------------------


def test_what_drafts_cost_and_promise() -> None:
    cost = cost_of(rounds_of(0.7, 0.002), 8, False)
    assert (cost.call_s, cost.step_s, cost.proposes, cost.nodes_per_depth) == pytest.approx((0.0, 0.002, 1.0, 1.0))
    assert cost.survival == pytest.approx([0.7**d for d in range(1, 9)], abs=2e-3)
    copying = cost_of(rounds_of(0.7, 0.001, asks=0.25), 8, True)
    assert (copying.call_s, copying.step_s, copying.proposes) == pytest.approx((0.002, 0.0, 0.25))
    assert cost_of([], 4, True).proposes == 0.0


def test_only_rounds_with_room_count() -> None:
    """A draft that the answer's end has cut says nothing of the depths that it has not."""
    whole, cut = RaceRound(5, 5, 4, 4, 0.0, 0.1, 40), RaceRound(2, 2, 1, 1, 0.0, 0.1, 2)
    assert cost_of([whole] * 3 + [cut] * 9, 4, True).survival == [1.0] * 4


def test_rounds_of_several_lengths_count_up_to_their_own() -> None:
    """Half of the long drafts stand, three quarters of the short ones: five of eight first levels, and beyond what the
    short ones reach the half of the long ones' that goes on."""
    long = [RaceRound(1, 5, 4, accepted, 0.0, 0.1) for accepted in (0, 0, 2, 4)]
    short = [RaceRound(1, 2, 1, accepted, 0.0, 0.1) for accepted in (0, 1, 1, 1)]
    assert survival_of([(long, 4)]) == pytest.approx([0.5, 0.5, 0.25, 0.25])
    assert survival_of([(long, 4), (short, 1)]) == pytest.approx([0.625, 0.625, 0.3125, 0.3125])
    assert survival_of([([], 2)]) == [0.0, 0.0]


@pytest.mark.parametrize(("alpha", "step_s"), [(0.9, 0.0002), (0.7, 0.002), (0.3, 0.004), (0.95, 0.00001)])
def test_the_best_depth_is_that_of_the_formula(alpha: float, step_s: float) -> None:
    """(1 - a^(k+1)) / (1 - a) tokens for v(k + 1) + c k + o (docs/theory.md), by brute force."""
    best = best_candidate(scouted(rounds_of(alpha, step_s)), V, REST)

    def speedup(k: int) -> float:
        tokens = (1 - alpha ** (k + 1)) / (1 - alpha)
        return tokens * (0.010 + REST) / (0.010 + 0.001 * k + step_s * k + REST)

    assert speedup(best.depth) >= 0.99 * max(speedup(k) for k in range(1, 9))
    assert best.predicted == pytest.approx(speedup(best.depth), rel=0.01)
    assert best.controller == f"constant,k={best.depth}"


def test_a_drafter_that_ends_its_own_drafts_is_charged_for_the_levels_that_it_ran() -> None:
    """Nine of ten drafts end behind their first level, the others run eight, seven of them in vain."""
    short = RaceRound(1, 2, 1, 0, 0.005, V.of(2) + REST + 0.005)
    accepted = short._replace(new_tokens=2, accepted=1)
    long = RaceRound(1, 9, 8, 0, 0.040, V.of(9) + REST + 0.040)
    scout = scouted([short, accepted] * 45 + [long] * 5 + [long._replace(new_tokens=2, accepted=1)] * 5)
    best = best_candidate(scout, V, REST)
    assert best.depth == 1
    assert best.cost.seconds(1) == pytest.approx(0.005)
    assert scout.cost_at(8).seconds(8) == pytest.approx(0.9 * 0.005 + 0.1 * 0.040)
    assert best.predicted == pytest.approx(1.0, rel=0.02)  # 1.5 tokens in 18 ms, plain 12; rows are whole


def test_the_speed_that_was_measured_sets_the_scale() -> None:
    """Rounds that took twice what the model says: so do those of every other length."""
    slow = [round_._replace(total_s=2 * round_.total_s) for round_ in rounds_of(0.7, 0.002)]
    usual, other = (best_candidate(scouted(rounds), V, REST) for rounds in (rounds_of(0.7, 0.002), slow))
    assert other.depth == usual.depth and other.predicted == pytest.approx(usual.predicted / 2)


def test_of_a_tree_only_the_measured_depth_is_known() -> None:
    scout = scouted(rounds_of(0.5, 0.002, nodes=32), trees=True)
    best = best_candidate(scout, V, REST)
    assert best.depth == 8 and best.predicted == scout.standing.speedup
    costs = RoundCosts(V, {best.drafter: best.cost}, REST)
    assert costs.round_s(best.drafter, 8) == pytest.approx(scout.standing.rounds[0].total_s)


# -- reasons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "trees", "words"),
    [
        (rounds_of(0.6, 0.02), False, ("too expensive", "target calls")),
        (rounds_of(0.05, 0.0002), False, ("rarely accepted", "5%")),
        (rounds_of(0.6, 0.0001, nodes=64), True, ("grow", "65 nodes cost 7.40 times one")),
        (rounds_of(0.1, 0.03, asks=0.1), False, ("rarely drafts", "10%")),
    ],
)
def test_why_a_drafter_loses(rounds: list[RaceRound], trees: bool, words: tuple[str, ...]) -> None:
    candidate = best_candidate(scouted(rounds, trees=trees), V, REST)
    assert candidate.predicted < 1
    for word in words:
        assert word in why_not(candidate, V, REST)


# -- what is tried ---------------------------------------------------------------------------------------------------


def test_lists_of_drafters() -> None:
    assert parse_names("model,k=8,ngram") == ["model,k=8", "ngram"]
    assert parse_names("model:./a=b, k=3 ,ngram,ngram") == ["model:./a=b,k=3", "ngram"]
    nested = "router,drafters=(model,k=4|ngram)"
    assert parse_names(f"suffix,{nested}") == ["suffix", nested]
    for text, words in (
        ("nosuch", "choose one of"),
        ("ngram,", "empty"),
        ("ngram,z=1", "valid ones"),
        ("none", "plain"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_names(text)


def test_a_drafter_in_a_file_is_measured_at_a_longer_length_as_well(tmp_path: Path) -> None:
    """The catalogue, in which its name was looked up, does not have it."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import foretoken as ft\n\n\nclass Mine(ft.Drafter):\n    name = 'mine'\n\n"
        "    def __init__(self, k: int = 3) -> None:\n        self.max_depth = k\n\n"
        "    def propose(self, context, budget):\n        return ft.TokenTree.root_only(context.root)\n"
    )
    assert generous(f"{file}:Mine", True) == f"{file}:Mine,k=8"
    assert generous(f"{file}:Mine,k=2", True) == f"{file}:Mine,k=2"


@pytest.mark.parametrize("name", [row.name for row in rows("drafter") if row.needs_training])
def test_a_length_that_the_trained_network_has(name: str) -> None:
    """Some drafters guess exactly one block: no other length is tried."""
    drafter = build_drafter(generous(find("drafter", name).example, False), load_model("builtin"))
    assert drafter is not None and drafter.max_depth >= 1


def test_lengths_and_sizes() -> None:
    assert generous("model,k=4", False) == "model,k=8" and generous("model,k=4", True) == "model,k=4"
    assert generous("model:./d", True) == "model:./d,k=8"
    assert generous("ngram", True) == "ngram,k=16" and generous("bpd", False) == "bpd"
    assert generous("mtp", False) == "mtp,nodes=8,depth=8" or generous("mtp", False) == "mtp,depth=8,nodes=8"
    assert sizes("eagle,nodes=16", False) == ["eagle,nodes=8", "eagle,nodes=32", "eagle,nodes=64"]
    assert sizes("eagle,nodes=16", True) == [] and sizes("ngram", False) == []
    assert with_option("cascade,k=8,inner=(ngram,n=3)", "k", 4) == "cascade,k=4,inner=(ngram,n=3)"
    assert router_spec("model,k=4", "ngram", (0.25, 0.0)) == "router,drafters=(model,k=4|ngram),costs=0.25|0"
    builtin = default_specs("builtin")
    assert builtin[:2] == ["model,k=4", "ngram"] and builtin.index("eagle") < builtin.index("retokenize,k=4")
    elsewhere = default_specs("./target")
    assert "eagle" not in elsewhere and "ngram" in elsewhere and not any("scripted" in spec for spec in elsewhere)


def test_likely_winners_come_first() -> None:
    offers = ("medusa:./head", "model:./draft")
    first = likely(Subject(HuggingFaceModel(llama()), "./target"), offers)
    assert first == ["ngram", "suffix,share=false", "quantized,bits=4", *offers]
    rest = further("./target", first)
    assert "recycling" in rest and not {"ngram", "suffix", "model,k=4"} & set(rest)
    assert likely(Subject(HuggingFaceModel(llama())))[3] == "model"


def test_the_tree_for_what_is_accepted() -> None:
    """The draft model always ranks the target's token second: a tree that never branches would be worth nothing."""
    target, draft = fixed_tables([0.1, 0.2, 0.4, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03], [0.5, 0.1, 0.3] + [0.1 / 6] * 6)
    shape = measured_shape(Workload(Subject(target), [[1, 2]], 20), ModelDrafter(draft))
    assert (
        shape["acceptance"] == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0] and min(shape["level_s"], shape["node_s"]) >= 0
    )
    with pytest.raises(ValueError, match="no siblings"):
        measured_shape(Workload(Subject(target), [[1, 2]], 20), NgramDrafter())
    spec = sequoia_spec("model,k=8", {**shape, "level_s": 0.1, "node_s": 0.0}, TargetCost({1: 1.0, 2: 1.0}))
    assert spec is not None and "tree=(sequoia,nodes=16,depth=8,acceptance=0 1 0 0 0 0 0 0)" in spec


def test_the_tree_for_what_nodes_cost() -> None:
    shape = {"acceptance": [0.5, 0.3, 0.1], "level_s": 0.1, "node_s": 0.0}
    assert sequoia_spec("model,k=8", shape, TargetCost({1: 1.0, 2: 3.0})) is None
    assert sequoia_spec("model,k=8", {**shape, "node_s": 2.0}, TargetCost({1: 1.0, 2: 1.0})) is None
    spec = sequoia_spec("model,k=8", shape, TargetCost({1: 1.0, 2: 1.0}))
    assert spec is not None and "tree=(sequoia,nodes=64," in spec and "acceptance=0.5 0.3 0.1)" in spec
    assert can_fill("model,k=8") and can_fill("early_exit")
    assert not any(map(can_fill, ("model,tree=2x2", "ngram", "medusa")))
