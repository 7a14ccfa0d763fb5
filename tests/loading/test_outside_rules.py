"""Verifiers and controllers from outside: what one does wrong is said by class, rule and line before it harms a text,
and no other request is harmed."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

import foretoken as ft
from foretoken.cli.main import main
from foretoken.core import Budget, Context, Kind, Scores, StepRecord, TokenTree, Verdict
from foretoken.core.outside import OutsideError
from foretoken.core.sampling import SamplingParams
from foretoken.engine.background import AsyncLlm
from foretoken.engine.request import Request, Running
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.goodput import GoodputController
from foretoken.methods.controllers.outside import ControllerError
from foretoken.methods.drafters.base import Drafter, Traits
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.verifiers.base import Coins, Verifier, rest_of
from foretoken.methods.verifiers.block import BlockVerifier
from foretoken.methods.verifiers.outside import VerifierError
from toys import engine, tables

BAD = 3
"""The first token of the prompt for which a rule is bad."""
LINE = r"\(test_outside_rules\.py, line \d+\)"


def served(requests: Sequence[Request], drafter: Drafter | None = None, **parts: Any) -> list[Running]:
    """Requests that run together, in their order, however they ended."""
    target, draft = tables()
    running = engine(target, drafter or ModelDrafter(draft, k=3), **parts)
    ids = [running.add(request) for request in requests]
    done: dict[int, Running] = {}
    while running.busy:
        done |= {run.id: run for run, emission in running.step() if emission.finish_reason is not None}
    return [done[i] for i in ids]


def sampled_requests(new_tokens: int = 16) -> list[Request]:
    """Four sampled requests, of which the last is the one with bad luck."""
    return [Request([first, 1, 2], SamplingParams(temperature=1.0), new_tokens, seed=first) for first in range(4)]


def check_alone(runs: Sequence[Running], kind: type[Exception], words: str, **parts: Any) -> None:
    """The last of :func:`sampled_requests` ended with these words, the others wrote what they write alone."""
    for request, run in zip(sampled_requests(), runs, strict=True):
        if request.prompt[0] == BAD:
            assert run.finish_reason == "error" and isinstance(run.error, kind)
            (message,) = str(run.error).splitlines()
            assert re.search(words, message), message
        else:
            assert run.finish_reason == "length"
            assert run.output == served([request], **parts)[0].output


# -- verifiers -------------------------------------------------------------------------------------------------------


class Rule(Verifier):
    """Speculative sampling, but for one request."""

    name = "mine"
    kinds: ClassVar[frozenset[Kind]] = frozenset({Kind.IID, Kind.POINT})
    chains_only = True

    def __init__(self, verdict: Any = None, after: int = 6) -> None:
        self.verdict, self.after = verdict, after

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        if scores.prefix[0] == BAD and len(scores.prefix) > self.after and len(tree) > 2:
            verdict: Verdict = self.verdict() if callable(self.verdict) else self.verdict
            return verdict
        for node in range(1, len(tree)):
            p, q, token = scores.p(node - 1), tree.distribution(node), tree.tokens[node]
            if not coins.accept(float(p[token]), 1.0 if q is None else float(q[token])):
                return Verdict(tuple(range(1, node)), coins.draw(rest_of(p, q, token)), False)
        return Verdict(tuple(range(1, len(tree))), coins.draw(scores.p(len(tree) - 1)), True)


def raises() -> Verdict:
    raise KeyError("lost")


WRONG = {
    "none": (None, "returned NoneType, not a Verdict"),
    "tuple": (([1], 1), "returned tuple, not a Verdict"),
    "below the vocabulary": (Verdict((), -1, False), "gave the next token -1: ids go from 0 to 3"),
    "beyond the vocabulary": (Verdict((), 4, False), "gave the next token 4: ids go from 0 to 3"),
    "float token": (Verdict((), 1.0, False), "gave a next token of type float: it must be an int"),  # type: ignore[arg-type]
    "tensor token": (Verdict((), torch.tensor(1), False), "gave a next token of type Tensor: it must be an int"),  # type: ignore[arg-type]
    "truth": (Verdict((), True, False), "gave a next token of type bool: it must be an int"),
    "no such node": (
        Verdict((1, 9), 1, False),
        "gave a path with node 9: draft nodes go from 1 to 3, and the root is not listed",
    ),
    "negative node": (Verdict((-1,), 1, False), "gave a path with node -1: draft nodes go from 1 to 3"),
    "the root": (Verdict((0, 1), 1, False), "gave a path with node 0: draft nodes go from 1 to 3, and the root is not"),
    "no path": (Verdict((2,), 1, False), r"gave the path \(2,\): node 2 is not a child of node 0"),
    "backwards": (Verdict((1, 2, 1), 1, False), r"gave the path \(1, 2, 1\): node 1 is not a child of node 2"),
    "float node": (Verdict((1.0,), 1, False), "gave a path with a node of type float: it must be an int"),  # type: ignore[arg-type]
    "no sequence": (Verdict(torch.tensor([1]), 1, False), "gave a path of type Tensor"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_verdict_ends_its_request_and_no_other(name: str) -> None:
    verdict, words = WRONG[name]
    runs = served(sampled_requests(), verifier=Rule(verdict))
    check_alone(runs, VerifierError, rf"Rule\.decide {LINE} {words}", verifier=Rule())


def test_whatever_a_verifier_raises_is_said_by_class_and_line() -> None:
    """The others' coins are tossed once: their texts are those that they have alone."""
    runs = served(sampled_requests(), verifier=Rule(raises))
    check_alone(runs, VerifierError, rf"Rule\.decide {LINE} raised KeyError: 'lost'", verifier=Rule())


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (torch.tensor([0.5, torch.nan, 0.5, 0.0]), "that are below 0, not finite, or all 0"),
        (torch.tensor([torch.inf, 0.0, 0.0, 0.0]), "that are below 0, not finite, or all 0"),
        (torch.tensor([0.5, -0.1, 0.5, 0.0]), "that are below 0, not finite, or all 0"),
        (torch.zeros(4), "that are below 0, not finite, or all 0"),
        (torch.ones(9), r"of shape \[9\]: it must be \[4\], the vocabulary"),
        (torch.ones(1, 4), r"of shape \[1, 4\]: it must be \[4\], the vocabulary"),
        ([0.25] * 4, r"of shape list: it must be \[4\], the vocabulary"),
    ],
)
def test_weights_that_are_no_distribution_are_not_drawn_from(weights: Any, words: str) -> None:
    class Slips(Rule):
        def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
            if scores.prefix[0] == BAD and len(scores.prefix) > 6:
                return Verdict((), coins.draw(weights), False)
            return super().decide(tree, scores, coins)

    runs = served(sampled_requests(), verifier=Slips())
    check_alone(
        runs,
        VerifierError,
        rf"Slips\.decide {LINE} raised ValueError: coins\.draw got weights {words}",
        verifier=Rule(),
    )


