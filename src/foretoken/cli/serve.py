"""``foretoken serve``: an OpenAI-compatible server with a web page, metrics and speculation statistics."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from foretoken.cli.model_argument import HELP, Model, one_model
from foretoken.cli.settings import option_of, parameter
from foretoken.core.settings import settings_of
from foretoken.server.config import ServerSettings, keys_in, settings_and_command

Given = typer.Option


def serve_command(
    model: Model = None,
    target: Annotated[str | None, Given(help=f"The same as MODEL: {HELP}")] = None,
    config: Annotated[
        Path | None,
        Given(help="YAML file with any of these settings (examples/serve.yaml).", envvar="FORETOKEN_CONFIG"),
    ] = None,
    api_key_file: Annotated[Path | None, Given(help="File with a key a line.", envvar="FORETOKEN_API_KEY_FILE")] = None,
    replicas: Annotated[
        int | None,
        Given(help="More than one: as many replicas under Ray Serve \\[1].", min=1, envvar="FORETOKEN_REPLICAS"),
    ] = None,
    ray_address: Annotated[
        str | None,
        Given(
            help="Ray cluster for --replicas: local, auto, or its address \\[local].", envvar="FORETOKEN_RAY_ADDRESS"
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Serve MODEL over HTTP.

    Every option is an environment variable as well, FORETOKEN_MAX_RUNNING for --max-running, and a line of the
    --config file, max_running.  Options come first, then the environment, then the file.
    """
    flags["model"] = model if target is None else one_model(model, target)
    from foretoken.core.io.checkpoints import check_source
    from foretoken.server import logs
    from foretoken.server.lifecycle import answer_signals

    flags["api_keys"] = _keys(flags.pop("api_key"), api_key_file)
    for name in ("allowed_host", "allowed_origin"):
        flags[name] = tuple(flags[name] or ()) or None
    settings, lines = settings_and_command(flags, config)
    replicas = lines.get("replicas", 1) if replicas is None else replicas
    if replicas < 1:
        raise ValueError(f"{config}: replicas must be at least 1, not {replicas}")
    ray_address = ray_address or lines.get("ray_address", "local")
    check_source(settings.model)
    _check_extra()
    with logs.installed(), answer_signals():  # checking for Ray imports it, which takes seconds
        code = _run(settings, replicas, ray_address)
    if code:
        raise typer.Exit(code)


def _run(settings: ServerSettings, replicas: int, ray_address: str) -> int:
    """Serve until a signal arrives; returns the exit code."""
    from foretoken.server import logs
    from foretoken.server.lifecycle import listener, run

    if replicas > 1:
        from foretoken.server.cluster.scale import check_ray, serve_replicas

        check_ray()
        sock = listener(settings)
        logs.say(f"starting {replicas} replicas of {settings.model} ...")
        return serve_replicas(settings, replicas, ray_address, sock)
    sock = listener(settings)
    logs.say(f"loading {settings.model} ...")
    return run(settings, sock)


def _keys(keys_given: list[str] | None, file: Path | None) -> tuple[str, ...] | None:
    """API keys from options and file; ``None`` if neither was set.  Raises ``ValueError`` for empty keys."""
    keys = [" ".join(key.split()) for key in keys_given or ()]
    if file is not None:
        keys += keys_in(file)
    if any(not key for key in keys):
        raise ValueError("an API key must not be empty")
    return tuple(keys) or None


def _check_extra() -> None:
    """Raise ``ValueError`` if a package that serving needs is missing."""
    import importlib.util

    missing = [
        name
        for name in ("fastapi", "uvicorn", "httptools", "prometheus_client")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ValueError(f"serving needs {', '.join(missing)}: pip install 'foretoken[server]'")


def _parameters() -> list[inspect.Parameter]:
    """Parameters of the command: its own, with one per server setting between them, which has no default here."""
    of_command = {option.name: option for option in inspect.signature(serve_command, eval_str=True).parameters.values()}
    kinds = get_type_hints(ServerSettings)
    parameters = [of_command["model"], of_command["target"], of_command["config"]]
    for entry, about in settings_of(ServerSettings).items():
        kind: Any = list[str] if isinstance(entry.default, tuple) else kinds[entry.name]
        name, variable = ("api_key", "FORETOKEN_API_KEY") if entry.name == "api_keys" else (entry.name, None)
        # A switch that is off by default needs no --no- form.
        names = [f"--{name.replace('_', '-')}"] if entry.default is False else []
        # The settings refuse what is out of bounds themselves, wherever it comes from
        annotation = option_of(kind | None, replace(about, low=None), names, envvar=variable)
        parameters.append(parameter(name, annotation, None))
        if entry.name == "api_keys":
            parameters.append(of_command["api_key_file"])
    parameters += [of_command["replicas"], of_command["ray_address"]]
    return [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in parameters]


serve_command.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
