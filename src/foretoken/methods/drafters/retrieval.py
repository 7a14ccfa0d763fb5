"""REST: continuations of the context's end in a corpus (He et al. 2023, https://arxiv.org/abs/2311.08252)."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.core import Budget, Context
from foretoken.methods.drafters.base import BuildContext, Traits
from foretoken.methods.drafters.datastore import DEPTH, SEPARATOR, Datastore, encoded
from foretoken.methods.drafters.sources import NOTHING, NgramSource, SourceDraft, SourceDrafter


def most_frequent(rows: NDArray[np.int32], most: int) -> SourceDraft:
    """The trie of the ``most`` most frequent prefixes of sorted ``rows`` [R, k]; no prefix contains a separator.

    A prefix is at least as frequent as its extensions, so the chosen prefixes form a tree; of equally frequent ones the
    shorter come first.
    """
    count, length = rows.shape
    # A cell begins a new prefix if its row differs from the one above at this column or before it.
    new = np.ones((length, count), bool)
    np.logical_or.accumulate((rows[1:] != rows[:-1]).T, axis=0, out=new[:, 1:])
    inside = np.logical_and.accumulate((rows != SEPARATOR).T, axis=0)
    column, first = np.nonzero(new)
    ends = np.append(first[1:], count)
    ends[:-1][column[1:] != column[:-1]] = count
    usable = inside[column, first]
    column, first, size = column[usable], first[usable], (ends - first)[usable]
    chosen = np.argsort(-size, kind="stable")[:most]
    chosen = chosen[np.lexsort((column[chosen], first[chosen]))]  # depth first: a parent is the last node one level up
    tokens = rows[first[chosen], column[chosen]].tolist()
    above = [-1] * (length + 1)
    parents = []
    for node, level in enumerate(column[chosen].tolist()):
        parents.append(above[level])
        above[level + 1] = node
    return SourceDraft(tokens, parents, (size[chosen] / count).tolist(), counted=True)


class _DatastoreSource(NgramSource):
    def __init__(self, drafter: RetrievalDrafter) -> None:
        super().__init__()
        self.drafter = drafter

    def propose(self, budget: Budget) -> SourceDraft:
        options, datastore = self.drafter, self.drafter.datastore
        length = min(options.max_depth, budget.max_depth)
        matched, low, high = datastore.longest(self.text[-options.n :], options.n, options.min_n)
        if not matched or length < 1:
            return NOTHING
        hits = high - low
        if hits <= options.hits:
            chosen = np.arange(low, high)
        else:  # evenly over all of them
            chosen = low + np.arange(options.hits) * hits // options.hits
        draft = most_frequent(
            datastore.continuations(chosen, matched, length), min(options.max_nodes, budget.max_nodes)
        )
        return SourceDraft(draft.tokens, draft.parents, draft.scores, matched, counted=True)


class RetrievalDrafter(SourceDrafter):
    """Looks up the longest n-gram that ends the context, and drafts a trie of its most frequent continuations.

    Args:
        n: longest n-gram that is looked up in the corpus.
        min_n: shortest n-gram that is looked up.
        k: tokens that are taken after every occurrence, the longest draft.
        nodes: maximum draft nodes.
        hits: maximum occurrences that are read.
    """

    name = "retrieval"
    traits = Traits(draws_trees=True, rewinds=True, learns=False)

    def __init__(
        self, datastore: Datastore, n: int = 16, min_n: int = 2, k: int = 10, nodes: int = 64, hits: int = 512
    ) -> None:
        if not 1 <= min_n <= n:
            raise ValueError(f"retrieval needs 1 <= min_n <= n, not min_n={min_n}, n={n}")
        if k < 1 or n + k > DEPTH:
            raise ValueError(f"retrieval needs k >= 1 and n + k <= {DEPTH}, not n={n}, k={k}")
        if nodes < 1 or hits < 1:
            raise ValueError(f"retrieval needs nodes >= 1 and hits >= 1, not nodes={nodes}, hits={hits}")
        self.datastore, self.n, self.min_n, self.hits = datastore, n, min_n, hits
        self.max_depth, self.max_nodes = k, nodes

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> RetrievalDrafter:
        """Build from a spec ``retrieval[:FILE]``; without a path, from modules of Python's standard library, in
        memory."""
        if path is not None:
            datastore = Datastore.open(path, context.tokenizer)
        elif context.tokenizer is not None:
            datastore = Datastore.from_documents(encoded(standard_library(), context.tokenizer))
        else:
            raise ValueError("retrieval without a tokenizer needs a file: retrieval:FILE (foretoken datastore build)")
        datastore.check_vocabulary(context.target.vocab_size)
        return cls(datastore, **options)

    def open(self, context: Context) -> NgramSource:
        return _DatastoreSource(self)


def standard_library() -> Iterator[str]:
    """Sources of a few modules of the running Python, about 390 KB.  Raises ``ValueError`` if it has none."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "collections/__init__", "csv", "dataclasses", "json/decoder", "json/encoder", "shutil",
             "textwrap", "unittest/case")  # fmt: skip
    files = [path for name in names if (path := folder / f"{name}.py").is_file()]
    if not files:
        raise ValueError("this Python has no sources to build a datastore from: give a file, retrieval:FILE")
    for path in files:
        yield path.read_text(encoding="utf-8")
