"""How a server is set up: flags, then environment variables, then a YAML file, then these defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foretoken.server.keys import Caller, Keys

PREFIX = "FORETOKEN_"
UNITS = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "kb": 10**3, "m": 2**20, "mib": 2**20, "mb": 10**6}
UNITS |= {"g": 2**30, "gib": 2**30, "gb": 10**9, "t": 2**40, "tib": 2**40, "tb": 10**12}


@dataclass(frozen=True)
class Settings:
    """What a server serves, and what it lets clients do.

    Attributes:
        model: as for :func:`foretoken.load`.
        served_name: what clients call it; its last path part by default.
        host, port: where it listens.
        drafter, verifier, controller, dtype, device, quantize, backend, profile: as for :func:`foretoken.load`.
        exact: ``"distribution"``, or ``"bitwise"``: a model that cannot keep that is not served.
        tensor_parallel: processes of this machine (on CUDA: devices) that the model is split over.
        max_running: requests that run together.
        max_queued: requests that wait besides; more get 503.
        kv_memory: bytes of keys and values, as "2GiB"; empty for no limit.
        prefill_chunk: prompt tokens that are read between two rounds.
        prefill_time: seconds that this may take while several requests run or wait; 0 for no limit.
        prefix_cache: whether finished texts are kept for others with the same beginning.
        prefix_memory: bytes that they may take, as "256MiB".
        api_keys: any of them opens every route; none leaves all open.  Behind a key there may be what it may take, as
            "KEY name=team-a running=4 queued=16 tokens_per_minute=60000 priority".
        key_running: choices of a key that run together, where its entry says nothing else; 0 for no limit.
        key_queued: choices of a key that wait besides; -1 for no limit.
        key_tokens_per_minute: tokens of prompts and answers of a key; 0 for no limit.
        allowed_host: names besides its address that the server answers to; "*" for all.
        insecure: allow an address that others can reach without a key.
        max_body: bytes of a request.
        request_timeout: seconds after which a request ends with 504.
        body_timeout: seconds in which a request must have arrived.
        write_timeout: seconds in which a client must take some of what was sent, or its connection is cut.
        max_unread: answers that may wait for clients that have stopped reading; of more the oldest is cut.
        shutdown_timeout: seconds that running requests have after SIGTERM.
        watchdog: seconds without a sign of life after which the engine counts as hung.
        ping: seconds between comments in a silent stream.
        stream_interval: fewest tokens of a chunk but the last.
        stream_pad: every chunk is filled up to a multiple of so many bytes, so that its size tells nothing.
        metrics_compat: other prefix ("vllm") under which all metrics appear as well.
        log_prompts: characters of a prompt in the log.
        root_path: where a proxy has put the server.
        chat_template: file with a chat template to use instead of the model's.
        online: the draft model learns from what the target writes while it serves.
        online_save: folder that the draft model is written to after every update.
    """

    model: str = "builtin"
    served_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    drafter: str = "auto"
    verifier: str = "auto"
    controller: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    quantize: str = ""
    backend: str = "auto"
    exact: str = "distribution"
    profile: str = ""
    tensor_parallel: int = 1
    max_running: int = 16
    max_queued: int = 256
    kv_memory: str = ""
    prefill_chunk: int = 256
    prefill_time: float = 0.1
    prefix_cache: bool = True
    prefix_memory: str = "256MiB"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_running: int = 0
    key_queued: int = -1
    key_tokens_per_minute: int = 0
    allowed_host: tuple[str, ...] = ()
    insecure: bool = False
    max_body: int = 2 * 2**20
    request_timeout: float = 600.0
    body_timeout: float = 20.0
    write_timeout: float = 30.0
    max_unread: int = 32
    shutdown_timeout: float = 30.0
    watchdog: float = 60.0
    ping: float = 15.0
    stream_interval: int = 1
    stream_pad: int = 0
    metrics_compat: str = ""
    log_prompts: int = 0
    root_path: str = ""
    chat_template: str = ""
    online: bool = False
    online_save: str = ""

    def __post_init__(self) -> None:
        for name in ("max_running", "tensor_parallel", "prefill_chunk", "max_body", "stream_interval", "max_unread"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "max_queued",
            "stream_pad",
            "log_prompts",
            "shutdown_timeout",
            "key_running",
            "key_tokens_per_minute",
            "prefill_time",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        for name in ("request_timeout", "body_timeout", "write_timeout", "watchdog", "ping"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        if self.exact not in ("distribution", "bitwise"):
            raise ValueError(f"exact must be distribution or bitwise, not {self.exact!r}")
        if self.metrics_compat not in ("", "vllm"):
            raise ValueError(f"metrics_compat must be empty or vllm, not {self.metrics_compat!r}")
        parse_bytes(self.kv_memory)
        parse_bytes(self.prefix_memory)
        if self.key_queued < -1:
            raise ValueError(f"key_queued must be at least 0, or -1 for no limit, not {self.key_queued}")
        if self.key_queued >= 0 and not self.key_running:
            raise ValueError("key_queued needs key_running: say how many of a key's requests may run")
        if (self.key_running or self.key_queued >= 0 or self.key_tokens_per_minute) and not self.api_keys:
            raise ValueError("key_running, key_queued and key_tokens_per_minute need keys: give an --api-key")
        self.keys  # noqa: B018 (wrong entries are refused now)
        if self.online_save and not self.online:
            raise ValueError("online_save needs online: nothing else changes the draft model")
        if self.online:
            self.online_drafter  # noqa: B018 (a drafter that cannot learn is refused now)
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.api_keys and not self.insecure:
            raise ValueError(
                f"--host {self.host} can be reached by others: give an --api-key, or say --insecure if that is meant"
            )

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or Path(self.model).name or self.model

    @property
    def online_drafter(self) -> str:
        """The spec of the draft model, as one that learns.

        Raises:
            ValueError: the drafter is no draft model.
        """
        name, comma, options = self.drafter.partition(",")
        kind, colon, path = name.partition(":")
        if kind not in ("auto", "model", "online"):
            raise ValueError(f"online trains a draft model: drafter must be auto or model[:PATH], not {self.drafter!r}")
        saved = f",save={self.online_save}" if self.online_save else ""
        return f"online{colon}{path}{comma}{options}{saved}"

    @cached_property
    def keys(self) -> Keys:
        """The keys, and what each may take.

        Raises:
            ValueError: an entry is wrong.
        """
        queued = None if self.key_queued < 0 else self.key_queued
        standard = Caller("", "", self.key_running, queued, self.key_tokens_per_minute)
        return Keys(self.api_keys, standard)

    @property
    def prefix_bytes(self) -> int:
        """Most memory of kept texts."""
        return (parse_bytes(self.prefix_memory) or 0) if self.prefix_cache else 0

    @property
    def kv_bytes(self) -> int | None:
        """The limit of keys and values, if there is one."""
        return parse_bytes(self.kv_memory)


def parse_bytes(text: str) -> int | None:
    """A size such as "2GiB" or "500MB" in bytes; ``None`` for nothing.

    Raises:
        ValueError: no such size.
    """
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(text).strip())
    if found is None or found[2].lower() not in UNITS:
        raise ValueError(f"{text!r} is no size: write it as 2GiB, 500MB or a number of bytes")
    size = int(float(found[1]) * UNITS[found[2].lower()])
    if size < 1:
        raise ValueError(f"{text!r} is no size: it must be at least one byte")
    return size


def settings_from(
    flags: Mapping[str, Any], file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Settings of flags that were given (those that are ``None`` were not), the environment, and a file.

    Raises:
        ValueError: a file that cannot be read, an unknown name in it, or a value of the wrong kind.
    """
    known = {one.name: one for one in fields(Settings)}
    found: dict[str, Any] = {}
    for name, value in _read(file).items():
        if name not in known:
            raise ValueError(f"{file} has {name!r}, which is no setting: known are {', '.join(known)}")
        found[name] = _value(name, value, str(file))
    if any(not environ.get(name, "key").strip(", ") for name in ("FORETOKEN_API_KEY", "FORETOKEN_API_KEYS")):
        raise ValueError("FORETOKEN_API_KEY is set and empty: unset it to serve without a key, or put the key in it")
    for name in known:
        if PREFIX + name.upper() in environ:
            found[name] = _value(name, environ[PREFIX + name.upper()], PREFIX + name.upper())
    found |= {name: _value(name, value, f"--{name}") for name, value in flags.items() if value is not None}
    return replace(Settings(insecure=True), **{"insecure": False} | found)


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError("--config needs PyYAML: pip install 'foretoken[server]'") from None
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {file}: {str(error).splitlines()[0]}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold names and values, not data of type {type(found).__name__}")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def _value(name: str, value: Any, where: str) -> Any:
    """A value of the field's type."""
    default = getattr(Settings(insecure=True), name)
    kind = type(default)
    try:
        if kind is tuple:
            parts = value.split(",") if isinstance(value, str) else list(value)
            return tuple(str(part).strip() for part in parts if str(part).strip())
        if kind is bool:
            text = str(value).lower()
            if text not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
                raise ValueError
            return text in ("true", "1", "yes", "on")
        if isinstance(value, bool) or value is None:
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {name} must be {_kinds(kind)}, not {value!r}") from None


def _kinds(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", tuple: "a list"}.get(kind, "a text")
