"""Drafters from outside: ``file.py:Class`` and entry points, wherever a spec is; what one does wrong is said by class,
rule and line, and harms no other request."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

import foretoken as ft
from foretoken import registry
from foretoken.cli.main import main
from foretoken.core import Budget, Context, TokenTree, outside
from foretoken.core.sampling import SamplingParams
from foretoken.core.specs import Spec, parse_spec
from foretoken.engine import service_thread
from foretoken.engine.background import AsyncLlm
from foretoken.engine.errors import EngineDead
from foretoken.engine.request import Request, Running
from foretoken.lab.bench.fitting import fits
from foretoken.lab.tune.choices import further
from foretoken.lab.workload import Subject
from foretoken.llm import assemble
from foretoken.loading import build_drafter
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.outside import DrafterError, check_proposal
from foretoken.methods.verifiers.compatibility import inner_rule
from toys import engine, tables

HEAD = """
import torch
from foretoken import Budget, Context, Drafter, Kind, TokenTree, Traits


"""
PERIOD = (
    HEAD
    + '''class Period(Drafter):
    """The text repeats."""

    name = "period"

    def __init__(self, period: int = 2, k: int = 4) -> None:
        self.period, self.max_depth = period, k

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        copied = context.tokens[-self.period:][:budget.max_depth]
        return TokenTree.chain(context.root, copied)
'''
)
PROMPT = "def fib(n):"
BAD = 3
"""The first token of the prompt for which a drafter is bad."""


def served(drafter: Any, requests: Sequence[Request]) -> list[Running]:
    """Requests that run together, in their order, however they ended."""
    target, _ = tables()
    running = engine(target, drafter)
    ids = [running.add(request) for request in requests]
    done: dict[int, Running] = {}
    while running.busy:
        done |= {run.id: run for run, emission in running.step() if emission.finish_reason is not None}
    return [done[i] for i in ids]


def written(folder: Path, body: str, name: str = "mine.py") -> str:
    """The path of a file with that code."""
    (folder / name).write_text(body, encoding="utf-8")
    return str(folder / name)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("mine.py:Period", Spec("mine.py:Period", None, {})),
        (" ./a/mine.py : Period , k = 3", Spec("./a/mine.py:Period", None, {"k": "3"})),
        ("mine.py:Head:./folder,k=3", Spec("mine.py:Head", "./folder", {"k": "3"})),
        ("mine.py", Spec("mine.py:", None, {})),
        ("model:./mine.py", Spec("model", "./mine.py", {})),
    ],
)
def test_a_class_in_a_file_is_a_name(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec


def test_it_drafts_alone_and_in_groups(tmp_path: Path) -> None:
    spec = f"{written(tmp_path, PERIOD)}:Period,period=3"
    target, _ = tables()
    drafter = build_drafter(spec, target)
    assert drafter is not None and (drafter.name, drafter.spec, drafter.max_depth) == ("period", spec, 4)
    for chosen in (spec, f"router,drafters=({spec}|ngram,n=2)", f"ensemble,drafters=({spec}|ngram,n=2)"):
        llm = assemble(target, build_drafter(chosen, target), "auto", "constant,k=3", None)
        for temperature in (0.0, 1.0):
            output = llm.generate([1, 2, 3], max_new_tokens=30, temperature=temperature, seed=1)
            plain = llm.plain.generate([1, 2, 3], max_new_tokens=30, temperature=temperature, seed=1)
            assert output.token_ids == plain.token_ids and output.stats.num_draft_tokens > 0


def test_a_build_method_gets_path_and_context(tmp_path: Path) -> None:
    body = (
        PERIOD
        + """
    @classmethod
    def build(cls, path, context, k: int = 2):
        made = cls(int(open(path).read()), k)
        made.inner = context.drafter("ngram")
        return made
