"""``foretoken demo``: one answer of a small chat model, plain and speculative, with the measured speed-up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.explain import stream_coloured
from foretoken.cli.generate import DEFAULT_PROMPT, compared, print_speeds
from foretoken.cli.models import fetched
from foretoken.cli.options import Common, Json
from foretoken.cli.output import has_colour, json_only, print_json, screen, status_line
from foretoken.cli.turns import prompt_for

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.lab.bench.compare import Comparison
    from foretoken.llm import Llm

NAME = "smollm2"
PROMPT = """How many hearts does an octopus have, and what do they do? Answer in the words of this text:

The octopus has three hearts. Two of them pump blood to the gills, and the third pumps it to the rest of the body. \
When an octopus swims, the third heart stops beating. That is why octopuses prefer to crawl."""
KIND = "an answer in the words of a text, which suits copied drafts"
"""Kind of text that the prompt asks for; the speed-up holds for such texts."""
OTHER = "Why is the sky blue?"
"""A question whose answer copies nothing from the prompt; the first speed-up alone would promise too much."""


@dataclass(frozen=True)
class Show:
    """Model and prompts of a demo.

    ``kind`` names the kind of text behind the speed-up.  ``other`` is a prompt that is measured but not shown (empty
    for none).
    """

    target: str
    title: str
    drafter: str
    prompt: str
    kind: str
    other: str = ""
    dtype: str = "auto"


BUILTIN = Show(
    "builtin", "the built-in model, 16M parameters", "auto", DEFAULT_PROMPT, "prose to go on with", dtype="float32"
)
REPEAT, NEW_TOKENS = 3, 64


def demo_command(
    fetch: Annotated[bool, typer.Option("--fetch", help=f"Fetch {NAME} first if it is missing.")] = False,
    as_json: Json = False,
) -> None:
    """Show one answer, plain and speculative: the same text, and the speed of both.

    The model is smollm2 if it was fetched (--fetch), otherwise the built-in one.
    """
    with json_only(as_json):
        show = _chosen(fetch)
        llm = _loaded(show)
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0}
        prompts = [prompt_for(llm, text, None, False, show.target) for text in (show.prompt, show.other) if text]
        if not as_json:
            _print_answers(screen(), show, llm, prompts[0], options)
        first, *others = [compared(llm, prompt, options, REPEAT) for prompt in prompts]
        if not as_json:
            _print_result(screen(), show, first, others)
    if as_json:
        further = [{"prompt": show.other, "speedup": other.speedup, "identical": other.identical} for other in others]
        about = {"model": show.target, "drafter": _drafter(llm), "prompt": show.prompt}
        print_json({**about, **first.public(), "others": further})


def _chosen(fetch: bool) -> Show:
    """The real model, or the built-in one, with the reason on stderr, if the real one is not cached and cannot be
    fetched."""
    from foretoken.core.io.checkpoints import located
    from foretoken.core.io.named_models import MODELS

    model = MODELS[NAME]
    try:
        if fetch:
            fetched(NAME)
        file = located(model)
    except (ValueError, OSError) as error:
        print(f"showing the built-in model: {' '.join(str(error).split())}", file=sys.stderr)
        return BUILTIN
    return Show(str(file), model.title, model.drafter, PROMPT, KIND, OTHER)


def _loaded(show: Show) -> Llm:
    with status_line() as say:
        say(f"loading {show.title}; the first time, its fast paths are checked and timed on this machine")
        return Common(target=show.target, drafter=show.drafter, dtype=show.dtype).load(own_sampling=True)


def _drafter(llm: Llm) -> str:
    return "none" if llm.drafter is None else llm.drafter.spec


def _print_answers(console: Console, show: Show, llm: Llm, prompt: str | list[int], options: dict[str, Any]) -> None:
    """Print both answers while they are generated."""
    import torch

    threads = torch.get_num_threads()
    exact = {"bitwise": "exact to the last bit here"}.get(llm.exactness, "exact up to rounding here")
    console.print(f"{show.title}; cpu, {threads} thread{'s' * (threads > 1)}, {exact}")
    console.print(f"> {show.prompt}", style="dim")
    console.rule("plain", align="left")
    stream_coloured(console, llm.plain, prompt, options)
    green = "; accepted draft tokens are green" if has_colour(console) else ""
    console.rule(f"speculative, drafter {_drafter(llm)}{green}", align="left")
    stream_coloured(console, llm, prompt, options)
    console.rule(align="left")


def _print_result(console: Console, show: Show, result: Comparison, others: Sequence[Comparison]) -> None:
    """Print the speeds and how they were measured."""
    print_speeds(console, result)
    for other in others:
        same = "the same text" if other.identical else "different text, please report it"
        line = f'"{show.other}", whose answer has nothing to copy: {other.speedup:.2f}x, {same}'
        console.print(line, style="bold")
    console.print(
        f"Compared: the same model, kernels and prompt ({show.kind}), greedy. Plain decoding writes one token a pass; "
        f"speculative decoding verifies several draft tokens in one pass. Medians of {REPEAT} runs in turns, without "
        "the prompt.",
        style="dim",
    )
