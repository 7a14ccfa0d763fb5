"""``foretoken generate``: complete a prompt; ``--compare`` and ``--explain`` show what speculation did."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.explain import print_explained, stream_explained
from foretoken.cli.model_argument import model_and_prompt
from foretoken.cli.options import OWN_SAMPLING, Common, Json, with_common
from foretoken.cli.output import has_colour, json_only, print_json, print_text, screen, status_line
from foretoken.cli.turns import Raw, System, check_turn, prompt_for, tell_defaults, tell_empty
from foretoken.core.io.hub_ids import expanded

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.engine.stats import SpecStats
    from foretoken.lab.bench.compare import Comparison, Runs
    from foretoken.llm import Llm, Output

DEFAULT_PROMPT = "The captain looked out over the sea and said nothing for a long time."
STDIN_WAIT_S = 10.0
NOTHING_TO_COMPARE = "--compare needs a drafter: --drafter none is plain decoding on both sides"
CUT = "; cut there: --max-new-tokens allows more"
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] [PROMPT]",
        help="MODEL: builtin, a name of `foretoken models`, a model folder, a GGUF file or a Hugging Face id; alone, "
        "it must be one of them or a path. PROMPT: text to complete, or to answer; - or a pipe without PROMPT: stdin "
        "(without a pipe: a built-in one).",
        show_default=False,
    ),
]
PromptFile = Annotated[Path | None, typer.Option(help="File with the prompt.")]


@with_common(model="own", own_sampling=True)
def generate_command(
    words: Words = None,
    prompt_file: PromptFile = None,
    system: System = None,
    raw: Raw = False,
    prediction: Annotated[
        Path | None, typer.Option(help="File with text expected in the answer, for --drafter prediction.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be given several times.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Plain and speculative decoding in one run.")] = False,
    repeat: Annotated[int, typer.Option(help="Runs of each arm with --compare (medians are shown).")] = 3,
    explain: Annotated[
        bool, typer.Option("--explain", help="Colour tokens by origin; JSON has origins, rounds.")
    ] = False,
    tensor_parallel: Annotated[
        int, typer.Option(help="Processes of this machine, on CUDA devices, that the target is split over.")
    ] = 1,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Answer a prompt, or complete it: a model with a chat template gets the prompt as a user's turn."""
    check_turn(system, raw)
    if repeat < 1:
        raise ValueError(f"--repeat must be at least 1, not {repeat}")
    if compare and common.drafter == "none":
        raise ValueError(NOTHING_TO_COMPARE)
    common, text = common_and_prompt(common, words, prompt_file)
    if "repeat" in common.explicit and not compare:
        print("--repeat is ignored: it needs --compare", file=sys.stderr)
    expected = {} if prediction is None else {"prediction": read_text(prediction)}
    with json_only(as_json):
        llm = common.load(tensor_parallel=tensor_parallel, own_sampling=True)
        tell_defaults(llm)
        tell_prediction(llm, expected.get("prediction"))
        task = Task(llm, text, prompt_for(llm, text, system, raw, common.target), raw)
        options: dict[str, Any] = {
            **llm.defaults.sampling,
            **common.request_options,
            "stop": stop or None,
            **expected,
        }
        if compare:
            result = compared(task.llm, task.prompt, options, repeat)
            report = result.public()
            if explain:
                report["speculative"]["origins"] = result.speculative.output.origins
        elif as_json or (explain and not has_colour(screen())):
            output = llm.generate(task.prompt, **options, explain=explain)
            tell_empty(llm, output.note, raw)
            report = _report(output) | (_explained(output, llm.tokenizer) if explain else {})
    if as_json:
        from foretoken.lab.workload import inflation

        grown = inflation(llm.target)
        print_json({**report, **_used(llm, options), **({} if grown is None else {"inflation": grown})})
    elif compare:
        _print_comparison(task, result, explain)
    elif explain and has_colour(screen()):
        output = stream_explained(screen(), llm, task.prompt, options, task.echo)
        tell_empty(llm, output.note, raw)
        _print_stats(output.stats, output.seed, task.is_cut(output.finish_reason))
    elif explain:
        _print_prompt(task)
        print_explained(screen(), output, llm.tokenizer)
        _print_stats(output.stats, output.seed, task.is_cut(output.finish_reason))
    else:
        _stream(task, options)


@dataclass(frozen=True)
class Task:
    """A prompt to answer.

    ``text`` is the user's text.  ``prompt`` is the model's input: that text, or token ids of the rendered chat
    template.  ``raw``: the template was left out on request.
    """

    llm: Llm
    text: str
    prompt: str | list[int]
    raw: bool = False

    def is_cut(self, finish_reason: str | None) -> bool:
        """Whether an answer was truncated; a completion has no natural end."""
        return finish_reason == "length" and not isinstance(self.prompt, str)

    @property
    def echo(self) -> str:
        """Text printed before the output: a completion continues its line, an answer begins a new one."""
        return self.text if isinstance(self.prompt, str) else self.text.rstrip("\n") + "\n"


