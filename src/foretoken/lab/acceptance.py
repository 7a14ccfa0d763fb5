"""Tokens per round of a drafter on ordinary text, compared with the expected figure.

A drafter with wrong layer ids loads and gives correct text, but poor drafts.  Its acceptance is therefore compared with
the figure from its card or its user, and the neighbouring layers are tried.  A drafter that lacks its layers' attention
window drafts well in short texts only: the same positions are tried with contexts of several lengths.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.engine.stats import SpecStats
from foretoken.lab.prompts import prompts_of_kind
from foretoken.llm import assemble
from foretoken.loading import build_drafter
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.methods.drafters.nets.store import CONFIG, WEIGHTS
from foretoken.models.base import LanguageModel
from foretoken.options import encode

if TYPE_CHECKING:
    from foretoken.training.formats.transfer import Imported

PROMPTS, NEW_TOKENS = 8, 64
"""Number of prompts and tokens per answer."""
ENOUGH = 0.8
"""Sufficient share of the expected figure: acceptance is a little lower on other kinds of text."""
LENGTHS = (256, 2048, 8192)
"""Context lengths in tokens; the first is the reference."""
DEPTHS = {"dflash": "taps", "dflash2": "taps", "dspark": "taps", "eagle3": "layers", "peagle": "layers"}
"""Configuration keys of the target's layer ids, by method."""
CHAINS = dict.fromkeys(("dflash", "dflash2", "dspark", "pard", "peagle"), "nodes=256,width=1") | dict.fromkeys(
    ("eagle", "eagle3"), "nodes=5,depth=5,width=1"
)
"""Spec options that make a method draft a chain; other methods draft chains by default."""
_NUMBER = r"(\d+(?:\.\d+)?)\b(?!\s*%)"
_STATED = re.compile(
    rf"(?:acceptance length|accepted length)[^\d\n]{{0,40}}{_NUMBER}|{_NUMBER}\s+tokens (?:a|per) round", re.IGNORECASE
)


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Tokens per round, including the target's own, and the share of rounds accepted up to each position."""

    tokens_a_round: float
    by_position: tuple[float, ...]
    rounds: int

    @classmethod
    def of(cls, stats: SpecStats, depth: int) -> MeasuredAcceptance:
        """Acceptance from the statistics of drafts up to ``depth`` tokens."""
        reached = [*stats.num_accepted_tokens_per_pos, *[0] * depth][:depth]
        shares = tuple(count / max(stats.num_drafts, 1) for count in reached)
        return cls(stats.mean_acceptance_length, shares, stats.num_drafts)