"""
    )
    (tmp_path / "period.txt").write_text("5")
    target, _ = tables()
    drafter: Any = build_drafter(f"{written(tmp_path, body)}:Period:{tmp_path / 'period.txt'},k=7", target)
    assert (drafter.period, drafter.max_depth, drafter.inner.name) == (5, 7, "ngram")


def test_dataclasses_and_imports_of_the_file_work(tmp_path: Path) -> None:
    body = "from __future__ import annotations\nfrom dataclasses import dataclass\n" + PERIOD.replace(
        "class Period", "@dataclass\nclass Seen:\n    count: int = 0\n\n\nclass Period"
    )
    row = registry.find("drafter", f"{written(tmp_path, body)}:Period")
    assert set(registry.convert_options("drafter", row.name, row.load(), {"k": "3"})) == {"k"}
    assert row.load() is row.load()


def test_a_relative_file_is_that_of_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    periods = {}
    for folder, period in (("a", 3), ("b", 5), ("a", 3)):
        (tmp_path / folder).mkdir(exist_ok=True)
        written(tmp_path / folder, PERIOD.replace("period: int = 2", f"period: int = {period}"), "mine.py")
        monkeypatch.chdir(tmp_path / folder)
        cls = registry.find("drafter", "mine.py:Period").load()
        assert (cls().period, periods.setdefault(folder, cls)) == (period, cls)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"there is no file mine\.py"):
        registry.find("drafter", "mine.py:Period")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a package with entry points; cached lookups are cleared."""
    known = (outside.installed, outside.installed_class, registry._find)

    def install(entries: str) -> None:
        place = tmp_path / "theirs-1.0.dist-info"
        place.mkdir()
        (place / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (place / "entry_points.txt").write_text(f"[foretoken.drafters]\n{entries}\n")
        written(tmp_path, PERIOD, "theirs_period.py")
        for each in known:
            each.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    sys.modules.pop("theirs_period", None)
    for each in known:
        each.cache_clear()


def test_an_entry_point_is_a_drafter_by_its_name(
    package: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    package("theirs = theirs_period:Period\nngram = theirs_period:Period\nbroken = theirs_period:Nothing")
    llm = ft.load("builtin", drafter="theirs,period=3")
    assert llm.drafter is not None and llm.drafter.spec == "theirs,period=3"
    assert build_drafter("ngram", llm.target).__class__.__module__.startswith("foretoken.")  # ours stays ours
    assert main(["methods", "--json"]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)["methods"] if row["role"] == "drafter"}
    assert listed["theirs"]["summary"] == "Comes from the installed package theirs." and listed["ngram"]["paper"]
    with pytest.raises(ValueError, match=r"drafter 'broken', theirs_period:Nothing of the package theirs, cannot"):
        build_drafter("broken", llm.target)
    with pytest.raises(ValueError, match="did you mean theirs"):
        build_drafter("their", llm.target)


def test_drafters_of_installed_packages_are_tried(package: Callable[[str], None]) -> None:
    package("theirs = theirs_period:Period\nbroken = theirs_period:Nothing")
    subject = Subject(tables()[0])
    fitting = {fit.name: fit for fit in fits(subject)}
    assert fitting["theirs"].works and fitting["theirs"].spec == "theirs"
    assert not fitting["broken"].works and "cannot be imported" in fitting["broken"].why
    assert {"theirs", "broken"} <= set(further("builtin", ["ngram"]))


# -- what is no drafter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "cls", "words"),
    [
        (PERIOD, "Perod", r"mine\.py has no class Perod: it has Period"),
        ("x = 3\n", "Period", r"mine\.py has no class Period: it has no drafter"),
        (PERIOD, "", "has no class name: give a drafter from outside as file.py:Class"),
        ("x = 3\n", "x", r"mine\.py:x is int, not a drafter: derive a class from foretoken\.Drafter"),
        ("\nclass Period:\n    pass\n", "Period", r"Period \(mine\.py, line 2\) is a class, but not a drafter: derive"),
        (HEAD + "class P(Drafter):\n    name = 'p'\n", "P", r"P \(mine\.py, line 6\) has no method propose"),
        (PERIOD.replace('name = "period"', ""), "Period", r'Period \(mine\.py, line 6\) has no name: write name = "'),
        ("def f(:\n", "P", r"mine\.py, line 1: SyntaxError: "),
        ("\nimport nothing_of_this_name\n", "P", r"mine\.py, line 2: ModuleNotFoundError: No module named"),
        ("\n\n1 / 0\n", "P", r"mine\.py, line 3: ZeroDivisionError: division by zero"),
        ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})\n", "P", r"mine\.py, line 1: Mute$"),
        ("raise SystemExit(3)\n", "P", r"mine\.py, line 1: SystemExit: 3"),
        ("raise type('Stop', (BaseException,), {})('now')\n", "P", r"mine\.py, line 1: Stop: now"),
        (PERIOD.replace("= 2, k", ", k").replace("k: int = 4", "k: int"), "Period", r"Period .*cannot be built: "),
        (PERIOD.replace("period, k\n", "period, k\n        1 / 0\n"), "Period", r"__init__ \(mine\.py, line 13\)"),
        (PERIOD + "        return 3\n\n    traits = 3\n", "Period", r"Period .*has traits of type int"),
        (PERIOD.replace("period, k\n", "period, 0\n"), "Period", r"Period .*has max_depth = 0: it must be"),
        (PERIOD + "\n    @classmethod\n    def build(cls, path, context):\n        return 3\n", "Period", "ed int"),
    ],
)  # fmt: skip
def test_what_is_no_drafter_is_said_in_one_line(tmp_path: Path, body: str, cls: str, words: str) -> None:
    target, _ = tables()
    with pytest.raises(ValueError, match=words) as caught:
        build_drafter(f"{written(tmp_path, body)}:{cls}", target)
    assert "\n" not in str(caught.value)


def test_options_are_those_of_the_constructor(tmp_path: Path) -> None:
    spec = f"{written(tmp_path, PERIOD)}:Period"
    target, _ = tables()
    with pytest.raises(ValueError, match=r"unknown option 'perod' of drafter '.*': did you mean period\?"):
        build_drafter(f"{spec},perod=3", target)
    with pytest.raises(ValueError, match=r"takes no path; its options: period, k$"):
        build_drafter(f"{spec}:./folder", target)


# -- what breaks the protocol ----------------------------------------------------------------------------------------


def bad(proposal: str, traits: str = "") -> str:
    """A drafter that is good but for one request."""
    return (
        HEAD
        + f'''class Bad(Drafter):
    """One request has bad luck."""

    name = "bad"
    {traits}

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        if context.tokens[0] == {BAD} and len(context.tokens) > 8:
            {proposal}
        return TokenTree.chain(context.root, context.tokens[-2:][:budget.max_depth])
'''
    )


