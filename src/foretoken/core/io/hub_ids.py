"""Models named by a Hugging Face id: whether the hub can be asked, found out before anything waits for it.

Without a network the hub's client tries every file again and again (33 seconds for a model that is not there).
"""

from __future__ import annotations

import os
import re
import time
from functools import lru_cache
from pathlib import Path
from threading import Thread

FILES = ("config.json", "adapter_config.json")
"""Of a model in the hub's cache, one of them is there."""
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class UnreachableError(ValueError):
    """A model that is neither on this machine nor to be fetched; the message says what to do."""


def place_of(source: str) -> str:
    """Where the model of a path or an id is read from: itself, or its folder in the hub's cache if the hub cannot be
    asked.  Raises ``UnreachableError`` where it is neither here nor in the cache, and nobody can be asked for it."""
    if Path(source).expanduser().exists():
        return source
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
        f"{source} is no folder here and not in the Hugging Face cache, and {reason}: check the path, or fetch the "
        f"model where there is a network (hf download {source}) and copy its folder here"
    )


def cached_folder(source: str) -> str | None:
    """The folder of a hub id in the hub's cache; ``None`` where it is not there."""
    from huggingface_hub import constants, try_to_load_from_cache

    files = [try_to_load_from_cache(source, file, cache_dir=constants.HF_HUB_CACHE) for file in FILES]
    return next((str(Path(file).parent) for file in files if isinstance(file, str)), None)


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    """Whether anything answers there; the answer is kept for a minute.

    The question is asked in a thread of its own, because looking up a name cannot be given a time limit.
    """
    wait_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 1.5)
    answers: list[bool] = []

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            get_session().head(endpoint, timeout=wait_s)
        except Exception:  # whatever it is, the hub could not be asked
            return
        answers.append(True)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(wait_s)
    return bool(answers)