def tell_prediction(llm: Llm, prediction: str | None) -> None:
    """Warn on stderr if the drafter ignores the prediction, or if the prediction drafter has none."""
    from foretoken.methods.drafters.prediction import PredictionDrafter

    waiting, uses = ([] if llm.drafter is None else [llm.drafter]), False
    while waiting:
        drafter = waiting.pop()
        waiting += drafter.drafters
        uses |= isinstance(drafter, PredictionDrafter)
    if prediction is not None and not uses:
        name = "none" if llm.drafter is None else llm.drafter.name
        print(f"--prediction is ignored: drafter {name} does not use it; --drafter prediction does", file=sys.stderr)
    elif isinstance(llm.drafter, PredictionDrafter) and not prediction:
        source = "without --prediction FILE" if prediction is None else "from an empty file"
        print(f"drafter prediction drafts nothing {source}: this is plain decoding", file=sys.stderr)


def _report(output: Output) -> dict[str, Any]:
    """An output as JSON fields."""
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        **({} if output.seed is None else {"seed": output.seed}),
        "stats": output.stats.as_dict(),
    }


def _explained(output: Output, tokenizer: Any) -> dict[str, Any]:
    """JSON fields of ``--explain``: origins of tokens, and rounds in the server's format."""
    from foretoken.lab.report.show.texts import token_namer

    text = token_namer(tokenizer)
    rounds = [
        {
            **round_.as_dict(),
            "texts": [text(token) for token in round_.tokens],
            "next_text": text(round_.next_token),
        }
        for round_ in output.rounds
    ]
    return {"origins": output.origins, "rounds": rounds}


def _used(llm: Llm, options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON fields for the sampling options of a model with its own defaults; empty for other models."""
    defaults = llm.defaults.sampling
    if not defaults:
        return {}
    names = [*defaults, *(name for name in OWN_SAMPLING if name in options and name not in defaults)]
    return {"sampling": {name: options[name] for name in names}, "sampling_source": llm.defaults.source}


def common_and_prompt(
    common: Common, words: Sequence[str] | None, file: Path | None, text: str | None = None
) -> tuple[Common, str]:
    """The checked options with their MODEL, and the prompt.  Raises ``ValueError`` for contradictory options.

    ``text`` is that of the file if it was read already.
    """
    model, prompt = model_and_prompt(words or (), "target" in common.explicit)
    common = common.of(model)
    common.check()
    return common, read_prompt(prompt, file, text)


def read_prompt(prompt: str | None, file: Path | None, text: str | None = None) -> str:
    """The prompt from the argument, a file, stdin or the built-in one.  Raises ``ValueError`` for two prompts or an
    empty one."""
    if prompt is not None and file is not None:
        raise ValueError("give a prompt or --prompt-file, not both")
    if file is not None:
        text = read_text(file) if text is None else text
    elif prompt == "-":
        text = _stdin()
    elif prompt is None:
        piped = _piped()
        text = DEFAULT_PROMPT if piped is None else piped
    else:
        text = _utf8(prompt, "the prompt")
    if not text:
        empty = "the prompt is" if (prompt != "-" and prompt is not None) or file else "standard input is"
        raise ValueError(f"{empty} empty: give at least one character")
    return text


def read_text(file: Path) -> str:
    """Text of a UTF-8 file, without a byte order mark.  Raises ``ValueError`` for other encodings."""
    try:
        return expanded(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None


def _stdin() -> str:
    """All of stdin.  Raises ``ValueError`` if it is not UTF-8."""
    try:
        return _utf8(sys.stdin.read(), "standard input")
    except UnicodeDecodeError:
        raise ValueError("standard input is not UTF-8 text") from None


def _utf8(text: str, what: str) -> str:
    """The text.  Raises ``ValueError`` if it is not UTF-8: some locales, and arguments, decode invalid bytes to lone
    surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not UTF-8 text") from None
    return text


def _piped() -> str | None:
    """Text from a pipe or a file at stdin; ``None`` if there is neither (a terminal, or /dev/null).

    Raises ``ValueError`` if nothing comes for a while: a pipe that a program left open must not hang this one, and the
    answer to another prompt than the one to come would be worse.
    """
    if sys.stdin is None or sys.stdin.closed:
        return None
    try:
        if stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode):
            return None
    except (OSError, ValueError):  # an object without a file descriptor
        return _stdin() or None
    try:
        ready, _, _ = select.select([sys.stdin], [], [], STDIN_WAIT_S)
    except (OSError, ValueError):  # a system that cannot select on pipes
        ready = [sys.stdin]
    if not ready:
        raise ValueError(f"nothing came on stdin in {STDIN_WAIT_S:g} s: give a prompt, or - to wait for it")
    return _stdin()