def test_a_wrong_verdict_where_nothing_was_drafted() -> None:
    class Alone(Rule):
        def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
            return Verdict((1,), 1, False) if len(tree) == 1 else super().decide(tree, scores, coins)

    (run,) = served([Request([1, 2], max_new_tokens=1)], verifier=Alone())
    assert re.search(r"Alone\.decide .* gave a path with node 1: nothing was drafted", str(run.error))


def test_probes_are_no_part_of_a_path() -> None:
    class Probing(Drafter):
        name = "probing"
        traits = Traits(draws_trees=True)

        def propose(self, context: Context, budget: Budget) -> TokenTree:
            return TokenTree((context.root, 1, 2), (-1, 0, 0), probes=(False, False, True))

    class Walks(Verifier):
        name = "walks"

        def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
            return Verdict((2,) if len(tree) > 2 else (), 1, False)

    (run,) = served([Request([1, 2], max_new_tokens=8)], Probing(), verifier=Walks())
    assert re.search(rf"Walks\.decide {LINE} gave a path with node 2, which is a probe", str(run.error))


def test_a_token_that_was_drawn_is_known_at_once() -> None:
    """Where nothing is drafted, our own rules leave the token open: it is drawn later, together with others."""
    seen = []

    class Looks(Rule):
        def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
            seen.append(coins.draw(scores.p(0)))
            return Verdict((), seen[-1], False)

    served(sampled_requests(4), verifier=Looks())
    assert seen and all(0 <= token < 4 for token in seen)