LINE = r"\(mine\.py, line \d+\)"
IID = "traits = Traits(kind=Kind.IID)"
DISTINCT = "traits = Traits(kind=Kind.WITHOUT_REPLACEMENT, draws_trees=True)"
TREES = "traits = Traits(draws_trees=True)"
CHANGES = (
    "text = context.tokens; text.append(1)",
    "text = context.tokens; text += [1]",
    "context.tokens.pop()",
    "context.tokens[-1] = 1",
    "del context.tokens[1:]",
    "context.tokens.sort()",
    "context.tokens = context.tokens + [1]",
    *(f"context.{name} = None" for name in ("rng", "sampler", "state", "sequence", "texts", "prompt_length")),
)
"""What would write guesses into the text, take some of it away, or leave a request that cannot go on."""
PROBE = "return TokenTree((context.root, 1, {}), (-1, 0, 0), probes=(False, False, True))"
BROKEN = [
    ("raise KeyError('lost')", "", rf"Bad\.propose {LINE} raised KeyError: 'lost'"),
    ("return self.helper()", "def helper(self):\n        return {}['lost']", rf"Bad\.helper {LINE} raised KeyError"),
    ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "", rf"Bad\.propose {LINE} raised Mute$"),
    ("raise SystemExit(type('Mute', (), {'__str__': lambda self: 1 / 0})())", "", r"RuntimeError: it called exit\(\)$"),
    ("return None", "", rf"Bad\.propose {LINE} returned NoneType, not a TokenTree"),
    ("return [1, 2]", "", rf"Bad\.propose {LINE} returned list, not a TokenTree"),
    ("return TokenTree.chain(context.root, [99])", "", rf"Bad\.propose {LINE} proposed token 99: ids"),
    ("return TokenTree.chain(context.root, [-1])", "", rf"Bad\.propose {LINE} proposed token -1: ids"),
    ("return TokenTree.chain((context.root + 1) % 4, [1])", "", rf"Bad\.propose {LINE} returned a tree that starts"),
    (PROBE.format(99), TREES, rf"Bad\.propose {LINE} proposed token 99: ids"),
    (PROBE.format(-1), TREES, rf"Bad\.propose {LINE} proposed token -1: ids"),
    ("return TokenTree.chain(context.root, [1], torch.full((1, 4), 0.25))", "", "of kind IID, which its traits do not"),
    ("return TokenTree((context.root, 1, 2), (-1, 0, 0))", "", "a tree of kind POINT, which its traits do not"),
    (
        "return TokenTree((context.root, 1, 2), (-1, 0, 0), Kind.IID, torch.full((1, 4), 0.25), (-1, 0, 0))",
        "",
        r"do not declare: write traits = Traits\(kind=Kind\.IID, draws_trees=True\)",
    ),
    ("return TokenTree((context.root, 1, 2), (-1, 0, 0))", IID, r"declare: write traits = Traits\(draws_trees=True\)"),
    ("return TokenTree.chain(context.root, [1], torch.full((1, 4), 0.5))", IID, "gave q with rows that are not"),
    ("return TokenTree.chain(context.root, [1], torch.full((1, 4), torch.nan))", IID, "gave q with rows that are not"),
    (
        "return TokenTree.chain(context.root, [1], torch.tensor([[torch.nan, 0.5, 0.5, 0.0]]))",
        IID,
        "gave q with rows that are not",
    ),
    (
        "return TokenTree.chain(context.root, [1, 1], torch.tensor([[0.0, 1.0, 0.0, 0.0], [torch.nan] * 4]))",
        IID,
        "gave q with rows that are not",
    ),
    *((change, "", rf"Bad\.propose {LINE} raised TypeError: context\.\w+ is read-only") for change in CHANGES),
    ("return TokenTree((context.root,) + (1,) * 65, (-1,) + (0,) * 65)", TREES, rf"{LINE} proposed 65 draft nodes"),
    ("return TokenTree.chain(context.root, [1.5])", "", rf"Bad\.propose {LINE} proposed a token of type float"),
    ("return TokenTree.chain(context.root, [[1, 2]])", "", "proposed a token of type list: it must be an int"),
    ("return TokenTree.chain(context.root, torch.tensor([1, 2]))", "", "proposed a token of type Tensor: it must be"),
    ("return TokenTree((context.root, 1), (-1, 0.0))", "", "proposed a parent of type float: it must be an int"),
    (
        "return TokenTree.chain(context.root, [1], torch.full((1, 4), 0.25).numpy())",
        IID,
        rf"Bad\.propose {LINE} gave q of type ndarray: it must be a tensor of floating-point numbers",
    ),
    (
        "return TokenTree.chain(context.root, [1], torch.tensor([[0, 1, 0, 0]]))",
        IID,
        r"gave q of type torch\.int64: it must be a tensor of floating-point numbers",
    ),
    (
        "return TokenTree((context.root, 1), (-1, 0), probes=(True,))",
        "",
        rf"Bad\.propose {LINE} raised ValueError: a token tree of 2 nodes has 1 probes: one per node, or none",
    ),
    ("return TokenTree((context.root, 1), (-1, 0), drafters=(0,))", "", "a token tree of 2 nodes has 1 drafters: one"),
    ("return TokenTree((context.root, 1), (-1, 0), drafters=(0, 5))", "", "named member 5 in drafters: they go"),
    (
        "return TokenTree((context.root, 1), (-1, 0), 'iid', torch.full((1, 4), 0.25), (-1, 0))",
        IID,
        "proposed a tree of the kind 'iid': write Kind.IID",
    ),
    ("return TokenTree.chain(context.root, [1], torch.full((1, 1), 1.0))", IID, "that do not fit a tree of 2 nodes"),
    (
        "return TokenTree.chain(context.root, [1], torch.tensor([[0.5, 0.0, 0.5, 0.0]]))",
        IID,
        "proposed a token with probability 0 in q: it was not drawn from q",
    ),
    (
        "return TokenTree.chain(context.root, [1], torch.full((1, 8), 0.125))",
        IID,
        rf"Bad\.propose {LINE} gave q of shape \[1, 8\]: its rows must have 4 columns, one for each of the target",
    ),
    (
        "return TokenTree((context.root, 1, 2), (-1, 0, 1), Kind.IID, torch.full((2, 4), 0.25), (-1, 0, -7))",
        IID,
        r"gave q of shape \[2, 4\] and q_rows that do not fit a tree of 3 nodes",
    ),
    (
        "q = torch.full((1, 4), 0.25); "
        "return TokenTree((context.root, 1, 1), (-1, 0, 0), Kind.WITHOUT_REPLACEMENT, q, (-1, 0, 0))",
        DISTINCT,
        rf"Bad\.propose {LINE} proposed token 1 twice below one node as draws without replacement",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("proposal", "traits", "words"), BROKEN)
