"""Requests in the engine: what is refused, queues, seeds, cancelling, interrupts, rounds without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foretoken
from foretoken import registry
from foretoken.core import Budget, Context, Kind, NonFiniteLogitsError, Scores, StepRecord, TokenTree, Verdict
from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.methods.controllers.auto import AutoController
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.verifiers.compatibility import verifiers_for
from foretoken.models.base import Capabilities, CapabilityError, Feed
from foretoken.models.other.table import TableModel
from toys import engine, llamas, outputs, serve, tables

PROMPT = [0, 1, 2, 3, 0, 1]
T1 = SamplingParams(temperature=1.0)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([]), "prompt is empty"),
        (Request([0] * 30), "prompt has 30 tokens and the model's context is 30: shorten"),
        (Request([0] * 31), "context is 30: shorten"),
        (Request([0], max_new_tokens=0), "max_new_tokens must be at least 1, not 0"),
        (Request([0], max_new_tokens=-3), "max_new_tokens must be at least 1, not -3"),
        (Request([0] * 10, max_new_tokens=21), "max_new_tokens=21 exceeds .* at most 20 of 30"),
        (Request([0, 4], max_new_tokens=5), "prompt token 4 is outside the vocabulary of 4"),
        (Request([0, -1], max_new_tokens=5), "prompt token -1 is outside"),
        (Request([0], SamplingParams(logit_bias={9: 1.0}), 5), "logit_bias token 9 is outside"),
        (Request([0], max_new_tokens=5, stop=["x"]), "stop strings need a tokenizer"),
        (Request([0], max_new_tokens=5, stop=[""]), "stop"),
    ],
)
def test_bad_requests_are_refused_in_one_line(request_: Request, words: str) -> None:
    target, _ = tables(context_length=30)
    refusing = engine(target)
    with pytest.raises(ValueError, match=words) as error:
        refusing.add(request_)
    assert "\n" not in str(error.value)
    assert not refusing.busy


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        (lambda draft: ModelDrafter(draft), "point"),
        (lambda draft: ModelDrafter(draft, tree="2x2", draw="iid"), "block"),
        (lambda draft: ModelDrafter(draft, tree="2x2", draw="iid"), "rejection"),
        (lambda draft: ModelDrafter(draft, tree="2x2", draw="iid"), "without_replacement"),
        (lambda draft: ModelDrafter(draft, tree="2x2"), "multi_round"),
        (lambda draft: ModelDrafter(draft, tree="2x2"), "kseq"),
        (lambda draft: NgramDrafter(), "kseq"),
    ],
    ids=["chain-point", "tree-block", "tree-rejection", "iid-wor", "wor-multi_round", "wor-kseq", "ngram-kseq"],
)
def test_a_wrong_pair_is_refused_with_the_list_of_right_ones(
    drafter: Callable[[TableModel], Drafter], verifier: str
) -> None:
    target, draft = tables()
    built = drafter(draft)
    with pytest.raises(ValueError, match=f"verifier '{verifier}' cannot verify drafter '{built.name}'") as error:
        engine(target, built, registry.make("verifier", verifier))
    for right in verifiers_for([(built.traits.kind, built.traits.draws_trees)], greedy=False):
        assert right in str(error.value)
        engine(target, built, registry.make("verifier", right))


@pytest.mark.parametrize("name", [row.name for row in registry.rows("verifier") if not row.lossless])
def test_lossy_rules_need_to_be_allowed(name: str) -> None:
    target, _ = tables()
    with pytest.raises(ValueError, match="lossy by design and needs allow_lossy=True"):
        engine(target, NgramDrafter(), registry.make("verifier", name))
    allowed = engine(target, NgramDrafter(), registry.make("verifier", name), allow_lossy=True)
    assert len(outputs(allowed, [Request(PROMPT, T1, 9, seed=0)])[0]) == 9


def test_allowing_lossy_rules_does_not_allow_wrong_pairs() -> None:
    target, draft = tables()
    with pytest.raises(ValueError, match="cannot verify"):
        engine(target, ModelDrafter(draft), registry.make("verifier", "point"), allow_lossy=True)


def test_the_greedy_rule_refuses_sampled_requests_when_they_come() -> None:
    target, draft = tables()
    greedy = engine(target, ModelDrafter(draft), registry.make("verifier", "greedy"))
    with pytest.raises(ValueError, match="lossless at temperature 0 only"):
        greedy.add(Request(PROMPT, T1))
    assert len(outputs(greedy, [Request(PROMPT, max_new_tokens=5)])[0]) == 5


MATCH = registry.make("verifier", "match")


def test_any_lossless_rule_serves_plain_decoding_and_empty_drafts() -> None:
    target, draft = tables()
    requests = [Request(PROMPT, T1, 6, seed=seed) for seed in range(3)]
    plain = {races: outputs(engine(target, verifier=rule), requests) for races, rule in ((True, None), (False, MATCH))}
    for row in registry.rows("verifier"):
        if row.lossless and row.name != "greedy":
            rule = registry.make("verifier", row.name)
            assert outputs(engine(target, verifier=rule), requests) == plain[rule.races]
            if not rule.chains_only and Kind.IID in rule.kinds:
                empty = engine(target, ModelDrafter(draft, tree="2x2", draw="iid"), rule)
                assert len(outputs(empty, [Request(PROMPT, T1, 1, seed=0)])[0]) == 1


def failure(failing: Engine) -> Exception | None:
    """The error that ends the one request of an engine in its first round."""
    ((run, emission),) = failing.step()
    assert emission.finish_reason == run.finish_reason == "error" and not emission.token_ids and not failing.busy
    assert run.error is emission.error
    return emission.error


def test_a_tree_that_is_not_what_the_drafter_promised_is_refused() -> None:
    target, _ = tables()
    branching = ScriptedDrafter(propose=lambda context, budget: TokenTree((context.root, 1, 2), (-1, 0, 0)))
    branching.traits = replace(branching.traits, draws_trees=False)
    lying = engine(target, branching, registry.make("verifier", "block"))
    lying.add(Request(PROMPT, T1, 5, seed=0))
    assert "supports chains only" in str(failure(lying))


def test_a_tree_with_another_root_is_refused() -> None:
    target, _ = tables()
    wrong = engine(target, ScriptedDrafter(propose=lambda context, budget: TokenTree.chain(2, [1])))
    wrong.add(Request(PROMPT, max_new_tokens=5))
    assert "starts with token 2" in str(failure(wrong))


def test_a_drafter_needs_a_controller() -> None:
    with pytest.raises(ValueError, match="needs a controller"):
        Engine(tables()[0], NgramDrafter())


@pytest.mark.parametrize(
    ("gap", "drafter"),
    [
        ("rollback", NgramDrafter()),
        ("tree_mask", ScriptedDrafter(propose=lambda context, budget: TokenTree.root_only(context.root))),
        ("keep_path", ScriptedDrafter(propose=lambda context, budget: TokenTree.root_only(context.root))),
    ],
)
def test_a_target_that_cannot_is_refused_with_its_layer_type(gap: str, drafter: Drafter) -> None:
    target, _ = tables()
    target.capabilities = Capabilities(**{gap: False}, missing={gap: "layers of type 'rwkv' keep one state"})  # type: ignore[arg-type]
    with pytest.raises(CapabilityError, match=f"needs a target with {gap}: layers of type 'rwkv'"):
        engine(target, drafter)
    engine(target)  # plain decoding needs nothing


# -- the queue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_more_than_max_batch_run_together(size: int) -> None:
    target, draft = tables()
    queueing = engine(target, ModelDrafter(draft), max_batch=size)
    ids = [queueing.add(Request(PROMPT, T1, 3 + i, seed=i)) for i in range(7)]
    finished: list[int] = []
    while queueing.busy:
        for run, emission in queueing.step():
            if emission.finish_reason is not None:
                finished.append(run.id)
                assert len(run.output) == run.request.max_new_tokens
        assert len(queueing.requests.running) <= size
    assert sorted(finished) == ids
    assert queueing.step() == []


def test_requests_join_in_order_and_between_rounds() -> None:
    target, _ = tables()
    queueing = engine(target, max_batch=2)
    first, second, third = (queueing.add(Request(PROMPT, max_new_tokens=n)) for n in (2, 5, 5))
    assert [run.id for run, _ in queueing.step()] == [first, second]
    assert [run.id for run, _ in queueing.step()] == [first, second]
    assert [run.id for run, _ in queueing.step()] == [second, third]


def test_a_controller_is_told_who_waits_and_how_much_is_left() -> None:
    class Listening(ConstantController):
        def __init__(self) -> None:
            super().__init__(k=2)
            self.heard: list[tuple[int, int, int]] = []

        def observe(self, context: Context, record: StepRecord) -> None:
            self.heard.append((record.request_id, record.waiting, context.max_length))

    target, draft = tables()
    controller = Listening()
    queueing = engine(target, ModelDrafter(draft), controller=controller, max_batch=1)
    first, second = (queueing.add(Request(PROMPT, T1, length, seed=1)) for length in (6, 9))
    while queueing.busy:
        queueing.step()
    assert set(controller.heard) == {(first, 1, len(PROMPT) + 6), (second, 0, len(PROMPT) + 9)}


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_a_seed_gives_the_same_output_in_any_company(drafter: str) -> None:
    target, draft = tables()
    build: dict[str, Callable[[], Drafter | None]] = {
        "model": lambda: ModelDrafter(draft, tree="2x2"),
        "ngram": NgramDrafter,
        "none": lambda: None,
    }
    request = Request(PROMPT, T1, 25, seed=1234)
    alone = outputs(engine(target, build[drafter]()), [request])[0]
    for size in (1, 2, 5):
        company = [Request([1, 2] * i + [3], T1, 5 * i + 1, seed=i) for i in range(1, 5)]
        for place in (0, 2, 4):
            texts = outputs(
                engine(target, build[drafter](), max_batch=size), [*company[:place], request, *company[place:]]
            )
            assert texts[place] == alone


def test_different_seeds_and_no_seeds_differ() -> None:
    target, draft = tables()
    seeds = [*range(8), None, None]
    texts = outputs(engine(target, ModelDrafter(draft)), [Request(PROMPT, T1, 30, seed=seed) for seed in seeds])
    assert len({tuple(tokens) for tokens in texts}) == len(seeds)


def test_cancelling() -> None:
    target, draft = llamas()
    cancelling = engine(target, ModelDrafter(draft), max_batch=2)
    ids = [cancelling.add(Request([3, 4, 5], T1, 20, seed=i)) for i in range(4)]
    alone = outputs(engine(target, ModelDrafter(draft)), [Request([3, 4, 5], T1, 20, seed=1)])[0]
    cancelling.step()
    cancelling.cancel(ids[0])  # running
    cancelling.cancel(ids[3])  # waiting
    cancelling.cancel(99)  # unknown: nothing happens
    assert [cancelling.requests.holds(i) for i in ids] == [False, True, True, False]
    done = {}
    while cancelling.busy:
        for run, emission in cancelling.step():
            if emission.finish_reason is not None:
                done[run.id] = run.output
    assert sorted(done) == [ids[1], ids[2]]
    assert done[ids[1]] == alone
    assert not target._sequences and not draft._sequences


def test_close_drops_everything() -> None:
    target, draft = llamas()
    closing = engine(target, ModelDrafter(draft), max_batch=1)
    for i in range(3):
        closing.add(Request([3, 4, 5], T1, 20, seed=i))
    closing.step()
    closing.close()
    assert not closing.busy and not target._sequences and not draft._sequences


# -- interrupts ------------------------------------------------------------------------------------------------------


class Fuse:
    """Raises at the n-th call of whatever it is put into."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.left, self.error = at, error

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def fused(method: Any, fuse: Fuse) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        fuse.burn()
        result = method(self, *args, **kwargs)
        fuse.burn()
        return result

    return call


