"""Jacobi decoding: the iteration against its definition, exactness, and what goes wrong at the edges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from foretoken import registry
from foretoken.core import Budget, Context, TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.jacobi import JacobiDrafter
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.point import PointVerifier
from foretoken.models.other.table import TableModel
from toys import FALSE_ALARM, MarkovTable, engine, joint_distribution, llamas, outputs, sampled_p_value, serve, tables

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3], [0, 0, 31, 0]]


class Recording(JacobiDrafter):
    """Keeps what it proposed."""

    def __init__(self, m: int = 8, init: str = "repeat") -> None:
        super().__init__(m, init)
        self.drafted: list[tuple[int, ...]] = []

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        tree = super().propose(context, budget)
        self.drafted.append(tuple(tree.tokens[1:]))
        return tree


class OnAndOff(Controller):
    """A draft of changing depth, now and then none."""

    name = "on_and_off"

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget((3, 0, 6, 1)[len(context.tokens) % 4], 4)


class Cutting(ConstantController):
    """Keeps the first two draft tokens of every draft."""

    def kept(
        self, contexts: Sequence[Context], trees: Sequence[TokenTree], beside: Sequence[TokenTree]
    ) -> list[Sequence[int]]:
        return [range(min(3, len(tree))) for tree in trees]


def counting() -> TableModel:
    """Goes on with the number after next: 1 2 -> 3 -> 4 -> 5."""
    return TableModel(lambda prefix: torch.eye(40, dtype=torch.float64)[(prefix[-2] + 2) % 40], 40)


def best(target: TableModel, prefix: list[int]) -> int:
    return int(target.distribution(prefix).argmax())


@cache
def plain_greedy() -> list[list[int]]:
    return outputs(engine(llamas()[0]), [Request(p, max_new_tokens=60) for p in PROMPTS])


def test_the_worked_example_of_the_docs() -> None:
    drafter = Recording(m=4)
    run = serve(engine(counting(), drafter), [Request([1, 2], max_new_tokens=10)])[0]
    assert run.output == list(range(3, 13))
    assert drafter.drafted[:4] == [(2, 2, 2, 2), (4, 4, 4, 4), (6, 6, 6, 6), (8, 8, 8, 8)]
    assert run.stats.num_drafts == 6  # 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12


@pytest.mark.parametrize("init", ["repeat", "prompt"])
def test_the_iteration_is_the_one_of_the_paper(init: str) -> None:
    """Every guess is the target's answer to the guesses before it in the round before."""
    target = MarkovTable(TableModel.random(12, seed=6, sharpness=3.0).distribution, 12)
    m, prompt = 5, [1, 4, 2]
    text, window, fresh, expected = list(prompt), [], 0, []
    while len(text) < 3 + 60:
        while len(window) < m:
            window.append((window or text)[-1] if init == "repeat" else prompt[fresh % 3])
            fresh += init == "prompt"
        window = window[:m]
        expected.append(tuple(window))
        answers = [best(target, text + window[:i]) for i in range(m + 1)]
        right = next((i for i in range(m) if window[i] != answers[i]), m)
        text += answers[: right + 1]
        window = answers[right + 1 :]
    drafter = Recording(m, init)
    run = serve(engine(target, drafter), [Request(prompt, max_new_tokens=60)])[0]
    assert run.output == text[3:63]
    whole = sum(len(p) == m for p in drafter.drafted)  # near the end they are cut to the room that is left
    assert drafter.drafted[:whole] == expected[:whole]
    assert run.stats.num_accepted_tokens > 5


def test_a_right_window_is_taken_whole() -> None:
    """A target that always says 3 has its fixed point after one round: m accepted tokens and the bonus token."""
    target = TableModel(lambda prefix: [0, 0, 0, 1], 4)
    run = serve(engine(target, JacobiDrafter(m=6)), [Request([1], max_new_tokens=1 + 7 + 7)])[0]
    assert run.stats.num_drafts == 3
    assert run.stats.num_accepted_tokens == 12