@pytest.mark.parametrize("group", ["{}", "router,drafters=({}|ngram,n=2)", "ensemble,drafters=({}|suffix,share=false)"])
def test_a_broken_rule_ends_its_request_and_no_other(
    tmp_path: Path, proposal: str, traits: str, words: str, group: str
) -> None:
    target, _ = tables()
    drafter = build_drafter(group.format(f"{written(tmp_path, bad(proposal, traits))}:Bad"), target)
    requests = [Request([first, 1, 2], SamplingParams(temperature=1.0), 20, seed=first) for first in range(4)]
    runs = served(drafter, requests)
    alone = [served(None, [request])[0].output for request in requests]
    for first, (run, right) in enumerate(zip(runs, alone, strict=True)):
        if first != BAD:
            assert (run.output, run.finish_reason) == (right, "length")
            continue
        assert run.finish_reason == "error" and isinstance(run.error, DrafterError)
        (message,) = str(run.error).splitlines()
        assert re.search(words, message), message


@pytest.mark.parametrize("group", ["{}", "router,drafters=({}|ngram,n=2)"])
def test_a_chain_is_cut_to_the_nodes_of_the_budget(tmp_path: Path, group: str) -> None:
    """As it is to the depth: the first tokens of a chain do not depend on later ones."""
    target, _ = tables()
    drafter = build_drafter(group.format(f"{written(tmp_path, PERIOD)}:Period,period=5,k=5"), target)
    llm = assemble(target, drafter, "auto", "constant,k=5,nodes=2", None)
    output = llm.generate([1, 2, 3, 1, 2, 3], max_new_tokens=30)
    assert output.token_ids == llm.plain.generate([1, 2, 3, 1, 2, 3], max_new_tokens=30).token_ids
    assert 0 < output.stats.num_draft_tokens <= 2 * output.stats.num_drafts


def four_requests(**more: Any) -> list[Request]:
    """Requests of which a drafter is bad for the last one."""
    return [Request([first, 1, 2], max_new_tokens=20, **more) for first in range(4)]


@pytest.mark.parametrize("in_main_thread", [True, False])
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("import sys; sys.exit(3)", r"RuntimeError: it called exit\(3\)"),
        ("raise type('Stop', (BaseException,), {})('now')", "RuntimeError: Stop: now"),
    ],
)
def test_a_drafter_that_ends_the_process_ends_its_request_only(
    tmp_path: Path, statement: str, words: str, in_main_thread: bool
) -> None:
    target, _ = tables()
    drafter = build_drafter(f"{written(tmp_path, bad(statement))}:Bad", target)
    alone = [served(None, [request])[0].output for request in four_requests()]
    if in_main_thread:
        runs = served(drafter, four_requests())
    else:
        with ThreadPoolExecutor(1) as thread:
            runs = thread.submit(served, drafter, four_requests()).result()
    assert [run.finish_reason for run in runs] == ["length", "length", "length", "error"]
    assert [run.output for run in runs[:BAD]] == alone[:BAD]
    assert re.search(rf"Bad\.propose {LINE} raised {words}", str(runs[BAD].error))


