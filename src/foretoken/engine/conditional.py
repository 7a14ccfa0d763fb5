"""Conditional sampling: one string of a finite language, drawn from the model's distribution conditioned on the
language.

The strings of the language are a tree of tokens, so one forward of the target gives the distribution after every node.
With p(v | node) of the request's own pipeline, a string of tokens x_1 .. x_k has the probability

    p(string) = p(x_1 | root) ... p(x_k | x_1 .. x_{k-1}) * p(end | x_1 .. x_k),

and the output is a draw from p(string) / (sum over the language). This equals plain sampling, repeated until the output
is a string of the language followed by the end of text. Masking every step instead is a product of normalised steps: it
ignores the continuations of a token (grammar-aligned decoding, https://arxiv.org/abs/2405.21047;
https://arxiv.org/abs/2605.07698 measures total variations up to .996).

A tree that is too wide for one forward, or that branches on a chain-only target, is scored in pieces before the round.
The string is drawn then, and the round scores and commits it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core import Context, Kind, NothingAllowedError, OptionError, Scores, TokenTree, Verdict
from foretoken.core.constraints import CannotGoOn, FiniteLanguage
from foretoken.core.sampling import NO_FILTERS, SamplingParams, draw
from foretoken.engine.request import Request
from foretoken.methods.trees.operations import select
from foretoken.methods.verifiers.base import Coins, Verifier
from foretoken.models.base import Feed, LanguageModel

MOST_NODES = 2048
"""Largest tree of a language in nodes; scoring it costs as much as a prompt of as many tokens."""


def whole_params(params: SamplingParams) -> SamplingParams:
    """The pipeline that scores strings. At temperature 0 it is the model's unfiltered distribution, of which the most
    likely string is taken, because a product of one-hot distributions would allow only one string."""
    return replace(params, temperature=1.0, **NO_FILTERS) if params.temperature == 0 else params


def check_language(
    request: Request, language: FiniteLanguage, target: LanguageModel, tokenizer: Any | None, ends: frozenset[int]
) -> None:
    """Raise ``OptionError`` for options that conflict with a request's language or its ends."""
    _check_options(request)
    if len(language) > MOST_NODES:
        raise OptionError(
            "constraint",
            f"the language has {len(language)} tokens as a tree, more than the limit of {MOST_NODES}: give "
            "fewer or shorter strings, or mask token by token instead",
        )
    if request.max_new_tokens <= language.longest:
        raise OptionError(
            "max_new_tokens",
            f"a limit of {request.max_new_tokens} new tokens is too small: the longest string of the language has "
            f"{language.longest} tokens, and end-of-text is one more",
        )
    if max(language.tokens) >= target.vocab_size:
        raise OptionError("constraint", "a string of the language holds tokens beyond the vocabulary")
    if not any(end < target.vocab_size for end in ends):
        raise OptionError("constraint", "the model has no end-of-text token, so no string of the language could end")
    _check_ends(request, language, tokenizer, ends)
    if not target.capabilities.rollback:
        reason = target.capabilities.missing.get("rollback", "it cannot roll back tokens")
        raise OptionError("constraint", f"this model cannot score the strings of a language: {reason}")


def _check_options(request: Request) -> None:
    """Check options: a string ends with the end of text, and every string keeps the model's probability."""
    if request.ignore_eos:
        raise OptionError(
            "ignore_eos", "ignore_eos cannot be combined with conditional sampling: a string ends with end-of-text"
        )
    for name, neutral in NO_FILTERS.items() if request.params.temperature > 0 else ():
        if getattr(request.params, name) != neutral:
            raise OptionError(
                name,
                f"{name} cannot be combined with conditional sampling: it would exclude strings of the language, "
                f"possibly all; leave it out or give {neutral}",
            )


