"""Validation of requests before they cost anything, and the choice of the next one to run."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from foretoken.core import OptionError
from foretoken.core.noise import check_seed
from foretoken.core.values import check_flags, check_ids, check_real, check_text, check_whole, texts_of
from foretoken.engine.request import Request, Running
from foretoken.models.base import LanguageModel
from foretoken.models.cache.fixed import rectangle_of
from foretoken.models.vocabulary import check_vocabulary

SCRATCH = 64
"""Slots for draft tokens that a sequence may need in addition to its tokens."""


def check(request: Request, target: LanguageModel) -> None:
    """Raise ``ValueError`` with the reason for a request that cannot be served."""
    check_vocabulary(target)
    _check_kinds(request)
    if request.seed is not None:
        check_seed(request.seed)
    _check_lengths(request, target.context_length, target.context_why)
    ids: dict[str, Iterable[int]] = {
        "prompt": request.prompt,
        "logit_bias": request.params.logit_bias,
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": request.allowed_token_ids or (),
        "prediction": request.prediction or (),
    }
    for option, tokens in ids.items():
        check_ids(option, tokens, target.vocab_size)
    if request.allowed_token_ids is not None and not request.allowed_token_ids:
        raise OptionError("allowed_token_ids", "allowed_token_ids must hold at least one token id")
    for name in ("logprobs", "prompt_logprobs", "min_tokens", "max_draft_tokens"):
        value = getattr(request, name)
        if value is not None and value < 0:
            raise OptionError(name, f"{name} must be at least 0, not {value}")
    if request.prompt_logprobs is not None and not target.capabilities.prompt_logits:
        raise OptionError("prompt_logprobs", f"prompt_logprobs: {target.capabilities.missing['prompt_logits']}")
    if request.min_tokens > request.max_new_tokens:
        raise OptionError(
            "min_tokens", f"min_tokens={request.min_tokens} is more than max_new_tokens={request.max_new_tokens}"
        )
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise OptionError("deadline_s", f"deadline_s must be above 0, not {request.deadline_s}")


def _check_kinds(request: Request) -> None:
    """Check types first, because NaN and booleans would pass comparisons of numbers."""
    for name in ("max_new_tokens", "min_tokens", "priority"):
        check_whole(name, getattr(request, name))
    for name in ("logprobs", "prompt_logprobs", "max_draft_tokens"):
        if getattr(request, name) is not None:
            check_whole(name, getattr(request, name))
    check_flags(ignore_eos=request.ignore_eos, include_stop=request.include_stop, explain=request.explain)
    if request.deadline_s is not None:
        check_real("deadline_s", request.deadline_s)
    check_text("cache_salt", request.cache_salt)
    texts_of("stop", request.stop, "stop string")


def _check_lengths(request: Request, context_length: int, reason: str) -> None:
    room = context_length - len(request.prompt)
    because = f" ({reason})" if reason else ""
    if not request.prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if room < 1:
        raise ValueError(
            f"the prompt has {len(request.prompt)} tokens and the model's context is {context_length}{because}: "
            "shorten the prompt"
        )
    if request.max_new_tokens < 1:
        raise OptionError("max_new_tokens", f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
    if request.max_new_tokens > room:
        raise OptionError(
            "max_new_tokens",
            f"max_new_tokens={request.max_new_tokens} exceeds the model's context: the prompt has "
            f"{len(request.prompt)} tokens, so at most {room} of {context_length} are left{because}",
        )


class KvBudget:
    """Memory for keys and values: a request is admitted when its prompt and answer fit.

    A model that runs graphs has one rectangle as its cache, in which every sequence takes as much as the longest.
    There, the whole rectangle counts.

    Args:
        limit: bytes; ``None`` for no limit.

    Attributes:
        reserved: slots that each admitted request may need.
    """

    def __init__(self, target: LanguageModel, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"kv_memory must be at least 1 byte, not {limit}")
        if limit is not None and not target.kv_bytes_per_token:
            raise ValueError(
                f"kv_memory needs a model with a known KV cache size per token, and {type(target).__name__} has none"
            )
        self.target, self.limit = target, limit
        self.reserved: dict[int, int] = {}

    def need(self, request: Request) -> int:
        """Bytes that a request may need if it runs alone."""
        return self._bytes([_slots(request)]) if self.limit is not None else 0

    def _bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of sequences with these numbers of slots together."""
        cache = rectangle_of(self.target)
        return (sum(lengths) if cache is None else prod(cache.rectangle(lengths))) * self.target.kv_bytes_per_token

    def check(self, request: Request) -> None:
        """Raise ``OptionError`` for a request that can never be admitted: for ``prompt`` if its length leaves no room,
        else for ``max_new_tokens``."""
        need = self.need(request)
        if self.limit is not None and need > self.limit:
            fits = (self.room(len(request.prompt)) or 0) > 0
            raise OptionError(
                "max_new_tokens" if fits else "prompt",
                f"the prompt and max_new_tokens={request.max_new_tokens} need {need} bytes of keys and values, and "
                f"kv_memory is {self.limit}: shorten the prompt or ask for fewer tokens",
            )

    def room(self, prompt: int) -> int | None:
        """Most new tokens that fit after a prompt of this length if it runs alone; 0 or less without room, ``None``
        without a limit."""
        if self.limit is None:
            return None
        longest = range(1, self.target.context_length + SCRATCH + 1)
        return bisect_right(longest, self.limit, key=lambda slots: self._bytes([slots])) - SCRATCH - prompt

    def at_once(self, prompt: int, new: int, most: int) -> int:
        """Number of requests with these prompt and output lengths that fit together, up to ``most``."""
        if self.limit is None:
            return most
        slots = prompt + new + SCRATCH
        return bisect_right(range(1, most + 1), self.limit, key=lambda count: self._bytes([slots] * count))

    def admits(self, run: Running) -> bool:
        """Reserve a request's memory. Returns whether it fits."""
        need = _slots(run.request)
        if self.limit is not None:
            lengths, cache = [*self.reserved.values(), need], rectangle_of(self.target)
            if self._bytes(lengths) > self.limit:
                return False
            if cache is not None and not cache.fit(lengths, self.limit // self.target.kv_bytes_per_token):
                return False
        self.reserved[run.id] = need
        return True

    def most_sequences(self, most: int) -> int:
        """Number of sequences of the shortest kind that fit together, up to ``most``; at least 1."""
        while self.limit is not None and most > 1 and self._bytes([1] * most) > self.limit:
            most //= 2
        return most

    def free(self, run: Running) -> None:
        """Release a request's reservation."""
        self.reserved.pop(run.id, None)

    @property
    def remaining(self) -> int | None:
        """Bytes neither reserved nor held by a rectangle; ``None`` without a limit."""
        if self.limit is None:
            return None
        cache = rectangle_of(self.target)
        used = 0 if cache is None else cache.num_bytes()
        return max(0, self.limit - max(used, self._bytes([*self.reserved.values()])))


def _slots(request: Request) -> int:
    return len(request.prompt) + request.max_new_tokens + SCRATCH


def kept_back(slots: int) -> int:
    """Batch slots reserved for owners without a running request, so that one owner cannot hold all: an eighth, rounded
    up."""
    return -(-slots // 8) if slots > 1 else 0


def first_in_turn(
    waiting: Sequence[Running], running: Sequence[Running], slots: int, kept_places: int, has_owners: bool = True
) -> Running | None:
    """The next request to join: by priority, then by its owner's number of running requests, then by arrival.

    Args:
        waiting: by priority, then in order of arrival.
        running: requests in the batch.
        kept_places: slots for owners without a running request.
        has_owners: whether any of those waiting may have an owner; else no other can join before the first.

    Returns:
        ``None`` if no request may join now.
    """
    num_running = Counter(run.request.owner for run in running)
    is_short = slots - len(running) <= kept_places
    may = [
        run
        for run in (waiting if has_owners else waiting[:1])
        if not _is_at_limit(run, num_running) and not (is_short and num_running[run.request.owner])
    ]
    return min(may, key=lambda run: (run.request.priority, num_running[run.request.owner]), default=None)


def _is_at_limit(run: Running, num_running: Counter[str]) -> bool:
    most = run.request.owner_running
    return bool(most) and num_running[run.request.owner] >= most
