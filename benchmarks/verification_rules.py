"""Acceptance rules on equal drafts at T=1: block against rejection on chains, traversal against recursive rejection on
trees.

In every round both rules decide about the same tree with the same target distributions, and their expected tokens are
exact: every outcome of a rule's coins is followed with its probability, so that no luck is left but that of the drafts.
The text goes on by one real verdict of the plain rule, so that trees stand where a run would put them.  The error of a
difference comes from its spread between rounds.

    python benchmarks/verification_rules.py [--prompts 10] [--new-tokens 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE
from torch import Tensor

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.llm import assemble
from foretoken.loading import build_drafter, load_model, load_tokenizer
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.verifiers.base import Coins, Verifier
from foretoken.models.base import LanguageModel
from foretoken.registry import make

ARMS = {
    "model,k=4": ("rejection", "block"),
    "model,k=8": ("rejection", "block"),
    "model,tree=2x2x2": ("without_replacement", "traversal"),
    "model,tree=3x2x1x1": ("without_replacement", "traversal"),
    "model,tree=(sequoia,nodes=16)": ("without_replacement", "traversal"),
}
"""Drafts -> the plain rule and its rival."""


class Following(Coins):
    """Coins that fall as told, then true, and remember how likely that was and which way was not taken."""

    def __init__(self, told: Sequence[bool]) -> None:
        self.told, self.taken, self.chance = list(told), list[bool](), 1.0
        self.others: list[list[bool]] = []

    def accept(self, num: float, den: float = 1.0, node: int | None = None) -> bool:
        """A coin that can fall both ways is told, or falls true."""
        chance = num / den if num < den else 1.0
        if chance <= 0.0 or chance >= 1.0:
            return chance >= 1.0
        place = len(self.taken)
        falls = self.told[place] if place < len(self.told) else True
        if place >= len(self.told):
            self.others.append([*self.taken, False])
        self.taken.append(falls)
        self.chance *= chance if falls else 1.0 - chance
        return falls

    def accept_lazily(self, bound: float, probability: Callable[[], float], node: int | None = None) -> bool:
        """As :meth:`accept`."""
        return self.accept(probability())

    def draw(self, distribution: Tensor) -> int:
        """Any possible token: the recovered or bonus token does not change how many there are."""
        return int(distribution.argmax())


def expected_tokens(rule: Verifier, tree: TokenTree, scores: Scores) -> float:
    """Tokens of a round under ``rule``, averaged over all its coins."""
    total, waiting = 0.0, [list[bool]()]
    while waiting:
        coins = Following(waiting.pop())
        verdict = rule.decide(tree, scores, coins)
        total += coins.chance * (1 + len(verdict.path))
        waiting += coins.others
    return total


class BothRules(Verifier):
    """What two rules expect of every tree; goes on as the first one says.

    Attributes:
        tokens: per round the expected tokens of the plain rule and of its rival.
    """

    name = "both_rules"

    def __init__(self, plain: str, rival: str) -> None:
        self.rules: list[Verifier] = [make("verifier", plain), make("verifier", rival)]
        self.kinds = self.rules[0].kinds  # type: ignore[misc]
        self.chains_only = self.rules[0].chains_only  # type: ignore[misc]
        self.tokens: list[tuple[float, float]] = []

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """Count both rules' tokens, then decide by the plain one with the request's own coins."""
        if len(tree) > 1:
            plain, rival = (expected_tokens(rule, tree, scores) for rule in self.rules)
            self.tokens.append((plain, rival))
        return self.rules[0].decide(tree, scores, coins)


@dataclass
class Row:
    """Tokens per round of two rules on the same drafts, and the difference with its standard error."""

    drafts: str
    plain: str
    rival: str
    rounds: int
    plain_tokens: float
    rival_tokens: float
    difference: float
    error: float
    gain: float = field(init=False)

    def __post_init__(self) -> None:
        self.gain = self.difference / self.plain_tokens


def compare(
    target: LanguageModel, drafter: Drafter, spec: str, prompts: Sequence[list[int]], options: argparse.Namespace
) -> Row:
    """One sort of drafts over all prompts."""
    plain, rival = ARMS[spec]
    both = BothRules(plain, rival)
    llm = assemble(target, drafter, both, "constant", None)
    for seed, prompt in enumerate(prompts):
        llm.generate(prompt, max_new_tokens=options.new_tokens, temperature=1.0, seed=seed, ignore_eos=True)
    gaps = [after - before for before, after in both.tokens]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5
    means = [statistics.fmean(side) for side in zip(*both.tokens, strict=True)]
    return Row(spec, plain, rival, len(gaps), means[0], means[1], statistics.fmean(gaps), error)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--only", nargs="*", default=list(ARMS), choices=list(ARMS), help="sorts of drafts")
    parser.add_argument("--prompts", type=int, default=10, help="how many of each kind")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, dest="out", help="write the numbers here as well")
    options = parser.parse_args()
    print(environment(), f"{options.new_tokens} new tokens, T=1", sep=", ")
    target, tokenizer = load_model(options.target), load_tokenizer(options.target)
    texts = [*(*CODE, *MORE_CODE)[: options.prompts], *(*PROSE, *MORE_PROSE)[: options.prompts]]
    prompts = [tokenizer(text)["input_ids"] for text in texts]  # type: ignore[misc]
    rows = []
    print("| drafts | plain rule | its rival | rounds | difference | gain |\n" + "|---" * 6 + "|")
    for spec in options.only:
        print(spec, file=sys.stderr)
        drafter = build_drafter(spec, target, target_source=options.target)
        if drafter is None:
            raise SystemExit(f"{spec} drafts nothing")
        rows.append(row := compare(target, drafter, spec, prompts, options))
        print(
            f"| `{spec}` | {row.plain} {row.plain_tokens:.3f} | {row.rival} {row.rival_tokens:.3f} | {row.rounds} "
            f"| {row.difference:+.4f} ± {row.error:.4f} | {row.gain:+.1%} |",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