def test_a_service_that_hangs_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its callers are told, too, and a second close does not wait again."""
    monkeypatch.setattr(service_thread, "END_S", 0.2)
    target, _ = tables()
    body = bad("self.gate.wait()", "gate = __import__('threading').Event()")
    drafter: Any = build_drafter(f"{written(tmp_path, body)}:Bad", target)

    async def scenario() -> tuple[Any, float]:
        service = AsyncLlm(assemble(target, drafter, "auto", "constant,k=3", None))
        await service.start()
        answer = asyncio.create_task(service.generate([BAD, 1, 2], max_new_tokens=20))
        await asyncio.sleep(0.2)
        await service.close(0.0)
        began_s = monotonic()
        await service.close(5.0)
        waited_s = monotonic() - began_s
        (failed,) = await asyncio.gather(answer, return_exceptions=True)
        drafter.gate.set()
        return failed, waited_s

    failed, waited_s = asyncio.run(scenario())
    assert isinstance(failed, EngineDead) and waited_s < 2.0
    assert re.fullmatch(rf"the engine did not stop: it is in Bad\.propose {LINE}", str(failed))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [str(failed)]


def test_the_other_answers_of_a_list_come_with_the_error(tmp_path: Path) -> None:
    target, _ = tables()
    drafter = build_drafter(f"{written(tmp_path, bad('raise KeyError(1)'))}:Bad", target)
    llm = assemble(target, drafter, "auto", "constant,k=3", None)
    prompts = [[0, 1, 2], [BAD, 1, 2], [1, 1, 2]]
    with pytest.raises(DrafterError, match=rf"Bad\.propose {LINE} raised KeyError: 1") as caught:
        llm.generate(prompts, max_new_tokens=20)
    first, failed, last = caught.value.__dict__["outputs"]
    plain = llm.plain.generate(prompts, max_new_tokens=20)
    assert failed is None and (first.token_ids, last.token_ids) == (plain[0].token_ids, plain[2].token_ids)
    with pytest.raises(DrafterError):
        llm.generate(prompts[1], max_new_tokens=20)
    assert not llm.engine.busy


def by_code(number: int, frame: object) -> None:
    """A handler of a host program."""
    sys.exit(7)


class Handler:
    """The same as an object, and as a method of it."""

    def __call__(self, number: int, frame: object) -> None:
        sys.exit(7)

    def handle(self, number: int, frame: object) -> None:
        sys.exit(7)


@pytest.mark.parametrize("handler", [by_code, Handler(), Handler().handle, partial(by_code)])
def test_an_exit_by_a_signal_that_arrives_inside_a_drafter_ends_the_process(tmp_path: Path, handler: Any) -> None:
    target, _ = tables()
    body = bad("import signal; signal.raise_signal(signal.SIGTERM)")
    drafter = build_drafter(f"{written(tmp_path, body)}:Bad", target)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit, match="7"):
            served(drafter, four_requests())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_inside_a_drafter_stops_the_engine(tmp_path: Path) -> None:
    target, _ = tables()
    body = bad("import signal; signal.raise_signal(signal.SIGINT)")
    drafter = build_drafter(f"{written(tmp_path, body)}:Bad", target)
    with pytest.raises(KeyboardInterrupt):
        served(drafter, four_requests())


@pytest.mark.parametrize("group", ["{}", "router,drafters=({}|ngram,n=2)"])
@pytest.mark.parametrize("statement", ["raise KeyError('lost')", "import sys; sys.exit(3)"])
def test_an_answer_is_complete_before_its_drafter_hears_of_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, statement: str, group: str
) -> None:
    target, _ = tables()
    file = written(tmp_path, PERIOD + f"\n    def finish(self, context):\n        {statement}\n")
    drafter = build_drafter(group.format(f"{file}:Period"), target)
    runs = served(drafter, four_requests())
    assert [run.finish_reason for run in runs] == ["length"] * 4
    assert [run.output for run in runs] == [served(None, [request])[0].output for request in four_requests()]
    (fault,) = [record.getMessage() for record in caplog.records if record.name == "foretoken.engine"]
    assert re.search(rf"Period\.finish {LINE} raised ", fault), fault


def test_a_drafter_is_not_shown_requests_that_want_no_drafts(tmp_path: Path) -> None:
    target, _ = tables()
    body = PERIOD + "\n    def observe(self, context, tree, scores, verdict):\n        raise KeyError('lost')\n"
    drafter = build_drafter(f"{written(tmp_path, body)}:Period", target)
    plain = served(drafter, four_requests(max_draft_tokens=0))
    assert [run.finish_reason for run in plain] == ["length"] * 4
    (run,) = served(drafter, four_requests()[:1])
    assert re.search(rf"Period\.observe {LINE} raised KeyError: 'lost'", str(run.error))


@pytest.mark.parametrize("group", ["{}", "router,drafters=({}|ngram,n=2)", "known,inner=({})"])
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("raise KeyError('lost')", "raised KeyError: 'lost'"),
        ("import sys; sys.exit(3)", r"raised RuntimeError: it called exit\(3\)"),
        ("return None", "returned NoneType: it must be a list of dictionaries"),
        ("return ['period']", "returned list: it must be a list of dictionaries"),
    ],
)
def test_a_description_that_fails_names_the_drafter(tmp_path: Path, statement: str, words: str, group: str) -> None:
    target, _ = tables()
    file = written(tmp_path, PERIOD + f"\n    def describe(self):\n        {statement}\n")
    llm = ft.load(target, drafter=group.format(f"{file}:Period"))
    with pytest.raises(DrafterError, match=rf"Period\.describe {LINE} {words}"):
        llm.describe()
    assert len(llm.generate([1, 2, 3], max_new_tokens=5).token_ids) == 5


HOSTILE = {
    "__init__": "def __init__(self):",
    "build": "@classmethod\n    def build(cls, path, context):",
    "shape_for": "@classmethod\n    def shape_for(cls, target):",
    "cost_beside": "def cost_beside(self, target_bytes):",
    "__setattr__": "def __setattr__(self, name, value):",
    "__getattribute__": "def __getattribute__(self, name):",
    "__eq__": "__hash__ = object.__hash__\n\n    def __eq__(self, other):",  # groups ask it of their members
} | {
    name: f"@property\n    def {name}(self):"
    for name in ("limits", "states", "foresight", "traits", "taps", "max_depth", "max_nodes", "drafters")
}
OURS = """class Hostile(Drafter):
    name = "hostile"

    def propose(self, context, budget):
        return TokenTree.chain(context.root, context.tokens[-2:])

