"""``foretoken chat``: a conversation in the terminal (or through a pipe)."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.cli.generate import CUT, stats_line
from foretoken.cli.options import Common, with_common
from foretoken.cli.output import screen
from foretoken.cli.turns import System, check_system, is_chat_model, tell_defaults, tell_empty
from foretoken.core.conversation import render

if TYPE_CHECKING:
    from foretoken.engine.stats import SpecStats
    from foretoken.llm import Llm, Piece

HELP = (
    "/help this line, /reset forgets the conversation, /history shows it, /stats switches the figures after answers; "
    "Ctrl-C ends an answer; /quit leaves, and so does Ctrl-D"
)


@with_common(own_sampling=True, max_new_tokens=256)
def chat_command(system: System = None, *, common: Common) -> None:
    """Talk to the target, turn by turn.

    With --seed, answer i (from 0) has the seed plus i; /reset does not start the count again.
    """
    common.check()
    interactive = sys.stdin.isatty()
    llm = common.load(own_sampling=True)
    if llm.tokenizer is None:
        raise ValueError(f"chat needs a tokenizer, and {common.target} has none")
    check_system(llm, system, common.target)
    tell_defaults(llm)
    session = Session(llm, {**llm.defaults.sampling, **common.request_options}, system=system)
    if not is_chat_model(llm):
        say = "has no chat template and is not trained for chat: it continues the text, and may produce nonsense"
        print(f"(note: {common.target} {say})", file=sys.stderr)
    if interactive:
        with contextlib.suppress(ImportError):  # line editing and history; not on every system
            import readline  # noqa: F401
        screen(stderr=True).print(HELP, style="dim")
    while (line := _read(interactive)) is not None:
        if line == "/quit":
            break
        try:
            session.handle(line)
        except KeyboardInterrupt:  # before or after the answer's tokens, or a second one
            if not interactive:
                raise
            print(f"\n({HELP})")


def _read(interactive: bool) -> str | None:
    """The next line, stripped; ``None`` at the end of the input."""
    while True:
        try:
            if interactive:
                return input("> ").strip()
            line = sys.stdin.readline()
            return line.strip() if line else None
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(f"\n({HELP})")


@dataclass
class Session:
    """One conversation: ``messages`` of user and assistant in turn, after a permanent ``system`` message.

    Attributes:
        num_answers: number of answers so far, also of those before ``/reset``.
    """

    llm: Llm
    options: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: SpecStats | None = None
    system: str | None = None
    shows_stats: bool = True
    num_answers: int = 0

    def handle(self, line: str) -> None:
        """Answer a line or run a command."""
        if line == "/help":
            print(f"({HELP})")
        elif line == "/reset":
            self.messages.clear()
            print("(forgotten)")
        elif line == "/history":
            self._show_history()
        elif line == "/stats":
            self.shows_stats = not self.shows_stats
            so_far = stats_line(self.stats) if self.stats else "nothing generated yet"
            print(f"(figures after answers are {'on' if self.shows_stats else 'off'}; so far: {so_far})")
        elif line.startswith("/"):
            print(f"(unknown command {line.split()[0]}: {HELP})")
        elif line:
            self._answer(line)

    def _show_history(self) -> None:
        """Print the messages that the model reads."""
        for message in self._all():
            print(f"{message['role']}: {message['content'].strip()}")
        if not self.messages:
            print("(nothing said yet)")

    def _answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            prompt, room = self._fitting_prompt()
            answer, last = self._say(prompt, {**self._options, "max_new_tokens": room})
        except BaseException as error:
            self.messages.pop()
            if not isinstance(error, ValueError):  # Ctrl-C
                raise
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return  # nothing was generated: the user can try another line
        self.num_answers += 1
        self.messages.append({"role": "assistant", "content": answer})
        if last is not None and last.stats is not None:
            tell_empty(self.llm, last.note)
            self._count(last.stats, last.finish_reason == "length")

    @property
    def _options(self) -> dict[str, Any]:
        """The options of the next answer.  With one seed for all, every answer would be drawn with the same noise."""
        from foretoken.core.noise import SEEDS

        seed = self.options.get("seed")
        return self.options if seed is None else {**self.options, "seed": (seed + self.num_answers) % SEEDS}

    def _say(self, prompt: list[int], options: dict[str, Any]) -> tuple[str, Piece | None]:
        """Stream one answer, and return it with its last piece; Ctrl-C ends it and keeps the text so far.

        A chat model's answer is kept unchanged, so that the next turn begins with the same tokens and only new ones are
        prefilled.
        """
        answer = ""
        last: Piece | None = None
        stop = None if self._has_template else ["\nUser:"]
        pieces = self.llm.stream(prompt, stop=stop, **options)
        try:
            for last in pieces:
                sys.stdout.write(last.text if answer.strip() else (answer + last.text).lstrip())
                sys.stdout.flush()
                answer += last.text
        except KeyboardInterrupt:
            self.llm.engine.close()
            sys.stdout.write(" (stopped)")
        finally:
            pieces.close()  # type: ignore[attr-defined]
        sys.stdout.write("\n")
        sys.stdout.flush()
        return (answer if self._has_template else answer.strip()), last

    def _count(self, stats: SpecStats, cut: bool) -> None:
        if self.shows_stats:
            read = f"{stats.num_prompt_tokens_computed} of {stats.num_prompt_tokens} prompt tokens read"
            if stats.num_draft_prompt_tokens_computed:
                read += f" ({stats.num_draft_prompt_tokens_computed} by the drafter)"
            line = f"{stats_line(stats)}, {read}{CUT * cut}"
            screen(stderr=True).print(f"({line})", style="dim")
        if self.stats is None:
            self.stats = stats
        else:
            self.stats.merge(stats)

    @property
    def _has_template(self) -> bool:
        return is_chat_model(self.llm)

    def _fitting_prompt(self) -> tuple[list[int], int]:
        """Token ids of the prompt, and the room for an answer.

        A full context loses its oldest turns, for an answer of at most half the context: a larger ``--max-new-tokens``
        would leave no turns.  Raises ``ValueError`` if the last message alone fills the context or the template refuses
        it; nothing is forgotten then.
        """
        context, limit = self.llm.target.context_length, int(self.options["max_new_tokens"])
        prompt = self._prompt()
        whole, dropped = len(prompt), 0
        while len(prompt) + min(limit, context // 2) > context and len(self.messages) - dropped > 2:
            dropped += 2
            prompt = self._prompt(dropped)
        room = context - len(prompt)
        if room < 1:
            raise ValueError(f"the message has {len(prompt)} tokens and the model's context is {context}: shorten it")
        if dropped:
            del self.messages[:dropped]
            say = f"the context of {context} tokens is full: forgot the oldest {dropped} messages"
            print(f"({say}, {whole - len(prompt)} tokens)", file=sys.stderr)
        return prompt, min(limit, room)

    def _all(self, start: int = 0) -> list[dict[str, str]]:
        """The messages from ``start`` on, after the system message."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages[start:]]

    def _prompt(self, start: int = 0) -> list[int]:
        if self._has_template:
            return render(self._all(start), self.llm.tokenizer)
        names = {"user": "User", "assistant": "Assistant"}
        lines = [f"{names[m['role']]}: {m['content']}\n" for m in self.messages[start:]]
        return self.llm.encode("".join(lines) + "Assistant:")
