"""Structured output fits its grammar and is what plain decoding writes; hostile grammars are refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foretoken as ft
from foretoken.llm import Llm

pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
jsonschema = pytest.importorskip("jsonschema")

from llguidance import LLMatcher  # noqa: E402

from foretoken.core import Budget, Context, Rng, Scores, TokenTree, Verdict  # noqa: E402
from foretoken.core.sampling import Sampler, SamplingParams  # noqa: E402
from foretoken.engine.processors import OfAnswer  # noqa: E402
from foretoken.methods.drafters.base import Drafter, Traits  # noqa: E402
from foretoken.methods.drafters.known import KnownDrafter  # noqa: E402
from foretoken.server.grammar import checked_grammar, compile_constraint  # noqa: E402
from foretoken.server.grammar.compiling import LIMITS, TRIAL, _tokenizers  # noqa: E402
from foretoken.server.grammar.constraint import GrammarConstraint  # noqa: E402
from foretoken.server.grammar.trial import Trial  # noqa: E402
from foretoken.server.inputs import constraints_of  # noqa: E402
from foretoken.server.known_formats import FORMATS, without_unknown_formats  # noqa: E402
from foretoken.server.schemas import CompletionRequest  # noqa: E402
from foretoken.server.serving import warm_up  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "A person as JSON: "
NOTHING_YET = torch.zeros(1, 0, dtype=torch.long)


@pytest.fixture(scope="module")
def plain() -> Llm:
    return ft.load("builtin", None, dtype="float32", prefix_cache=False)


def speculative(plain: Llm, drafter: str) -> Llm:
    built = ft.loading.build_drafter(drafter, plain.target, tokenizer=plain.tokenizer)  # type: ignore[attr-defined]
    from foretoken.llm import assemble

    return assemble(plain.target, built, "auto", "constant", plain.tokenizer)


def constraint(llm: Llm, kind: str = "json_schema", spec: Any = SCHEMA) -> GrammarConstraint:
    return compile_constraint(kind, spec, llm.tokenizer, llm.target.vocab_size)


@pytest.mark.parametrize("drafter", ["ngram", "model,k=4", "known,inner=(model,k=3)", "model,tree=2x2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_fits_and_is_plain_decodings(plain: Llm, drafter: str, temperature: float) -> None:
    fast = speculative(plain, drafter)
    for seed in range(3):
        options: dict[str, Any] = {"max_new_tokens": 80, "temperature": temperature, "seed": seed}
        expected = plain.generate(PROMPT, constraint=constraint(plain), **options)
        output = fast.generate(PROMPT, constraint=constraint(plain), **options)
        assert output.token_ids == expected.token_ids
        assert output.finish_reason == "eos"
        jsonschema.validate(json.loads(output.text), SCHEMA)


@pytest.mark.parametrize("drafter", [None, "ngram", "model,k=4", "known,inner=(model,k=3)", "model,tree=2x2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_grammar_wins_over_the_least_length(plain: Llm, drafter: str | None, temperature: float) -> None:
    """The end of the text lies inside drafts that go on, and before ``min_tokens``."""
    llm = plain if drafter is None else speculative(plain, drafter)
    options: dict[str, Any] = {"max_new_tokens": 80, "temperature": temperature, "seed": 2}
    expected = plain.generate(PROMPT, constraint=constraint(plain), **options)
    assert expected.finish_reason == "eos" and len(expected.token_ids) < 70
    for more in ({"min_tokens": 70}, {"ignore_eos": True}):
        output = llm.generate(PROMPT, constraint=constraint(plain), **options, **more)
        assert (output.token_ids, output.finish_reason) == (expected.token_ids, "eos")
    longer = llm.generate(PROMPT, constraint=constraint(plain, "regex", "[a-z ]{3,40}"), **options, min_tokens=12)
    again = plain.generate(PROMPT, constraint=constraint(plain, "regex", "[a-z ]{3,40}"), **options, min_tokens=12)
    assert longer.token_ids == again.token_ids
    assert len(longer.token_ids) > 12 or len(longer.text) == 40


@pytest.mark.parametrize("drafter", [None, "ngram", "model,k=4", "known,inner=(model,k=3)"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_the_allowed_tokens_cannot_spell(plain: Llm, drafter: str | None, temperature: float) -> None:
    llm = plain if drafter is None else speculative(plain, drafter)
    letters = [spelled(plain, letter)[0] for letter in "abc"]
    options: dict[str, Any] = {"allowed_token_ids": letters, "temperature": temperature, "seed": 2}
    for spec, words in (("[xyz]+", "allow no first token"), ("[abc]{3}[xyz]", "allow no token after 3 generated")):
        with pytest.raises(ValueError, match=words) as error:
            llm.generate(PROMPT, constraint=constraint(plain, "regex", spec), **options)
        assert "the constraint and allowed_token_ids" in str(error.value)
    output = llm.generate(PROMPT, constraint=constraint(plain, "regex", "[abc]{3}x?"), **options)
    assert len(output.text) == 3 and output.finish_reason == "eos"


def test_forced_tokens_are_drafted_and_accepted(plain: Llm) -> None:
    options: dict[str, Any] = {"max_new_tokens": 80, "temperature": 1.0, "seed": 5}
    without = plain.generate(PROMPT, constraint=constraint(plain), **options)
    known = speculative(plain, "known").generate(PROMPT, constraint=constraint(plain), **options)
    assert known.token_ids == without.token_ids
    assert known.stats.mean_acceptance_length > 1.3
    assert known.stats.acceptance_rate > 0.8
    assert known.stats.num_drafts < without.stats.num_drafts


def test_a_batch_of_different_grammars(plain: Llm) -> None:
    fast = speculative(plain, "known,inner=ngram")
    specs = [("regex", r"[0-9]{3}-[a-f]{2}"), ("json_object", None), ("grammar", 'start: "yes" | "no"')]
    requests = [
        plain.request(PROMPT, constraint=constraint(plain, *spec), max_new_tokens=24, temperature=1.0, seed=i)
        for i, spec in enumerate(specs)
    ]
    alone = [plain._run([request])[0] for request in requests]
    again = [
        plain.request(PROMPT, constraint=constraint(plain, *spec), max_new_tokens=24, temperature=1.0, seed=i)
        for i, spec in enumerate(specs)
    ]
    together = fast._run(again)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert together[2].text in ("yes", "no")
    assert together[1].text.lstrip().startswith("{")


def test_one_constraint_for_several_requests(plain: Llm) -> None:
    """Prompts of different lengths, and a stream that begins while another is written."""
    prompts, options = ["A person: ", "Write one person as JSON and nothing else: "], {"max_new_tokens": 24}
    alone = [plain.generate(prompt, constraint=constraint(plain), **options).token_ids for prompt in prompts]
    shared = constraint(plain)
    assert [output.token_ids for output in plain.generate(prompts, constraint=shared, **options)] == alone
    first = plain.stream(prompts[0], constraint=shared, **options)
    written = list(next(first).token_ids)
    second = [token for part in plain.stream(prompts[1], constraint=shared, **options) for token in part.token_ids]
    assert [[*written, *(token for part in first for token in part.token_ids)], second] == alone


def test_every_prefix_is_answered_as_if_it_were_the_first(plain: Llm) -> None:
    """The processor is a pure function of the prefix: branches may be visited in any order."""
    moving = constraint(plain)
    texts = ['{"name": "x", "age"', '{"name"', "", '{"name": "xy', '{"name": "x", "age": 1', "["]
    scores = torch.zeros(1, plain.target.vocab_size)
    for text in [*texts, *reversed(texts)]:
        ids = plain.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        fresh = constraint(plain)
        output = torch.tensor([ids], dtype=torch.long)
        expected = fresh(output, scores)
        assert torch.equal(moving(output, scores), expected)
        assert torch.isfinite(expected).any()


def test_a_grammar_by_enumeration(plain: Llm) -> None:
    """The distribution is the target's own, restricted to what may follow and normalised."""
    rule = constraint(plain, "regex", "(ab|ac|b)")
    scores = torch.randn(1, plain.target.vocab_size)
    masked = rule(NOTHING_YET, scores)
    allowed = {plain.tokenizer.decode([i]) for i in torch.isfinite(masked[0]).nonzero().flatten().tolist()}  # type: ignore[union-attr]
    assert allowed == {"a", "b", "ab", "ac"}
    inside = torch.isfinite(masked)
    assert torch.equal(masked[inside], scores[inside])