"""


GROUP = "router,drafters=({}|ngram,n=2)"


@pytest.mark.parametrize(
    ("hook", "group"),
    [("__eq__", GROUP), *((hook, group) for hook in HOSTILE if hook != "__eq__" for group in ("{}", GROUP))],
)
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("raise KeyError('lost')", "raised KeyError: 'lost'"),
        ("import sys; sys.exit(3)", r"raised RuntimeError: it called exit\(3\)"),
        ("raise type('Stop', (BaseException,), {})('now')", "raised RuntimeError: Stop: now"),
    ],
)
def test_whatever_is_raised_at_load_is_one_line(
    tmp_path: Path, hook: str, statement: str, words: str, group: str
) -> None:
    target, _ = tables()
    file = written(tmp_path, f"{HEAD}{OURS}    {HOSTILE[hook]}\n        {statement}\n")
    with pytest.raises(DrafterError, match=rf"^Hostile\.{hook} {LINE} {words}$"):
        ft.load(target, drafter=group.format(f"{file}:Hostile"))


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("shape_for", r"Hostile\.shape_for {} returned int: it must be options by name"),
        ("cost_beside", r"Hostile\.cost_beside {} returned NoneType: it must be a number"),
        ("limits", r"Hostile {} has limits of type int: write Limits\(\.\.\.\)"),
        ("taps", r"Hostile {} has taps of type int: write a tuple of names"),
        ("drafters", r"Hostile {} has drafters of type int: write a tuple of drafters"),
        ("foresight", r"Hostile {} has foresight of type int, which has no minimum_budget and predicted_from"),
    ],
)
def test_facts_of_a_wrong_type_are_said_at_load(tmp_path: Path, hook: str, words: str) -> None:
    target, _ = tables()
    returned = "None" if hook == "cost_beside" else "3"
    file = written(tmp_path, f"{HEAD}{OURS}    {HOSTILE[hook]}\n        return {returned}\n")
    with pytest.raises(DrafterError, match=f"^{words.format(LINE)}$"):
        ft.load(target, drafter=f"{file}:Hostile")


def test_an_interrupt_at_load_is_one(tmp_path: Path) -> None:
    target, _ = tables()
    for body in (f"{HEAD}{OURS}    {HOSTILE['build']}\n        raise KeyboardInterrupt\n", "raise KeyboardInterrupt\n"):
        with pytest.raises(KeyboardInterrupt):
            ft.load(target, drafter=f"{written(tmp_path, body, f'mine{len(body)}.py')}:Hostile")


NAN = {"all": "q[:] = torch.nan", "one entry": "q[0, 3] = torch.nan", "last row": "q[-1] = torch.nan"}
SHAPES = {
    "chain": ("Kind.IID", "(0, 1)", "(-1, 0, 1)"),
    "siblings": ("Kind.WITHOUT_REPLACEMENT", "(0, 0)", "(-1, 0, 0)"),
    "tree": ("Kind.IID", "(0, 0)", "(-1, 0, 1)"),
}


@pytest.mark.parametrize("planted", NAN)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
def test_no_q_with_nan_is_believed(tmp_path: Path, planted: str, shape: str, batched: bool) -> None:
    """Every comparison with NaN is false: a check that looks for wrong values finds none."""
    kind, parents, rows = SHAPES[shape]
    body = (
        HEAD
        + f"""class Bad(Drafter):
    name = "bad"
    traits = Traits(kind={kind}, draws_trees={shape != "chain"})

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        q = torch.full((2, 4), 0.25)
        if context.tokens[0] == {BAD}:
            {NAN[planted]}
        return TokenTree((context.root, 1, 2), (-1, *{parents}), {kind}, q, {rows})
"""
    )
    if batched:
        body += """
    def propose_batch(self, contexts, budgets):
        return [self.propose(*one) for one in zip(contexts, budgets)]
"""
    target, _ = tables()
    drafter = build_drafter(f"{written(tmp_path, body)}:Bad", target)
    requests = [Request([first, 1, 2], SamplingParams(temperature=1.0), 12) for first in range(4)]
    runs = served(drafter, requests)
    assert [run.finish_reason for run in runs] == ["length", "length", "length", "error"]
    assert isinstance(runs[BAD].error, DrafterError) and "rows that are not distributions" in str(runs[BAD].error)


def test_what_guesses_for_a_draft_model_is_checked_as_well(tmp_path: Path) -> None:
    """A wrong q inside a cascade would make the cascade's own q wrong, which its proposals do not show."""
    body = bad("return TokenTree.chain(context.root, [1], torch.full((1, 4), torch.nan))", IID).replace(
        "Traits(kind=Kind.IID)", "Traits(kind=Kind.IID, rewinds=True)"
    )
    target, draft = tables()
    inner = build_drafter(f"{written(tmp_path, body)}:Bad", target)
    assert inner is not None
    requests = [Request([first, 1, 2], SamplingParams(temperature=1.0), 20) for first in range(4)]
    runs = served(CascadeDrafter(draft, inner, inner_rule, k=4), requests)
    assert [run.finish_reason for run in runs] == ["length", "length", "length", "error"]
    assert re.search(rf"Bad\.propose {LINE} gave q with rows that are not", str(runs[BAD].error))


