"""Every drafter keeps what it learns across requests within the tenant, and kept texts change no draft."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from cases import CASES, Case, bpd, eagle3, feature_drafter, hydra, jump, kangaroo, medusa
from matrix import rows

from foretoken import load
from foretoken.core import Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request, Running
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.eagle import EagleDrafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.known import KnownDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.mtp import MtpDrafter
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.methods.drafters.nets.mtp import MtpConfig, MtpNet
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.ngram_cache import NgramCacheDrafter
from foretoken.methods.drafters.online import OnlineDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.drafters.suffix import SuffixDrafter
from foretoken.methods.drafters.swift import SwiftDrafter
from foretoken.methods.drafters.tenants import Tenants
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models.base import LanguageModel
from toys import engine, llamas, serve

ROOM = 2**24
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3, 1, 2], [9, 1, 2, 3, 4, 9, 1, 2, 30, 17, 12] * 3]
Build = Callable[[LanguageModel, LanguageModel], Drafter]

SHARING: dict[str, Build] = {
    "suffix": lambda target, draft: SuffixDrafter(k=6),
    "suffix tree": lambda target, draft: SuffixDrafter(k=6, tree=True, factor=2.0),
    "ngram_cache": lambda target, draft: NgramCacheDrafter(k=3),
    "recycling": lambda target, draft: RecyclingDrafter(nodes=8),
    "recycling adapt": lambda target, draft: RecyclingDrafter(nodes=8, adapt=2),
    "swift": lambda target, draft: SwiftDrafter(target, k=3, threshold=0.1, nodes=8, keep=0, window=3),
    "online": lambda target, draft: OnlineDrafter(
        draft, k=3, target=target, every=1, lr=1e-1, budget=1.0, thread=False
    ),
    "ensemble": lambda target, draft: EnsembleDrafter([ModelDrafter(draft, k=2), SuffixDrafter(k=4)]),
    "router": lambda target, draft: RouterDrafter([RecyclingDrafter(nodes=6), NgramDrafter(n=2)]),
    "known": lambda target, draft: KnownDrafter(SuffixDrafter(k=6)),
    "cascade": lambda target, draft: CascadeDrafter(draft, RecyclingDrafter(nodes=6), inner_rule, k=4),
}
"""Drafters that learn from one request for the next."""
CHANGING = {name: build for name, build in SHARING.items() if name != "cascade"}
"""Those whose drafts show it: what works inside a cascade changes its time alone."""


def requests(salt: str) -> list[Request]:
    """Both tenants send the same prompts, which is where the other's texts would help most."""
    return [
        Request(prompt, SamplingParams(temperature=float(i % 2)), 24, seed=i, cache_salt=salt, explain=True)
        for i, prompt in enumerate(PROMPTS)
    ]


def drafts(serving: Engine, salt: str) -> list[list[list[int]]]:
    """Every tree that was scored for a tenant's requests, which come one after the other, and what was written."""
    traces = []
    for request in requests(salt):
        (run,) = serve(serving, [request])
        assert run.error is None, run.error
        traces.append([*(trace.tokens for trace in run.rounds), run.output])
    return traces


def make(build: Build) -> Engine:
    target, draft = llamas()
    return engine(target, build(target, draft), prefix_bytes=ROOM)


every_drafter = pytest.mark.parametrize(
    "build",
    [*(case.build for _, case in rows()), *SHARING.values()],
    ids=[*(f"{name}.{case.label}" for name, case in rows()), *(f"sharing {name}" for name in SHARING)],
)


@every_drafter
def test_nothing_of_one_tenant_is_drafted_for_another(build: Build) -> None:
    fresh, used = make(build), make(build)
    for _ in range(2):
        drafts(used, "a")
    assert drafts(used, "b") == drafts(fresh, "b")


@pytest.mark.parametrize("build", CHANGING.values(), ids=CHANGING)
def test_a_tenant_learns_from_itself(build: Build) -> None:
    """The control of the test above, which could not tell sharing from not sharing if nothing were learnt."""
    salt = "" if build is SHARING["online"] else "a"
    serving = make(build)
    first = [drafts(serving, salt) for _ in range(3)][-1]
    again = make(build)
    assert first != drafts(again, salt), "nothing was learned"
    assert [trace[-1] for trace in first] == [trace[-1] for trace in drafts(again, salt)], "a draft changed the text"


