"""Three caches of n-gram statistics: the request's, past requests' and a corpus's (llama.cpp's ``lookup``).

https://github.com/ggml-org/llama.cpp/tree/master/examples/lookup.  A cache maps an n-gram to counts of the tokens after
it (:mod:`foretoken.methods.drafters.ngram_counts`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import RLock
from time import monotonic
from typing import Any, ClassVar
from weakref import WeakValueDictionary, finalize

from foretoken.core import Budget, Context, check_least
from foretoken.core.io.hub_ids import expanded
from foretoken.methods.drafters.base import BuildContext, Traits
from foretoken.methods.drafters.datastore import encoded, fingerprint, joined
from foretoken.methods.drafters.ngram_counts import SIZES, CountTable, FollowerCounts, NgramCache
from foretoken.methods.drafters.sources import NgramSource, SourceDraft, SourceDrafter
from foretoken.methods.drafters.tenants import Tenants

LAX = ((2, 66), (2, 50), (1, 50), (1, 50))
"""Minimum samples and minimum percentage of the best token, for n = 1..4, in the context cache."""
STRICT = ((4, 75), (3, 66), (2, 66), (2, 66))
"""The same for the dynamic cache."""
SAVED_EVERY_S = 60.0
"""Seconds between two writes of a dynamic cache while requests end."""


def best_follower(
    cache: NgramCache, tokens: Sequence[int], thresholds: Sequence[tuple[int, int]], static: FollowerCounts | None
) -> tuple[int, float] | None:
    """The next token by the longest n-gram above the thresholds, and its share of the samples.

    Candidates are ranked by :meth:`FollowerCounts.best`.
    """
    for n in range(min(cache.sizes[-1], len(tokens)), cache.sizes[0] - 1, -1):
        samples, percent = thresholds[n - 1]
        counts = cache.followers(tokens[-n:])
        if counts is None or counts.total < samples or 100 * counts.most < percent * counts.total:
            continue
        token, count = counts.best(static)
        if 100 * count >= percent * counts.total:
            return token, count / counts.total
    return None


class _Saving:
    """Writes what the drafters with one file learn: building the file takes long, and requests wait for it.

    The file gets what it held before and the counts of all of them.  A drafter's cache alone would lack what the others
    have learned since it was loaded.

    Args:
        loaded: content of the file.
    """

    by_path: ClassVar[WeakValueDictionary[Path, _Saving]] = WeakValueDictionary()
    lock = RLock()  # of all: a file may be loaded in one thread while requests end in another

    def __init__(self, path: Path, fingerprint: str, loaded: NgramCache) -> None:
        self.path, self.fingerprint = path, fingerprint
        self._base, self._learned = loaded, dict[int, NgramCache]()
        self._drafters, self._has_more = set[int](), False
        self._due_s, self._process = monotonic() + SAVED_EVERY_S, os.getpid()
        self.by_path[path.resolve()] = self

    @classmethod
    def joined(cls, path: Path, fingerprint: str, loaded: NgramCache, drafter: int) -> _Saving:
        """The one of a file whose content a drafter has just loaded.

        Raises:
            ValueError: the file is one of another tokenizer that nothing was written to yet.
        """
        with cls.lock:
            saving = cls.by_path.get(path.resolve())
            if saving is None:
                saving = cls(path, fingerprint, loaded)
            if fingerprint and saving.fingerprint and fingerprint != saving.fingerprint:
                raise ValueError(f"ngram_cache already saves to {path} for another tokenizer: give each its own file")
            saving.fingerprint = saving.fingerprint or fingerprint
            if not path.exists():  # nothing was learned yet, or somebody wants to begin anew
                saving._base, saving._learned = loaded, {}
            saving._drafters.add(drafter)
            return saving

    def learn(self, drafter: int, cache: NgramCache, tokens: Sequence[int], counted: NgramCache | None = None) -> None:
        """Let the cache of a drafter remember a text; ``counted`` as for :meth:`NgramCache.remember`."""
        with self.lock:
            cache.remember(tokens, counted)
            self._learned[drafter], self._has_more = cache, True
            if monotonic() >= self._due_s:
                self.write()

    def write(self) -> None:
        """Write what was learned since the last time; not in a forked process."""
        with self.lock:
            if self._has_more and os.getpid() == self._process:
                self._base.save(self.path, self.fingerprint, list(self._learned.values()))
                self._has_more, self._due_s = False, monotonic() + SAVED_EVERY_S

    def settle(self, drafter: int) -> None:
        """Keep the counts of a drafter that is loaded again or gone."""
        with self.lock:
            cache = self._learned.pop(drafter, None)
            if cache is not None:
                self._base = NgramCache(self._base.sizes, self._base.frozen([cache]))

    def leave(self, drafter: int) -> None:
        """Write what a drafter that is gone has learned, and keep it for the others."""
        with self.lock:
            self.write()
            self._drafters.discard(drafter)
            if self._drafters:
                self.settle(drafter)

    @classmethod
    def write_to(cls, path: Path) -> None:
        """Write what this process has learned for a file, before it is read."""
        saving = cls.by_path.get(path.resolve())
        if saving is not None:
            saving.write()


class _CacheSource(NgramSource):
    """One request's counts, and the caches that it shares."""

    def __init__(self, drafter: NgramCacheDrafter, salt: str) -> None:
        super().__init__()
        self.drafter, self.salt = drafter, salt
        self.current, self.past = NgramCache(), drafter.tenants.of(salt)
        self._num_counted = 0

    def read(self) -> None:
        """Count the request's own text, which no other request uses before its end."""
        start, self._num_counted = self._num_counted, len(self.text)
        self.current.count(self.text, start)

    def propose(self, budget: Budget) -> SourceDraft:
        self.read()
        tokens: list[int] = []
        scores: list[float] = []
        tail, sure = self.text[-SIZES[-1] :], 1.0
        for _ in range(min(self.drafter.max_depth, budget.max_depth, budget.max_nodes)):
            best = self.drafter.next_token(self.current, self.past, tail)
            if best is None:
                break
            sure *= best[1]
            tokens.append(best[0])
            scores.append(sure)
            tail = [*tail[-SIZES[-1] + 1 :], best[0]]
        return SourceDraft(tokens, range(-1, len(tokens) - 1), scores, counted=True)

    def close(self) -> None:
        if self._num_counted:
            self.read()
        self.drafter.remember(self.text, self.salt, self.current if self._num_counted else None)