def test_no_drafter_is_to_blame_for_the_committed_root(tmp_path: Path) -> None:
    """A committed token outside the vocabulary is no drafter's fault."""
    target, _ = tables()
    drafter = build_drafter(f"{written(tmp_path, PERIOD)}:Period", target)
    assert drafter is not None
    context: Any = SimpleNamespace(root=99)
    check_proposal(TokenTree.chain(99, [1]), context, drafter, target, thorough=True)
    with pytest.raises(DrafterError, match="proposed token 99"):
        check_proposal(TokenTree.chain(99, [99]), context, drafter, target, thorough=True)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "returned NoneType for 1 requests: it must be a list with one tree for each"),
        ("[]", "returned 0 trees for 1 requests: it must be a list"),
        ("found * 2", "returned 2 trees for 1 requests: it must be a list"),
    ],
)
@pytest.mark.parametrize("group", ["{}", "router,drafters=({}|ngram,n=2)"])
def test_trees_are_one_for_each_request(tmp_path: Path, returned: str, words: str, group: str) -> None:
    body = (
        PERIOD
        + f"""
    def propose_batch(self, contexts, budgets):
        found = [self.propose(*one) for one in zip(contexts, budgets)]
        return {returned} if any(context.tokens[0] == {BAD} for context in contexts) else found
"""
    )
    target, _ = tables()
    drafter = build_drafter(group.format(f"{written(tmp_path, body)}:Period"), target)
    runs = served(drafter, [Request([first, 1, 2], max_new_tokens=12) for first in range(4)])
    assert [run.finish_reason for run in runs] == ["length", "length", "length", "error"]
    assert re.search(rf"Period\.propose_batch {LINE} {words}", str(runs[BAD].error))


def test_an_object_must_say_what_it_is_as_well() -> None:
    class Nameless(Drafter):
        def propose(self, context: Context, budget: Budget) -> TokenTree:
            return TokenTree.root_only(context.root)

    class Deep(Nameless):
        name = "deep"
        max_depth: Any = "5"

    target, _ = tables()
    for drafter in (Nameless(), [Nameless(), "ngram"]):
        with pytest.raises(DrafterError, match=r'Nameless \(.*, line \d+\) has no name: write name = "\.\.\."'):
            ft.load(target, drafter=drafter)
    with pytest.raises(DrafterError, match=r"Deep \(.*\) has max_depth = '5': it must be a whole number"):
        ft.load(target, drafter=Deep())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "def observe(self, context, verdict): ...",
            r"observe .* is called with \(context, tree, scores, verdict\): too",
        ),
        ("def start(self): ...", r"start .* is called with \(context\): too many"),
        ("def finish(self, context, extra): ...", r"finish .* is called with \(context\): missing a required argument"),
        ("def propose(self, context): ...", r"propose .* is called with \(context, budget\): too many"),
        ('taps = "last"', r"has taps = 'last': write a tuple, \(\"last\",\)"),
    ],
)
def test_methods_that_nobody_can_call_are_refused_at_load(tmp_path: Path, body: str, words: str) -> None:
    target, _ = tables()
    with pytest.raises(DrafterError, match=rf"Period.*{words}") as raised:
        build_drafter(f"{written(tmp_path, PERIOD + chr(10) + '    ' + body)}:Period", target)
    assert re.search(LINE, str(raised.value))


class Forgetful(NgramDrafter):
    name = "forgetful"

    def __init__(self) -> None:
        """It forgets those above it."""


class Forgotten(ModelDrafter):
    name = "forgotten"

    def __init__(self) -> None:
        """It forgets those above it."""


def test_a_constructor_that_forgot_its_base_class_is_said() -> None:
    target, _ = tables()
    words = r"\(test_outside_drafters\.py, line \d+\) .* has no attribute '\w+', which its base class sets: call super"
    (run,) = served(Forgetful(), [Request([1, 2, 1], max_new_tokens=4)])
    assert re.match(f"Forgetful {words}", str(run.error)) and isinstance(run.error, DrafterError)
    with pytest.raises(DrafterError, match=f"Forgotten {words}"):
        ft.load(target, drafter=Forgotten())


def test_a_class_in_place_of_an_object_is_said() -> None:
    target, _ = tables()
    with pytest.raises(DrafterError, match=r"Forgetful \(.*, line \d+\) is a class: give an object, Forgetful\("):
        ft.load(target, drafter=Forgetful)  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", ["start", "observe", "minimum_budget", "predicted_from"])