def test_every_drafter_that_shares_is_among_the_tested() -> None:
    """One whose class can share state by its options is tested with these options."""
    shared = {build(*llamas()).name for build in SHARING.values()}
    assert all(build(*llamas()).traits.shares_state for build in SHARING.values())
    for name, case in rows():
        assert not case.build(*llamas()).traits.shares_state or name in shared


def test_salted_requests_teach_an_online_draft_model_only_where_that_is_asked_for() -> None:
    for salted, salt, updates in ((False, "a", 0), (True, "a", 3), (False, "", 3)):
        target, draft = llamas()
        options: dict[str, Any] = {"every": 1, "lr": 1e-2, "budget": 1.0, "salted": salted, "thread": False}
        drafter = OnlineDrafter(draft, k=3, target=target, **options)
        drafts(engine(target, drafter), salt)
        report = drafter.report()
        assert report["updates"] == updates and report["serving_s"] > 0


# -- who is remembered -----------------------------------------------------------------------------------------------


def test_the_tenant_that_was_away_longest_is_forgotten() -> None:
    tenants: Tenants[list[int]] = Tenants(list, most=2)
    tenants.of("a").append(1)
    tenants.of("b").append(2)
    tenants.of("a").append(3)
    assert tenants.of("c") == [] and len(tenants) == 2
    assert tenants.of("a") == [1, 3] and tenants.of("b") == []
    tenants.clear()
    assert tenants.of("a") == []


def test_tenants_together_keep_to_their_room() -> None:
    tenants: Tenants[list[int]] = Tenants(list, most=10, size=len, room=5)
    for name, size in (("a", 2), ("b", 3), ("c", 4)):
        tenants.of(name).extend(range(size))
    assert [len(tenants.of(name)) for name in ("c", "d")] == [4, 0]
    assert len(tenants.of("b")) == 0 and len(tenants.of("a")) == 0


def test_tenants_that_grow_together_keep_to_their_room() -> None:
    tenants: Tenants[list[int]] = Tenants(list, most=10, size=len, room=5)
    for _ in range(4):  # all of them are known from the first time on
        for name in ("a", "b", "c"):
            tenants.of(name).extend([1, 1])
    assert len(tenants.of("c")) + len(tenants.of("b")) <= 5


@pytest.mark.parametrize(("cls", "newer"), [(SuffixDrafter, 30), (NgramCacheDrafter, 44)])
def test_a_small_tenant_leaves_a_large_one_its_newer_part(
    cls: type[SuffixDrafter | NgramCacheDrafter], newer: int
) -> None:
    drafter = cls(tokens=100)

    def learn(salt: str, text: list[int]) -> int:
        context = Context(0, [0, *text], 1, Sampler(SamplingParams()), Rng(0), salt=salt)
        drafter.start(context)
        drafter.finish(context)
        return drafter.tenants.of(salt).size

    sizes = [learn("", [2 * i, 2 * i + 1] * 5) for i in range(8)]
    assert sizes[-1] >= 80
    assert learn("a", [3] * 30) >= 30
    assert drafter.tenants.of("").size == newer
    for salt in "bcdefg":
        learn(salt, [4] * 20)
    assert drafter.tenants.of("").size == 0, "whoever was away longest is dropped at last"


def test_a_flood_of_salts_keeps_memory_bounded() -> None:
    target, _ = llamas()
    suffix, recycling = SuffixDrafter(k=4, tokens=300), RecyclingDrafter(nodes=6)
    serving = engine(target, EnsembleDrafter([suffix, recycling]))
    for i in range(100):
        serve(serving, [Request([1, 2, 3, i % 32], max_new_tokens=12, cache_salt=f"salt {i}")])
    assert len(recycling.tenants) == 16
    kept = [suffix.tenants.of(f"salt {i}").size for i in range(99, 70, -1)]
    assert kept[0] > 0 and kept[-1] == 0


# -- kept texts ------------------------------------------------------------------------------------------------------


def computed(run: Running) -> tuple[int, int]:
    return run.stats.num_prompt_tokens_computed, run.stats.num_prompt_tokens


