"""Which tests ``make test`` leaves to ``make test-slow``.  This is the one place that decides.

``SLOW`` names tests by file and function, or whole files.  Its values say what stays in ``make test`` all the same: a
cell stays while it is the first with one of its keys (the first of each drafter, say), and without keys none stays.
``pytest.mark.slow`` on a test does the same as a row without keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

Key = Callable[[pytest.Item], Hashable]
ROOT = Path(__file__).parent


def parameter(*names: str) -> Key:
    """The values of some parameters."""
    return lambda item: tuple(str(parameters(item).get(name)) for name in names)


def parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def drafter(item: pytest.Item) -> Hashable:
    """The drafter of a cell of the exactness matrix, whose id is ``drafter.case`` or ``drafter.case.verifier``."""
    found = re.search(r"(\w+)\.", item.callspec.id if hasattr(item, "callspec") else "")
    return found[1] if found else item.name


def rule(item: pytest.Item) -> Hashable:
    """The verifier of a pair of the matrix and the sorts of proposals that it sees there."""
    pair = parameters(item)["pair"]
    return pair.verifier, pair.proposals


SLOW: dict[str, Sequence[Key]] = {
    "exactness/test_fake_device.py::test_every_drafter": [drafter],
    "exactness/test_fake_device.py::test_every_verifier": [parameter("verifier"), parameter("proposal")],
    "exactness/test_graph_steps.py::test_every_drafter": [drafter],
    "exactness/test_matrix.py::test_a_race_writes_what_plain_decoding_writes": [drafter, rule],
    "exactness/test_matrix.py::test_greedy_in_a_ragged_batch": [drafter],
    "exactness/test_matrix.py::test_greedy_in_other_precisions_and_alone": [drafter, parameter("dtype", "batch")],
    "exactness/test_matrix.py::test_greedy_under_every_verifier": [drafter, rule],
    "exactness/test_matrix.py::test_the_distribution_is_exactly_the_targets": [drafter, rule],
    "exactness/test_matrix.py::test_the_first_samples_are_the_same_alone": [drafter, rule],
    "exactness/test_mixed_load.py::test_every_request_of_a_random_mix_writes_what_it_writes_alone": [drafter],
    "exactness/test_planted_errors.py::test_every_cell_sees_draws_from_something_else_than_q": [rule],
    "exactness/test_planted_errors.py::test_every_cell_sees_scores_of_the_wrong_node": [rule],
    "exactness/test_planted_errors.py::test_planted_errors_are_seen_by_the_sampled_cell": [],
    "exactness/test_seeds.py::test_every_controller_leaves_the_text_of_the_seed": [
        parameter("controller"),
        parameter("drafter"),
    ],
    "exactness/test_seeds.py::test_every_drafter_writes_the_text_of_the_seed": [drafter, parameter("batch")],
    "exactness/test_state.py::test_caches_equal_a_fresh_prefill_after_every_round": [drafter],
    "exactness/test_state.py::test_joining_and_leaving_requests_change_nothing": [drafter],
    "exactness/test_state.py::test_proposals_keep_to_the_budget": [drafter],
    "exactness/test_state.py::test_the_context_may_be_filled_to_the_last_token": [drafter, parameter("temperature")],
    "exactness/test_tenants.py::test_drafts_after_a_kept_text_are_those_after_a_text_that_was_read": [drafter],
    "exactness/test_tenants.py::test_nothing_of_one_tenant_is_drafted_for_another": [drafter],
    "exactness/test_trained_target.py::test_greedy_under_every_verifier": [rule],
    "exactness/test_trained_target.py::test_the_distribution_is_exactly_the_targets": [rule],
}


def name_of(item: pytest.Item) -> tuple[str, str]:
    """The file, relative to this folder, and ``file::function``."""
    file = str(item.path.relative_to(ROOT)) if item.path.is_relative_to(ROOT) else str(item.path)
    return file, f"{file}::{item.originalname if isinstance(item, pytest.Function) else item.name}"


def slow(items: Iterable[pytest.Item], table: dict[str, Sequence[Key]] = SLOW) -> Iterable[pytest.Item]:
    """Those of the collected tests that ``make test`` leaves out."""
    seen: set[Hashable] = set()
    for item in items:
        file, function = name_of(item)
        row = function if function in table else file
        if row not in table:
            continue
        keys = [(function, index, key(item)) for index, key in enumerate(table[row])]
        if seen.issuperset(keys):
            yield item
        seen.update(keys)