@pytest.mark.parametrize("init", ["repeat", "prompt"])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_greedy_output_is_that_of_plain_decoding(m: int, init: str) -> None:
    for size in (1, 3):
        speculative = engine(llamas()[0], JacobiDrafter(m, init), max_batch=size)
        runs = serve(speculative, [Request(p, max_new_tokens=60) for p in PROMPTS])
        assert [run.output for run in runs] == plain_greedy()
        assert sum(run.stats.num_accepted_tokens for run in runs) > 10


def test_budgets_that_change_and_rounds_without_a_draft() -> None:
    requests = [Request(p, max_new_tokens=60) for p in PROMPTS]
    assert outputs(engine(llamas()[0], JacobiDrafter(5), controller=OnAndOff()), requests) == plain_greedy()


@pytest.mark.parametrize("in_group", [False, True])
def test_a_chain_that_was_cut_is_learned_from(in_group: bool) -> None:
    """The two positions that were scored get predictions; the guesses behind them stay as they were."""
    drafter = Recording(m=4)
    group = EnsembleDrafter([drafter]) if in_group else drafter
    run = serve(engine(counting(), group, controller=Cutting(4)), [Request([1, 2], max_new_tokens=10)])[0]
    assert run.output == list(range(3, 13))
    assert drafter.drafted[:4] == [(2, 2, 2, 2), (4, 4, 2, 2), (6, 2, 2, 2), (8, 2, 2, 2)]


@pytest.mark.parametrize(("k", "nodes", "expected"), [(3, 64, 3), (64, 2, 2), (64, 64, 5)])
def test_no_more_than_the_budget(k: int, nodes: int, expected: int) -> None:
    drafter = Recording(m=5)
    serve(engine(counting(), drafter, controller=ConstantController(k, nodes)), [Request([1, 2], max_new_tokens=20)])
    assert {len(p) for p in drafter.drafted[:5]} == {expected}


def test_the_default_budget_holds_the_window() -> None:
    assert (JacobiDrafter(m=70).max_depth, JacobiDrafter(m=70).max_nodes) == (70, 70)


@pytest.mark.parametrize("rule", [None, PointVerifier()], ids=["auto", "point"])
@pytest.mark.parametrize("init", ["repeat", "prompt"])
def test_sampled_distribution(init: str, rule: Verifier | None) -> None:
    target, _ = tables()
    modes = {
        "T=1": SamplingParams(temperature=1.0),
        "filters": SamplingParams(temperature=0.7, top_k=3, repetition_penalty=1.3),
    }
    prompt = [0, 1, 2, 3, 0]
    distributions = {mode: joint_distribution(target, params, prompt, 4) for mode, params in modes.items()}
    speculative = engine(target, JacobiDrafter(m=3, init=init), rule, max_batch=8)
    assert sampled_p_value(speculative, modes, distributions, prompt, 4, 400) > FALSE_ALARM


def test_the_end_of_the_context() -> None:
    target = MarkovTable(TableModel.random(8, seed=1, sharpness=2.0).distribution, 8, context_length=20)
    request = Request([1, 2, 3], max_new_tokens=17)
    assert outputs(engine(target, JacobiDrafter(m=30)), [request]) == outputs(engine(target), [request])


def test_no_state_is_left_behind() -> None:
    drafter = JacobiDrafter(3)
    run = serve(engine(counting(), drafter), [Request([1, 2], max_new_tokens=5)])[0]
    assert drafter not in run.context.state


@pytest.mark.parametrize(
    ("options", "word"), [({"m": 0}, "m >= 1"), ({"m": -2}, "m >= 1"), ({"init": "random"}, "'repeat' or 'prompt'")]
)
def test_bad_options(options: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        JacobiDrafter(**options)  # type: ignore[arg-type]


def test_the_registry_row() -> None:
    row = registry.find("drafter", "jacobi")
    spec = registry.parse_spec(row.example)
    drafter = row.load()(**registry.convert_options("drafter", "jacobi", row.load(), spec.options))
    assert drafter.max_depth == 8
    assert not drafter.traits.draws_trees
