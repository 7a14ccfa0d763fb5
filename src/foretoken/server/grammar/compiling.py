"""Compilation of a schema, a regular expression or a grammar to a constraint, within limits."""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer

from foretoken.core.values import one_line
from foretoken.server.grammar.constraint import GrammarConstraint
from foretoken.server.grammar.trial import Trial
from foretoken.server.known_formats import SPACING, without_unknown_formats

KINDS = ("json_object", "json_schema", "regex", "grammar", "choice")
LONGEST = 64 * 1024
"""Maximum characters of a schema, an expression or a grammar."""
DEEPEST = 64
"""Maximum nesting depth of a schema."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""Cost limits of compiling and of every step in llguidance's units (:mod:`foretoken.server.grammar.trial` limits
time)."""
TRIAL = Trial()
TOKEN = re.compile(r"<\[\d+\]>")
"""A token by its id: special tokens are not spelled by their text."""

_tokenizers: weakref.WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], LLTokenizer]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def compile_constraint(
    kind: str,
    spec: Any,
    tokenizer: Any,
    vocab_size: int,
    patience_s: float | None = None,
    ends: Iterable[int] = (),
) -> GrammarConstraint:
    """Compile a constraint for one request.  Raises :class:`TrialBusy` after ``patience_s``, and ``ValueError`` for an
    unknown kind, for a spec that is invalid or too large, and for an unsupported tokenizer.

    Args:
        kind: ``json_object``, ``json_schema``, ``regex``, ``grammar`` (Lark's syntax, as llguidance reads it) or
            ``choice``.
        spec: the schema (an object or its JSON), the expression, the grammar, the texts to choose from; nothing for
            ``json_object``.
        tokenizer: the target's, a fast one of Transformers.
        vocab_size: width of the logits, which may exceed the tokenizer's vocabulary.
        patience_s: seconds to wait while other grammars are on trial; ``None``: no limit.
        ends: the model's end-of-text ids (``llm.target.eos_token_ids``), which may be more than the tokenizer's own.
    """
    grammar = checked_grammar(kind, spec, patience_s)
    every_end = known_ends(tokenizer, vocab_size, ends)
    view = tokenizer_view(tokenizer, vocab_size, every_end)
    matcher = LLMatcher(view, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    _check(kind, matcher.get_error())
    return GrammarConstraint(matcher, vocab_size, every_end)


def checked_grammar(kind: str, spec: Any, patience_s: float | None) -> str:
    """llguidance's form of the spec, checked to compile within the limits.  Raises as :func:`compile_constraint`
    does."""
    grammar = _grammar(kind, spec)
    if kind != "json_object":  # a constant of ours
        _check(kind, TRIAL.error(TOKEN.sub("<[0]>", grammar), LIMITS, patience_s))  # the trial has a small vocabulary
    return grammar


def _check(kind: str, error: str) -> None:
    if error.startswith("NoExtension"):
        error = "no text fits it"
    if error:
        raise ValueError(f"the {kind} cannot be compiled: {one_line(error, 300)}")


def _grammar(kind: str, spec: Any) -> str:
    """llguidance's form of the spec."""
    if kind not in KINDS:
        raise ValueError(f"a constraint is one of {', '.join(KINDS)}, not {kind!r}")
    try:
        if kind == "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=SPACING)
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(json.dumps(_schema(spec)), overrides=SPACING)
        if kind == "choice":
            spec = "|".join(re.escape(text) for text in checked_texts(spec))
        if not isinstance(spec, str) or not spec:
            raise ValueError(f"a {kind} must be non-empty text")
        if len(spec) > LONGEST:
            raise ValueError(f"the {kind} has {len(spec)} characters, more than the limit of {LONGEST}")
        return LLMatcher.grammar_from_lark(spec) if kind == "grammar" else LLMatcher.grammar_from_regex(spec)
    except (TypeError, RecursionError, OverflowError, UnicodeError) as error:
        raise ValueError(f"the {kind} cannot be compiled: {one_line(error, 300)}") from None


def checked_texts(texts: Any) -> Sequence[str]:
    """The texts of a choice.  Raises ``ValueError`` for other values, and without any text that is not empty."""
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a choice must be a list of strings")
    if not any(texts):
        raise ValueError("a choice needs at least one non-empty string")
    return texts


def _schema(spec: Any) -> Any:
    """The validated schema, without unknown formats."""
    if isinstance(spec, str):
        if len(spec) > LONGEST:
            raise ValueError(f"the schema has {len(spec)} characters, more than the limit of {LONGEST}")
        try:
            spec = json.loads(spec)
        except json.JSONDecodeError as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
    if isinstance(spec, bool):  # llguidance takes no options with such a schema
        if not spec:
            raise ValueError("no value fits the schema false")
        spec = {}
    if not isinstance(spec, dict):
        raise ValueError(f"a schema must be an object, not a value of type {type(spec).__name__}")
    if _depth(spec) > DEEPEST:
        raise ValueError(f"the schema is nested more than {DEEPEST} levels deep")
    if len(json.dumps(spec)) > LONGEST:
        raise ValueError(f"the schema has more than {LONGEST} characters")
    return without_unknown_formats(spec)


def _depth(spec: Any) -> int:
    """Nesting depth of a document, counted without recursion and no further than needed."""
    level, depth = [spec], 0
    while level and depth <= DEEPEST:
        level = [
            part
            for node in level
            if isinstance(node, dict | list)
            for part in (node.values() if isinstance(node, dict) else node)
        ]
        depth += 1
    return depth


def tokenizer_view(tokenizer: Any, vocab_size: int, ends: Iterable[int] = ()) -> LLTokenizer:
    """llguidance's view of a tokenizer, cached: building it takes a second for a large vocabulary.  A text may end with
    the tokenizer's own end-of-text id and with ``ends``."""
    key = (vocab_size, frozenset(ends) | frozenset(end_ids(tokenizer)))
    with _lock:
        try:
            views = _tokenizers.setdefault(tokenizer, {})
        except TypeError:
            views = {}
        if key not in views:
            try:
                views[key] = _viewed(tokenizer, *key)
            except (ValueError, AttributeError, RuntimeError) as error:
                raise ValueError(
                    f"structured output needs a fast tokenizer of Transformers: {one_line(error, 300)}"
                ) from None
        return views[key]


def _viewed(tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> LLTokenizer:
    """View of a Transformers tokenizer, or of one that spells its tokens as bytes itself (a GGUF file's)."""
    own = end_ids(tokenizer)
    ordered = [*own, *sorted(ends.difference(own))] or None  # the first one is llguidance's own choice of an end
    if hasattr(tokenizer, "spelling"):
        wrapper = TokenizerWrapper(_Spelled(tokenizer, vocab_size))
        return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=ordered)
    return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ordered)


class _Spelled:
    """Adapter for llguidance of a tokenizer that is not Transformers' own, but has ``spelling`` (bytes of a token) and
    ``encode``."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        if self.eos_token_id is None:
            raise ValueError("the file has no end-of-text token")
        self.special_token_ids = sorted(tokenizer.all_special_ids)
        size = min(vocab_size, len(tokenizer))
        self.tokens = [tokenizer.spelling(token) for token in range(size)] + [b""] * (vocab_size - size)

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text without special tokens around it."""
        string = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(string, add_special_tokens=False)


def end_ids(tokenizer: Any) -> list[int]:
    """The tokenizer's end-of-text ids."""
    end = getattr(tokenizer, "eos_token_id", None)
    return [] if end is None else [int(end)]


def known_ends(tokenizer: Any, vocab_size: int, ends: Iterable[int]) -> frozenset[int]:
    """The tokenizer's end-of-text ids, and those of ``ends`` that have a logit."""
    return frozenset(end_ids(tokenizer)) | {end for end in ends if 0 <= end < vocab_size}
