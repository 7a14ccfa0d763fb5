"""Options shared by several commands."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.model_argument import HELP, GroupModel, Model, existing_model, one_model
from foretoken.cli.output import doing
from foretoken.cli.settings import FromOptions, parameter, parameters_of, signed, with_settings
from foretoken.core.io.hub_ids import expanded
from foretoken.core.settings import flag, setting
from foretoken.options import COMMAND_LINE, FIELDS, FILTERS, Field
from foretoken.registry import find, parse_spec

if TYPE_CHECKING:
    from foretoken.lab.workload import Subject
    from foretoken.llm import Llm
    from foretoken.models.base import LanguageModel


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line; the rest goes to stderr.")]
DRAFTER_HELP = (
    "auto, none or NAME[:PATH][,KEY=VALUE...], such as ngram, model:./draft,k=4 or eagle3:./head; "
    "`foretoken methods` lists all."
)
OWN_SAMPLING = tuple(name for name in COMMAND_LINE if FIELDS[name].sampling)
"""Options whose defaults a model may set."""


@dataclass(frozen=True)
class Common:
    """Options of every command that runs a model.

    ``drafter``, ``verifier`` and ``controller`` are spec strings ``name[:path][,key=value...]``.  ``sampling`` has the
    options of every request (keyword arguments of :meth:`foretoken.llm.Llm.generate`).  ``explicit`` has the names of
    the options on the command line.
    """

    target: str = setting("builtin", f"The same as MODEL: {HELP}")
    drafter: str = setting("auto", DRAFTER_HELP)
    verifier: str = setting("auto", "auto or NAME, such as coupled, block or traversal; `foretoken methods` lists all.")
    controller: str = setting("auto", "auto or NAME, such as goodput or constant,k=4; `foretoken methods` lists all.")
    profile: Path | None = setting(
        None, "Profile of `foretoken tune`: its drafter, verifier and controller replace auto."
    )
    dtype: str = setting("auto", "auto (the checkpoint's), float32, float64, bfloat16 or float16.")
    device: str = setting("auto", "auto (the first available of cuda, mps and cpu), cpu, cuda, cuda:1, mps.")
    inflate: str | None = setting(
        None, "For measuring: the target's outputs at the cost of 300m, 1b, 3b, 7b parameters."
    )
    quantize: str | None = setting(
        None, "Quantise the target's weights on the cpu: int8, int4, int8-a8 or int4-a8. Its output changes."
    )
    backend: str = setting("auto", "Backend of a GGUF file: auto (native if supported), native or llama.cpp.")
    allow_lossy: bool = flag("Permit verifiers that change the target's distribution.")

    sampling: Mapping[str, Any] = field(default_factory=lambda: {name: FIELDS[name].default for name in COMMAND_LINE})
    explicit: frozenset[str] = frozenset()

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens to generate."""
        return int(self.sampling["max_new_tokens"])

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        return float(self.sampling["temperature"])

    @property
    def seed(self) -> int | None:
        """Seed of sampling."""
        return self.sampling["seed"]

    @property
    def filters(self) -> dict[str, Any]:
        """Options that filter tokens, such as top-k and top-p."""
        return {name: self.sampling[name] for name in FILTERS}

    def of(self, model: str | None, is_run: bool = True) -> Common:
        """These options with the MODEL argument, if any.  Raises ``ValueError`` if ``--target`` names another model,
        or, with ``is_run``, if the model does not exist."""
        choose = existing_model if is_run else one_model
        return dataclasses.replace(self, target=choose(model, self.target if "target" in self.explicit else None))

    @property
    def request_options(self) -> dict[str, Any]:
        """:attr:`sampling` without implicit values of options that the model may set."""
        return {key: value for key, value in self.sampling.items() if key not in OWN_SAMPLING or key in self.explicit}

    def check(self) -> None:
        """Raise ``ValueError`` for wrong names and values before a slow load."""
        if self.drafter not in ("auto", "none"):
            check_drafter(self.drafter)
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        self.check_rules()
        if self.seed is not None:
            from foretoken.core.noise import check_seed

            check_seed(self.seed)
        unusual = {name: value for name in OWN_SAMPLING if (value := self.sampling[name]) != FIELDS[name].default}
        if unusual:
            from foretoken.core.sampling import SamplingParams

            SamplingParams(**unusual)

    def check_rules(self) -> None:
        """Raise ``ValueError`` for an unknown verifier or controller."""
        if self.verifier != "auto":
            find("verifier", parse_spec(self.verifier).name)
        if self.controller != "auto":
            find("controller", parse_spec(self.controller).name)

    def load(self, tensor_parallel: int = 1, own_sampling: bool = False) -> Llm:
        """Load the target with its drafter, verifier and controller.

        ``own_sampling`` is for commands that generate: ``llm.defaults`` has the model's own sampling options, and a
        busy machine gets one thread if that is faster.  Raises ``ValueError`` for parts that do not fit each other, and
        as :meth:`check` does.
        """
        self.check()
        with doing(f"loading {self.target} ..."):
            from foretoken.llm import load

            llm = load(
                self.target,
                None if self.drafter == "none" else self.drafter,
                self.verifier,
                self.controller,
                allow_lossy=self.allow_lossy,
                profile=self.profile,
                tensor_parallel=tensor_parallel,
                generation_config="auto" if own_sampling else None,
                **self._loading,
            )
        self._tell_inflated(llm.target)
        for name in ("verifier", "controller"):
            if llm.drafter is None and name in self.explicit:
                print(f"--{name} is ignored: without a drafter there are no drafts", file=sys.stderr)
        if own_sampling:  # for commands that generate, not those that measure
            from foretoken.loading.measured.busy import settle_threads

            if (message := settle_threads(llm.target)) is not None:
                print(f"warning: {message}", file=sys.stderr)
        return llm

    def load_target(self, is_told: bool = True) -> LanguageModel:
        """Load the target alone.  With ``is_told``, an inflated target is reported on stderr."""
        from foretoken.loading import load_model

        target = load_model(self.target, **self._loading)
        if is_told:
            self._tell_inflated(target)
        return target

    @property
    def _loading(self) -> dict[str, Any]:
        """Keyword arguments that load the target."""
        options = {name: getattr(self, name) for name in ("device", "inflate", "quantize", "backend")}
        return {**options, "dtype": None if self.dtype == "auto" else self.dtype}

    def subject(self, is_told: bool = True) -> Subject:
        """Load the target (as :meth:`load_target`) with the settings for building its drafters.  As in
        :func:`foretoken.llm.load`, a chat model's answers end with its turns."""
        from foretoken.core.conversation import turn_ends
        from foretoken.lab.workload import Subject
        from foretoken.loading import load_tokenizer

        target, tokenizer = self.load_target(is_told), load_tokenizer(self.target, self.backend)
        target.eos_token_ids |= frozenset(end for end in turn_ends(tokenizer) if end < target.vocab_size)
        return Subject(
            target,
            self.target,
            tokenizer,
            self.verifier,
            self.controller,
            None if self.device == "auto" else self.device,
            self.allow_lossy,
        )

    def _tell_inflated(self, target: LanguageModel) -> None:
        """Print a line about an inflated target, as all later output refers to it."""
        if self.inflate is not None:
            from foretoken.lab.workload import target_name

            print(f"target: {target_name(target, self.target)}", file=sys.stderr)