def test_rules_of_ours_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.engine import acceptance

    monkeypatch.setattr(acceptance, "check_verdict", None)
    assert all(run.finish_reason == "length" for run in served(sampled_requests()))


@pytest.mark.parametrize(
    ("verifier", "words"),
    [
        (Rule, rf"Rule {LINE} is a class: give an object, Rule\(\.\.\.\)"),
        (3, "an int is not a verifier: give a name, or an object of a verifier class"),
        (type("Nameless", (Rule,), {"name": None})(), "Nameless .* has no name: write name = "),
        (type("Kindless", (Rule,), {"kinds": Kind.IID})(), "Kindless .* has kinds = .*: write a set"),
        (type("Kindless", (Rule,), {"kinds": frozenset()})(), "Kindless .* has kinds = .*: write a set"),
    ],
)
def test_what_is_no_verifier_is_said_at_load(verifier: Any, words: str) -> None:
    target, draft = tables()
    with pytest.raises(ValueError, match=words) as caught:
        ft.load(target, drafter=ModelDrafter(draft), verifier=verifier)
    assert "\n" not in str(caught.value)


class OwnBlock(BlockVerifier):
    name = "own_block"

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        return super().decide(tree, scores, coins)


class OwnModel(ModelDrafter):
    name = "own_model"

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        return TokenTree.root_only(context.root)


class OwnGoodput(GoodputController):
    name = "own_goodput"

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(0)


class Whole(OwnBlock):
    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        return self.decide(tree, scores, coins)


def test_a_method_that_a_faster_one_bypasses_is_refused_at_load() -> None:
    """Its author would measure our method, not theirs."""
    target, draft = tables()
    parts: dict[str, tuple[dict[str, Any], str]] = {
        "OwnBlock.decide": ({"verifier": OwnBlock()}, "BlockVerifier.decide_fast"),
        "OwnModel.propose": ({"drafter": OwnModel(draft, k=3)}, "ModelDrafter.propose_batch"),
        "OwnGoodput.budget": ({"controller": OwnGoodput()}, "AutoController.budgets"),
    }
    for plain, (part, fast) in parts.items():
        words = rf"{re.escape(plain)} {LINE} is bypassed by {re.escape(fast)}: override {fast.split('.')[1]}, too"
        with pytest.raises(OutsideError, match=words):
            ft.load(target, **{"drafter": ModelDrafter(draft, k=3), **part})
    assert ft.load(target, drafter=ModelDrafter(draft, k=3), verifier=Whole()).generate([1, 2], max_new_tokens=4)


# -- controllers -----------------------------------------------------------------------------------------------------


class Two(Controller):
    """Two draft tokens for everybody, but for one request."""

    name = "two"

    def __init__(self, budget: Any = None, hook: str = "budget") -> None:
        self.wrong, self.hook = budget, hook

    def hit(self, context: Context, hook: str) -> bool:
        """Whether a hook is the one that goes wrong."""
        return hook == self.hook and context.tokens[0] == BAD and len(context.tokens) > 5

    def budget(self, context: Context, batch_size: int) -> Budget:
        if self.hit(context, "budget"):
            budget: Budget = self.wrong() if callable(self.wrong) else self.wrong
            return budget
        return Budget(2, 2)

    def observe(self, context: Context, record: StepRecord) -> None:
        if self.hit(context, "observe"):
            raise KeyError("lost")

    def explain(self, context: Context) -> str:
        why: str = self.wrong() if self.hit(context, "explain") else "two"
        return why

    def finish(self, context: Context) -> None:
        if self.hit(context, "finish"):
            self.wrong()


