"""Tokenizers of models, and whether two models share one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.core.io.checkpoints import BUILTIN, ZOO, LoadError, cause_of, is_adapter, location_of, resolve
from foretoken.core.io.hub_ids import expanded
from foretoken.core.values import with_article
from foretoken.loading.adapters import read_adapter
from foretoken.loading.gguf import is_gguf, load_gguf_tokenizer
from foretoken.loading.handed import unwrapped
from foretoken.models.base import LanguageModel
from foretoken.models.checks.judging import ROWS, SENTENCE

TEMPLATE = "chat_template.jinja"


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ``ValueError`` for an object that is no tokenizer, before a text fails on it."""
    if tokenizer is None or isinstance(tokenizer, _UnreadTokenizer):  # any access would read it
        return
    if callable(tokenizer) and hasattr(tokenizer, "decode") and not isinstance(tokenizer, type):
        return
    description = repr(tokenizer) if isinstance(tokenizer, str | Path) else with_article(type(tokenizer).__name__)
    source = f"AutoTokenizer.from_pretrained({tokenizer!r})" if isinstance(tokenizer, str | Path) else "AutoTokenizer's"
    raise ValueError(f"tokenizer must be a Transformers tokenizer, not {description}: give {source}")


def load_tokenizer(source: Any, backend: str = "auto") -> Any | None:
    """The tokenizer of a model source, or ``None`` if it has none.

    ``backend`` selects the reader of a GGUF file (:mod:`foretoken.loading.gguf`); llama.cpp's models use its own.
    Raises ``LoadError`` if its files are damaged.
    """
    source = unwrapped(source)
    if isinstance(source, LanguageModel) and source.path is not None:
        source, backend = source.path, "llama.cpp"
    if is_gguf(source):
        return load_gguf_tokenizer(source, backend)
    from transformers import AutoTokenizer

    if not isinstance(source, str | Path):
        source = getattr(getattr(source, "config", None), "_name_or_path", "") or ""
        if not source or not Path(source).is_dir():
            return None
    path = resolve(source)
    if Path(path).is_dir() and not _has_tokenizer(Path(path)):
        folder = expanded(path)
        if is_adapter(folder):
            return load_tokenizer(read_adapter(folder).base)
        return load_tokenizer(BUILTIN) if folder.parent == ZOO else None
    location = location_of(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    except Exception as error:  # damaged files fail in many ways
        raise LoadError(f"cannot load a tokenizer from {path}: {_damaged(Path(path)) or cause_of(error)}") from None
    limit = tokenizer.model_max_length
    if not isinstance(limit, int | float):  # every text is compared with it
        raise LoadError(
            f"cannot load a tokenizer from {path}: tokenizer_config.json has model_max_length {ascii(limit)[:40]}, "
            "which is not a number: copy it again"
        )
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return any((folder / name).exists() for name in names)


class _UnreadTokenizer:
    """A tokenizer whose files are read on first use, because reading takes most of a second."""

    _read: Any = None

    def __init__(self, model: Any) -> None:
        self._model = model

    def _tokenizer(self) -> Any:
        if self._read is None:
            self._read = load_tokenizer(self._model)
        return self._read

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by copy and pickle before the object is filled
            raise AttributeError(name)
        return getattr(self._tokenizer(), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer()(*args, **options)

    def __len__(self) -> int:
        return len(self._tokenizer())


def tokenizer_when_needed(model: Any) -> Any | None:
    """The tokenizer of a ``PreTrainedModel``, read on first use; ``None`` if it has none.  Damaged files raise
    ``LoadError`` then."""
    folder = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    if folder and Path(folder).is_dir() and _has_tokenizer(Path(folder)):
        return _UnreadTokenizer(model)
    return load_tokenizer(model)


def _damaged(folder: Path) -> str:
    """Error message for the first tokenizer file that is no JSON object or no text; empty if there is none."""
    files = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
    for name in files:
        file = folder / name
        try:
            whole = not file.exists() or isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
        except (OSError, ValueError):
            whole = False
        if not whole:
            return f"{name} is damaged or half-written, copy it again"
    try:
        (folder / TEMPLATE).read_text(encoding="utf-8")
    except ValueError:
        return f"{TEMPLATE} is damaged (it is not text), copy it again"
    except OSError:
        pass
    return _no_vocabulary(folder)


def _no_vocabulary(folder: Path) -> str:
    """Error message for a missing or unreadable file of tokens; empty if the file is good."""
    if not folder.is_dir() or any((folder / name).exists() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        return ""
    file = folder / "tokenizer.json"
    if not file.exists():
        return f"{file.name} is missing, copy it from the model's source"
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the package has no exception classes
        return f"{file.name} holds no tokenizer ({cause_of(error)}), copy it again"
    return ""


def ordinary_text(source: Any) -> list[int] | None:
    """Ids of a sentence in the model's chat template, if it has one; ``None`` without a tokenizer or if the template
    fails."""
    try:
        tokenizer = load_tokenizer(source)
        if tokenizer is None:
            return None
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template([{"role": "user", "content": SENTENCE}], tokenize=False)
        else:
            text = SENTENCE
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[-ROWS:]
    except Exception:  # using the tokenizer reports the error
        return None


def check_same_tokenizer(target: Any | None, draft: Any | None, name: str) -> None:
    """Raise ``ValueError`` if the draft model's tokenizer is not the target's."""
    if target is None or draft is None:
        return
    target_ids, draft_ids = _ids_of(target), _ids_of(draft)
    if target_ids == draft_ids:
        return
    differing = sorted(set(target_ids.items()) ^ set(draft_ids.items()), key=lambda item: item[1])
    token, index = differing[0]
    raise ValueError(
        f"the draft model {name} has another tokenizer than the target ({len(differing)} entries differ, first "
        f"{token!r} = {index}): use it as 'shared_vocab:{name}' or 'retokenize:{name}', or a drafter that needs no "
        "draft model, for example 'ngram'"
    )


def _ids_of(tokenizer: Any) -> dict[str, int]:
    """The vocabulary without the names that converters to GGUF give to padding entries."""
    return {token: token_id for token, token_id in tokenizer.get_vocab().items() if token != f"[PAD{token_id}]"}


def check_vocabularies(target: LanguageModel, draft: LanguageModel, name: str) -> None:
    """Raise ``ValueError`` if the widths of the logits differ too much for one vocabulary; padded ones differ
    little."""
    wide, narrow = max(target.vocab_size, draft.vocab_size), min(target.vocab_size, draft.vocab_size)
    if wide - narrow > max(512, wide // 100):
        raise ValueError(
            f"the draft model {name} has a vocabulary of {draft.vocab_size}, the target one of {target.vocab_size}: "
            f"they do not share a tokenizer; use it as 'shared_vocab:{name}' or 'retokenize:{name}'"
        )