def with_common(
    omit: tuple[str, ...] = (), *, model: str = "argument", own_sampling: bool = False, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the common options: one per field of :class:`Common`, passed as its parameter ``common``.

    Other parameters become options as in :func:`foretoken.cli.settings.with_settings`.

    Args:
        omit: fields that the command does not take or declares itself.
        model: source of MODEL: the only ``"argument"``; the hidden option of a ``"group"``
            (:class:`foretoken.cli.model_argument.ModelGroup`); or handled by the command (``"own"``).
        own_sampling: sampling options default to the model's own, and the help says so.
    """
    shared = [
        parameter(p.name, _decided_by_model(p) if own_sampling and p.name in OWN_SAMPLING else p.annotation,
                   defaults.get(p.name, p.default))
        for p in common_parameters() if p.name not in omit
    ]  # fmt: skip

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command = with_settings(command)
        parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "common"]
        context = next((p.name for p in parameters if p.annotation is typer.Context), None)
        first = [] if context is not None else [parameter("ctx", typer.Context, inspect.Parameter.empty)]
        if model != "own":
            first.append(parameter("model", Model if model == "argument" else GroupModel, None))

        @wraps(command)
        def run(**values: Any) -> None:
            ctx = values[context] if context is not None else values.pop("ctx")
            chosen = values.pop("model") if model != "own" else None
            fields = {p.name: values.pop(p.name) for p in shared}
            sampling = {name: fields.pop(name, FIELDS[name].default) for name in COMMAND_LINE}
            common = Common(**fields, sampling=sampling, explicit=given_options(ctx))
            if model != "own":
                common = common.of(chosen, is_run=ctx.invoked_subcommand is None)
            command(common=common, **values)

        return signed(run, [*first, *parameters, *shared])

    return decorate


def common_parameters() -> list[inspect.Parameter]:
    """The options of :class:`Common` as command parameters, with request options before the last one."""
    *fields, lossy = parameters_of(Common, FromOptions())
    sampling = [parameter(name, _option(FIELDS[name]), FIELDS[name].default) for name in COMMAND_LINE]
    return [*fields, *sampling, lossy]


def _option(field: Field) -> Any:
    kind = Any if field.kind is None else field.kind
    return Annotated[kind | None if field.default is None else kind, typer.Option(help=field.help)]


def check_drafter(spec: str) -> None:
    """Raise ``ValueError`` for a drafter's unknown name or missing path, before heavy imports."""
    parsed = parse_spec(spec)
    find("drafter", parsed.name)
    path = parsed.path
    if path is not None and path.startswith((".", "/", "~")) and not expanded(path).exists():
        raise ValueError(f"drafter {parsed.name!r}: no such file or folder: {path}")


def given_options(ctx: typer.Context) -> frozenset[str]:
    """Names of the parameters on the command line."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def refuse_options_before(ctx: typer.Context) -> None:
    """Raise ``ValueError`` for options before a subcommand, which would be lost."""
    names = [name for name in ctx.params if name in given_options(ctx)]
    if names:
        option = "--" + names[0].replace("_", "-").replace("as-json", "json")
        if names[0] == "model":
            option = str(ctx.params["model"])
        command = f"foretoken {ctx.info_name} {ctx.invoked_subcommand}"
        raise ValueError(f"put {option} after the subcommand: {command} {option} ...")


def _decided_by_model(parameter: inspect.Parameter) -> Any:
    """The option, with help that names the model's own value as the default."""
    option = copy.copy(parameter.annotation.__metadata__[0])
    option.show_default = f"the model's, else {parameter.default:g}"
    return Annotated[parameter.annotation.__origin__, option]
