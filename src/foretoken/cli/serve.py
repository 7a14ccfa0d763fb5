"""``foretoken serve``: an OpenAI-compatible server with a page, metrics and speculation in every answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.model_argument import HELP, Model, one_model

Given = typer.Option


def serve_command(
    model: Model = None,
    target: Annotated[str | None, Given(help=f"The same as MODEL: {HELP}")] = None,
    config: Annotated[
        Path | None,
        Given(help="YAML file with any of these settings (examples/serve.yaml).", envvar="FORETOKEN_CONFIG"),
    ] = None,
    served_name: Annotated[str | None, Given(help="What clients call the model.")] = None,
    host: Annotated[str | None, Given(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, Given(help="Port to listen on [8000].")] = None,
    drafter: Annotated[str | None, Given(help="Spec of the drafter, auto or none [auto].")] = None,
    verifier: Annotated[str | None, Given(help="Acceptance rule [auto].")] = None,
    controller: Annotated[str | None, Given(help="How much to draft [auto].")] = None,
    profile: Annotated[str | None, Given(help="File that foretoken tune wrote.")] = None,
    dtype: Annotated[str | None, Given(help="float32, float64, bfloat16 or float16 [the checkpoint's].")] = None,
    device: Annotated[str | None, Given(help="auto, cpu, cuda, cuda:1 or mps [auto].")] = None,
    quantize: Annotated[
        str | None, Given(help="int8 or int4 weights (int8-a8, int4-a8: 8-bit activations too), on the cpu.")
    ] = None,
    backend: Annotated[str | None, Given(help="What runs a GGUF file: auto, native or llama.cpp [auto].")] = None,
    exact: Annotated[
        str | None,
        Given(help="bitwise: equal texts whatever is drafted and served beside, or no start [distribution]."),
    ] = None,
    tensor_parallel: Annotated[
        int | None, Given(help="Processes of this machine, on CUDA devices, that the model is split over [1].")
    ] = None,
    max_running: Annotated[int | None, Given(help="Requests that run together [16].")] = None,
    max_queued: Annotated[int | None, Given(help="Requests that wait besides; more get 503 [256].")] = None,
    kv_memory: Annotated[str | None, Given(help="Memory of keys and values, as 2GiB [no limit].")] = None,
    prefill_chunk: Annotated[int | None, Given(help="Prompt tokens read between two rounds [256].")] = None,
    prefill_time: Annotated[float | None, Given(help="Seconds for this while others wait; 0: no limit [0.1].")] = None,
    prefix_cache: Annotated[
        bool | None, Given("--prefix-cache/--no-prefix-cache", help="Reuse texts with the same beginning [yes].")
    ] = None,
    prefix_memory: Annotated[str | None, Given(help="Memory of reused texts, as 256MiB [256MiB].")] = None,
    api_key: Annotated[
        list[str] | None, Given(help="Key that opens every route; may be given again.", envvar="FORETOKEN_API_KEY")
    ] = None,
    api_key_file: Annotated[Path | None, Given(help="File with a key a line.", envvar="FORETOKEN_API_KEY_FILE")] = None,
    key_running: Annotated[int | None, Given(help="Choices of one key that run together [no limit].")] = None,
    key_queued: Annotated[int | None, Given(help="Choices of one key that wait besides [no limit].")] = None,
    key_tokens_per_minute: Annotated[int | None, Given(help="Tokens of one key [no limit].")] = None,
    allowed_host: Annotated[
        list[str] | None,
        Given(help="Another name that clients may call the server; may be given again; * for all."),
    ] = None,
    insecure: Annotated[bool | None, Given("--insecure", help="Allow a public address without a key.")] = None,
    max_body: Annotated[int | None, Given(help="Bytes of a request [2097152].")] = None,
    request_timeout: Annotated[float | None, Given(help="Seconds of a request [600].")] = None,
    body_timeout: Annotated[float | None, Given(help="Seconds in which a request must have arrived [20].")] = None,
    write_timeout: Annotated[float | None, Given(help="Seconds that an answer may stay unread [30].")] = None,
    max_unread: Annotated[int | None, Given(help="Answers that may stay unread together [32].")] = None,
    shutdown_timeout: Annotated[float | None, Given(help="Seconds to finish in after SIGTERM [30].")] = None,
    watchdog: Annotated[
        float | None, Given(help="Seconds of silence after which the engine counts as hung [60].")
    ] = None,
    ping: Annotated[float | None, Given(help="Seconds between comments in a silent stream [15].")] = None,
    stream_interval: Annotated[int | None, Given(help="Fewest tokens of a chunk but the last [1].")] = None,
    stream_pad: Annotated[int | None, Given(help="Fill chunks up to a multiple of so many bytes [0].")] = None,
    metrics_compat: Annotated[str | None, Given(help="vllm: all metrics under vLLM's names, too.")] = None,
    log_prompts: Annotated[int | None, Given(help="Characters of a prompt in the log [0].")] = None,
    root_path: Annotated[str | None, Given(help="Where a proxy has put the server.")] = None,
    chat_template: Annotated[str | None, Given(help="File with a chat template.")] = None,
    online: Annotated[bool | None, Given("--online", help="The draft model learns while it serves.")] = None,
    online_save: Annotated[str | None, Given(help="Folder for the draft model that has learned.")] = None,
    replicas: Annotated[
        int, Given(help="More than one: as many replicas under Ray Serve.", min=1, envvar="FORETOKEN_REPLICAS")
    ] = 1,
    ray_address: Annotated[
        str,
        Given(help="Ray cluster for --replicas: local, auto, or its address.", envvar="FORETOKEN_RAY_ADDRESS"),
    ] = "local",
) -> None:
    """Serve MODEL over HTTP.

    Every option is an environment variable as well, FORETOKEN_MAX_RUNNING for --max-running, and a line of the
    --config file, max_running.  Options come first, then the environment, then the file.
    """
    flags: dict[str, Any] = {
        name: value
        for name, value in locals().items()
        if name not in ("target", "config", "api_key", "api_key_file", "replicas", "ray_address")
    }
    if target is not None:
        flags["model"] = one_model(model, target)
    from foretoken.core.io.checkpoints import check_source
    from foretoken.server import logs
    from foretoken.server.config import settings_from
    from foretoken.server.lifecycle import listener, run

    logs.keep_standard_files()
    flags["api_keys"] = _keys(api_key, api_key_file)
    flags["allowed_host"] = tuple(allowed_host or ()) or None
    settings = settings_from(flags, config)
    check_source(settings.model)
    _check_extra()
    logs.install()
    if replicas > 1:
        from foretoken.server.cluster.scale import check_ray, serve_replicas

        check_ray()
        sock = listener(settings)
        logs.say(f"starting {replicas} replicas of {settings.model} ...")
        code = serve_replicas(settings, replicas, ray_address, sock)
    else:
        sock = listener(settings)
        logs.say(f"loading {settings.model} ...")
        code = run(settings, sock)
    if code:
        raise typer.Exit(code)


def _keys(given: list[str] | None, file: Path | None) -> tuple[str, ...] | None:
    """Keys of options and file; ``None`` where neither was given.

    Raises:
        ValueError: a file that cannot be read, or an empty key.
    """
    found = [" ".join(one.split()) for one in given or ()]
    if file is not None:
        try:
            found += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except OSError as error:
            raise ValueError(f"cannot read --api-key-file {file}: {error.strerror}") from None
    if any(not key for key in found) or (file is not None and not found):
        raise ValueError("an API key must not be empty")
    return tuple(found) or None


def _check_extra() -> None:
    """Refuse to start without what serving needs.

    Raises:
        ValueError: an extra is missing.
    """
    import importlib.util

    missing = [
        name
        for name in ("fastapi", "uvicorn", "httptools", "prometheus_client")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ValueError(f"serving needs {', '.join(missing)}: pip install 'foretoken[server]'")
