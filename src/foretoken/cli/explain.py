"""Coloured tokens: which were accepted drafts, which came from the target itself."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from foretoken.cli.output import has_colour
from foretoken.show.texts import token_texts as token_texts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from foretoken.llm import Output

STYLES = {"accepted": "green", "recovered": "bold red", "bonus": "bold cyan", "plain": "", "root": ""}
MARKS = {"accepted": ("[", "]"), "recovered": ("<", ">"), "bonus": ("{", "}"), "plain": ("", "")}
TREES = 3
"""Rounds whose trees are printed."""
MEANINGS = {
    "accepted": "accepted draft token",
    "recovered": "recovered (a draft was rejected here)",
    "bonus": "bonus (a whole path was accepted)",
    "plain": "plain (nothing was drafted)",
}


def explained(output: Output, tokenizer: Any, colour: bool) -> Text:
    """The output with its tokens coloured by origin, or marked when there is no colour."""
    from rich.text import Text

    texts = token_texts(tokenizer, output.token_ids, output.text)
    result = Text()
    pairs = [(o, t) for o, t in zip(output.origins, texts, strict=True) if t]
    for origin, group in groupby(pairs, key=lambda pair: pair[0]):
        run = [text for _, text in group]
        if colour:
            result.append("".join(run), STYLES[origin])
        else:
            left, right = MARKS[origin]
            result.append(left + "|".join(run) + right if left else "".join(run))
    return result


def legend(colour: bool) -> Text:
    """What the colours or marks mean, on one line per origin."""
    from rich.text import Text

    result = Text()
    for origin, meaning in MEANINGS.items():
        left, right = MARKS[origin]
        sample = Text("text", STYLES[origin]) if colour else Text(f"{left}text{right}")
        result.append_text(Text("  ")).append_text(sample).append(f"  {meaning}\n")
    return result


def print_explained(console: Console, output: Output, tokenizer: Any) -> None:
    """Legend, then the text, then the token trees of the first rounds if the output has any."""
    colour = has_colour(console)
    console.print(legend(colour), end="", soft_wrap=True)
    console.print(explained(output, tokenizer, colour), soft_wrap=True)
    if output.rounds:
        _print_trees(console, output, tokenizer, colour)


def _print_trees(console: Console, output: Output, tokenizer: Any, colour: bool) -> None:
    from rich.text import Text

    from foretoken.show.lines import lines_of
    from foretoken.show.run import shown

    rounds = shown(output, tokenizer, "", ()).rounds
    for number, one in enumerate(rounds[:TREES], 1):
        console.print(Text(f"round {number}: {one.caption}", "dim"), soft_wrap=True)
        for line in lines_of(one):
            left, right = MARKS.get(line.kind, ("", ""))
            text = line.text if colour else f"{left}{line.text}{right}"
            shown_line = Text(f"  {line.branch}").append(text, STYLES.get(line.kind, "dim"))
            console.print(shown_line.append(f"  {line.why}" if line.why else "", "dim"), soft_wrap=True)
    if len(rounds) > TREES:
        more = f"{len(rounds) - TREES} more rounds: foretoken show draws them all"
        console.print(Text(more, "dim"), soft_wrap=True)
