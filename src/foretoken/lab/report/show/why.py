"""Outcome of every node of a round, with a reason in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foretoken.lab.report.show.texts import quoted

if TYPE_CHECKING:
    from foretoken.engine.trace import AcceptanceTest, RoundTrace

Status = Literal["root", "accepted", "rejected", "untried", "probe"]
ON_THE_PATH = "accepted: on the path that the rule has kept"


@dataclass(frozen=True)
class TraceNode:
    """One node of a round.

    ``parent`` is the index of its parent (-1 for the root); p and q are the target's and the draft's probability, if
    known.
    """

    index: int
    parent: int
    token: int
    text: str
    status: Status
    why: str
    p: float | None
    q: float | None


def nodes_of(trace: RoundTrace, text: Callable[[int], str]) -> list[TraceNode]:
    """The nodes of a round with their outcomes."""
    tests, status = own_tests(trace), statuses(trace)
    nodes = []
    for i, token in enumerate(trace.tokens):
        reason = _reason(trace, i, status, tests, text)
        nodes.append(TraceNode(i, trace.parents[i], token, text(token), status[i], reason, trace.p[i], trace.q[i]))
    return nodes


def own_tests(trace: RoundTrace) -> dict[int, AcceptanceTest]:
    """The tests of single draft tokens, by node; none for a rule over whole paths."""
    tests = trace.tests if trace.decides_by == "tests" else ()
    return {test["node"]: test for test in tests if test["node"] is not None}


def statuses(trace: RoundTrace) -> list[Status]:
    """Outcome of every node.  Untried: it was not its turn, or the token before it was not accepted."""
    accepted, tests = set(trace.accepted), own_tests(trace)
    chosen = {trace.parents[node]: node for node in trace.accepted}
    outcomes: list[Status] = ["root"]
    for i in range(1, len(trace.tokens)):
        above = trace.parents[i]
        in_turn = above not in chosen or trace.decides_by == "choices" or i < chosen[above]
        through = ("root", "accepted", "rejected") if trace.decides_by == "paths" else ("root", "accepted")
        if i in accepted:
            outcomes.append("accepted")
        elif i in trace.probes:
            outcomes.append("probe")
        elif i in tests:  # one that passed but is not on the path has an equal sibling that is
            outcomes.append("untried" if passed(tests[i]) else "rejected")
        else:  # where single tokens are tested, this one was not
            outcomes.append("rejected" if not tests and in_turn and outcomes[above] in through else "untried")
    return outcomes


def _reason(
    trace: RoundTrace, i: int, status: Sequence[Status], tests: Mapping[int, AcceptanceTest], text: Callable[[int], str]
) -> str:
    if i == 0:
        return "the last token of the text: the target reads it now"
    if status[i] == "probe":
        return "probe: scored for the drafter, never a candidate"
    if status[i] == "untried":
        return _untried(trace, i, status, tests, text)
    if i in tests and status[i] == "accepted" and not passed(tests[i]):
        return "accepted: its test failed, but the draw from what was left gave it again"
    if i in tests:
        return _tested(trace, tests[i])
    if trace.decides_by == "paths":
        return _together(trace, status[i])
    return _chosen(trace, i, status[i], text)


def _untried(
    trace: RoundTrace, i: int, status: Sequence[Status], tests: Mapping[int, AcceptanceTest], text: Callable[[int], str]
) -> str:
    above = trace.parents[i]
    if i in tests:
        return "not needed: an equal draft leads further"
    if status[above] not in ("root", "accepted"):
        return f"not reached: {quoted(text(trace.tokens[above]))} was not accepted"
    sibling = next((node for node in trace.accepted if trace.parents[node] == above), None)
    if sibling is None:
        return "not tried: an equal draft was"
    return f"not tried: its sibling {quoted(text(trace.tokens[sibling]))} was accepted"


def passed(test: AcceptanceTest) -> bool:
    """Whether a test accepted its token."""
    return test["u"] < test["chance"]


def _tested(trace: RoundTrace, test: AcceptanceTest) -> str:
    name = {"rejection": "p/q", "point": "its share of what is left"}.get(trace.verifier, "its chance")
    if test["chance"] >= 1.0:
        return f"accepted: {name} is at least 1"
    sign, word = ("<", "accepted") if passed(test) else ("≥", "rejected")
    return f"{word}: u = {test['u']:.2g} {sign} {name} = {test['chance']:.2g}"


def _chosen(trace: RoundTrace, i: int, status: Status, text: Callable[[int], str]) -> str:
    subject = "the target's most likely token" if trace.verifier == "greedy" else "the token that the target took"
    if status == "accepted":
        return f"accepted: it is {subject}" if trace.decides_by == "choices" else ON_THE_PATH
    following = [node for node in trace.accepted if trace.parents[node] == trace.parents[i]]
    token = trace.tokens[following[0]] if following else trace.next_token
    return f"rejected: {subject} is {quoted(text(token))}"


def _together(trace: RoundTrace, status: Status) -> str:
    """Reason for verifiers that decide over whole paths."""
    failed = sum(not passed(test) for test in trace.tests)
    if status == "accepted":
        return ON_THE_PATH
    return f"rejected: no path through it was kept ({failed} test{'s' * (failed != 1)} failed)"
