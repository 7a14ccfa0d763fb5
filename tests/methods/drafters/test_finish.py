"""A part of a drafter that fails at the end of a request keeps nothing of the others in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.ahead import AheadDrafter
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.online import OnlineDrafter
from foretoken.methods.drafters.reading import FeatureReader, ReadingDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models.huggingface import HuggingFaceModel
from toys import engine, llamas, serve

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class FailingNgram(NgramDrafter):
    """Raises at the end of every request."""

    def finish(self, context: Context) -> None:
        super().finish(context)
        raise RuntimeError("planted")


def failing() -> FailingNgram:
    return FailingNgram(n=2, k=3)


GROUPS: dict[str, Callable[[HuggingFaceModel], Drafter]] = {
    "ensemble": lambda draft: EnsembleDrafter([failing(), ModelDrafter(draft, k=2)]),
    "router": lambda draft: RouterDrafter([failing(), ModelDrafter(draft, k=2)]),
    "nested": lambda draft: CascadeDrafter(
        llamas()[1], failing(), inner_rule, k=4, early=2, late=ModelDrafter(draft, k=2)
    ),
    "cascade": lambda draft: CascadeDrafter(draft, failing(), inner_rule, k=4),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_other_members_release_their_sequences(name: str, caplog: pytest.LogCaptureFixture) -> None:
    target, draft = llamas()
    released = []
    release = draft.release
    draft.release = lambda sequence: (released.append(sequence), release(sequence))[1]  # type: ignore[method-assign]
    (run,) = serve(engine(target, GROUPS[name](draft)), [Request(PROMPT, max_new_tokens=8)])
    assert len(run.output) == 8 and "planted" in caplog.text
    assert released and draft.kv_bytes == 0


def fail(*args: Any) -> None:
    raise RuntimeError("planted")


def started(drafter: Drafter) -> Context:
    context = Context(0, list(PROMPT), len(PROMPT), Sampler(SamplingParams()), Rng(0))
    drafter.start(context)
    return context


def test_the_learner_forgets_a_request_whose_sequence_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = OnlineDrafter(llamas()[1], k=2, thread=False)
    context = started(drafter)
    drafter.propose(context, Budget())
    learner: Any = drafter.learner
    monkeypatch.setattr(learner.served, "release", fail)
    with pytest.raises(RuntimeError, match="planted"):
        drafter.finish(context)
    assert learner._active == 0 and learner.report()["requests"] == 1


def test_the_learner_forgets_a_request_whose_lesson_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = OnlineDrafter(llamas()[1], k=2, thread=False)
    context = started(drafter)
    learner: Any = drafter.learner
    monkeypatch.setattr(learner, "finished", fail)
    with pytest.raises(RuntimeError, match="planted"):
        drafter.finish(context)
    assert learner._active == 0


def test_the_twins_sequence_beside_the_drafters_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = AheadDrafter(llamas()[1], k=2, thread=False)
    context = started(drafter)
    drafter.propose(context, Budget())
    context.state[drafter, "sequence"] = drafter.twin.open()
    monkeypatch.setattr(drafter.twin, "release", fail)
    with pytest.raises(RuntimeError, match="planted"):
        drafter.finish(context)
    assert not context.state


class Reading(ReadingDrafter, NgramDrafter):
    """A drafter with a reader, whose own end fails."""

    def finish(self, context: Context) -> None:
        ReadingDrafter.finish(self, context)


def test_the_reader_beside_its_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter: Any = Reading(n=2, k=3)
    finished: list[Context] = []
    drafter.reader = FeatureReader.__new__(FeatureReader)
    monkeypatch.setattr(drafter.reader, "finish", finished.append)
    monkeypatch.setattr(drafter.reader, "start", lambda context: None)
    monkeypatch.setattr(NgramDrafter, "finish", fail)
    context = started(drafter)
    with pytest.raises(RuntimeError, match="planted"):
        drafter.finish(context)
    assert finished == [context]