def test_logits_that_are_wider_than_the_tokenizer(plain: Llm) -> None:
    wide = plain.target.vocab_size + 100
    rule = compile_constraint("regex", "[a-z]+", plain.tokenizer, wide)
    masked = rule(NOTHING_YET, torch.zeros(1, wide))
    assert not torch.isfinite(masked[0, plain.target.vocab_size :]).any()


TOLD = {
    *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri", "time"),
    *(
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    ),
    *("base64url", "binary", "byte", "decimal", "json-string", "password", "path", "url"),
}
"""Formats that JSON Schema, OpenAPI and Pydantic know."""


def test_formats_that_are_enforced_are_those_that_llguidance_knows() -> None:
    def known(name: str) -> bool:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        return not LLMatcher.validate_grammar(grammar)

    assert {name for name in TOLD if known(name)} == FORMATS


def test_another_format_is_an_annotation(plain: Llm) -> None:
    """It holds wherever a schema stands; a property of that name and values that look like a schema are kept."""
    secret = {"type": "string", "format": "password"}
    value = {"format": "password"}
    schema: dict[str, Any] = {
        "$defs": {"format": secret},
        "type": "object",
        "properties": {"format": {"$ref": "#/$defs/format"}, "list": {"type": "array", "items": secret}},
        "patternProperties": {"^x": {"anyOf": [secret, {"type": "null"}]}},
        "required": ["format"],
        "default": value,
        "examples": [value],
    }
    cleaned = without_unknown_formats(schema)
    text = {"type": "string"}
    assert cleaned["$defs"] == {"format": text} and cleaned["properties"]["list"]["items"] == text
    assert cleaned["patternProperties"] == {"^x": {"anyOf": [text, {"type": "null"}]}}
    assert (cleaned["properties"]["format"], cleaned["default"], cleaned["examples"]) == (
        {"$ref": "#/$defs/format"},
        value,
        [value],
    )
    assert schema["$defs"] == {"format": secret}
    rule = constraint(plain, "json_schema", schema)
    written = spelled(plain, '{"format": "any", "list": ["x"], "x": null}')
    assert rule.fits([], written) == len(written) and rule.may_end(written)
    only = constraint(plain, "json_schema", {"const": value})
    written = spelled(plain, '{"format": "password"}')
    assert only.fits([], written) == len(written) and only.may_end(written)


