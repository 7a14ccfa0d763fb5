"""Tokens coloured by origin: accepted draft tokens, or tokens of the target."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from foretoken.cli.output import has_colour, print_text
from foretoken.engine.stopping import Detokenizer
from foretoken.lab.report.show.texts import token_texts, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from foretoken.engine.request import Origin
    from foretoken.lab.report.show.run import Round
    from foretoken.lab.report.show.why import TraceNode
    from foretoken.llm import Llm, Output, Piece

STYLES = {"accepted": "green", "recovered": "bold red", "bonus": "bold cyan", "plain": "", "root": ""}
MARKS = {"accepted": ("[", "]"), "recovered": ("<", ">"), "bonus": ("{", "}"), "plain": ("", "")}


def explained(output: Output, tokenizer: Any, colour: bool) -> Text:
    """The output with its tokens coloured by origin, or marked where there is no colour."""
    texts = token_texts(tokenizer, output.token_ids, output.text)
    return coloured(list(zip(output.origins, texts, strict=True)), colour)


def coloured(words: Sequence[tuple[str, str]], colour: bool) -> Text:
    """Pairs of origin and text, coloured or marked."""
    from rich.text import Text

    result = Text()
    pairs = [(origin, text) for origin, text in words if text]
    for origin, group in groupby(pairs, key=lambda pair: pair[0]):
        run = [text for _, text in group]
        if colour:
            result.append("".join(run), STYLES[origin])
        else:
            left, right = MARKS[origin]
            result.append(left + "|".join(run) + right if left else "".join(run))
    return result


def legend(colour: bool) -> Text:
    """The meaning of colours or marks, one line per origin."""
    from rich.text import Text

    meanings = {
        "accepted": "accepted draft token",
        "recovered": "recovered (a draft was rejected here)",
        "bonus": "bonus (a whole path was accepted)",
        "plain": "plain (nothing was drafted)",
    }
    result = Text()
    for origin, meaning in meanings.items():
        left, right = MARKS[origin]
        sample = Text("text", STYLES[origin]) if colour else Text(f"{left}text{right}")
        result.append_text(Text("  ")).append_text(sample).append(f"  {meaning}\n")
    return result


def print_explained(console: Console, output: Output, tokenizer: Any) -> None:
    """Print the legend, the text, and the token trees of the first rounds if the output has any."""
    colour = has_colour(console)
    console.print(legend(colour), end="")
    print_text(console, explained(output, tokenizer, colour))
    if output.rounds:
        _print_trees(console, output, tokenizer, colour)


def stream_explained(
    console: Console, llm: Llm, prompt: str | Sequence[int], options: Mapping[str, Any], echo: str = ""
) -> Output:
    """Generate on a console with colours: print the legend, stream the coloured text, print the trees.  Returns the
    output.

    ``llm`` needs a tokenizer.  ``echo`` is printed before the output on a terminal.  Raises as :meth:`Llm.stream` does,
    before printing.
    """

    def begin() -> None:
        console.print(legend(colour=True), end="")
        if sys.stdout.isatty():
            print_text(console, echo, "dim", end="")

    output = stream_coloured(console, llm, prompt, {**options, "explain": True}, begin)
    _print_trees(console, output, llm.tokenizer, colour=True)
    return output


def stream_coloured(
    console: Console,
    llm: Llm,
    prompt: str | Sequence[int],
    options: Mapping[str, Any],
    begin: Callable[[], None] = lambda: None,
) -> Output:
    """Generate and stream the text, coloured if the console shows colours.  Returns the output.

    ``llm`` needs a tokenizer.  ``begin`` is called before the first text, once the request has been accepted.  Raises
    as :meth:`Llm.stream` does, before printing.
    """
    from foretoken.engine.output import Pieces, output_of

    rounds = llm.calls.follow(llm.request(prompt, **options))
    run, emission = next(rounds)
    begin()
    pieces, colours = Pieces(llm.tokenizer), _Colours(llm.tokenizer)
    try:
        print_text(console, colours.push(pieces.push(run, emission)), end="")
        for run, emission in rounds:
            print_text(console, colours.push(pieces.push(run, emission)), end="")
    finally:  # ends an interrupted line too
        console.print()
    return output_of(run, llm.tokenizer)


class _Colours:
    """Colours the pieces of a stream.  A partial character belongs to the token that completes it."""

    def __init__(self, tokenizer: Any) -> None:
        self._decoder = Detokenizer(tokenizer)
        self._waiting: list[tuple[str, Origin]] = []

    def push(self, piece: Piece) -> Text:
        """The new text of a piece.  The rest is held back, as it may begin a stop string."""
        from rich.text import Text

        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            self._waiting.append((self._decoder.push([token]), origin))
        if piece.finish_reason is not None and piece.origins:
            self._waiting.append((self._decoder.flush(), piece.origins[-1]))
        result, room = Text(), len(piece.text)
        while room and self._waiting:
            text, whence = self._waiting.pop(0)
            result.append(text[:room], STYLES[whence])
            if text[room:]:
                self._waiting.insert(0, (text[room:], whence))
            room = max(0, room - len(text))
        return result


def _print_trees(console: Console, output: Output, tokenizer: Any, colour: bool) -> None:
    from foretoken.lab.report.show.run import shown_run

    print_rounds(console, shown_run(output, tokenizer, "", ()).rounds, colour, "foretoken show draws them all")


def print_rounds(
    console: Console, rounds: Sequence[Round], colour: bool, more: str, first: int = 0, most: int = 3
) -> None:
    """Print the token trees of ``most`` rounds from index ``first``; ``more`` names a way to see the others."""
    from rich.text import Text

    for number, round_ in enumerate(rounds[first : first + most], first + 1):
        console.print(Text(f"round {number}: {round_.caption}", "dim"))
        for line in lines_of(round_):
            left, right = MARKS.get(line.kind, ("", ""))
            text = line.text if colour else f"{left}{line.text}{right}"
            shown_line = Text(f"  {line.branch}").append(text, STYLES.get(line.kind, "dim"))
            console.print(shown_line.append(f"  {line.why}" if line.why else "", "dim"))
    left_over = len(rounds) - first - most
    if left_over > 0:
        console.print(Text(f"{left_over} more rounds: {more}", "dim"))


@dataclass(frozen=True)
class TreeLine:
    """One node, printed on one line.

    Attributes:
        branch: the branch characters before the node.
        kind: ``root``, ``accepted``, ``rejected``, ``untried``, ``probe``, or the origin of the target's own token.
        why: the reason for a rejection, else empty.
    """

    branch: str
    text: str
    kind: str
    why: str


def lines_of(round_: Round) -> list[TreeLine]:
    """The tree of a round: the root first, every child below its parent, accepted children before others.

    Omits probes, and untried nodes whose parents were untried or rejected.
    """
    last = max((n.index for n in round_.nodes if n.status == "accepted"), default=0)
    children: dict[int, list[TraceNode]] = {n.index: [] for n in round_.nodes}
    for node in round_.nodes[1:]:
        parent = round_.nodes[node.parent]
        if node.status != "probe" and not (node.status == "untried" and parent.status in ("untried", "rejected")):
            children[node.parent].append(node)
    children[last].insert(0, round_.next_token)
    for below in children.values():
        below.sort(key=lambda n: n.status != "accepted")
    lines = [TreeLine("", visible(round_.nodes[0].text), "root", "")]
    waiting = _placed(children[0], "")
    while waiting:
        node, indent, is_last = waiting.pop()
        is_next = node.index < 0
        kind = round_.origin if is_next else node.status
        reason = node.why if node.status == "rejected" else ""
        lines.append(TreeLine(indent + ("└─ " if is_last else "├─ "), visible(node.text), kind, reason))
        if not is_next:
            waiting += _placed(children[node.index], indent + ("   " if is_last else "│  "))
    return lines


def _placed(siblings: Sequence[TraceNode], indent: str) -> list[tuple[TraceNode, str, bool]]:
    """Siblings, the first of them last, with their indent and whether their line is the last one."""
    return [(node, indent, node is siblings[-1]) for node in reversed(siblings)]
