"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.registry import Role, find, parse_spec, rows

if TYPE_CHECKING:
    from foretoken.llm import Llm
    from foretoken.models.base import LanguageModel


def _names(role: Role) -> str:
    return ", ".join(row.name for row in rows(role))


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line; the rest goes to stderr.")]


@dataclass(frozen=True)
class Common:
    """The options of every command that runs a model.

    ``drafter``, ``verifier`` and ``controller`` are spec strings ``name[:path][,key=value...]``.
    """

    target: Annotated[str, typer.Option(help="builtin, a model folder, a GGUF file, or a Hugging Face id.")] = "builtin"
    drafter: Annotated[str, typer.Option(help=f"Spec NAME[:PATH][,KEY=VALUE...]: auto, none, {_names('drafter')}.")] = (
        "auto"
    )
    verifier: Annotated[str, typer.Option(help=f"auto, {_names('verifier')}.")] = "auto"
    controller: Annotated[str, typer.Option(help=f"{_names('controller')}.")] = "auto"
    profile: Annotated[
        Path | None, typer.Option(help="JSON file with drafter, verifier and controller for what is left at auto.")
    ] = None
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, float64, bfloat16 or float16.")] = "auto"
    device: Annotated[
        str, typer.Option(help="auto (the first of cuda, mps and cpu that is there), cpu, cuda, cuda:1, mps.")
    ] = "auto"
    inflate: Annotated[
        str | None, typer.Option(help="For measuring: the target's outputs at the cost of 300m, 1b, 3b, 7b parameters.")
    ] = None
    quantize: Annotated[
        str | None, typer.Option(help="Quantise the target's weights on the cpu: int8 or int4. It is then another one.")
    ] = None
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(help="Nucleus mass in (0, 1].")] = 1.0
    min_p: Annotated[float, typer.Option(help="Drop tokens below this fraction of the most likely one.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Fixes the output when sampling.")] = None
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Permit verifiers that change the target's distribution.")
    ] = False

    @property
    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of :meth:`foretoken.llm.Llm.generate`."""
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Find wrong names and values before seconds are spent on loading.

        Raises:
            ValueError: an unknown method, or a sampling option outside its range.
        """
        if self.drafter not in ("auto", "none"):
            find("drafter", parse_spec(self.drafter).name)
        if self.verifier != "auto":
            find("verifier", parse_spec(self.verifier).name)
        if self.controller != "auto":
            find("controller", parse_spec(self.controller).name)
        if self.seed is not None:
            from foretoken.core.noise import check_seed

            check_seed(self.seed)

    def load(self, drafter: str | None = None, tensor_parallel: int = 1) -> Llm:
        """Load the target and everything around it; ``drafter`` replaces the option.

        Raises:
            ValueError: an unknown name or option, parts that do not fit, or a bad checkpoint.
        """
        self.check()
        from foretoken.llm import load
        from foretoken.sampling import SamplingParams

        SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)
        chosen = drafter or self.drafter
        llm = load(
            self.target,
            None if chosen == "none" else chosen,
            self.verifier,
            self.controller,
            dtype=None if self.dtype == "auto" else self.dtype,
            device=self.device,
            allow_lossy=self.allow_lossy,
            profile=self.profile,
            inflate=self.inflate,
            quantize=self.quantize,
            tensor_parallel=tensor_parallel,
        )
        self._tell_inflated(llm.target)
        return llm

    def load_target(self) -> LanguageModel:
        """Load the target alone.

        Raises:
            ValueError: a bad checkpoint, dtype, device or size.
        """
        from foretoken.loading import load_model

        target = load_model(
            self.target,
            dtype=None if self.dtype == "auto" else self.dtype,
            device=self.device,
            inflate=self.inflate,
            quantize=self.quantize,
        )
        self._tell_inflated(target)
        return target

    def _tell_inflated(self, target: LanguageModel) -> None:
        """Whatever is printed below is about an inflated target: say so first."""
        if self.inflate is not None:
            from foretoken.bench.inflate import target_name

            print(f"target: {target_name(target, self.target)}", file=sys.stderr)


def with_common(omit: tuple[str, ...] = (), **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the common options: its parameter ``common`` becomes one option per field of :class:`Common`.

    Args:
        omit: fields that the command does not take or declares itself.
        defaults: defaults of this command that differ.
    """
    fields = [f for f in dataclasses.fields(Common) if f.name not in omit]
    kinds = typing.get_type_hints(Common, include_extras=True)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            common = Common(**{f.name: values.pop(f.name) for f in fields})
            command(common=common, **values)

        own = typing.get_type_hints(command, include_extras=True)
        parameters = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own[p.name])
            for p in inspect.signature(command).parameters.values()
            if p.name != "common"
        ]
        shared = [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(f.name, f.default),
                annotation=kinds[f.name],
            )
            for f in fields
        ]
        run.__signature__ = inspect.Signature(parameters + shared)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters + shared}
        return run

    return decorate