def _print_prompt(task: Task) -> None:
    """Echo the prompt on a terminal; a pipe gets the completion alone."""
    if sys.stdout.isatty():
        print_text(screen(), task.echo, "dim", end="")


def _stream(task: Task, options: dict[str, Any]) -> None:
    pieces = task.llm.stream(task.prompt, **options)
    last = next(pieces)  # a bad prompt raises before anything is printed
    _print_prompt(task)
    sys.stdout.write(last.text)
    try:
        for last in pieces:
            sys.stdout.write(last.text)
            sys.stdout.flush()
    finally:  # ends an interrupted line too
        sys.stdout.write("\n")
        sys.stdout.flush()
    tell_empty(task.llm, last.note, task.raw)
    if last.stats is not None:
        _print_stats(last.stats, last.seed, task.is_cut(last.finish_reason))


def _print_stats(stats: SpecStats, seed: int | None, cut: bool) -> None:
    line = stats_line(stats) + (f", seed {seed}" if seed is not None else "") + CUT * cut
    screen(stderr=True).print(line, style="dim")


def stats_line(stats: SpecStats) -> str:
    """Counts and speeds of a generation in one line."""
    line = f"{stats.num_new_tokens} tokens, {stats.tokens_per_s:.1f} tokens/s"
    if stats.num_draft_tokens:
        line += (
            f", mean acceptance length {stats.mean_acceptance_length:.2f}, acceptance rate {stats.acceptance_rate:.0%}"
        )
    return line


def compared(llm: Llm, prompt: str | list[int], options: dict[str, Any], repeat: int) -> Comparison:
    """Plain and speculative runs of a prompt in turns, with a status line.  ``llm`` needs a drafter."""
    from foretoken.lab.bench.compare import compare

    if llm.drafter is None:
        raise ValueError(NOTHING_TO_COMPARE)
    if options.get("temperature", 0) > 0 and options["seed"] is None:
        options = {**options, "seed": 0}
    with status_line() as say:
        say("warming up")
        return compare(llm, prompt, options, repeat, lambda done: say(f"run {min(done + 1, repeat)} of {repeat}"))


def _print_comparison(task: Task, result: Comparison, explain: bool) -> None:
    console, llm = screen(), task.llm
    console.rule("plain", align="left")
    print_text(console, task.echo, "dim", end="")
    print_text(console, result.plain.output.text)
    console.rule("speculative", align="left")
    begins_anew = explain and not task.echo.endswith("\n")
    print_text(console, task.echo, "dim", end="\n" if begins_anew else "")
    if explain:
        print_explained(console, result.speculative.output, llm.tokenizer)
    else:
        print_text(console, result.speculative.output.text)
    console.rule(align="left")
    print_speeds(console, result)


def print_speeds(console: Console, result: Comparison) -> None:
    """Print the speeds, their ratio, the equality of outputs, and acceptance."""
    console.print(f"plain        {_speed(result.plain)}")
    console.print(f"speculative  {_speed(result.speculative)}")
    stats = result.speculative.output.stats
    console.print(f"speed-up     {result.speedup:.2f}x", style="bold")
    console.print(f"output identical: {_identity(result)}", style="bold")
    console.print(f"mean acceptance length {stats.mean_acceptance_length:.2f} tokens per round")
    counts = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens"
    console.print(f"acceptance rate {stats.acceptance_rate:.0%} ({counts})")
    console.print(f"time         {time_split(stats)}")


def _speed(arm: Runs) -> str:
    spread = f"(median of {len(arm.rates)}: {min(arm.rates):.1f} to {max(arm.rates):.1f})" if len(arm.rates) > 1 else ""
    return f"{arm.tokens_per_s:8.1f} tokens/s, {arm.output.stats.num_new_tokens} tokens {spread}".rstrip()


def _identity(result: Comparison) -> str:
    difference = result.difference
    if difference is None:
        return "yes"
    if not result.comparable:
        where = f"from token {difference.position} on"
        return f"no ({where}; only coupled sampling, --verifier auto, keeps the text of a seed)"
    gap = "one output ends there" if difference.logit_gap is None else f"logit gap {difference.logit_gap:.3g}"
    kind = "numerical tie" if difference.is_tie else "a real difference, please report it"
    return f"no (from token {difference.position} on: {gap}, {kind})"


def time_split(stats: SpecStats) -> str:
    """Shares of the rounds' time by stage."""
    busy = stats.draft_s + stats.target_s + stats.verify_s + stats.overhead_s
    parts = ("draft", "target", "verify", "overhead")
    shares = ", ".join(f"{part} {getattr(stats, part + '_s') / busy:.0%}" for part in parts) if busy else ""
    return f"{busy:.2f} s: {shares}; prefill {stats.prefill_s:.2f} s"
