"""SuffixDecoding: golden drafts, and equality with a plain tree of all suffixes."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.drafters.sources import Automaton
from foretoken.methods.drafters.suffix import MatchLimits, SuffixDrafter, speculate
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.match import MatchVerifier
from toys import FALSE_ALARM, engine, joint_distribution, llamas, outputs, sampled_p_value, tables

GOLDEN = [1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3, 4, 7, 1, 2, 3]


def context(tokens: list[int], prompt_length: int | None = None) -> Context:
    length = len(tokens) if prompt_length is None else prompt_length
    return Context(0, tokens, length, Sampler(SamplingParams(), length), Rng(0))


# -- the plain twin: a tree of all suffixes ------------------------------------------------------------------------


class Node:
    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}


def suffix_tree(texts: list[list[int]], depth: int) -> Node:
    """Every text inserted token by token: all active nodes move to a child, as the paper says."""
    root = Node()
    for text in texts:
        active: list[Node] = []
        for token in text:
            active = [node.children.setdefault(token, Node()) for node in [root, *active]][:depth]
            for node in active:
                node.count += 1
    return root


def find(root: Node, tokens: list[int]) -> Node | None:
    node: Node | None = root
    for token in tokens:
        node = node.children.get(token) if node is not None else None
    return node


def plain_path(root: Node, tokens: list[int], limits: MatchLimits) -> float:
    """Best expected number of accepted tokens over all suffixes."""
    best = 0.0
    for m in range(1, min(len(tokens), limits.depth - 1) + 1):
        node = find(root, tokens[-m:])
        if node is None:
            break
        score, sure, drafted = 0.0, 1.0, 0
        while drafted < limits.allowed(m) and node.children:
            child = max(node.children.values(), key=lambda n: n.count)
            sure *= child.count / node.count
            if sure < limits.min_prob:
                break
            score, drafted, node = score + sure, drafted + 1, child
        best = max(best, score)
    return best


# -- golden vectors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "tokens", "scores", "expected"),
    [(1.0, [4, 5, 1], [0.5, 0.25, 0.25], 1.0), (2.0, [4, 5, 1, 2, 3], [0.5, 0.25, 0.25, 0.25, 0.25], 1.5)],
)
def test_golden_drafts(factor: float, tokens: list[int], scores: list[float], expected: float) -> None:
    guess = SuffixDrafter(depth=8, factor=factor).draft(context(list(GOLDEN)), Budget(max_depth=64))
    assert (guess.tokens, guess.scores, guess.expected, guess.match) == (tokens, scores, expected, 3)


def test_tree_mode_takes_the_most_probable_nodes() -> None:
    drafter = SuffixDrafter(k=8, depth=8, factor=2.0, tree=True)
    tree = drafter.propose(context(list(GOLDEN)), Budget(max_depth=8, max_nodes=64))
    paths = {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))}
    assert drafter.traits.draws_trees
    assert {(4,), (9,), (4, 5), (4, 7)} <= paths  # 1/2, 1/4, 1/4, 1/4
    assert len(tree) - 1 == 6  # factor 2 x match 3
    assert len(drafter.propose(context(list(GOLDEN)), Budget(max_depth=1)).tokens) == 3  # root, 4, 9


# -- equality with the twin ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_automaton_counts_as_the_tree_does(seed: int) -> None:
    rng = random.Random(seed)
    depth, vocabulary = (4, 7, 64)[seed % 3], 2 + seed % 3
    texts = [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
    texts.append([1] * 80)
    automaton, ends = Automaton(depth, counted=True), [0] * len(texts)
    for place in range(80):  # texts grow side by side
        for i, text in enumerate(texts):
            if place < len(text):
                ends[i] = automaton.append(ends[i], text[place])
    root = suffix_tree(texts, depth)
    stack: list[tuple[Node, int, int]] = [(root, 0, 0)]
    seen = 0
    while stack:
        node, state, level = stack.pop()
        if level:
            assert automaton.count[state] == node.count
            seen += 1
        if level < depth:
            assert dict(automaton.children(state)).keys() == node.children.keys()
            stack += [(child, automaton.go(state, token), level + 1) for token, child in node.children.items()]
    assert seen >= 30


@pytest.mark.parametrize("seed", range(4))
def test_the_best_suffix_is_that_of_the_plain_rule(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(3) for _ in range(300)]
    for limits in (
        MatchLimits(16),
        MatchLimits(5, depth=8, factor=0.5, offset=1.0),
        MatchLimits(32, factor=4.0, min_prob=0.01),
    ):
        automaton, end, proposed = Automaton(limits.depth, counted=True), 0, 0
        root = Node()
        active: list[Node] = []
        for place, token in enumerate(text):
            end = automaton.append(end, token)
            active = [node.children.setdefault(token, Node()) for node in [root, *active]][: limits.depth]
            for node in active:
                node.count += 1
            if place % 11 == 0:
                guess = speculate(automaton, text[: place + 1], limits)
                assert guess.expected == pytest.approx(plain_path(root, text[: place + 1], limits))
                proposed += len(guess.tokens)
        assert proposed > 20


# -- other requests ------------------------------------------------------------------------------------------------


def finished(drafter: SuffixDrafter, prompt: list[int], output: list[int]) -> None:
    request = context(list(prompt), len(prompt))
    drafter.start(request)
    request.tokens.extend(output)
    drafter.finish(request)
    assert not request.state


def draft(drafter: SuffixDrafter, tokens: list[int], **budget: Any) -> list[int]:
    return list(drafter.propose(context(tokens), Budget(**{"max_depth": 16, **budget})).tokens[1:])


def test_outputs_of_other_requests_are_known_and_their_prompts_are_not() -> None:
    drafter = SuffixDrafter()
    finished(drafter, [1, 2, 3], [4, 5, 6, 7])
    assert draft(drafter, [9, 4, 5]) == [6, 7]
    assert draft(drafter, [9, 1, 2]) == []
    alone = SuffixDrafter(share=False)
    finished(alone, [1], [4, 5, 6, 7])
    assert draft(alone, [9, 4, 5]) == [] and not alone.traits.shares_state


def test_a_running_request_helps_the_others() -> None:
    drafter = SuffixDrafter()
    running = context([1], 1)
    drafter.start(running)
    running.tokens.extend([4, 5, 6])
    drafter.source(running)
    assert draft(drafter, [9, 4, 5]) == [6]


def test_a_prompt_is_read_at_the_first_draft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others use only outputs, and a request may never be drafted for."""
    read: list[int] = []
    append = Automaton.append

    def watched(self: Automaton, last: int, token: int) -> int:
        read.append(token)
        return append(self, last, token)

    monkeypatch.setattr(Automaton, "append", watched)
    drafter = SuffixDrafter()
    finished(drafter, [1, 2, 3], [4, 5])
    assert read == [4, 5]
    request = context([1, 2, 3], 3)
    drafter.start(request)
    assert read == [4, 5]
    drafter.propose(request, Budget(4))
    request.tokens.append(6)
    drafter.propose(request, Budget(4))
    assert read == [4, 5, 1, 2, 3, 6, 6]  # the last one for the request and for the others