PLACES: list[tuple[type[Any], str]] = [
    (ModelDrafter, "start"),
    (ModelDrafter, "propose_batch"),
    (TableModel, "forward"),
    (TableModel, "commit"),
    (Scores, "p"),
    (Scores, "choice"),
    (ConstantController, "budget"),
]


@pytest.mark.parametrize("at", [1, 2, 5, 8])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].__name__}.{place[1]}")
def test_an_interrupt_leaves_the_engine_usable(
    place: tuple[type[Any], str], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it strikes: requests go on as if nothing had happened, or are gone; new ones are served."""
    target, draft = tables()
    coupled = place != (Scores, "p")  # coupled requests make no distributions
    rule = None if coupled else registry.make("verifier", "traversal")
    build = lambda: engine(target, ModelDrafter(draft, tree="2x2"), rule, max_batch=3)  # noqa: E731
    requests = [Request(PROMPT, T1, 14 + i, seed=i) for i in range(4)]
    alone = outputs(build(), requests)
    struck = build()
    ids = [struck.add(request) for request in requests]
    cls, name = place
    with monkeypatch.context() as patch:
        patch.setattr(cls, name, fused(getattr(cls, name), Fuse(at)))
        done: dict[int, list[int]] = {}
        interrupts = 0
        while struck.busy:
            try:
                gained = struck.step()
            except KeyboardInterrupt:
                interrupts += 1
                for run in struck.requests.running:
                    assert run.sequence.tokens == run.context.tokens[:-1] and not run.sequence.scratch_tokens
                continue
            done |= {run.id: run.output for run, emission in gained if emission.finish_reason is not None}
    assert interrupts == 1
    assert set(done) <= set(ids)
    # What goes on has lost the uniforms of the broken round, no more: it is complete and of the right length.  A text
    # that its seed fixes has lost nothing.
    assert all(len(done[i]) == requests[ids.index(i)].max_new_tokens for i in done)
    assert not coupled or all(done[i] == alone[ids.index(i)] for i in done)
    assert outputs(struck, requests) == alone


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("new_tokens", [1, 5])
def test_no_token_is_lost_when_an_interrupt_strikes_before_a_round_s_tokens_are_given_out(
    at: int, new_tokens: int
) -> None:
    """A request goes on with all of its tokens told, or is gone; also in the round of the step that admitted it."""
    fuse = Fuse(at)
    target, draft = tables()
    struck = engine(target, ModelDrafter(draft), on_round=lambda *_: fuse.burn())
    struck.add(Request(PROMPT, max_new_tokens=new_tokens))
    told: list[int] = []
    outcome = None
    while struck.busy:
        try:
            for run, emission in struck.step():
                told += emission.token_ids
                outcome = run.output if emission.finish_reason else outcome
        except KeyboardInterrupt:
            continue
    assert outcome is None or (outcome == told and len(told) == new_tokens)


def test_greedy_requests_survive_an_interrupt_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas()
    requests = [Request([3 + i, 4, 5], max_new_tokens=20) for i in range(3)]
    alone = outputs(engine(target), requests)
    struck = engine(target, ModelDrafter(draft))
    ids = [struck.add(request) for request in requests]
    struck.step()
    with monkeypatch.context() as patch:
        patch.setattr(Scores, "choice", fused(Scores.choice, Fuse(2)))
        with pytest.raises(KeyboardInterrupt):
            struck.step()
    done = {}
    while struck.busy:
        done |= {run.id: run.output for run, emission in struck.step() if emission.finish_reason is not None}
    assert [done[i] for i in ids] == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_of_one_request_do_not_end_the_others(temperature: float) -> None:
    """The failing request ends: a round that failed for all is tried for each, on the same scores."""

    def poisoned(prefix: tuple[int, ...]) -> Sequence[float]:
        return [float("nan")] * 2 if prefix[0] == 1 and len(prefix) > 4 else [0.3, 0.7]

    target = TableModel(poisoned, 2)
    shared = engine(target)
    params = SamplingParams(temperature=temperature)
    good, bad = (shared.add(Request([first, 0], params, 6, seed=0)) for first in (0, 1))
    for _ in range(3):
        shared.step()
    ended = {run.id: emission for run, emission in shared.step()}
    assert isinstance(ended[bad].error, NonFiniteLogitsError) and ended[good].finish_reason is None
    done = {}
    while shared.busy:
        done |= {run.id: len(run.output) for run, emission in shared.step() if emission.finish_reason is not None}
    assert done == {good: 6}


# -- rounds without drafts -------------------------------------------------------------------------------------------


class Untouchable(NgramDrafter):
    """Fails as soon as anything of it runs."""

    def _update(self, context: Context) -> Any:
        raise AssertionError("drafter code ran")

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        raise AssertionError("drafter code ran")

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        raise AssertionError("drafter code ran")

    def finish(self, context: Context) -> None:
        raise AssertionError("drafter code ran")


@pytest.mark.parametrize("controller", [ConstantController(k=0), ConstantController(nodes=0)], ids=["k=0", "nodes=0"])
@pytest.mark.parametrize("params", [SamplingParams(), T1], ids=["greedy", "sampled"])
def test_no_drafter_code_runs_at_k_0(controller: Controller, params: SamplingParams) -> None:
    target, _ = tables()
    request = Request(PROMPT, params, 10, seed=0)
    (run,) = serve(engine(target, Untouchable(), controller=controller), [request])
    assert run.output == outputs(engine(target), [request])[0]
    assert run.stats.num_draft_tokens == 0 and set(run.origins) == {"plain"}


class EveryOther(Controller):
    """Drafts in every second round."""

    name = "every_other"

    def budget(self, context: Context, batch_size: int) -> Budget:
        turn = context.state[self] = not context.state.get(self, True)
        return Budget(3 if turn else 0)


def test_no_proposal_is_asked_for_in_a_round_of_k_0() -> None:
    depths: list[int] = []

    class Counting(ModelDrafter):
        def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
            depths.extend(budget.max_depth for budget in budgets)
            return super().propose_batch(contexts, budgets)

    target, draft = tables()
    (run,) = serve(engine(target, Counting(draft), controller=EveryOther()), [Request(PROMPT, max_new_tokens=30)])
    assert run.output == outputs(engine(target), [Request(PROMPT, max_new_tokens=30)])[0]
    assert 0 not in depths and len(depths) < run.stats.num_drafts < 2 * len(depths) + 2


def test_the_controller_sees_every_round() -> None:
    records: list[StepRecord] = []

    class Watching(ConstantController):
        def observe(self, context: Context, record: StepRecord) -> None:
            records.append(record)

    target, draft = tables()
    runs = serve(
        engine(target, ModelDrafter(draft, k=3), controller=Watching()),
        [Request(PROMPT, T1, 20, seed=i) for i in range(2)],
    )
    for run in runs:
        run_records = [record for record in records if record.request_id == run.id]
        assert len(run_records) == run.stats.num_drafts
        assert sum(record.num_accepted_tokens for record in run_records) == run.stats.num_accepted_tokens
        assert sum(record.num_draft_tokens for record in run_records) == run.stats.num_draft_tokens
        assert all(record.num_nodes == record.num_draft_tokens + 1 for record in run_records)
    assert records[0].batch_size == 2


@pytest.mark.parametrize("most", [0, 2, None])
def test_a_controller_learns_nothing_from_drafts_that_a_request_or_its_end_shortened(most: int | None) -> None:
    """Positions that a request does not allow were not drafted: they are no misses, and no draft is not the drafter's
    silence; nor is it in a round for the last token."""
    target, draft = tables()
    drafter, controller = ModelDrafter(draft, k=4), AutoController()
    free = DrafterCost(call_s=1e-6, step_s=1e-6, survival=[0.9, 0.8, 0.7, 0.6])
    controller.start_from(RoundCosts(TargetCost({1: 1.0, 64: 1.0}), {drafter.limits.name: free}))
    learning = engine(target, drafter, controller=controller)
    prior = controller.acceptance.population[False][0]
    at_first = [hits / tries for hits, tries in zip(prior.hits, prior.tries, strict=True)]
    serve(learning, [Request(PROMPT, T1, 40, seed=i, max_draft_tokens=most) for i in range(6)])
    tallies = [tally for by_member in controller.acceptance.population.values() for tally in by_member]
    assert sum(tally.bare for tally in tallies) == 0
    shares = [hits / tries for hits, tries in zip(tallies[1].hits, tallies[1].tries, strict=True)]
    learned = [abs(share - known) > 1e-9 for share, known in zip(shares, at_first, strict=True)]
    assert learned == [position < (4 if most is None else most) for position in range(4)]


def test_only_one_target_call_a_round() -> None:
    target, draft = tables()
    serve(engine(target, ModelDrafter(draft, k=3)), [Request(PROMPT, max_new_tokens=1) for _ in range(3)])
    before = target.forward_calls
    runs = serve(engine(target, ModelDrafter(draft, k=3)), [Request([0], max_new_tokens=12) for _ in range(3)])
    assert target.forward_calls - before == max(run.stats.num_drafts for run in runs)


def test_taps_reach_the_drafter() -> None:
    """Hidden states of committed positions, root first, whatever path was accepted."""
    seen: list[tuple[int, Tensor]] = []

    class Tapped(ModelDrafter):
        taps = ("last",)

        def start(self, context: Context) -> None:
            super().start(context)
            seen.append((0, context.hidden["last"]))

        def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
            seen.append((context.hidden_start, context.hidden["last"]))

    target, draft = llamas()
    (run,) = serve(engine(target, Tapped(draft, tree="2x2")), [Request([3, 4, 5, 6], max_new_tokens=16)])
    sequence = target.open()
    whole = target.forward([Feed(sequence, run.context.tokens)], ["last"])[0].taps["last"]
    assert len(seen) > 3
    for start, rows in seen:
        torch.testing.assert_close(rows, whole[start : start + len(rows)], rtol=0, atol=1e-11)


def test_a_lossy_rule_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="'typical' is lossy by design and needs allow_lossy=True"):
        foretoken.load("no/such/folder", verifier="typical")
