"""A prompt as a user turn in a chat template; notes about sampling defaults and empty answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.output import screen
from foretoken.core.conversation import control_tokens, has_template, render

if TYPE_CHECKING:
    from foretoken.llm import Llm

System = Annotated[str | None, typer.Option(help="For a chat model: the system message in front of the prompt.")]
Raw = Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without the model's chat template.")]


def check_turn(system: str | None, raw: bool) -> None:
    """Raise ``ValueError`` for ``--system`` with ``--raw``, before a model is loaded."""
    if system is not None and raw:
        raise ValueError("--system needs the chat template, and --raw leaves it out: give one of them")


def is_chat_model(llm: Llm) -> bool:
    """Whether the model's tokenizer has a chat template."""
    return llm.tokenizer is not None and has_template(llm.tokenizer)


def check_system(llm: Llm, system: str | None, target: str) -> None:
    """Raise ``ValueError`` for a system message if the model has no chat template or its template refuses it."""
    if system is None:
        return
    if not is_chat_model(llm):
        raise ValueError(f"{target} has no chat template, which --system needs: put the instructions into the prompt")
    render([{"role": "system", "content": system}, {"role": "user", "content": "Hello"}], llm.tokenizer)


def prompt_for(llm: Llm, text: str, system: str | None, raw: bool, target: str) -> str | list[int]:
    """The text itself, or for a chat model the token ids of a conversation that begins with it.  Raises ``ValueError``
    for empty text, and as :func:`check_system` does."""
    check_system(llm, system, target)
    if raw or not is_chat_model(llm):
        return text
    if not text.strip():
        raise ValueError("the prompt is empty: give at least one character")
    if controls := control_tokens(text, llm.tokenizer):
        says = f"the prompt holds {', '.join(controls)}, and the model's chat template is put around it"
        screen(stderr=True).print(f"{says}: --raw completes it as it stands", soft_wrap=True, markup=False)
    messages = [{"role": "user", "content": text}]
    return render([{"role": "system", "content": system}, *messages] if system is not None else messages, llm.tokenizer)


def tell_defaults(llm: Llm) -> None:
    """Print the model's own sampling defaults on stderr."""
    if llm.defaults.sampling:
        screen(stderr=True).print(f"sampling: {llm.defaults}", style="dim")


def tell_empty(llm: Llm, note: str, raw: bool = False) -> None:
    """Print on stderr the reason for an empty answer, from the output's ``note``."""
    if note:
        advice = "; --raw leaves the chat template out" if raw and is_chat_model(llm) else ""
        screen(stderr=True).print(f"the answer is empty: {note}{advice}")