def test_the_own_text_wins_ties() -> None:
    drafter = SuffixDrafter()
    finished(drafter, [1], [4, 5, 6])
    assert draft(drafter, [4, 5, 7, 4, 5]) == [7, 4]


def test_old_outputs_are_dropped() -> None:
    drafter = SuffixDrafter(cached=4)
    for i in range(4):
        finished(drafter, [1], [100 + i, 200 + i, 300 + i])
    assert draft(drafter, [9, 100, 200]) == [300]
    finished(drafter, [1], [104, 204, 304])
    assert draft(drafter, [9, 100, 200]) == []
    assert draft(drafter, [9, 102, 202]) == [302]
    assert draft(drafter, [9, 104, 204]) == [304]
    small = SuffixDrafter(tokens=8)
    for i in range(6):
        finished(small, [1], [100 + i, 200 + i, 300 + i])
    assert sum(len(a.text) for a in small.tenants.of("").generations) <= 12
    assert draft(small, [9, 105, 205]) == [305] and draft(small, [9, 100, 200]) == []


def test_budget_and_confidence() -> None:
    drafter = SuffixDrafter(depth=8, factor=2.0)
    assert draft(drafter, list(GOLDEN), max_depth=2) == [4, 5]
    assert draft(drafter, list(GOLDEN), max_nodes=3) == [4, 5, 1]
    assert draft(drafter, list(GOLDEN), min_confidence=0.6) == [4]  # 4 was sure to 1/2 and ends the draft


NO_NUMBERS = [{name: value} for name in ("factor", "offset") for value in (math.nan, math.inf)]


@pytest.mark.parametrize(
    "options", [{"k": 0}, {"depth": 1}, {"factor": -1.0}, {"min_prob": 2.0}, {"cached": 0}, *NO_NUMBERS], ids=str
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="suffix needs"):
        SuffixDrafter(**options)


# -- exactness with outputs that are shared ------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True])
def test_exact_with_shared_outputs(tree: bool) -> None:
    target, _ = llamas()
    requests = [Request(p, max_new_tokens=30) for p in ([5, 6, 7], [3], [5, 6, 7], [5, 6, 7, 8], [3])]
    speculative = engine(target, SuffixDrafter(k=6, tree=tree, factor=3.0), max_batch=2)
    assert outputs(speculative, requests) == outputs(engine(target), requests)


def test_sampled_distribution_with_shared_outputs() -> None:
    target, _ = tables()
    modes = {"T=1": SamplingParams(temperature=1.0)}
    prompt = [0, 1, 2, 3, 0, 1]
    distributions = {mode: joint_distribution(target, params, prompt, 3) for mode, params in modes.items()}
    speculative = engine(target, SuffixDrafter(k=4, tree=True, factor=3.0), max_batch=4)
    assert sampled_p_value(speculative, modes, distributions, prompt, 3, 400) > FALSE_ALARM


@pytest.mark.parametrize("rule", [None, MatchVerifier()], ids=["auto", "match"])
def test_a_seed_fixes_the_output_whatever_was_shared(rule: Verifier | None) -> None:
    target, _ = tables()
    requests = [Request([0, 1, 2, 0, 1], SamplingParams(temperature=1.0), 12, seed=seed) for seed in range(6)]
    plain = outputs(engine(target, verifier=rule), requests)
    for size in (1, 4):
        speculative = engine(target, SuffixDrafter(k=3), rule, max_batch=size)
        assert outputs(speculative, requests) == plain
        assert outputs(speculative, requests[::-1]) == plain[::-1]  # by now it has learnt these texts
