"""``auto`` where the length of contexts changes: short chats and long prompts in turns, over plain decoding.

Drafts are free, and their tokens are right with a given probability: a row costs more behind a long text, so that few
right tokens pay behind a short one and lose behind a long one.  The first run of every prompt teaches the drafter what
the target writes.  Rates are new tokens by processor time from the first round to the last (one thread, so that other
processes disturb little), those of drafts over plain decoding's just before.

    OMP_NUM_THREADS=1 python benchmarks/context_costs.py [TARGET] [--right 0.2] [--long 2600] [--new-tokens 120]
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import random
import statistics
import tarfile
import time
from typing import Any

from common import environment
from real_models import CHAT

import foretoken as ft
from foretoken.core import Budget, Context, TokenTree
from foretoken.methods.drafters.scripted import ScriptedDrafter

SOURCES = (argparse, tarfile, difflib)
DEEPEST, REPEATS = 8, 3


class Oracle:
    """Drafts of what the target wrote before, every token right with one probability."""

    def __init__(self, right: float) -> None:
        self.right, self.answers = right, dict[tuple[int, ...], list[int]]()

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """A chain behind the root; wrong tokens at positions that do not depend on the length of the draft."""
        prompt = tuple(context.tokens[: context.prompt_length])
        start = len(context.tokens) - context.prompt_length
        answer = self.answers.get(prompt, [])[start : start + min(budget.max_depth, budget.max_nodes, DEEPEST)]
        wrong = [random.Random(start + i).random() >= self.right for i in range(len(answer))]
        return TokenTree.chain(
            context.root,
            [(token + is_wrong) % 1000 if is_wrong else token for token, is_wrong in zip(answer, wrong, strict=True)],
        )


def rate(llm: ft.Llm, messages: list[dict[str, str]], new_tokens: int, **options: Any) -> tuple[float, list[int]]:
    """Tokens by second of processor time after the first round, and the answer."""
    ends: list[float] = []
    llm.engine.on_round = lambda *_: ends.append(time.process_time())
    (out,) = llm.generate([messages], max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True, **options)
    first = out.stats.mean_acceptance_length
    return (len(out.token_ids) - first) / (ends[-1] - ends[0]), list(out.token_ids)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2")
    parser.add_argument("--right", type=float, default=0.2)
    parser.add_argument("--long", type=int, default=2600, help="tokens of the long prompts, about")
    parser.add_argument("--new-tokens", type=int, default=120)
    args = parser.parse_args()
    oracle = Oracle(args.right)
    llm = ft.load(args.target, drafter=ScriptedDrafter(propose=oracle.propose), controller="auto")
    print(environment(), args, ft.__file__)
    ratios: dict[str, list[float]] = {"short": [], "long": []}
    for question, source in zip(CHAT, SOURCES, strict=False):
        ids = llm.tokenizer(inspect.getsource(source))["input_ids"][: args.long]
        texts = {"short": question, "long": f"{llm.tokenizer.decode(ids)}\n\nSummarise this text."}
        for kind, text in texts.items():
            messages = [{"role": "user", "content": text}]
            plain, answer = rate(llm, messages, args.new_tokens, max_draft_tokens=0)
            oracle.answers[tuple(llm.request(messages).prompt)] = answer
            for _ in range(REPEATS):
                speed, same = rate(llm, messages, args.new_tokens)
                ratios[kind].append(speed / plain)
                print(
                    f"{kind}: {speed / plain:.2f} of plain, {'same' if same == answer else 'another'} text", flush=True
                )
    print({kind: round(statistics.median(found), 3) for kind, found in ratios.items()})


if __name__ == "__main__":
    main()