def test_whatever_a_hook_raises_is_said_by_class_and_line(tmp_path: Path, hook: str) -> None:
    usual = f"super().{hook}(context, *more)" if hasattr(Drafter, hook) else "more[0] if more else None"
    body = (
        PERIOD
        + f"""
    foresight = property(lambda self: self)

    def minimum_budget(self, context, budget):
        return budget

    def predicted_from(self, context):
        return None

    def {hook}(self, context, *more):
        if context.tokens[0] == {BAD}:
            raise KeyError("lost")
        return {usual}
"""
    )
    target, _ = tables()
    drafter = build_drafter(f"{written(tmp_path, body)}:Period", target)
    requests = [Request([first, 1, 2], SamplingParams(temperature=1.0), 12, seed=first) for first in range(4)]
    runs = served(drafter, requests)
    assert [run.finish_reason for run in runs] == ["length", "length", "length", "error"]
    assert isinstance(runs[BAD].error, DrafterError)
    assert re.search(rf"Period\.{hook} {LINE} raised KeyError: 'lost'", str(runs[BAD].error))


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("free_for", "Traits(free_for="),
        ("observes", "Traits(learns="),
        ("minimum_budget", "from the property foresight"),
        ("predicted_from", "from the property foresight"),
    ],
)
def test_a_method_that_nobody_asks_any_more_is_refused(tmp_path: Path, old: str, now: str) -> None:
    body = (
        PERIOD
        + f"""
    def {old}(self, *more):
        return True
"""
    )
    target, _ = tables()
    with pytest.raises(DrafterError, match=rf"Period {LINE} has a method {old}, .*{re.escape(now)}"):
        build_drafter(f"{written(tmp_path, body)}:Period", target)


def test_who_draws_in_a_way_of_its_own_must_say_so(tmp_path: Path) -> None:
    """Drawn together with other requests, its own way of drawing would be skipped without a word."""
    body = """
from foretoken.methods.drafters.model import ModelDrafter


class Own(ModelDrafter):
    def _candidates(self, tree, logits, parent, width):
        return super()._candidates(tree, logits, parent, width)

    @classmethod
    def build(cls, path, context, **options):
        return cls(context.target, target=context.target)


class Says(Own):
    draws_together = False
"""
    target, _ = tables()
    file = written(tmp_path, body)
    with pytest.raises(DrafterError, match=r"Own .* overrides _candidates: write draws_together"):
        build_drafter(f"{file}:Own", target)
    assert build_drafter(f"{file}:Says", target) is not None


def test_errors_of_ours_keep_their_class(tmp_path: Path) -> None:
    """A drafter from outside that runs out of memory has broken no rule."""
    body = bad("raise MemoryError('full')")
    target, _ = tables()
    drafter = build_drafter(f"{written(tmp_path, body)}:Bad", target)
    (run,) = served(drafter, [Request([BAD, 1, 2], max_new_tokens=12)])
    assert isinstance(run.error, MemoryError)


# -- commands --------------------------------------------------------------------------------------------------------


def test_commands_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"{written(tmp_path, PERIOD)}:Period"
    assert main(["generate", PROMPT, "--drafter", spec, "--max-new-tokens", "8", "--compare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is True
    page = str(tmp_path / "show.html")
    assert main(["show", PROMPT, "--drafter", spec, "--max-new-tokens", "8", "--out", page]) == 0
    bench = ["bench", "--drafter", spec, "--max-new-tokens", "8", "--max-prompts", "1", "--repeat", "1"]
    assert main([*bench, "--out", str(tmp_path / "run.jsonl")]) == 0
    arms = {json.loads(line).get("arm") for line in (tmp_path / "run.jsonl").read_text().splitlines()}
    assert spec in arms


@pytest.mark.parametrize("command", ["generate", "chat", "show", "parity", "bench", "batch"])
def test_a_file_that_is_not_there_is_said_before_anything_is_loaded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    more = {"batch": [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")], "generate": [PROMPT], "show": [PROMPT]}
    assert main([command, *more.get(command, []), "--drafter", "nowhere.py:Period"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line == "error: there is no file nowhere.py: give a drafter from outside as file.py:Class"


def test_a_bad_drafter_is_one_line_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"{written(tmp_path, bad('raise KeyError(1)').replace('== 3 and', '!= -1 and'))}:Bad"
    assert main(["generate", PROMPT, "--drafter", spec, "--controller", "constant,k=2"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: Bad.propose (mine.py, line ") and lines[-1].endswith("raised KeyError: 1")
    assert "Traceback" not in "".join(lines)


# -- data that names code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["{}:Period", "router,drafters=(ngram|{}:Period)"])
def test_a_profile_runs_no_code_unless_it_is_named_besides(tmp_path: Path, drafter: str) -> None:
    file = written(tmp_path, "raise SystemExit('run')\n")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"drafter": drafter.format(file), "controller": "constant,k=2"}))
    with pytest.raises(ValueError, match=r"the profile .* names code .*, which is only run when you name it"):
        ft.load("builtin", profile=profile)
    good = written(tmp_path, PERIOD, "good.py")
    assert ft.load("builtin", drafter=f"{good}:Period", profile=profile).drafter is not None


def test_a_certificate_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"{written(tmp_path, PERIOD)}:Period"
    file = tmp_path / "certificate.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPT)
    quick = ["--max-new-tokens", "6", "--samples", "0", "--prompts", str(prompts)]
    assert main(["parity", "--drafter", spec, "--certificate", str(file), *quick]) == 0
    capsys.readouterr()
    assert main(["parity", "--verify", str(file)]) == 2
    assert "names code" in capsys.readouterr().err
    assert main(["parity", "--verify", str(file), "--drafter", spec]) == 0