class AcceptanceCheck:
    """Runs a new drafter on ordinary text, greedily, with chains.

    ``expect`` is in tokens per round, above 1; defaults to the figure on the drafter's card.
    """

    def __init__(self, expect: float | None = None) -> None:
        if expect is not None and not 1 < expect < float("inf"):
            raise ValueError(f"expect is in tokens a round, the target's own included, and above 1, not {expect}")
        self.expect = expect

    def __call__(self, new: Imported) -> dict[str, Any]:
        """``acceptance`` (:class:`MeasuredAcceptance` fields, ``expected``, and tokens per round ``by_length`` of the
        context) and ``warnings``.

        Raises ``ValueError`` if the target has no tokenizer, if less than .8 of the expected figure is reached, or if
        drafts fail in long texts and a figure was expected.  The message names the layers with higher acceptance or
        other likely causes.
        """
        if new.tokenizer is None:
            raise ValueError(f"{new.target} has no tokenizer, and acceptance is measured on text: leave the check out")
        most = max(1, new.model.context_length // 2)  # truncates prompts to half of a short context
        prompts = [prompt.encode(new.tokenizer)[-most:] for prompt in prompts_of_kind(new.tokenizer)[:PROMPTS]]
        expected = stated(new.source) if self.expect is None else self.expect
        measured = _measured(new, new.folder, prompts)
        better = ""
        if expected is None or measured.tokens_a_round < ENOUGH * expected:
            better = _better_layers(new, measured, prompts)
            if expected is not None:
                raise ValueError(_too_little(new, measured, expected, better))
        by_length = _by_length(new)
        fault = _fault_of_lengths(by_length)
        if fault and expected is not None:
            raise ValueError(f"{new.source} {fault}")
        warnings = [better] * bool(better) + [f"it {fault}"] * bool(fault)
        return {"acceptance": {**asdict(measured), "expected": expected, "by_length": by_length}, "warnings": warnings}


def measure_acceptance(target: LanguageModel, drafter: Drafter, prompts: Sequence[Sequence[int]]) -> MeasuredAcceptance:
    """Acceptance for greedy answers, with drafts of the drafter's full length in every round."""
    return MeasuredAcceptance.of(drafted(target, drafter, prompts, NEW_TOKENS), drafter.max_depth)


def drafted(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    controller: str | Controller = "constant",
    **options: Any,
) -> SpecStats:
    """Statistics of answers to prompts, greedy by default; ``options`` are those of ``generate``.

    Answers have ``new_tokens`` tokens, or as many as the context allows, without an early end.
    """
    llm = assemble(target, drafter, "auto", controller, None)
    most = max(1, min(new_tokens, target.context_length - max(map(len, prompts))))
    outputs = llm.generate([list(ids) for ids in prompts], max_new_tokens=most, ignore_eos=True, **options)
    return SpecStats.summed(out.stats for out in outputs)


def stated(folder: Path) -> float | None:
    """The lowest number of tokens per round on the card in a folder; ``None`` if it states none."""
    card = folder / "README.md"
    if not folder.is_dir() or not card.is_file():
        return None
    text = re.sub(r"[|*`:]", " ", card.read_text(encoding="utf-8", errors="replace"))
    figures = [float(before or after) for before, after in _STATED.findall(text)]
    return min((figure for figure in figures if figure > 1), default=None)


def _measured(new: Imported, folder: Path, prompts: Sequence[Sequence[int]]) -> MeasuredAcceptance:
    spec = new.spec.format(folder)
    options = CHAINS.get(new.spec.split(":")[0], "")
    drafter = build_drafter(
        f"{spec},{options}" if options else spec, new.model, target_source=new.target, tokenizer=new.tokenizer
    )
    if isinstance(drafter, HeadsDrafter):
        drafter = drafter.reshaped([(0,) * depth for depth in range(1, len(drafter.heads.blocks) + 1)])
    if drafter is None:
        raise ValueError(f"{spec} drafts nothing")
    return measure_acceptance(new.model, drafter, prompts)


def _by_length(new: Imported, texts: int = 2) -> dict[int, float]:
    """Tokens per round by context length, at the same positions; empty unless two lengths fit."""
    # Ordinary text on every machine: a module of Python's standard library
    tokens: list[int] = encode(inspect.getsource(argparse), new.tokenizer)
    room = new.model.context_length - NEW_TOKENS
    lengths = [length for length in LENGTHS if length <= min(room, len(tokens))]
    if len(lengths) < 2:
        return {}
    ends = [len(tokens) - i * (len(tokens) - lengths[-1]) // max(texts - 1, 1) for i in range(texts)]
    return {
        length: _measured(new, new.folder, [tokens[end - length : end] for end in ends]).tokens_a_round
        for length in lengths
    }


def _fault_of_lengths(by_length: Mapping[int, float]) -> str:
    """The fault that long texts reveal, in words; empty if none."""
    if not by_length:
        return ""
    short, *longer = by_length.items()
    # A drafter is broken if long texts have less than half of the draft tokens accepted that short ones have.
    wrong = [(length, tokens) for length, tokens in longer if tokens - 1 < 0.5 * (short[1] - 1)]
    if not wrong:
        return ""
    (length, tokens), *_ = wrong
    return (
        f"gives {tokens:.2f} tokens a round after {length} tokens of text and {short[1]:.2f} after {short[0]}: "
        "layers that were trained with a window must have it in config.json, and for others give window=N"
    )


def _better_layers(new: Imported, measured: MeasuredAcceptance, prompts: Sequence[Sequence[int]]) -> str:
    """Advice to shift the layer ids if neighbouring layers are clearly better, else empty."""
    tried = {by: _shifted(new, by, prompts) for by in (-1, 1)}
    tokens = {by: shifted.tokens_a_round for by, shifted in tried.items() if shifted is not None}
    best = max(tokens, key=tokens.__getitem__, default=0)
    # Least improvement that counts
    if not best or tokens[best] < 1.1 * measured.tokens_a_round:
        return ""
    return (
        f"its layer ids are off by one: with ids one {'higher' if best > 0 else 'lower'} it gives "
        f"{tokens[best]:.2f} tokens a round; correct them in config.json and import it again"
    )


def _shifted(new: Imported, by: int, prompts: Sequence[Sequence[int]]) -> MeasuredAcceptance | None:
    """Acceptance with every layer id shifted by ``by``; ``None`` without layer ids or outside the target's layers."""
    file = new.folder / CONFIG
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    key = DEPTHS.get(config.get("method", ""))
    depths = [] if key is None else [int(part) + by for part in config["config"][key].split(",")]
    if not depths or min(depths) < 0 or max(depths) > config["target"]["num_layers"]:
        return None
    config["config"][key] = ",".join(map(str, depths))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        (Path(folder) / WEIGHTS).symlink_to((new.folder / WEIGHTS).resolve())
        return _measured(new, Path(folder), prompts)


def _too_little(new: Imported, measured: MeasuredAcceptance, expected: float, better: str) -> str:
    method = new.spec.split(":")[0]
    masks = ["a wrong mask_token_id"] if DEPTHS.get(method) == "taps" or method == "peagle" else []
    layers = ["layer ids of another numbering"] if method in DEPTHS else []
    causes = ["another target than it was trained for", *layers, *masks, "a figure for trees or for text of one kind"]
    return (
        f"{new.source} gives {measured.tokens_a_round:.2f} tokens a round on ordinary text, as a chain, less "
        f"than {ENOUGH:.0%} of the expected {expected:g}: {better or 'likely causes are ' + ', '.join(causes)}"
    )