def test_a_known_format_is_enforced_and_one_that_is_no_text_is_refused(plain: Llm) -> None:
    date = constraint(plain, "json_schema", {"type": "string", "format": "date"})
    wrong = spelled(plain, '"yesterday"')
    assert date.fits([], wrong) < len(wrong)
    with pytest.raises(ValueError, match="format"):
        constraint(plain, "json_schema", {"type": "string", "format": 5})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: list[tuple[str, Any]] = [
    ("json_schema", nested(70)),
    ("json_schema", "{not json"),
    ("json_schema", {"type": "no such type"}),
    ("json_schema", 5),
    ("json_schema", {"$ref": "https://example.com/schema.json"}),
    ("json_schema", {"enum": ["x" * 70_000]}),
    ("regex", "(unclosed"),
    ("regex", ""),
    ("regex", "a" * 70_000),
    ("grammar", "start: nothing"),
    ("grammar", "this is no grammar"),
    ("xml", "<a/>"),
    ("json_schema", {"$ref": "#"}),
    ("json_schema", "[" * 60_000),
    ("json_schema", '{"const": NaN}'),
    ("json_schema", {"const": "\ud800"}),
    ("json_schema", {"type": "integer", "multipleOf": 999_983}),
    ("json_schema", {"type": "integer", "minimum": 10**300}),
    ("json_schema", {"allOf": [{"oneOf": [{"const": i} for i in range(4)]} for _ in range(12)]}),
    ("regex", ".*" * 20_000),
    ("regex", "(" * 30_000 + ")" * 30_000),
    ("regex", "(?=x)y"),
    ("regex", "\ud800"),
    ("grammar", "start: a\na: b\nb: a"),
    ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
]


def test_a_grammar_that_ended_the_trial_leaves_it_working(plain: Llm) -> None:
    with pytest.raises(ValueError, match="too much time or memory"):
        constraint(plain, "regex", ".*" * 19_000)
    assert TRIAL._process is None  # it was ended, and the next grammar gets another one
    rule = constraint(plain, "regex", "[0-9]{3}")
    assert rule.fits([], spelled(plain, "123")) > 0


def test_a_trial_that_the_machine_interrupted_is_repeated() -> None:
    """A busy machine is not the grammar's fault, so only refusals by the trial's own limits are kept."""
    trial = Trial()
    try:
        assert trial.error("start: /a/", LIMITS) == ""
        assert trial._process is not None
        os.kill(trial._process.pid, signal.SIGSTOP)
        assert "too much time" in trial.error("start: /b/", LIMITS)  # after 1.6 s by the clock
        assert trial.error("start: /b/", LIMITS) == ""
        costly = "start: /" + ".*" * 19_000 + "/"
        assert "too much time" in trial.error(costly, LIMITS) and trial._process is None
        assert "too much time" in trial.error(costly, LIMITS) and trial._process is None, "it was tried again"
    finally:
        trial.close()


