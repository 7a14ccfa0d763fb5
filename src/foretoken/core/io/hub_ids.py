"""Models by Hugging Face id, with an early check whether the hub can be reached.

Without a network the hub's client retries every file (33 seconds for a missing model).
"""

from __future__ import annotations

import os
import re
import time
from functools import lru_cache
from pathlib import Path
from threading import Thread

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class UnreachableError(ValueError):
    """A model that is neither local nor reachable; the message gives a remedy."""


def location_of(source: str) -> str:
    """Source of a model: the path or id itself, or its folder in the hub's cache if the hub cannot be reached. Raises
    ``UnreachableError`` if it is neither local nor cached and the hub cannot be reached."""
    if expanded(source).exists():
        return below_home(source)
    if not _ID.fullmatch(source):
        raise UnreachableError(f"{source} is neither a model folder nor a GGUF file here, nor a Hugging Face id")
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT, int(time.monotonic() / 60)):
        return source
    folder = cached_folder(source)
    if folder is not None:
        return folder
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
    raise UnreachableError(
        f"{source} is neither a folder here nor in the Hugging Face cache, and {reason}: check the path, or fetch the "
        f"model where there is a network (hf download {source}) and copy its folder here"
    )


def below_home(path: str) -> str:
    """A path without its leading ``~``, which Transformers would read as a folder's name; any other text unchanged.
    Raises ``ValueError`` for an unknown user's."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        raise ValueError(f"{path} begins with a user who has no folder here: write the whole path") from None


def expanded(path: str | Path) -> Path:
    """:func:`below_home` for a path that is opened here."""
    return Path(below_home(str(path)))


def cached_folder(source: str) -> str | None:
    """The folder of a hub id in the hub's cache; ``None`` if it is not cached."""
    from huggingface_hub import constants, try_to_load_from_cache

    names = ("config.json", "adapter_config.json")  # every model has one of them
    files = [try_to_load_from_cache(source, name, cache_dir=constants.HF_HUB_CACHE) for name in names]
    return next((str(Path(file).parent) for file in files if isinstance(file, str)), None)


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    """Whether the endpoint answers; the result is cached for a minute.

    A separate thread asks, because a name lookup has no time limit.
    """
    wait_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 1.5)
    answers: list[bool] = []

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            get_session().head(endpoint, timeout=wait_s)
        except Exception:  # any error: the hub could not be reached
            return
        answers.append(True)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(wait_s)
    return bool(answers)