class Batched(Two):
    """The same for all requests together."""

    def budgets(self, contexts: Sequence[Context]) -> Any:
        if any(self.hit(context, "budget") for context in contexts):
            return self.wrong
        return [Budget(2, 2) for _ in contexts]


BUDGETS = {
    "none": (None, "returned NoneType, not a Budget"),
    "int": (3, "returned int, not a Budget"),
    "depth": (Budget(2.5, 2), r"returned a Budget with max_depth = 2\.5: it must be a whole number"),  # type: ignore[arg-type]
    "nodes": (Budget(2, None), "returned a Budget with max_nodes = None: it must be a whole number"),  # type: ignore[arg-type]
    "truth": (Budget(True, 2), "returned a Budget with max_depth = True: it must be a whole number"),
    "member": (Budget(2, 2, member="ngram"), "returned a Budget with member = 'ngram'"),  # type: ignore[arg-type]
    "confidence": (Budget(2, 2, min_confidence="0.4"), "with min_confidence = '0.4': it must be a number"),  # type: ignore[arg-type]
    "stop": (Budget(2, 2, stop=0.4), r"returned a Budget with stop = 0\.4, which cannot be called"),  # type: ignore[arg-type]
    "otherwise": (Budget(2, 2, otherwise=3), "returned int, not a Budget"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_wrong_budget_ends_its_request_and_no_other(name: str) -> None:
    budget, words = BUDGETS[name]
    runs = served(sampled_requests(), controller=Two(budget))
    check_alone(runs, ControllerError, rf"Two\.budget {LINE} .*{words}", controller=Two())


@pytest.mark.parametrize(
    ("budgets", "words"),
    [
        (None, "returned NoneType for a round of 1: it must be a list with one Budget for each"),
        ([], "returned 0 budgets for a round of 1: it must be a list"),
        ([Budget(2, 2)] * 2, "returned 2 budgets for a round of 1: it must be a list"),
        ([3], "returned int, not a Budget"),
    ],
)
def test_wrong_budgets_of_a_batch(budgets: Any, words: str) -> None:
    runs = served(sampled_requests(), controller=Batched(budgets))
    check_alone(runs, ControllerError, rf"Batched\.budgets {LINE} {words}", controller=Batched())


@pytest.mark.parametrize("hook", ["budget", "observe"])
def test_a_controller_cannot_write_into_a_text(hook: str) -> None:
    class Writes(Two):
        def hit(self, context: Context, hook: str) -> bool:
            if super().hit(context, hook):
                context.tokens = [*context.tokens, 1]
            return False

    runs = served(sampled_requests(), controller=Writes(hook=hook))
    words = rf"Writes\.hit {LINE} raised TypeError: context\.tokens is read-only: only the engine sets it"
    check_alone(runs, ControllerError, words, controller=Two())


@pytest.mark.parametrize("hook", ["budget", "observe"])
def test_whatever_a_controller_raises_is_said_by_class_and_line(hook: str) -> None:
    runs = served(sampled_requests(), controller=Two(raises, hook))
    check_alone(runs, ControllerError, rf"Two\.{hook} {LINE} raised KeyError: 'lost'", controller=Two())


@pytest.mark.parametrize(
    ("hook", "wrong", "words"),
    [
        ("finish", raises, "raised KeyError: 'lost'"),
        ("finish", sys.exit, r"raised RuntimeError: it called exit\(\)"),
        ("explain", raises, "raised KeyError: 'lost'"),
        ("explain", sys.exit, r"raised RuntimeError: it called exit\(\)"),
        ("explain", lambda: 3, "returned int: it must be a string"),
    ],
)
def test_an_answer_is_complete_before_its_controller_hears_of_its_end(
    hook: str, wrong: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs = served(sampled_requests(), controller=Two(wrong, hook))
    assert [run.finish_reason for run in runs] == ["length"] * 4
    assert [run.why for run in runs] == ["two"] * 3 + ["" if hook == "explain" else "two"]
    for request, run in zip(sampled_requests(), runs, strict=True):
        assert run.output == served([request], controller=Two(hook="none"))[0].output
    (fault,) = [record for record in caplog.records if record.name == "foretoken.engine"]
    assert re.search(rf"Two\.{hook} {LINE} {words}", fault.getMessage())
    assert fault.levelname == "WARNING" and fault.exc_info is None, "one line, without a traceback"


@pytest.mark.parametrize(
    ("controller", "words"),
    [
        (Two, rf"Two {LINE} is a class: give an object, Two\(\.\.\.\)"),
        (3, "an int is not a controller: give a name, or an object of a controller class"),
        (type("Nameless", (Two,), {"name": None})(), "Nameless .* has no name: write name = "),
    ],
)
def test_what_is_no_controller_is_said_at_load(controller: Any, words: str) -> None:
    target, draft = tables()
    with pytest.raises(ControllerError, match=words) as caught:
        ft.load(target, drafter=ModelDrafter(draft), controller=controller)
    assert "\n" not in str(caught.value)


def exits() -> None:
    sys.exit(3)


def hostile(base: type[Any], hook: str, raises: Any) -> Any:
    """An object of whom one method or property raises."""

    class Hostile(base):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name == hook:
                raises()
            return super().__getattribute__(name)

    return Hostile()


@pytest.mark.parametrize(
    ("wrong", "words"), [(raises, "KeyError: 'lost'"), (exits, r"RuntimeError: it called exit\(3\)")]
)
@pytest.mark.parametrize("hook", ["name", "kinds", "lossless", "greedy_only", "drafts", "attach"])
def test_whatever_a_rule_raises_at_load_is_one_line(hook: str, wrong: Any, words: str) -> None:
    target, draft = tables()
    part: dict[str, Any] = (
        {"controller": hostile(Two, hook, wrong)}
        if hook in ("drafts", "attach")
        else {"verifier": hostile(Rule, hook, wrong)}
    )
    with pytest.raises((VerifierError, ControllerError), match=rf"^Hostile\.__getattribute__ {LINE} raised {words}$"):
        ft.load(target, drafter=ModelDrafter(draft, k=3), **part)


def test_a_verifier_that_exits_when_a_request_joins_costs_that_request() -> None:
    target, draft = tables()
    llm = ft.load(target, drafter=ModelDrafter(draft, k=3), verifier=hostile(Rule, "races", exits))
    with pytest.raises(VerifierError, match=rf"Hostile\.__getattribute__ {LINE} raised RuntimeError: it called exit"):
        llm.generate([1, 2, 3], max_new_tokens=3)


@pytest.mark.parametrize("wrong", [raises, exits, lambda: None], ids=["raises", "exits", "nothing"])
def test_a_report_that_fails_ends_no_engine(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Reporting(Two):
        def report(self) -> Any:
            return wrong()

    async def answered() -> tuple[list[int], Any]:
        target, draft = tables()
        serving = AsyncLlm(ft.load(target, drafter=ModelDrafter(draft, k=3), controller=Reporting()))
        await serving.start()
        try:
            output = await serving.generate([1, 2, 3], max_new_tokens=3)
            return output.token_ids, serving.status.dead
        finally:
            await serving.close(0)

    tokens, dead = asyncio.run(answered())
    assert len(tokens) == 3 and dead is None
    (fault,) = [record.getMessage() for record in caplog.records if record.name == "foretoken.engine"]
    assert re.fullmatch(rf"the controller cannot report: Reporting\.report {LINE} r(ais|eturn)ed .*", fault)


@pytest.mark.parametrize("role", ["verifier", "controller"])
def test_a_class_in_a_file_is_for_drafters(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", f"--{role}", "mine.py:Rule"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(
        f"error: mine.py:Rule is a class in a file: a {role} from outside is given in Python, ft.load("
    )
