"""One request as its client saw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Drafts:
    """What speculation did, as far as a server says.

    Attributes:
        rounds: verification rounds (calls of the target); ``None`` where it is not told.
        drafted, accepted: draft tokens.
    """

    rounds: int | None = None
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Drafts) -> None:
        """Count another one in."""
        self.rounds = None if self.rounds is None or other.rounds is None else self.rounds + other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round, the target's own included."""
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclass
class Sample:
    """One request.

    Attributes:
        number: which; the same number asked the same of every arm.
        category: of its prompt.
        sent_s: when it was sent, on the clock of ``time.perf_counter``; the following are, too.
        first_s: when its first text came.
        last_s: when it said that it was finished.
        chunks: events that carried text.
        tokens, prompt_tokens: what the server counted; chunks where it counts nothing.
        counted: whether the server counted.
        text, finish_reason: what it said.
        done: whether the stream ended with ``[DONE]``.
        error: what kind of error ended it; empty for none.
        detail: the error in words.
        drafts: what speculation did, if it is told.
        token_ids: of the answer, where they were asked for and are told.
        gap: for an answer that differs from another: how much less likely its token was (see ``run.find_gaps``).
        ignored: fields that the server says it ignored.
    """

    number: int
    category: str
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    chunks: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    counted: bool = False
    text: str = ""
    finish_reason: str | None = None
    done: bool = False
    error: str = ""
    detail: str = ""
    drafts: Drafts | None = None
    token_ids: list[int] = field(default_factory=list)
    gap: float | None = None
    ignored: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended as it should."""
        return not self.error and self.last_s is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if not self.ok or self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        """Time to the end."""
        return None if not self.ok or self.last_s is None else self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; nothing for an answer that came in one piece."""
        if not self.ok or self.first_s is None or self.last_s is None or self.tokens < 2 or self.chunks < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def fail(self, kind: str, detail: str) -> Sample:
        """It ended with an error."""
        self.error, self.detail = kind, " ".join(detail.split())[:300]
        return self

    def read(self, event: Mapping[str, Any], now_s: float) -> None:
        """Take in one event of the stream.

        Raises:
            StreamError: it is an error.
        """
        if event.get("error"):
            raise StreamError(_message(event["error"]))
        for choice in event.get("choices") or ():
            text = _text_of(choice)
            if text:
                self.first_s = now_s if self.first_s is None else self.first_s
                self.chunks += 1
                self.text += text
            self.token_ids += choice.get("token_ids") or ()
            if choice.get("finish_reason"):
                self.finish_reason, self.last_s = str(choice["finish_reason"]), now_s
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            self.counted = True
            self.tokens = int(usage.get("completion_tokens") or 0)
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        self.drafts = drafts_of(event) or self.drafts

    def close(self) -> Sample:
        """The stream has ended without an error: did it end as it should?"""
        if self.finish_reason is None:
            said = "[DONE]" if self.done else "nothing more"
            return self.fail("truncated", f"the stream ended with {said} and without a finish_reason")
        if not self.counted:
            self.tokens = self.chunks
        if self.first_s is None:  # no text at all: the end is what came first
            self.first_s = self.last_s
        return self


class StreamError(Exception):
    """An error that came as an event of a stream."""


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def _text_of(choice: Mapping[str, Any]) -> str:
    """The text of a choice of a completion or of a chat, thoughts and calls of tools included."""
    if "text" in choice:
        return str(choice["text"] or "")
    delta = choice.get("delta") or {}
    found = [delta.get(name) for name in ("reasoning_content", "content")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        found += [function.get("name"), function.get("arguments")]
    return "".join(str(part) for part in found if part)


def drafts_of(event: Mapping[str, Any]) -> Drafts | None:
    """What an event says of speculation: ``metrics.speculative_decoding``, llama.cpp's timings, or OpenAI's usage."""
    metrics = event.get("metrics")
    spec = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if isinstance(spec, Mapping) and "num_draft_tokens" in spec:
        rounds = spec.get("num_spec_steps")
        return Drafts(
            None if rounds is None else int(rounds),
            int(spec["num_draft_tokens"] or 0),
            int(spec.get("num_accepted_draft_tokens") or 0),
        )
    timings = event.get("timings")
    if isinstance(timings, Mapping) and timings.get("draft_n"):
        return Drafts(None, int(timings["draft_n"]), int(timings.get("draft_n_accepted") or 0))
    usage = event.get("usage")
    details = usage.get("completion_tokens_details") if isinstance(usage, Mapping) else None
    if isinstance(details, Mapping):
        accepted = int(details.get("accepted_prediction_tokens") or 0)
        rejected = int(details.get("rejected_prediction_tokens") or 0)
        if accepted + rejected:
            return Drafts(None, accepted + rejected, accepted)
    return None