ENDLESS = ["a{1000000000}", "(ab){1000000000}"]


@pytest.mark.parametrize("drafter", [None, "known,inner=ngram"])
@pytest.mark.parametrize("spec", ENDLESS)
def test_a_grammar_that_cannot_be_followed_is_an_error_and_no_end(plain: Llm, spec: str, drafter: str | None) -> None:
    """llguidance stops at its limits as it does at the end of a text: half an output must not pass for a whole one."""
    llm = plain if drafter is None else speculative(plain, drafter)
    with pytest.raises(ValueError, match="cannot be advanced"):
        llm.generate(PROMPT, constraint=constraint(plain, "regex", spec), max_new_tokens=64, seed=1)


def spelled(llm: Llm, text: str) -> list[int]:
    return list(llm.tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[misc]


def test_how_many_drafts_fit(plain: Llm) -> None:
    rule = constraint(plain, "regex", "abc (yes|no)")
    good, bad = spelled(plain, "abc yes"), spelled(plain, "abc maybe")
    end = plain.tokenizer.eos_token_id  # type: ignore[union-attr]
    assert rule.fits([], [*good, end]) == len(good) + 1
    assert 0 < rule.fits([], bad) < len(bad)
    assert rule.fits(bad, good) == 0
    assert rule.fits(good, [end]) == 1


class OwnSpelling:
    """A tokenizer that spells its tokens itself, as a GGUF file's does: one token a byte, and three special ones."""

    eos_token_id, bos_token_id, all_special_ids = 256, None, [256, 257, 258]

    def __len__(self) -> int:
        return 259

    def spelling(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize("is_own", [False, True])
def test_every_end_of_the_model_may_follow_a_complete_output(plain: Llm, is_own: bool) -> None:
    """A chat model ends its turn with another id than the tokenizer's; ids beyond the logits end nothing."""
    tokenizer: Any = OwnSpelling() if is_own else plain.tokenizer
    width = len(tokenizer)
    own = int(tokenizer.eos_token_id)
    other = 257 if is_own else spelled(plain, "~")[0]
    written = list(b"ab") if is_own else spelled(plain, "ab")
    scores = torch.zeros(1, width)
    for ends in ({other, width + 5}, {own, other}, set[int]()):
        rule = compile_constraint("regex", "(ab)+", tokenizer, width, ends=ends)
        assert rule.ends == {own} | (ends & {other})
        allowed = set(torch.isfinite(rule(torch.tensor([written]), scores)[0]).nonzero().flatten().tolist())
        assert {own, other} & allowed == rule.ends
        assert rule.fits(written, [other]) == int(other in rule.ends)
        assert not set(torch.isfinite(rule(NOTHING_YET, scores)[0]).nonzero().flatten().tolist()) & {own, other}
    whole = compile_constraint("regex", "ab", tokenizer, width, ends={other})
    assert torch.isfinite(whole(torch.tensor([written]), scores)[0]).nonzero().flatten().tolist() == sorted(
        {own, other}
    )


def test_a_request_of_the_server_may_end_as_the_model_does(plain: Llm) -> None:
    other = spelled(plain, "~")[0]
    target = SimpleNamespace(vocab_size=plain.target.vocab_size, eos_token_ids=frozenset({0, other}))
    serving: Any = SimpleNamespace(llm=SimpleNamespace(tokenizer=plain.tokenizer, target=target))
    body = CompletionRequest.model_validate(
        {"model": "m", "prompt": "a", "structured_outputs": {"choice": ["no", "not now"]}}
    )
    (rule,) = asyncio.run(constraints_of(body, 1, serving))
    assert isinstance(rule, GrammarConstraint) and rule.ends == {0, other}
    assert rule.fits(spelled(plain, "no"), [other]) == 1


def test_a_grammar_is_compiled_once_for_all_choices(plain: Llm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four prompts with a schema of a tenth of a second took more than the two seconds of a grammar."""
    compiled: list[Any] = []

    def counted(kind: str, spec: Any, patience_s: float | None) -> str:
        compiled.append(spec)
        return checked_grammar(kind, spec, patience_s)

    monkeypatch.setattr("foretoken.server.grammar.compiling.checked_grammar", counted)
    serving: Any = SimpleNamespace(llm=plain)
    body = CompletionRequest.model_validate(
        {"model": "m", "prompt": "a", "structured_outputs": {"choice": ["no", "not now"]}}
    )
    rules: list[Any] = asyncio.run(constraints_of(body, 64, serving))
    assert len(rules) == 64 and len(compiled) == 1
    scores, written = torch.zeros(1, plain.target.vocab_size), torch.tensor([spelled(plain, "no")])
    for rule in (rules[0], rules[5]):  # each choice is at its own place
        rule(written, scores)
    expected = constraint(plain, "choice", ["no", "not now"])(NOTHING_YET, scores)
    assert all(torch.equal(rule(NOTHING_YET, scores), expected) for rule in rules)


def test_conditional_sampling_needs_no_second_view_of_the_tokenizer() -> None:
    """The view of a large vocabulary takes longer than a grammar may, and the server has built one at its start."""
    tokenizer: Any = OwnSpelling()
    target = SimpleNamespace(vocab_size=len(tokenizer), eos_token_ids=frozenset({256, 257}))
    llm: Any = SimpleNamespace(tokenizer=tokenizer, target=target)
    warm_up(llm)
    body = CompletionRequest.model_validate(
        {"model": "m", "prompt": "a", "structured_outputs": {"choice": ["up", "down"], "sampling": "conditional"}}
    )
    serving: Any = SimpleNamespace(llm=llm)
    asyncio.run(constraints_of(body, 1, serving))
    assert len(_tokenizers[tokenizer]) == 1


class Guessing(Drafter):
    """The same tree in every round: one branch that may fit, with a probe, and one that never does."""

    name = "guessing"
    max_nodes = 8
    traits = Traits(draws_trees=True)

    def __init__(self, good: list[int], bad: list[int]) -> None:
        self.good, self.bad, self.seen = good, bad, []

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        a, b = self.good[:2], self.bad[:2]
        return TokenTree([context.root, *a, *b, 5, 6], [-1, 0, 1, 0, 3, 1, 3], probes=[False] * 5 + [True] * 2)

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        self.seen.append(list(tree.tokens[1:]))


def test_guesses_that_the_grammar_refuses_are_cut(plain: Llm) -> None:
    good, bad = spelled(plain, "hello, world"), spelled(plain, "[1, 2]")
    rule = constraint(plain, "regex", "(hello, world|hello, moon|x)")
    inner = Guessing(good, bad)
    known = KnownDrafter(inner)
    sampler = Sampler(SamplingParams(processors=(OfAnswer(rule.processor, 1),)), 1)
    context = Context(0, [7], 1, sampler, Rng(0), constraint=rule)
    tree = known.propose(context, Budget(max_depth=2, max_nodes=8))
    assert list(tree.tokens[1:]) == [*good[:2], 5] and list(tree.probes) == [False, False, False, True]
    free = Context(1, [7], 1, Sampler(SamplingParams(), 1), Rng(0))
    assert len(known.propose(free, Budget(max_depth=2, max_nodes=8))) == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["pass_tokens", "lookahead"])
def test_probes_are_not_shown_to_a_grammar(plain: Llm, drafter: str, temperature: float) -> None:
    """The ids of look-ahead tokens lie behind the vocabulary, which is an error of the matcher."""
    fast = speculative(plain, f"known,inner={drafter}")
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 1}
    expected = plain.generate(PROMPT, constraint=constraint(plain), **options)
    output = fast.generate(PROMPT, constraint=constraint(plain), **options)
    assert output.token_ids == expected.token_ids and output.finish_reason == expected.finish_reason
    assert output.stats.num_drafts < len(output.token_ids)


@pytest.mark.parametrize(("kind", "spec"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_grammars_are_answered(plain: Llm, kind: str, spec: Any) -> None:
    """Each is refused with one line or compiled, within the time that a request may take."""
    answer: list[Any] = []

    def attempt() -> None:
        try:
            answer.append(constraint(plain, kind, spec))
        except ValueError as error:
            answer.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(20)  # a watchdog, not a measurement
    assert answer, "the grammar is still being compiled"
    assert isinstance(answer[0], ValueError) and "\n" not in str(answer[0]) and len(str(answer[0])) < 600


def test_a_grammar_with_very_many_states_costs_its_own_request_at_most(plain: Llm) -> None:
    """It compiles, since its states are made when they are reached; what a step may cost is bounded."""
    rule = constraint(plain, "regex", "(a{1,5000}){1,5000}")
    finished: list[Any] = []

    def attempt() -> None:
        try:
            finished.append(plain.generate(PROMPT, constraint=rule, max_new_tokens=12, temperature=1.0, seed=1))
        except ValueError as error:
            finished.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60)
    assert finished
    assert isinstance(finished[0], ValueError) or set(finished[0].text) <= {"a"}
