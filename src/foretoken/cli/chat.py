"""``foretoken chat``: a conversation in the terminal (or through a pipe)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.cli.generate import stats_line
from foretoken.cli.options import Common, with_common
from foretoken.cli.output import screen

if TYPE_CHECKING:
    from foretoken.engine.stats import SpecStats
    from foretoken.llm import Llm

HELP = "/quit leaves, /reset forgets the conversation, /stats shows counts; Ctrl-C ends an answer"


@with_common(max_new_tokens=256)
def chat_command(*, common: Common) -> None:
    """Talk to the target, turn by turn."""
    common.check()
    llm = common.load()
    if llm.tokenizer is None:
        raise ValueError(f"chat needs a tokenizer, and {common.target} has none")
    session = Session(llm, common.sampling)
    if not getattr(llm.tokenizer, "chat_template", None):
        say = "was not trained to talk: it goes on with the text, and may write nonsense; --target PATH takes another"
        print(f"(note: {common.target} {say})", file=sys.stderr)
    interactive = sys.stdin.isatty()
    if interactive:
        screen(stderr=True).print(HELP, style="dim", soft_wrap=True)
    while (line := _read(interactive)) is not None:
        if line == "/quit":
            break
        session.handle(line)


def _read(interactive: bool) -> str | None:
    """The next line without its end; ``None`` at the end of the input."""
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
    """One conversation.

    Attributes:
        llm: what answers.
        options: sampling options.
        messages: ``{"role", "content"}``, user and assistant in turn.
    """

    llm: Llm
    options: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: SpecStats | None = None

    def handle(self, line: str) -> None:
        """Answer a line, or obey a command."""
        if line == "/reset":
            self.messages.clear()
            print("(forgotten)")
        elif line == "/stats":
            print(f"({stats_line(self.stats) if self.stats else 'nothing generated yet'})")
        elif line.startswith("/"):
            print(f"(unknown command {line.split()[0]}: {HELP})")
        elif line:
            self._answer(line)

    def _answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            prompt, room = self._fitting_prompt()
        except ValueError as error:
            self.messages.pop()
            print(f"error: {error}", file=sys.stderr)
            return
        said = self._say(prompt, {**self.options, "max_new_tokens": room})
        self.messages.append({"role": "assistant", "content": said.strip()})

    def _say(self, prompt: list[int], options: dict[str, Any]) -> str:
        """Stream one answer; Ctrl-C ends it and keeps what was said."""
        said = ""
        stop = None if self._has_template else ["\nUser:"]
        pieces = self.llm.stream(prompt, stop=stop, **options)
        try:
            for piece in pieces:
                text = piece.text if said else piece.text.lstrip()
                said += text
                sys.stdout.write(text)
                sys.stdout.flush()
                if piece.stats is not None:
                    self._count(piece.stats)
        except KeyboardInterrupt:
            self.llm.engine.close()
            sys.stdout.write(" (stopped)")
        finally:
            pieces.close()  # type: ignore[attr-defined]
        sys.stdout.write("\n")
        sys.stdout.flush()
        return said

    def _count(self, stats: SpecStats) -> None:
        if self.stats is None:
            self.stats = stats
        else:
            self.stats.merge(stats)

    # -- prompts -----------------------------------------------------------------------------------------------------

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.llm.tokenizer, "chat_template", None))

    def _fitting_prompt(self) -> tuple[list[int], int]:
        """Token ids and the room for an answer; the oldest turns go when the context is full.

        Raises:
            ValueError: the last message alone fills the context.
        """
        context, wanted = self.llm.target.context_length, int(self.options["max_new_tokens"])
        prompt = self._prompt()
        dropped = 0
        while len(prompt) + wanted > context and len(self.messages) > 2:
            del self.messages[:2]
            dropped += 2
            prompt = self._prompt()
        if dropped:
            print(f"(the context is full: forgot the oldest {dropped} messages)", file=sys.stderr)
        room = context - len(prompt)
        if room < 1:
            raise ValueError(f"the message has {len(prompt)} tokens and the model's context is {context}: shorten it")
        return prompt, min(wanted, room)

    def _prompt(self) -> list[int]:
        if self._has_template:
            return self.llm.encode(self.messages)
        names = {"user": "User", "assistant": "Assistant"}
        lines = [f"{names[m['role']]}: {m['content']}\n" for m in self.messages]
        return self.llm.encode("".join(lines) + "Assistant:")
