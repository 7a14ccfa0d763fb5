"""Server settings: flags, then environment variables, then a YAML file, then the defaults here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foretoken.core.io.hub_ids import expanded
from foretoken.core.settings import setting, settings_of
from foretoken.core.values import one_line
from foretoken.server.keys import Caller, Keys

PREFIX = "FORETOKEN_"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,A-Z]+")
"""An origin as browsers send it, in lower case."""
COMMAND: dict[str, type] = {"target": str, "api_key_file": str, "replicas": int, "ray_address": str}
"""Options of ``foretoken serve`` that are lines of the file, too, but no settings of a server."""
UNITS = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "kb": 10**3, "m": 2**20, "mib": 2**20, "mb": 10**6}
UNITS |= {"g": 2**30, "gib": 2**30, "gb": 10**9, "t": 2**40, "tib": 2**40, "tb": 10**12}


@dataclass(frozen=True)
class ServerSettings:
    """Server settings; every field is an option of ``foretoken serve``.

    Details that the fields' help texts omit:

    Attributes:
        model, drafter, verifier, controller, profile, dtype, device, quantize, backend: as for :func:`foretoken.load`.
        served_name: the last part of the model's path by default.
        default_max_tokens: smaller defaults of the model or the route remain; 0 for what fits.
        exact: ``"distribution"``, or ``"bitwise"``, which refuses a model that cannot keep it.
        prefix_cache: whether finished sequences are kept for others with the same prefix.
        api_keys: any of them opens every route; without keys all routes are open.  Limits may follow a key, as in "KEY
            name=team-a running=4 queued=16 tokens_per_minute=60000 priority".
        key_running: for keys whose entry sets no limit; 0 for no limit.
        key_queued: -1 for no limit.
        key_tokens_per_minute: of prompts and answers; 0 for no limit.
        request_timeout: after which a request ends with 504.
        write_timeout: after which a client that reads nothing is disconnected.
        max_unread: beyond it the oldest is cut.
        stream_pad: hides the length of a chunk's text.
        online_save: written after every update.
    """

    model: str = "builtin"
    served_name: str = setting("", "Model name for clients.")
    host: str = setting("127.0.0.1", "Address to listen on [127.0.0.1].")
    port: int = setting(8000, "Port to listen on [8000].")
    drafter: str = setting("auto", "Spec of the drafter, auto or none [auto].")
    verifier: str = setting("auto", "Acceptance rule [auto].")
    controller: str = setting("auto", "Rule for the draft length [auto].")
    profile: str = setting("", "Profile of `foretoken tune`.")
    dtype: str = setting("auto", "float32, float64, bfloat16 or float16 [the checkpoint's].")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1 or mps [auto].")
    quantize: str = setting("", "int8 or int4 weights (int8-a8, int4-a8: 8-bit activations too), on the cpu.")
    backend: str = setting("auto", "Backend of a GGUF file: auto, native or llama.cpp [auto].")
    exact: str = setting(
        "distribution", "bitwise: the same text whatever is drafted and served beside it, else no start [distribution]."
    )
    tensor_parallel: int = setting(
        1, "Processes of this machine, on CUDA devices, that the model is split over [1].", low=1
    )
    max_running: int = setting(16, "Requests that run together [16].", low=1)
    max_queued: int = setting(256, "Further requests that wait; more get 503 [256].", low=0)
    kv_memory: str = setting("", "Memory for keys and values, as 2GiB [no limit].")
    default_max_tokens: int = setting(0, "max_tokens of requests without it [what fits].", low=0)
    prefill_chunk: int = setting(256, "Prompt tokens read between two rounds [256].", low=1)
    prefill_time: float = setting(0.1, "Seconds of such reading while others wait; 0: no limit [0.1].", low=0)
    prefix_cache: bool = setting(True, "Reuse the keys and values of equal prompt beginnings [yes].")
    prefix_memory: str = setting("256MiB", "Size of the prefix cache, as 256MiB [256MiB].")
    api_keys: tuple[str, ...] = setting((), "Key that opens every route; may be given again.", shown=False)
    key_running: int = setting(0, "Choices of one key that run together [no limit].", low=0)
    key_queued: int = setting(-1, "Further choices of one key that wait [no limit].")
    key_tokens_per_minute: int = setting(0, "Tokens a minute of one key [no limit].", low=0)
    allowed_host: tuple[str, ...] = setting(
        (), "Another name that clients may call the server; may be given again; * for all."
    )
    allowed_origin: tuple[str, ...] = setting(
        (), "Origin of web pages that may use the server, as https://chat.example; may be given again; * for all."
    )
    insecure: bool = setting(False, "Allow a public address without a key.")
    max_body: int = setting(2 * 2**20, "Largest request, in bytes [2097152].", low=1)
    request_timeout: float = setting(600.0, "Longest time of a request, in seconds [600].")
    body_timeout: float = setting(20.0, "Seconds for the body of a request to arrive [20].")
    write_timeout: float = setting(30.0, "Seconds for a client to go on reading an answer [30].")
    max_unread: int = setting(32, "Unread answers at a time [32].", low=1)
    shutdown_timeout: float = setting(30.0, "Seconds to finish in after SIGTERM [30].", low=0)
    watchdog: float = setting(60.0, "Seconds of silence after which the engine counts as hung [60].")
    ping: float = setting(15.0, "Seconds between comments in a silent stream [15].")
    stream_interval: int = setting(1, "Fewest tokens of a streamed chunk, except the last [1].", low=1)
    stream_pad: int = setting(0, "Pad streamed chunks to a multiple of this many bytes [0].", low=0)
    metrics_compat: str = setting("", "vllm: all metrics under vLLM's names, too.")
    log_prompts: int = setting(0, "Characters of a prompt in the log [0].", low=0)
    root_path: str = setting("", "Path under which a proxy serves it.")
    chat_template: str = setting("", "File with a chat template.")
    online: bool = setting(False, "The draft model learns while it serves.")
    online_save: str = setting("", "Folder for the trained draft model.")

    def __post_init__(self) -> None:
        for entry, about in settings_of(ServerSettings).items():
            value = getattr(self, entry.name)
            if about.low is not None and not value >= about.low:
                raise ValueError(f"{entry.name} must be at least {about.low}, not {value}")
        for name in ("request_timeout", "body_timeout", "write_timeout", "watchdog", "ping"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        if self.exact not in ("distribution", "bitwise"):
            raise ValueError(f"exact must be distribution or bitwise, not {self.exact!r}")
        if self.metrics_compat not in ("", "vllm"):
            raise ValueError(f"metrics_compat must be empty or vllm, not {self.metrics_compat!r}")
        for origin in self.allowed_origin:
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    "allowed_origin must be scheme://host or scheme://host:port in small letters, null or *, "
                    f"not {origin!r}"
                )
        parse_bytes(self.kv_memory)
        parse_bytes(self.prefix_memory)
        if self.key_queued < -1:
            raise ValueError(f"key_queued must be at least 0, or -1 for no limit, not {self.key_queued}")
        if self.key_queued >= 0 and not self.key_running:
            raise ValueError("key_queued needs key_running: give the number of a key's requests that may run")
        if (self.key_running or self.key_queued >= 0 or self.key_tokens_per_minute) and not self.api_keys:
            raise ValueError("key_running, key_queued and key_tokens_per_minute need keys: give an --api-key")
        self.keys  # noqa: B018 (wrong entries are refused now)
        if self.online_save and not self.online:
            raise ValueError("online_save needs online: nothing else changes the draft model")
        if self.online:
            self.online_drafter  # noqa: B018 (a drafter that cannot learn is refused now)
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.api_keys and not self.insecure:
            raise ValueError(
                f"--host {self.host} can be reached by others: give an --api-key, or --insecure to allow that"
            )

    @property
    def name(self) -> str:
        """Model name for clients."""
        return self.served_name or Path(self.model).name or self.model

    @property
    def root(self) -> str:
        """Path under which a proxy serves it, without a slash at its end."""
        return self.root_path.rstrip("/")

    @property
    def url(self) -> str:
        """Address for clients; an IPv6 address is in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.root}"

    @property
    def online_drafter(self) -> str:
        """Spec of the online draft model.  Raises ``ValueError`` if the drafter is no draft model."""
        name, comma, options = self.drafter.partition(",")
        kind, colon, path = name.partition(":")
        if kind not in ("auto", "model", "online"):
            raise ValueError(f"online trains a draft model: drafter must be auto or model[:PATH], not {self.drafter!r}")
        saved = f",save={self.online_save}" if self.online_save else ""
        return f"online{colon}{path}{comma}{options}{saved}"

    @cached_property
    def keys(self) -> Keys:
        """The keys and their limits.  Raises ``ValueError`` for an invalid entry."""
        queued = None if self.key_queued < 0 else self.key_queued
        standard = Caller("", "", self.key_running, queued, self.key_tokens_per_minute)
        return Keys(self.api_keys, standard)

    @property
    def prefix_bytes(self) -> int:
        """Maximum size of the prefix cache."""
        return (parse_bytes(self.prefix_memory) or 0) if self.prefix_cache else 0

    @property
    def kv_bytes(self) -> int | None:
        """Limit of the KV cache; ``None`` without one."""
        return parse_bytes(self.kv_memory)


