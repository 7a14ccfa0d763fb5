"""Options that several commands share, and what is made of them."""

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
"""Options for which a model may have values of its own."""


@dataclass(frozen=True)
class Common:
    """The options of every command that runs a model.

    ``drafter``, ``verifier`` and ``controller`` are spec strings ``name[:path][,key=value...]``; ``sampling`` has what
    every request is asked (keyword arguments of :meth:`foretoken.llm.Llm.generate`); ``explicit`` has the names of the
    options that were really given.
    """

    target: str = setting("builtin", f"The same as MODEL: {HELP}")
    drafter: str = setting("auto", DRAFTER_HELP)
    verifier: str = setting("auto", "auto or NAME, such as coupled, block or traversal; `foretoken methods` lists all.")
    controller: str = setting("auto", "auto or NAME, such as goodput or constant,k=4; `foretoken methods` lists all.")
    profile: Path | None = setting(None, "JSON file with drafter, verifier and controller for what is left at auto.")
    dtype: str = setting("auto", "auto (the checkpoint's), float32, float64, bfloat16 or float16.")
    device: str = setting("auto", "auto (the first of cuda, mps and cpu that is there), cpu, cuda, cuda:1, mps.")
    inflate: str | None = setting(
        None, "For measuring: the target's outputs at the cost of 300m, 1b, 3b, 7b parameters."
    )
    quantize: str | None = setting(
        None, "Quantise the target's weights on the cpu: int8, int4, int8-a8 or int4-a8. It is then another."
    )
    backend: str = setting("auto", "What runs a GGUF file: auto (native where it is covered), native or llama.cpp.")
    allow_lossy: bool = flag("Permit verifiers that change the target's distribution.")

    sampling: Mapping[str, Any] = field(default_factory=lambda: {name: FIELDS[name].default for name in COMMAND_LINE})
    explicit: frozenset[str] = frozenset()

    @property
    def max_new_tokens(self) -> int:
        """Most tokens to generate."""
        return int(self.sampling["max_new_tokens"])

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        return float(self.sampling["temperature"])

    @property
    def seed(self) -> int | None:
        """Of the output when sampling."""
        return self.sampling["seed"]

    @property
    def filters(self) -> dict[str, Any]:
        """What cuts tokens off."""
        return {name: self.sampling[name] for name in FILTERS}

    def of(self, model: str | None, is_run: bool = True) -> Common:
        """These options for a MODEL that was given as an argument, or was not, and that must be there where it is about
        to be run (``is_run``).  Raises ``ValueError`` where ``--target`` names another one."""
        choose = existing_model if is_run else one_model
        return dataclasses.replace(self, target=choose(model, self.target if "target" in self.explicit else None))

    @property
    def request_options(self) -> dict[str, Any]:
        """:attr:`sampling` without what the model may decide because nobody gave it."""
        return {key: value for key, value in self.sampling.items() if key not in OWN_SAMPLING or key in self.explicit}

    def check(self) -> None:
        """Refuse wrong names and values, by a ``ValueError``, before seconds are spent on loading."""
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
        """Find an unknown verifier or controller, by a ``ValueError``."""
        if self.verifier != "auto":
            find("verifier", parse_spec(self.verifier).name)
        if self.controller != "auto":
            find("controller", parse_spec(self.controller).name)

    def load(self, tensor_parallel: int = 1, own_sampling: bool = False) -> Llm:
        """Load the target and everything around it.

        ``own_sampling``: to answer, with the model's own sampling options as ``llm.defaults``, and with one thread
        where that is faster on a busy machine.  Raises ``ValueError`` for parts that do not fit each other, and as
        :meth:`check` does.
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
        if own_sampling:  # a command that answers; others measure
            from foretoken.loading.measured.busy import settle_threads

            if (message := settle_threads(llm.target)) is not None:
                print(f"warning: {message}", file=sys.stderr)
        return llm

    def load_target(self, is_told: bool = True) -> LanguageModel:
        """Load the target alone; an inflated one is told of first, if ``is_told``."""
        from foretoken.loading import load_model

        target = load_model(self.target, **self._loading)
        if is_told:
            self._tell_inflated(target)
        return target

    @property
    def _loading(self) -> dict[str, Any]:
        """How the target is loaded."""
        options = {name: getattr(self, name) for name in ("device", "inflate", "quantize", "backend")}
        return {**options, "dtype": None if self.dtype == "auto" else self.dtype}

    def subject(self, is_told: bool = True) -> Subject:
        """Load the target (as :meth:`load_target`), and name what drafters for it are made with."""
        from foretoken.lab.workload import Subject
        from foretoken.loading import load_tokenizer

        return Subject(
            self.load_target(is_told),
            self.target,
            load_tokenizer(self.target, self.backend),
            self.verifier,
            self.controller,
            None if self.device == "auto" else self.device,
            self.allow_lossy,
        )

    def _tell_inflated(self, target: LanguageModel) -> None:
        """Whatever is printed below is about an inflated target: say so first."""
        if self.inflate is not None:
            from foretoken.lab.workload import target_name

            print(f"target: {target_name(target, self.target)}", file=sys.stderr)


def with_common(
    omit: tuple[str, ...] = (), *, model: str = "argument", own_sampling: bool = False, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the common options: its parameter ``common`` becomes one option per field of :class:`Common`, and
    others become options as :func:`foretoken.cli.settings.with_settings` says.

    Args:
        omit: fields that the command does not take or declares itself.
        model: how MODEL comes: as the only ``"argument"``; as the hidden option that a ``"group"`` makes of it
            (:class:`foretoken.cli.model_argument.ModelGroup`); or as the command's ``"own"`` business.
        own_sampling: the model's own sampling options are the defaults, and the help says so.
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
    """The options of :class:`Common` as parameters of a command, those of requests before the last one."""
    *fields, lossy = parameters_of(Common, FromOptions())
    sampling = [parameter(name, _option(FIELDS[name]), FIELDS[name].default) for name in COMMAND_LINE]
    return [*fields, *sampling, lossy]


def _option(field: Field) -> Any:
    kind = Any if field.kind is None else field.kind
    return Annotated[kind | None if field.default is None else kind, typer.Option(help=field.help)]


def check_drafter(spec: str) -> None:
    """Refuse a drafter's unknown name, or a path that is not there, by a ``ValueError`` before anything is imported."""
    parsed = parse_spec(spec)
    find("drafter", parsed.name)
    path = parsed.path
    if path is not None and path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        raise ValueError(f"drafter {parsed.name!r}: there is no file or folder {path}")


def given_options(ctx: typer.Context) -> frozenset[str]:
    """Names of the parameters that stand on the command line."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def _decided_by_model(parameter: inspect.Parameter) -> Any:
    """An option whose help says that the model's own value is the default."""
    option = copy.copy(parameter.annotation.__metadata__[0])
    option.show_default = f"the model's, else {parameter.default:g}"
    return Annotated[parameter.annotation.__origin__, option]
