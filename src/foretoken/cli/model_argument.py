"""MODEL, the first positional argument of every command that runs a model, and its equivalent ``--target``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from foretoken.core.io.hub_ids import expanded
from foretoken.core.names import did_you_mean

BUILTIN = "builtin"
HELP = "builtin, a name that `foretoken models` lists, a model folder, a GGUF file, or a Hugging Face id."
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=HELP, show_default=BUILTIN)]
Target = Annotated[str | None, typer.Option(help="The same as MODEL.", show_default=BUILTIN)]
GroupModel = Annotated[str | None, typer.Option("--model", hidden=True)]
"""Hidden option that receives MODEL in :class:`ModelGroup`."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PATH = re.compile(r"(/|\./|\.\./|~/)\S*/?\S+")


def one_model(model: str | None, target: str | None) -> str:
    """The model from MODEL, ``--target``, both or neither (``builtin``).  Raises ``ValueError`` for two different
    models and for an empty name, often an unset shell variable."""
    if "" in (model, target):
        raise ValueError("MODEL is empty: name a model, or leave it out for the built-in one")
    if model is not None and target is not None and model != target:
        raise ValueError(f"MODEL is {model!r} and --target is {target!r}: give one of them")
    return model or target or BUILTIN


def existing_model(model: str | None, target: str | None) -> str:
    """:func:`one_model`, checked to exist, so that a wrong path fails before seconds of imports."""
    from foretoken.core.io.checkpoints import check_source

    chosen = one_model(model, target)
    check_source(chosen)
    return chosen


def names_model(text: str) -> bool:
    """Whether a single argument is a MODEL rather than text: ``builtin``, a model name, a model folder, a GGUF file, a
    path or ``org/name``, without spaces."""
    return is_model(text) or _HUB_ID.fullmatch(text) is not None or _PATH.fullmatch(text) is not None


def is_model(text: str) -> bool:
    """Whether the text names a local model or one that can be fetched by name."""
    from foretoken.core.io.named_models import MODELS

    if text == BUILTIN or text.startswith(f"{BUILTIN}:") or text in MODELS:
        return True
    try:
        path = expanded(text)
        configs = ("config.json", "adapter_config.json")
        return any((path / file).is_file() for file in configs) or (path.suffix == ".gguf" and path.is_file())
    except (OSError, ValueError):  # too long for a path, or contains a null byte
        return False


def _is_file(text: str) -> bool:
    try:
        return expanded(text).is_file()
    except (OSError, ValueError):
        return False


def model_and_prompt(words: Sequence[str], has_target: bool) -> tuple[str | None, str | None]:
    """Split ``[MODEL] [PROMPT]``; with ``--target``, a single word is the PROMPT.  Raises ``ValueError`` for more than
    two words, and for a file that is not a model, as the user meant its text."""
    if len(words) > 2:
        raise ValueError(f"{len(words)} arguments instead of MODEL and PROMPT: put the prompt between quotes")
    if len(words) == 2:
        return words[0], words[1]
    if words and not is_model(words[0]) and _is_file(words[0]):
        raise ValueError(f"{words[0]} is a file: give --prompt-file {words[0]} for the text in it")
    if words and not has_target and names_model(words[0]):
        return words[0], None
    return None, words[0] if words else None


def model_before(words: Sequence[str], words_after: str) -> tuple[str | None, Sequence[str]]:
    """Split ``[MODEL] PLACES``: MODEL is present if there is one word more than places.  Raises ``ValueError`` for
    other numbers of words."""
    count = len(words_after.split())
    if len(words) == count + 1:
        return words[0], words[1:]
    if len(words) != count:
        raise ValueError(f"expected the arguments [MODEL] {words_after}, not {len(words)} arguments")
    return None, words


class WordsCommand(TyperCommand):
    """A command that splits its positional arguments itself.  Its usage line shows them as written."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The parts of the usage line after the command name."""
        words = [str(part.metavar) for part in self.params if part.param_type_name == "argument"]
        return [self.options_metavar or "", *words]


class ModelGroup(TyperGroup):
    """A command with subcommands whose first positional may be MODEL instead of a subcommand's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn MODEL into the hidden option ``--model``, unless it is a subcommand's name or close to one."""
        *_, rest, _order = (None, *self.make_parser(ctx).parse_args(list(args)))
        word = next(iter(rest or ()), None)
        if (
            word is not None
            and word not in self.commands
            and (names_model(word) or not did_you_mean(word, list(self.commands)))
        ):
            before = len(args) - len(rest)
            args = [*args[:before], "--model", word, *args[before + 1 :]]
        return super().parse_args(ctx, args)