def traced(serving: Engine, prompt: list[int]) -> tuple[Running, list[list[int]]]:
    """A run and the trees of its rounds."""
    (run,) = serve(serving, [Request(prompt, max_new_tokens=16, explain=True)])
    assert run.error is None, run.error
    return run, [trace.tokens for trace in run.rounds]


def second_turn(keeping: Engine, cold: Engine, first: list[int], more: list[int]) -> None:
    """Where a beginning was taken over, by the target and by its drafter, drafts and text are those of an engine that
    read all of it."""
    (run, trees), (_, expected) = traced(keeping, first), traced(cold, first)
    assert trees == expected
    prompt = [*first, *run.output, *more]
    (second, trees), (fresh, expected) = traced(keeping, prompt), traced(cold, prompt)
    assert second.output == fresh.output and trees == expected
    assert computed(second) == (len(more) + 1, len(prompt)) and computed(fresh) == (len(prompt), len(prompt))
    reads, anew = (run.stats.num_draft_prompt_tokens_computed for run in (second, fresh))
    if keeping.drafter is not None and not keeping.drafter.traits.shares_state:  # else its weights may have changed
        assert reads < anew / 2 or reads == anew == 0


@pytest.mark.parametrize(("name", "case"), list(rows()), ids=[f"{name}.{case.label}" for name, case in rows()])
def test_drafts_after_a_kept_text_are_those_after_a_text_that_was_read(name: str, case: Case) -> None:
    engines = []
    for room in (ROOM, 0):
        target, draft = llamas()
        engines.append(engine(target, case.build(target, draft), prefix_bytes=room))
    second_turn(*engines, [(7 * i) % 31 for i in range(40)], [3, 1, 2])


@cache
def builtin() -> Any:
    return load("builtin", drafter=None, dtype="float32", graphs=False)


NETS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "eagle": lambda target: feature_drafter(EagleDrafter, EagleNet, EagleConfig, target),
    "eagle3": lambda target: eagle3(target, share_head=False),
    "mtp": lambda target: feature_drafter(MtpDrafter, MtpNet, MtpConfig, target),
    "medusa": lambda target: medusa(target, 6, random=False),
    "hydra": lambda target: hydra(target, 6, random=False, prefix=True),
    "bpd": lambda target: bpd(target, random=False),
    "kangaroo": lambda target: kangaroo(target),
    "jump": lambda target: jump(target),
}


@pytest.mark.parametrize("name", list(NETS))
def test_hidden_states_of_a_prompt_are_kept_with_it(name: str) -> None:
    """On a trained target in float32."""
    llm = builtin()
    first = llm.encode("def fibonacci(n):\n    if n < 2:\n        return n\n" * 4)
    engines = [engine(llm.target, NETS[name](llm.target), prefix_bytes=room) for room in (ROOM, 0)]
    second_turn(*engines, first, llm.encode("# and"))


HEADS = [(name, case) for name, case in rows() if name in ("eagle", "eagle3", "mtp", "hydra", "kangaroo")]


@pytest.mark.parametrize(("name", "case"), HEADS, ids=[f"{name}.{case.label}" for name, case in HEADS])
def test_heads_read_a_long_text_in_pieces_and_none_without_drafts(name: str, case: Case) -> None:
    prompt = [(7 * i + i * i // 3) % 31 for i in range(90)]
    (plain,) = serve(engine(llamas()[0]), [Request(prompt, max_new_tokens=24)])
    target, draft = llamas()
    serving = engine(target, case.build(target, draft), prefix_bytes=ROOM, prefill_chunk=16)
    for most, tokens in ((0, 24), (None, 1), (None, 24)):
        request = Request(prompt, max_new_tokens=tokens, max_draft_tokens=most, explain=True)
        (run,) = serve(serving, [request])
        assert run.output == plain.output[:tokens]
        read = run.stats.num_draft_prompt_tokens_computed
        if most == 0 or tokens == 1:
            assert read == 0 and run.stats.num_draft_tokens == 0
        elif read or name != "hydra":  # which reads nothing without a prefix layer
            waited = next(i for i, trace in enumerate(run.rounds) if len(trace.tokens) > 1)
            assert waited >= 1 and 89 <= read <= 90 + waited


def test_all_drafters_have_a_case() -> None:
    assert {name for name, _ in rows()} == set(CASES)
