"""What the length of a match tells a drafter that copies: one draft length for all matches, or one for each length.

A greedy text is cut into rounds without a model: the longest earlier match of up to 8 tokens proposes, and what agrees
with the text is accepted.  A target call with k draft tokens costs 1 + k ROW.  Both policies are fitted on one half of
the texts and judged on the other.

    python benchmarks/match_lengths.py MODEL [--chat] [--rows 0.03,0.08,0.16]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

import foretoken as ft

LONGEST, LENGTHS = 8, (0, 1, 2, 3, 4, 6, 8, 10, 16)
Policy = Callable[[int], int]
"""Draft length by match length."""
Rounds = Sequence[tuple[int, int]]
"""Match length and number of agreeing tokens at every position of a text."""


def texts(model: str, chat: bool) -> list[tuple[list[int], list[int]]]:
    """Prompt and greedy answer of every question."""
    llm = ft.load(model, drafter=None)
    if not chat:
        outputs = [(llm.tokenizer.encode(p), llm.generate(p, max_new_tokens=160)) for p in CODE + MORE_CODE]
        return [(list(prompt), list(out.token_ids)) for prompt, out in outputs]
    answered = []
    for question in PROSE + MORE_PROSE:
        messages = [{"role": "user", "content": question}]
        prompt = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answered.append((list(prompt), list(llm.chat(messages, max_new_tokens=160, repetition_penalty=1.0).token_ids)))
    return answered


def longest_match(tokens: Sequence[int]) -> tuple[int, int]:
    """Length of the longest suffix that occurred before, and where its continuation begins."""
    for length in range(LONGEST, 0, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == suffix:
                return length, start + length
    return 0, len(tokens)


def rounds_of(prompt: list[int], answer: list[int]) -> Rounds:
    """What a draft from every position would be."""
    whole, rounds = prompt + answer, []
    for i in range(len(answer)):
        end = len(prompt) + i
        length, at = longest_match(whole[:end])
        agreeing = 0
        while agreeing < LENGTHS[-1] and end + agreeing < len(whole) and at + agreeing < end:
            if whole[at + agreeing] != whole[end + agreeing]:
                break
            agreeing += 1
        rounds.append((length, agreeing))
    return rounds


def speed(answers: Sequence[Rounds], policy: Policy, row: float) -> float:
    """Tokens per cost of a call with one row."""
    tokens, cost = 0, 0.0
    for rounds in answers:
        i = 0
        while i < len(rounds):
            length, agreeing = rounds[i]
            drafted = policy(length)
            cost += 1 + row * drafted
            i += min(agreeing, drafted) + 1
        tokens += len(rounds)
    return tokens / cost


def fitted(answers: Sequence[Rounds], row: float) -> tuple[Policy, Policy]:
    """The best single length, for matches from a least length on, and the best table by match length."""
    least, k = max(
        ((least, k) for least in (1, 2, 3, 4) for k in LENGTHS),
        key=lambda choice: speed(answers, lambda m: choice[1] if m >= choice[0] else 0, row),
    )
    table = [k if m >= least else 0 for m in range(LONGEST + 1)]
    for _ in range(3):  # coordinate ascent
        for m in range(1, LONGEST + 1):
            values = {k: speed(answers, [*table[:m], k, *table[m + 1 :]].__getitem__, row) for k in LENGTHS}
            table[m] = max(values, key=values.__getitem__)
    return lambda m: k if m >= least else 0, table.__getitem__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--chat", action="store_true", help="questions to a chat model, otherwise code to continue")
    parser.add_argument("--rows", default="0.03,0.08,0.16", help="costs of a further row")
    args = parser.parse_args()
    answers = [rounds_of(*text) for text in texts(args.model, args.chat)]
    halves = answers[::2], answers[1::2]
    for row in map(float, args.rows.split(",")):
        ratios = []
        for learned, judged in (halves, halves[::-1]):
            single, table = fitted(learned, row)
            ratios.append(speed(judged, table, row) / speed(judged, single, row))
        print(f"row {row}: a length for each match length over one for all, held out: {ratios[0]:.3f}, {ratios[1]:.3f}")


if __name__ == "__main__":
    main()
