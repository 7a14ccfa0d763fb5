"""With forwards of fixed shapes, frozen as CUDA graphs are, every drafter gives the tokens that it gives without."""

from __future__ import annotations

from functools import cache

import pytest
from cases import CASES, Case
from matrix import rows

from fake_graphs import Recordings
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.models.forward.graphed import follow, with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llama, outputs

REQUESTS = [
    Request([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], SamplingParams(), 7),
    Request([3], SamplingParams(temperature=1.0), 4, seed=1),
    Request([9, 1, 2, 3, 4, 9, 1, 2], SamplingParams(temperature=0.8, top_p=0.9), 4, seed=2),
]


def cases() -> list[tuple[str, Case]]:
    """All but the trained ones, which differ in their weights alone."""
    chosen = [(name, case) for name, case in rows() if not case.label.startswith("trained")]
    assert {name for name, _ in chosen} == CASES.keys()
    return chosen


@cache
def graphed(draft_too: bool) -> tuple[HuggingFaceModel, HuggingFaceModel]:
    """Target and draft model with fixed steps.  All cases share them: what one has captured serves the next."""
    target, draft = (HuggingFaceModel(llama(noise=noise)) for noise in (0.0, 0.3))
    with_graphs(target, True, Recordings())
    if draft_too:
        follow(draft, target)
    return target, draft


@pytest.mark.parametrize(("name", "case"), cases(), ids=[f"{name}.{case.label}" for name, case in cases()])
def test_every_drafter(name: str, case: Case) -> None:
    target, draft = HuggingFaceModel(llama()), HuggingFaceModel(llama(noise=0.3))
    expected = outputs(engine(target, case.build(target, draft), max_batch=2), REQUESTS)
    target, draft = graphed(name != "online")  # its draft model is trained while it drafts, and has none
    recordings = target.graphs.recorder.recordings
    before = sum(recording.replays for recording in recordings)
    assert outputs(engine(target, case.build(target, draft), max_batch=2), REQUESTS) == expected
    assert target.graphs_off == "" and not target._sequences
    # What a part of the layers has drafted the others go on with, which is no step of its own.
    assert sum(recording.replays for recording in recordings) > before or name in ("early_exit", "kangaroo")