def _check_ends(request: Request, language: FiniteLanguage, tokenizer: Any | None, ends: frozenset[int]) -> None:
    """Check that ends of the text follow strings and do not occur in them."""
    inside = ends.intersection(language.tokens)
    if inside:
        option = "stop_token_ids" if inside & request.stop_token_ids else "constraint"
        raise OptionError(option, f"a string of the language holds token {min(inside)}, which ends the text")
    texts = (
        [str(tokenizer.decode(string)) for string in language.strings] if request.stop and tokenizer is not None else []
    )
    for stop in request.stop:
        text = next((string for string in texts if stop in string), None)
        if text is not None:
            raise OptionError("stop", f"the stop string {stop!r} would end the string {text[:60]!r} of the language")


class LanguageRound:
    """The single round of a request with a finite language: its tree and its acceptance rule.

    Args:
        ends: ids that end the text.
        greedy: take the most likely string (the first of equals) instead of drawing one.
        uniforms: two numbers in [0, 1), for the string and for the end that follows it. They are fixed, so a repeated
            call gives the same string.

    Attributes:
        width: nodes scored per forward, without their ancestors; as in drafters' widest trees.
    """

    width = 64

    def __init__(self, language: FiniteLanguage, ends: frozenset[int], greedy: bool, uniforms: Sequence[float]) -> None:
        self.language, self.ends, self.greedy, self.uniforms = language, ends, greedy, uniforms

    def propose(self, target: LanguageModel, context: Context) -> tuple[TokenTree, Verifier]:
        """The whole language as a tree, or the drawn string if scoring takes several forwards.

        A pure function of the prefix, so it may be repeated. The request's scratch in the target is left empty.
        """
        tree = tree_of(self.language, context.root)
        whole = self.language.whole
        if target.room(context.sequence) <= max(tree.depths):
            raise CannotGoOn(
                "the longest string of the language crosses a length at which the model prefills the sequence again"
            )
        branches = target.capabilities.tree_mask and target.capabilities.keep_path
        if len(tree) > self.width or not (branches or tree.is_chain):
            log_probs = score_in_pieces(target, context, tree, self.ends, self.width if branches else None)
            last = self._rule(whole).choose(string_log_probs(tree, whole, *log_probs))[0]
            tree = select(tree, tree.path(last))
            whole = (*(False for _ in tree.tokens[1:]), True)
        return tree, self._rule(whole)

    def _rule(self, whole: Sequence[bool]) -> ConditionalVerifier:
        return ConditionalVerifier(whole, self.ends, self.greedy, self.uniforms)


class ConditionalVerifier(Verifier):
    """Draws one string of a tree by the strings' probabilities; ``whole`` [N] marks the nodes where one may end. The
    other arguments are those of :class:`LanguageRound`."""

    name = "conditional"
    decides_by = "paths"
    kinds = frozenset({Kind.POINT})
    reads_logits = True

    def __init__(self, whole: Sequence[bool], ends: frozenset[int], greedy: bool, uniforms: Sequence[float]) -> None:
        self.whole, self.ends, self.greedy, self.uniforms = whole, ends, greedy, uniforms

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """The path of the string, and the end of text after it."""
        log_probs = step_log_probs(tree, scores, self.ends)
        last, end = self.choose(string_log_probs(tree, self.whole, *log_probs))
        return Verdict(tree.path(last)[1:], end, True)

    def choose(self, log_probs: Tensor) -> tuple[int, int]:
        """The last node of a string and the id that ends it, from log-probabilities [N, E] of :func:`string_log_probs`.
        Raises ``CannotGoOn`` if no string has any probability."""
        strings = log_probs.logsumexp(-1)
        best = strings.max()
        if float(best) == -torch.inf:
            raise CannotGoOn(
                "no string of the language has any probability: the request's other rules exclude them all"
            )
        node = int(strings.argmax()) if self.greedy else draw((strings - best).exp(), self.uniforms[0])
        ends = log_probs[node]
        index = int(ends.argmax()) if self.greedy else draw((ends - ends.max()).exp(), self.uniforms[1])
        return node, sorted(self.ends)[index]

    def draws_last(self, tree: TokenTree) -> bool:
        """Always false: a string is drawn, not a token."""
        return False


def tree_of(language: FiniteLanguage, root: int) -> TokenTree:
    """The language as a draft after the token ``root``."""
    return TokenTree((root, *language.tokens[1:]), language.parents)


