"""How often the target's token is among k candidates of one place: coupled races beside drawn siblings.

The target writes sampled texts; at every place both models' distributions are kept, and each rule judges k = 1, 2, 4, 8
candidates there, so that all see the same places.  Coupled: is the winner of E/p among the k first of E/q, on fresh
noise.  Drawn: the rule that ``auto`` gives unseeded requests (block for one draft, traversal for siblings drawn without
replacement), recursive rejection, and the k likeliest tokens of q as points.

    python benchmarks/coupled_siblings.py [--prompts 8] [--new-tokens 64] [--draws 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import environment
from prompts import CODE, PROSE
from torch import Tensor

from foretoken.core import Context, Kind, Rng, Scores, TokenTree
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.llm import assemble
from foretoken.loading import build_draft_model, load_model, load_tokenizer
from foretoken.methods.drafters.drawing import best, draw_without_replacement
from foretoken.models.base import Feed, LanguageModel
from foretoken.registry import make

WIDTHS = (1, 2, 4, 8)


@dataclass
class Given:
    """A request whose distributions are given: what the rules ask for p."""

    p: Tensor
    greedy = fixed = False
    noise = None
    prompt_length = 0
    context_free = True
    recipe = None

    def distribution(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        """[V] p."""
        return self.p

    def distributions(self, logits: Tensor, prefixes: object) -> Tensor:
        """[N, V] p at every node."""
        return self.p.expand(len(logits), -1)


def distributions(model: LanguageModel, tokens: Sequence[int], first: int, sampler: Sampler) -> Tensor:
    """[n, V] what the model gives each token from position ``first`` on."""
    sequence = model.open()
    model.prefill(sequence, tokens[: first - 1])
    logits = model.forward([Feed(sequence, tokens[first - 1 : -1])])[0].logits
    model.release(sequence)
    return sampler.distributions(logits, None)


def drawn(rule: str, p: Tensor, q: Tensor, width: int, seed: int) -> bool:
    """Whether one of ``width`` drawn siblings is accepted."""
    context = Context(0, [0], 1, None, Rng(seed))
    tokens = draw_without_replacement(q, width, context)
    none, every = (-1,), (0,) * len(tokens)
    tree = TokenTree((0, *tokens), (*none, *every), Kind.WITHOUT_REPLACEMENT, q[None], (*none, *every))
    scores = Scores(torch.zeros(len(tree), len(p)), tree, [0], Given(p))  # type: ignore[arg-type]
    return bool(make("verifier", rule).verify(tree, scores, context.rng).path)


def coupled(p: Tensor, q: Tensor, width: int, noise: Noise, position: int) -> bool:
    """Whether the target's winner is among the first ``width`` of the draft."""
    gumbels = noise.gumbels(position, len(p), p.device)
    return int((p.log() + gumbels).argmax()) in best(q.log() + gumbels, width)


def main() -> None:
    """A table per temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draws", type=int, default=4, help="trials per place")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target, tokenizer = load_model("builtin", dtype="float32"), load_tokenizer("builtin")
    draft = build_draft_model(None, target, "builtin", tokenizer, None)
    plain = assemble(target, None, "auto", "auto", tokenizer)
    prompts = [text for pair in zip(CODE, PROSE, strict=False) for text in pair][: args.prompts]
    rows = []
    for temperature in args.temperatures:
        sampler = Sampler(SamplingParams(temperature=temperature))
        hits: dict[tuple[str, int], int] = {}
        places = 0
        with torch.inference_mode():
            for seed, prompt in enumerate(prompts):
                ids = list(tokenizer(prompt)["input_ids"])
                options = {"max_new_tokens": args.new_tokens, "temperature": temperature, "ignore_eos": True}
                text = ids + plain.generate(ids, seed=1000 + seed, **options).token_ids
                p, q = (distributions(model, text, len(ids), sampler) for model in (target, draft))
                noise = Noise(seed)
                for trial in range(args.draws * len(p)):
                    mine, theirs = p[trial % len(p)], q[trial % len(p)]
                    places += 1
                    for width in WIDTHS:
                        found = {
                            "coupled": coupled(mine, theirs, width, noise, trial),
                            "auto's drawn rule": drawn("traversal", mine, theirs, width, trial),
                            "recursive rejection": drawn("without_replacement", mine, theirs, width, trial),
                        }
                        for rule, hit in found.items():
                            hits[rule, width] = hits.get((rule, width), 0) + hit
                for mine, theirs in zip(p, q, strict=True):
                    for width in WIDTHS:
                        share = float(mine[theirs.topk(width).indices].sum()) * args.draws
                        hits["likeliest, as points", width] = hits.get(("likeliest, as points", width), 0) + share
        print(f"T={temperature}, {places} trials, k = {', '.join(map(str, WIDTHS))}")
        for rule in dict.fromkeys(rule for rule, _ in hits):
            found = [round(hits[rule, width] / places, 3) for width in WIDTHS]
            rows.append({"temperature": temperature, "rule": rule, "accepted": found, "trials": places})
            print(f"  {rule:24} {'  '.join(f'{share:.3f}' for share in found)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
