"""The rows of the exactness matrix: drafter case x verifier, found through the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from cases import CASES, Case
from torch import Tensor
from trained import only_built

from foretoken import registry
from foretoken.core import Kind
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.compatibility import verifiers_for
from foretoken.models.base import LanguageModel
from toys import joint_distribution, llamas, sampled_p_value, tables

AUTO = "auto"
SAMPLES, SAMPLED_BATCH = 1000, 32
"""The number of texts of a sampled cell, and how many are drawn at a time."""
SAMPLED_PROMPT, SAMPLED_TOKENS = [0, 1, 2, 3, 0, 1], 4


@dataclass(frozen=True)
class Pair:
    """A drafter case and the verifier that follows it (``auto`` lets the engine choose).

    ``seeded`` says whether a seed fixes a sampled output whatever else is served.  Coupled sampling, which ``auto``
    gives it, always does; with a rule that has draws of its own, drafts must not depend on other requests.
    ``proposals`` are the drafter's, ``races`` says whether requests without a seed draw on noise all the same, and
    ``learns`` whether drafts depend on what was served before.
    """

    drafter: str
    case: Case
    verifier: str
    seeded: bool = True
    proposals: frozenset[tuple[Kind, bool]] = frozenset()
    races: bool = False
    learns: bool = False

    @property
    def id(self) -> str:
        """``model.iid-tree.kseq``"""
        return f"{self.drafter}.{self.case.label}.{self.verifier}"

    @property
    def auto(self) -> bool:
        """Whether the engine chooses the verifier."""
        return self.verifier == AUTO

    def make_verifier(self) -> Verifier | None:
        """A fresh verifier."""
        return None if self.auto else registry.make("verifier", self.verifier)  # type: ignore[no-any-return]


def toy_models(case: Case) -> tuple[LanguageModel, LanguageModel]:
    """A target of four tokens and a draft model: tables, or networks where the drafter needs one."""
    return llamas(vocab=4) if case.network else tables()


def rows() -> Iterator[tuple[str, Case]]:
    """Every case of every drafter in the registry (a drafter without a case fails a test of its own)."""
    for row in registry.rows("drafter"):
        for case in CASES.get(row.name, []):
            yield row.name, case


def rows_by_name() -> Iterator[tuple[str, Case]]:
    """The same with names of their own, ``drafter.case``."""
    for name, case in rows():
        yield f"{name}.{case.label}", case


@cache
def pairs(greedy: bool) -> list[Pair]:
    """Every case with every lossless verifier that the engine lets follow it, ``auto`` first."""
    combined = []
    models = {True: llamas(vocab=4), False: tables()}  # one pair for all: nothing is decoded here
    for name, case in rows():
        with only_built():
            drafter: Drafter = case.build(*models[bool(case.network)])
        fitting = verifiers_for(drafter.traits.proposals, greedy=False)
        combined += [
            pair_of(name, case, drafter, verifier) for verifier in (AUTO, *fitting, *(["greedy"] if greedy else []))
        ]
    return combined


def pair_of(name: str, case: Case, drafter: Drafter, verifier: str) -> Pair:
    """The pair of a drafter, which was built for this case, and a verifier."""
    races = verifier == "coupled" or (verifier == AUTO and drafter.traits.prefers_noise)
    return Pair(
        name, case, verifier, is_seeded(drafter, verifier), drafter.traits.proposals, races, drafter.traits.shares_state
    )


def is_seeded(drafter: Drafter, verifier: str = AUTO) -> bool:
    """Whether a seed fixes a sampled output whatever else is served."""
    points = all(kind is Kind.POINT for kind, _ in drafter.traits.proposals)
    return verifier in (AUTO, "coupled") or not drafter.traits.shares_state or (points and verifier == "match")


def ban(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that looks at the whole prefix: never the last token again, nor another one picked by the sum."""
    vocab = scores.shape[-1]
    banned = scores.clone()
    for row, ids in enumerate(input_ids):
        banned[row, ids[-1]] = -torch.inf
        banned[row, (ids.sum() + len(ids)) % vocab] = -torch.inf
    return banned


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}

GREEDY_MODES = {
    "greedy": SamplingParams(),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "penalties": SamplingParams(**PENALTIES),  # type: ignore[arg-type]
    "processor": SamplingParams(processors=(ban,)),
}

SAMPLED_MODES = {
    "T=1": SamplingParams(temperature=1.0),
    "filters": SamplingParams(temperature=0.7, top_k=3, top_p=0.95, min_p=0.1),
    "penalties": SamplingParams(temperature=1.0, **PENALTIES),  # type: ignore[arg-type]
    "processor": SamplingParams(temperature=1.0, processors=(ban,)),
}

SEEDED_MODES = {
    **SAMPLED_MODES,
    "cold": SamplingParams(temperature=0.3),
    "top-k": SamplingParams(temperature=1.5, top_k=5),
    "nucleus": SamplingParams(temperature=1.0, top_p=0.8),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 2.0, 7: -5.0}),
}


def sampled_chance(speculative: Engine, right: LanguageModel, mode: str = "T=1") -> float:
    """The p-value of a sampled cell: how likely a right engine is to be so far from what ``right`` would write."""
    params = {mode: SAMPLED_MODES[mode]}
    distributions = {mode: joint_distribution(right, params[mode], SAMPLED_PROMPT, SAMPLED_TOKENS)}
    return sampled_p_value(speculative, params, distributions, SAMPLED_PROMPT, SAMPLED_TOKENS, SAMPLES)
