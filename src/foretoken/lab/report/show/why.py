"""Outcome of every node of a round, with a reason in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foretoken.lab.report.show.texts import quoted

if TYPE_CHECKING:
    from foretoken.engine.trace import RoundTrace

Status = Literal["root", "accepted", "rejected", "untried", "probe"]
Test = dict[str, float]
"""A verifier's test: a uniform ``u`` that must be below ``chance``."""

CHOOSING = frozenset({"greedy", "coupled", "match"})
"""Verifiers that draw the target's own token and look for an equal child."""
TRYING = frozenset({"rejection", "multi_round", "without_replacement", "kseq", "point"})
"""Verifiers that try the children of a node one after another."""


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
    met, status = deciding_tests(trace), statuses(trace)
    nodes = []
    for i, token in enumerate(trace.tokens):
        reason = _reason(trace, i, status, met, text)
        nodes.append(TraceNode(i, trace.parents[i], token, text(token), status[i], reason, trace.p[i], trace.q[i]))
    return nodes


def statuses(trace: RoundTrace) -> list[Status]:
    """Outcome of every node.  Untried: it was not its turn, or the token before it was not accepted."""
    accepted, met = set(trace.accepted), deciding_tests(trace)
    chosen = {trace.parents[node]: node for node in trace.accepted}
    whole_paths = trace.verifier not in CHOOSING | TRYING
    every_test_is_known = trace.verifier in TRYING - {"point"}  # there equal draft tokens share a test
    outcomes: list[Status] = ["root"]
    for i in range(1, len(trace.tokens)):
        above = trace.parents[i]
        in_turn = above not in chosen or trace.verifier in CHOOSING or i < chosen[above]
        reached = outcomes[above] in ("root", "accepted") or (whole_paths and outcomes[above] == "rejected")
        if i in accepted:
            outcomes.append("accepted")
        elif i in trace.probes:
            outcomes.append("probe")
        elif i in met:  # one that passed but is not on the path has an equal sibling that is
            outcomes.append("untried" if passed(met[i]) else "rejected")
        else:  # no own test: an equal node's child was accepted first, or its turn never came
            outcomes.append("rejected" if in_turn and reached and not every_test_is_known else "untried")
    return outcomes


def deciding_tests(trace: RoundTrace) -> dict[int, Test]:
    """Tests by node, for verifiers that try children in order."""
    if trace.verifier not in TRYING:
        return {}
    tests: dict[int, Test] = {}
    tests_left, alive = list(trace.tests), [0]
    while tests_left:
        children = [c for node in alive for c in range(1, len(trace.tokens)) if trace.parents[c] == node]
        children = [c for c in children if c not in trace.probes]
        chosen = None
        tried: set[int] = set()
        for child in children:
            if trace.verifier == "point" and trace.tokens[child] in tried:
                continue  # equal draft tokens are tried once there
            tried.add(trace.tokens[child])
            if not tests_left or chosen is not None:
                break
            tests[child] = tests_left.pop(0)
            if passed(tests[child]):
                chosen = trace.tokens[child]
        if chosen is None:  # all failed; the draw from the residual may be one of them again (kseq)
            chosen = next((trace.tokens[child] for child in children if child in trace.accepted), None)
        if chosen is None:
            break
        alive = [child for child in children if trace.tokens[child] == chosen]
    return tests


def _reason(
    trace: RoundTrace, i: int, status: Sequence[Status], met: dict[int, Test], text: Callable[[int], str]
) -> str:
    above = trace.parents[i]
    if i == 0:
        return "the last token of the text: the target reads it now"
    if status[i] == "probe":
        return "probe: scored for the drafter, never a candidate"
    if status[i] == "untried" and i in met:
        return "not needed: an equal draft leads further"
    if status[i] == "untried":
        if status[above] in ("root", "accepted"):
            sibling = next(node for node in trace.accepted if trace.parents[node] == above)
            return f"not tried: its sibling {quoted(text(trace.tokens[sibling]))} was accepted"
        return f"not reached: {quoted(text(trace.tokens[above]))} was not accepted"
    if i in met and status[i] == "accepted" and not passed(met[i]):
        return "accepted: its test failed, but the draw from what was left gave it again"
    if i in met:
        return _tested(trace, met[i])
    if trace.verifier in CHOOSING:
        return _chosen(trace, i, status[i], text)
    return _together(trace, status[i])


def passed(test: Test) -> bool:
    """Whether a test accepted its token."""
    return test["u"] < test["chance"]


def _tested(trace: RoundTrace, test: Test) -> str:
    name = {"rejection": "p/q", "point": "its share of what is left"}.get(trace.verifier, "its chance")
    if test["chance"] >= 1.0:
        return f"accepted: {name} is at least 1"
    sign, word = ("<", "accepted") if passed(test) else ("≥", "rejected")
    return f"{word}: u = {test['u']:.2g} {sign} {name} = {test['chance']:.2g}"


def _chosen(trace: RoundTrace, i: int, status: Status, text: Callable[[int], str]) -> str:
    subject = "the target's most likely token" if trace.verifier == "greedy" else "the token that the target took"
    if status == "accepted":
        return f"accepted: it is {subject}"
    following = [node for node in trace.accepted if trace.parents[node] == trace.parents[i]]
    token = trace.tokens[following[0]] if following else trace.next_token
    return f"rejected: {subject} is {quoted(text(token))}"


def _together(trace: RoundTrace, status: Status) -> str:
    """Reason for verifiers that decide over whole paths."""
    failed = sum(not passed(test) for test in trace.tests)
    if status == "accepted":
        return "accepted: on the path that the rule has kept"
    return f"rejected: no path through it was kept ({failed} test{'s' * (failed != 1)} failed)"
