"""How to build every drafter for the toy models: the one place that a new drafter adds a line to.

``CASES`` maps a registry name to its cases.  A case is a label and a function ``(target, draft) -> drafter``; both are
:class:`~foretoken.models.base.LanguageModel` objects, ``draft`` one that differs a little from ``target``.  A drafter
that needs a network (hidden states, layers) says ``network=True``: its law is then tested on a tiny llama instead of
tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretoken.drafters.base import Drafter
from foretoken.drafters.datastore import Datastore
from foretoken.drafters.jacobi import JacobiDrafter
from foretoken.drafters.lookahead import LookaheadDrafter
from foretoken.drafters.model import ModelDrafter
from foretoken.drafters.ngram import NgramDrafter
from foretoken.drafters.ngram_cache import NgramCacheDrafter
from foretoken.drafters.prediction import PredictionDrafter
from foretoken.drafters.recycling import RecyclingDrafter
from foretoken.drafters.retrieval import RetrievalDrafter
from foretoken.drafters.sam import SamDrafter
from foretoken.drafters.scripted import ScriptedDrafter
from foretoken.drafters.suffix import SuffixDrafter
from foretoken.models.base import LanguageModel
from foretoken.trees.operations import first_nodes, from_paths


@dataclass(frozen=True)
class Case:
    """One way to build a drafter.

    Attributes:
        label: what is special about it.
        build: makes the drafter from a target and a draft model.
        network: whether the target must be a network.
    """

    label: str
    build: Callable[[LanguageModel, LanguageModel], Drafter]
    network: bool = False


CASES: dict[str, list[Case]] = {
    "model": [
        Case("chain", lambda target, draft: ModelDrafter(draft, k=3)),
        Case("greedy-chain", lambda target, draft: ModelDrafter(draft, k=3, draw="greedy")),
        Case("iid-tree", lambda target, draft: ModelDrafter(draft, tree="3x2x1", draw="iid")),
        Case("wor-tree", lambda target, draft: ModelDrafter(draft, tree="2x2x1", draw="without_replacement")),
        Case("greedy-tree", lambda target, draft: ModelDrafter(draft, tree="2x2x1", draw="greedy")),
        Case("itself", lambda target, draft: ModelDrafter(target, k=3)),
    ],
    "ngram": [
        Case("recent", lambda target, draft: NgramDrafter(n=2, k=3)),
        Case("first", lambda target, draft: NgramDrafter(n=3, k=4, match="first")),
    ],
    "jacobi": [
        Case("repeat", lambda target, draft: JacobiDrafter(m=4)),
        Case("prompt", lambda target, draft: JacobiDrafter(m=3, init="prompt")),
    ],
    "lookahead": [
        Case("window", lambda target, draft: LookaheadDrafter(w=3, n=3, g=2)),
        Case("prompt", lambda target, draft: LookaheadDrafter(w=4, n=4, g=3, pool_from_prompt=True, shift="accepted")),
    ],
    "ngram_cache": [Case("context", lambda target, draft: NgramCacheDrafter(k=3, share=False))],
    "suffix": [
        Case("path", lambda target, draft: SuffixDrafter(k=4, share=False)),
        Case("tree", lambda target, draft: SuffixDrafter(k=6, tree=True, factor=2.0, share=False)),
    ],
    "sam": [
        Case("dynamic", lambda target, draft: SamDrafter(k=3)),
        Case("static", lambda target, draft: SamDrafter(k=3, bias=0, corpus=[[0, 1, 2, 3, 1, 2, 0], [3, 3, 0, 1]])),
    ],
    "recycling": [Case("tree", lambda target, draft: RecyclingDrafter(nodes=6, share=False))],
    "prediction": [Case("text", lambda target, draft: PredictionDrafter(k=3, default=[0, 1, 2, 3, 1, 1, 0, 2]))],
    "retrieval": [
        Case(
            "trie", lambda target, draft: RetrievalDrafter(Datastore.from_documents([[0, 1, 2, 3], [0, 1, 0]]), min_n=1)
        ),
    ],
    "scripted": [
        Case("chain", lambda target, draft: ScriptedDrafter("1 2 0")),
        Case(
            "tree",
            lambda target, draft: ScriptedDrafter(
                propose=lambda context, budget: first_nodes(
                    from_paths(context.root, [(0, 1, 2), (0, 2), (2, 0, 1), (3,)]), budget.max_nodes
                )
            ),
        ),
    ],
}
