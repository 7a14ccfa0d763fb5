"""The drafters that copy from text, without any model: a replay of recorded answers, and microseconds per round.

Replay: the recorded text is the target, so acceptance needs no network.  Every answer is encoded with the built-in
tokenizer; the prompt is the question and what was said before.  ``recycling`` has no logits to learn from here: the
token that came is put first in its row, so the figure is a lower bound.  ``prediction`` gets the first answer as the
prediction of the second one.

    python benchmarks/ngram_family.py [--data ../shared/data] [--megabytes 20]
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import environment

from foretoken.core import Budget, Context, Rng, TokenTree
from foretoken.core.io.documents import iter_documents
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.stats import SpecStats
from foretoken.loading import load_tokenizer
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.datastore import Datastore, build_datastore
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.ngram_cache import NgramCacheDrafter
from foretoken.methods.drafters.prediction import PredictionDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.drafters.retrieval import RetrievalDrafter
from foretoken.methods.drafters.sam import DatastoreCorpus, SamDrafter
from foretoken.methods.drafters.suffix import SuffixDrafter

TRACE = "traces/vicuna_7b_v1.5_greedy_mt_bench.jsonl"
QUESTIONS = "prompts/spec_bench.jsonl"
BOOKS = "corpus/novels_60mb.txt.zst"


@dataclass
class Answer:
    """One recorded answer: ids of what came before it, its own, and an expected text."""

    prompt: list[int]
    tokens: list[int]
    prediction: list[int] | None


def answers(data: Path, tokenizer: Any) -> Iterator[Answer]:
    """Both turns of every recorded conversation."""
    questions: dict[int, list[str]] = {}
    if (data / QUESTIONS).exists():
        rows = map(json.loads, (data / QUESTIONS).read_text(encoding="utf-8").splitlines())
        questions = {row["question_id"]: row["turns"] for row in rows}
    for line in (data / TRACE).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        turns = questions.get(row["question_id"], ["", ""])
        text, before = tokenizer("A chat.\n")["input_ids"], None
        for question, answer in zip(turns, row["choices"][0]["turns"], strict=False):
            text = text + tokenizer(f"USER: {question}\nASSISTANT: ")["input_ids"]
            tokens = tokenizer(answer)["input_ids"]
            if tokens:
                yield Answer(list(text), tokens, before)
            text, before = text + tokens, tokens


class Clock:
    """Processor seconds of the drafter in each round, proposing and learning (waiting for a busy machine left out)."""

    def __init__(self) -> None:
        self.rounds: list[float] = []


def accepted_path(tree: TokenTree, text: Sequence[int], written: int) -> list[int]:
    """Nodes that agree with the text."""
    path, node = [], 0
    while written + len(path) < len(text) - 1:
        matching = [c for c in tree.children[node] if tree.tokens[c] == text[written + len(path)]]
        if not matching:
            break
        node = matching[0]
        path.append(node)
    return path


def learn(drafter: Drafter, context: Context, came: Sequence[int]) -> None:
    """What ``observe`` would do: recycling learns the token that came, the others read the text."""
    if isinstance(drafter, RecyclingDrafter):
        table = drafter.learned(context).followers
        text = context.tokens[-len(came) - 1 :]
        for token, following in itertools.pairwise(text):
            table.reserve(max(text) + 1)
            row = [following, *(t for t in table.rows[token].tolist() if t != following)][:8]
            table.update([token], np.array([row], np.int32))
    else:
        drafter.source(context)  # type: ignore[attr-defined]


def replay(drafter: Drafter, answer: Answer, clock: Clock, request: int = 0) -> SpecStats:
    """Rounds until the answer is written."""
    sampler = Sampler(SamplingParams(), len(answer.prompt))
    context = Context(request, list(answer.prompt), len(answer.prompt), sampler, Rng(0), prediction=answer.prediction)
    stats, written, text = SpecStats(), 0, answer.tokens
    drafter.start(context)
    while written < len(text):
        start_s = time.thread_time()
        tree = drafter.propose(context, Budget(drafter.max_depth, drafter.max_nodes))
        spent = time.thread_time() - start_s
        path = accepted_path(tree, text, written)
        came = text[written : written + len(path) + 1]
        context.tokens.extend(came)
        written += len(came)
        stats.add_round(tree.num_drafts, len(path), len(came))
        start_s = time.thread_time()
        learn(drafter, context, came)
        clock.rounds.append(spent + time.thread_time() - start_s)
    drafter.finish(context)
    return stats


def methods(store: Datastore) -> dict[str, Callable[[], Drafter]]:
    """Every method at its defaults, and variants that the published systems use."""
    return {
        "ngram": NgramDrafter,
        "ngram (Transformers)": lambda: NgramDrafter(n=2, k=10, match="first"),
        "ngram (vLLM, n=5)": lambda: NgramDrafter(n=5, min_n=5, match="first"),
        "ngram_cache": NgramCacheDrafter,
        "ngram_cache, share=false": lambda: NgramCacheDrafter(share=False),
        "suffix": SuffixDrafter,
        "suffix, share=false": lambda: SuffixDrafter(share=False),
        "suffix, tree=true, k=32": lambda: SuffixDrafter(k=32, tree=True, factor=4.0),
        "sam": SamDrafter,
        "sam, with the datastore": lambda: SamDrafter(corpus=DatastoreCorpus(store)),
        "recycling": RecyclingDrafter,
        "recycling, nodes=16": lambda: RecyclingDrafter(nodes=16),
        "prediction (second turns)": PredictionDrafter,
        "retrieval": lambda: RetrievalDrafter(store),
    }


def show(name: str, stats: SpecStats, clock: Clock, seconds: float) -> None:
    """One line of the table."""
    micros = sorted(1e6 * s for s in clock.rounds)
    print(
        f"{name:28}{stats.mean_acceptance_length:8.3f}{stats.acceptance_rate:10.3f}"
        f"{stats.num_draft_tokens / max(1, stats.num_drafts):10.1f}{statistics.median(micros):11.1f}"
        f"{micros[int(0.99 * len(micros))]:10.1f}{seconds:9.1f}"
    )


def header(title: str) -> None:
    """Names of the columns."""
    print(f"\n{title}")
    print(f"{'':28}{'length':>8}{'accepted':>10}{'drafted':>10}{'median us':>11}{'99 % us':>10}{'seconds':>9}")


def run(title: str, makers: dict[str, Callable[[], Drafter]], texts: Sequence[Answer]) -> None:
    """The table of all methods on the same texts."""
    header(title)
    for name, make in makers.items():
        drafter, stats, clock = make(), SpecStats(), Clock()
        chosen = [a for a in texts if a.prediction is not None] if isinstance(drafter, PredictionDrafter) else texts
        start_s = time.perf_counter()
        for i, answer in enumerate(chosen):
            stats.merge(replay(drafter, answer, clock, i))
        show(name, stats, clock, time.perf_counter() - start_s)


def books(path: Path, megabytes: float) -> Iterator[str]:
    """Documents of the corpus up to a size."""
    room = megabytes * 1e6
    for document in iter_documents([path]):
        if room <= 0:
            return
        room -= len(document)
        yield document


def build(data: Path, megabytes: float, tokenizer: Any, folder: Path) -> Datastore:
    """A datastore file of the given size of text, opened as a user would."""
    text = folder / "text.jsonl"
    with text.open("w", encoding="utf-8") as file:
        for document in books(data / BOOKS, megabytes):
            file.write(json.dumps({"text": document}) + "\n")
    start_s = time.perf_counter()
    report = build_datastore([text], tokenizer, folder / "store")
    built = time.perf_counter()
    store = Datastore.open(folder / "store", tokenizer)
    print(
        f"datastore: {text.stat().st_size / 1e6:.1f} MB of text, {report['tokens']:,} tokens, file of "
        f"{report['bytes'] / 1e6:.1f} MB, built in {built - start_s:.1f} s, "
        f"opened in {time.perf_counter() - built:.2f} s"
    )
    return store


def long_context(tokenizer: Any, prompt: int = 4096, answer: int = 400) -> list[Answer]:
    """4096 tokens of Python source as the prompt, and what follows as the answer."""
    ids = tokenizer(inspect.getsource(argparse))["input_ids"]
    expected = [*ids[prompt : prompt + 100], *ids[prompt + 105 : prompt + answer]]  # with five tokens left out
    return [Answer(ids[:prompt], ids[prompt : prompt + answer], expected)]


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Replay and microseconds of the n-gram family.")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--megabytes", type=float, default=20.0, help="text in the datastore")
    arguments = parser.parse_args()
    if not (arguments.data / TRACE).exists() or not (arguments.data / BOOKS).exists():
        print(f"skipped: {arguments.data} has no {TRACE} and {BOOKS}; give the folder with --data")
        return 0
    tokenizer = load_tokenizer("builtin")
    if tokenizer is None:
        print("skipped: the built-in tokenizer is not there")
        return 0
    print(environment())
    with tempfile.TemporaryDirectory() as folder:
        store = build(arguments.data, arguments.megabytes, tokenizer, Path(folder))
        texts = list(answers(arguments.data, tokenizer))
        count = sum(len(a.tokens) for a in texts)
        run(f"replay of {len(texts)} recorded answers, {count:,} tokens", methods(store), texts)
        run("at a context of 4096 tokens (Python source)", methods(store), long_context(tokenizer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