def parse_bytes(text: str) -> int | None:
    """Bytes of a size such as "2GiB" or "500MB"; ``None`` for an empty text.  Raises ``ValueError`` for an invalid
    size."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(text).strip())
    if match is None or match[2].lower() not in UNITS:
        raise ValueError(f"{text!r} is not a size: write it as 2GiB, 500MB or a number of bytes")
    size = int(float(match[1]) * UNITS[match[2].lower()])
    if size < 1:
        raise ValueError(f"{text!r} is not a size: it must be at least one byte")
    return size


def settings_from(
    flags: Mapping[str, Any], file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> ServerSettings:
    """Settings from flags (``None``: not given), the environment and a file.  Raises ``ValueError`` for an unreadable
    file, an unknown name in it, and a value of the wrong type."""
    return settings_and_command(flags, file, environ)[0]


def settings_and_command(
    flags: Mapping[str, Any], file: Path | None, environ: Mapping[str, str] = os.environ
) -> tuple[ServerSettings, dict[str, Any]]:
    """The settings, and the file's values for the command's own options; the file, perhaps a pipe, is read once."""
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(ServerSettings)}
    values: dict[str, Any] = {}
    lines: dict[str, Any] = {}
    for name, value in _read(file).items():
        if name in COMMAND:
            lines[name] = _value(name, COMMAND[name], value, str(file))
            continue
        if name not in kinds:
            raise ValueError(f"{file} has {name!r}, which is not a setting: use one of {', '.join([*kinds, *COMMAND])}")
        values[name] = _value(name, kinds[name], value, str(file))
    if "target" in lines:
        if values.get("model", lines["target"]) != lines["target"]:
            raise ValueError(
                f"{file}: model is {values['model']!r} and target is {lines['target']!r}: give one of them"
            )
        values["model"] = lines["target"]
    if "api_key_file" in lines:
        values["api_keys"] = (*values.get("api_keys", ()), *keys_in(Path(lines["api_key_file"])))
    if any(not environ.get(name, "key").strip(", ") for name in ("FORETOKEN_API_KEY", "FORETOKEN_API_KEYS")):
        raise ValueError("FORETOKEN_API_KEY is set and empty: unset it to serve without a key, or put the key in it")
    for name in kinds:
        if flags.get(name) is None and PREFIX + name.upper() in environ:
            values[name] = _value(name, kinds[name], environ[PREFIX + name.upper()], PREFIX + name.upper())
    values |= {
        name: _value(name, kinds[name], value, f"--{name}") for name, value in flags.items() if value is not None
    }
    return replace(ServerSettings(insecure=True), **{"insecure": False} | values), lines


def keys_in(file: Path) -> list[str]:
    """Entries of a file with a key a line.  Raises ``ValueError`` for one that cannot be read or has no key."""
    try:
        keys = [line.strip() for line in expanded(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"cannot read --api-key-file {file}: {error.strerror}") from None
    if not keys:
        raise ValueError("an API key must not be empty")
    return keys


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError("--config needs PyYAML: pip install 'foretoken[server]'") from None
    try:
        content = yaml.safe_load(expanded(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {file}: {one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold names and values, not data of type {type(content).__name__}")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _value(name: str, kind: type, value: Any, where: str) -> Any:
    """The value, converted to the type of the setting."""
    try:
        if kind is tuple:
            parts = value.split(",") if isinstance(value, str) else list(value)
            return tuple(str(part).strip() for part in parts if str(part).strip())
        if kind is bool:
            text = str(value).lower()
            if text not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
                raise ValueError
            return text in ("true", "1", "yes", "on")
        cut = kind is int and isinstance(value, float) and not value.is_integer()
        if isinstance(value, bool) or value is None or cut:
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {name} must be {_kinds(kind)}, not {value!r}") from None


def _kinds(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", tuple: "a list"}.get(kind, "a text")