def step_log_probs(tree: TokenTree, scores: Scores, ends: frozenset[int]) -> tuple[Tensor, Tensor]:
    """log p(token of a node | nodes above it) [N], 0 for the root, and log p(end | node) [N, E] for ``ends`` in
    ascending order; float64 on the CPU."""
    rows = _log_probs(tree, scores)
    device = rows.device
    steps = rows.new_zeros(len(tree))
    if len(tree) > 1:
        steps[1:] = rows[torch.tensor(tree.parents[1:], device=device), torch.tensor(tree.tokens[1:], device=device)]
    ids = [end for end in sorted(ends) if end < rows.shape[-1]]
    last = rows.new_full((len(tree), len(ends)), -torch.inf)
    last[:, : len(ids)] = rows[:, ids]  # ids beyond the vocabulary are the largest
    return steps.cpu().double(), last.cpu().double()


def _log_probs(tree: TokenTree, scores: Scores) -> Tensor:
    """[N, V] log-probabilities after every node on its own prefix; all -inf where nothing may follow."""
    sampler, lengths = scores.sampler, scores.lengths
    if sampler.context_free:
        rows = sampler.ranking(scores.logits, lengths, None)
    else:
        rows = torch.stack([_log_probs_after(node, scores) for node in range(len(tree))])
    if rows.device.type != "mps":
        rows = rows.double()
    totals = rows.logsumexp(-1, keepdim=True)  # the pipeline's scores have an unknown constant per row
    return torch.where(totals > -torch.inf, rows - totals, -torch.inf)


def _log_probs_after(node: int, scores: Scores) -> Tensor:
    logits, length = scores.logits[node : node + 1], scores.lengths[node : node + 1]
    try:
        return scores.sampler.ranking(logits, length, [scores.node_prefix(node)])[0]
    except NothingAllowedError:
        return torch.full_like(logits[0], -torch.inf, dtype=torch.promote_types(logits.dtype, torch.float32))


def string_log_probs(tree: TokenTree, whole: Sequence[bool], steps: Tensor, ends: Tensor) -> Tensor:
    """[N, E] log-probability of the string that ends at each node, by end token; -inf where none ends.

    Args:
        whole: [N] nodes at which a string ends.
        steps: [N] log-probability of every node given those above it.
        ends: [N, E] log-probability of every end after every node.
    """
    totals = steps.tolist()
    for node in range(1, len(tree)):
        totals[node] += totals[tree.parents[node]]
    strings = ends + torch.tensor(totals, dtype=torch.float64)[:, None]
    strings[~torch.tensor(whole)] = -torch.inf
    return strings


def score_in_pieces(
    target: LanguageModel, context: Context, tree: TokenTree, ends: frozenset[int], width: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`step_log_probs` of a tree of any size, by several forwards on the request's empty scratch.

    Memory is bounded: only the probabilities of the tree's tokens are kept of a piece's logits.

    Args:
        context: the request; its ``sequence`` is used and left unchanged.
        width: nodes per piece, without their ancestors; ``None`` takes one path at a time.
    """
    steps = torch.zeros(len(tree), dtype=torch.float64)
    last = torch.full((len(tree), len(ends)), -torch.inf, dtype=torch.float64)
    for nodes in pieces(tree, width):
        part = select(tree, nodes)
        rows = target.forward([Feed(context.sequence, part.tokens, part.parents)])[0]
        steps[nodes], last[nodes] = step_log_probs(
            part, Scores(rows.logits, part, context.tokens, context.sampler), ends
        )
        target.commit(context.sequence, ())
    return steps, last


def pieces(tree: TokenTree, width: int | None) -> Iterator[list[int]]:
    """Node lists in ascending order, each a tree with all its ancestors; together they cover all nodes."""
    if width is None:
        parents = set(tree.parents)
        yield from (tree.path(node) for node in range(len(tree)) if node not in parents)
        return
    for start in range(0, len(tree), width):
        nodes = set(range(start, min(start + width, len(tree))))
        # In preorder the ancestors of a node are in the piece, or are ancestors of its first node.
        nodes.update(tree.path(start))
        yield sorted(nodes)