class NgramCacheDrafter(SourceDrafter):
    """Chains by n-gram statistics of this text (lax), of past texts (strict) and of a corpus.

    Args:
        k: maximum draft tokens.
        share: learn from finished requests (the dynamic cache), separately for each salt.
        tokens: maximum remembered tokens of finished requests, of all salts together (about 600 bytes each); at least
            half of them are kept, besides the loaded ones.
        static: file of a static cache, which ``build_static_cache`` writes.
        save: with a path in the spec: write the dynamic cache of requests without a salt back to it, at the end of a
            request at most once a minute, and when the drafter or the process ends; a crash or a kill loses what was
            learned since the last time.
    """

    name = "ngram_cache"

    def __init__(
        self, k: int = 8, share: bool = True, static: str = "", save: bool = False, tokens: int = 400_000
    ) -> None:
        check_least(self.name, 1, k=k, tokens=tokens)
        self.max_depth, self.save_always = k, save
        self.traits = Traits(shares_state=share, learns=share)
        self.path: Path | None = None
        self.fingerprint = ""
        self._saving: _Saving | None = None
        self._loaded = NgramCache()
        self.tenants = Tenants(
            lambda: NgramCache(self._loaded.sizes, self._loaded.table, tokens),
            size=lambda cache: cache.size,
            room=tokens,
            shrink=NgramCache.forget_older,
        )
        self.static = NgramCache.load(static) if static else None

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> NgramCacheDrafter:
        """Build from a spec ``ngram_cache[:FILE]``: FILE holds the dynamic cache and may be missing with
        ``save=true``."""
        static = options.pop("static", "")
        drafter = cls(**options)
        drafter.fingerprint = fingerprint(context.tokenizer) if context.tokenizer is not None else ""
        if static:
            drafter.static = NgramCache.load(static, drafter.fingerprint)
        if drafter.save_always and not drafter.traits.shares_state:
            raise ValueError("ngram_cache with share=false learns nothing that could be saved: leave out save=true")
        if drafter.save_always and path is None:
            raise ValueError("ngram_cache needs a file to save to: ngram_cache:FILE,save=true")
        if path is not None:
            drafter.path = expanded(path)
            if drafter.save_always and not drafter.path.parent.is_dir():
                raise ValueError(f"ngram_cache cannot save to {path}: there is no folder {drafter.path.parent}")
            _Saving.write_to(drafter.path)
            if drafter.path.exists() or not drafter.save_always:
                drafter.load(path)
            if drafter.save_always:
                drafter._saving_to(drafter.path)
        return drafter

    @property
    def dynamic(self) -> NgramCache:
        """The dynamic cache of requests without a salt."""
        return self.tenants.of("")

    def open(self, context: Context) -> NgramSource:
        return _CacheSource(self, context.salt)

    def next_token(self, current: NgramCache, past: NgramCache, tokens: Sequence[int]) -> tuple[int, float] | None:
        """The next token and its share, by the request's cache, else by past requests', else by the corpus's."""
        static = self.static.followers(tokens[-2:]) if self.static is not None and len(tokens) > 1 else None
        best = best_follower(current, tokens, LAX, static) or best_follower(past, tokens, STRICT, static)
        samples, percent = LAX[1]
        if best is None and static is not None and static.total >= samples:
            token, count = static.best()
            if 100 * count >= percent * static.total:
                best = token, count / static.total
        return best

    def remember(self, tokens: Sequence[int], salt: str = "", counted: NgramCache | None = None) -> None:
        """Add a finished request's tokens to the tenant's dynamic cache; ``counted`` as for
        :meth:`NgramCache.remember`."""
        if self.traits.shares_state:
            if self.save_always and self.path is not None and not salt:
                self._saving_to(self.path).learn(id(self), self.tenants.of(salt), tokens, counted)
            else:
                self.tenants.of(salt).remember(tokens, counted)

    def _saving_to(self, path: Path) -> _Saving:
        if self._saving is None:
            self._saving = _Saving.joined(path, self.fingerprint, self._loaded, id(self))
            finalize(self, self._saving.leave, id(self))  # also at the end of the process
        return self._saving

    def save(self, path: str | Path) -> None:
        """Write the dynamic cache of requests without a salt."""
        self.dynamic.save(path, self.fingerprint)

    def load(self, path: str | Path) -> None:
        """Load a saved dynamic cache, from which every tenant starts.

        Raises:
            ValueError: the file is missing, damaged, or of another tokenizer.
        """
        _Saving.write_to(expanded(path))
        if self._saving is not None:
            self._saving.settle(id(self))
        self._loaded = NgramCache.load(path, self.fingerprint or None)
        self.tenants.clear()


def build_static_cache(documents: Iterable[str], tokenizer: Any, out: str | Path) -> int:
    """Count the bigrams of a corpus for ``ngram_cache,static=OUT``; return the number of entries.

    Raises:
        ValueError: the corpus is empty.
    """
    tokens = joined(encoded(documents, tokenizer))
    if not len(tokens):
        raise ValueError("the corpus is empty: a static cache needs text")
    bigrams = range(2, 3)
    cache = NgramCache(bigrams, CountTable.of_text(tokens, bigrams))
    cache.save(out, fingerprint(tokenizer))
    return len(cache.table or ())
