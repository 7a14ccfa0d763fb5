"""The engine in its thread: throughput, time to the first token beside long prompts, memory, chat turns, drafting.

Everything is measured in one process on the built-in target, in processor seconds of all its threads, so that other
processes count little; arms take turns.  Ratios are medians over ``--repeat`` turns.  ``--only`` picks sections,
``--json`` keeps the numbers.

    OMP_NUM_THREADS=1 python benchmarks/serving_engine.py [--repeat 7] [--only throughput memory] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from common import environment
from prompts import CODE, MORE_CODE, MORE_PROSE, PROSE

import foretoken as ft
from foretoken import AsyncLlm
from foretoken.engine.request import Request
from foretoken.llm import Llm, Output

TEXTS = tuple(text for four in zip(CODE, PROSE, MORE_CODE, MORE_PROSE, strict=True) for text in four)
LONG, SHORT = 3_000, 100
ZOO = ("model,k=4", "model,tree=3x2x1", "ngram", "suffix", "recycling", "lookahead", "medusa", "hydra", "bpd", "eagle",
       "eagle3", "mtp", "kangaroo", "pass_tokens", "sparse_kv,budget=64", "quantized,bits=8,k=5",
       "cascade,k=8,inner=(ngram,n=3,k=8)", "router,drafters=(model,k=4|ngram|suffix)",
       "ensemble,drafters=(model,k=4|ngram)")  # fmt: skip
"""Drafters that the built-in target has without training."""
CONTEXT = 4_096
"""The built-in target's is 1,024; rotary embeddings go on behind that, and what is written matters to no figure."""


def loaded(drafter: str | None, **more: Any) -> Llm:
    """The built-in target with a context for long prompts."""
    llm = ft.load("builtin", drafter=drafter, prefix_cache=False, **more)
    llm.target.context_length = CONTEXT
    return llm


@asynccontextmanager
async def running(llm: Llm, **options: Any) -> Any:
    """An engine that is started, and closed again."""
    engine = AsyncLlm(llm, prefix_cache=False, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close(0.0)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which so many are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# -- throughput ------------------------------------------------------------------------------------------------------


async def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Concurrent requests against ``llm.generate`` of the same prompts in one batch."""
    found = {}
    for drafter in args.drafters:
        spec = None if drafter == "none" else drafter
        for size in (8, 32):
            batch, served = loaded(spec), loaded(spec)
            async with running(served, max_running=size) as engine:
                found[f"{drafter}, {size}"] = await _against_batch(args, batch, engine, TEXTS[:size])
            print(f"  {drafter}, {size} at once: {found[f'{drafter}, {size}']}", flush=True)
    return found


async def _against_batch(
    args: argparse.Namespace, batch: Llm, engine: AsyncLlm, texts: Sequence[str]
) -> dict[str, float]:
    options: dict[str, Any] = {"max_new_tokens": args.new_tokens, "ignore_eos": True}

    async def concurrently() -> list[list[int]]:
        outputs = await asyncio.gather(*(engine.generate(text, **options) for text in texts))
        return [output.token_ids for output in outputs]

    async def in_one_batch() -> list[list[int]]:
        return [output.token_ids for output in batch.generate(list(texts), **options)]

    seconds = await _in_turns({"engine": concurrently, "batch": in_one_batch}, args.repeat)
    tokens = args.new_tokens * len(texts)
    return {
        "ratio": round(_ratio(seconds["batch"], seconds["engine"]), 3),
        "engine_tokens_per_s": round(tokens / statistics.median(seconds["engine"])),
        "batch_tokens_per_s": round(tokens / statistics.median(seconds["batch"])),
    }


async def _in_turns(arms: Mapping[str, Callable[..., Awaitable[Any]]], repeat: int) -> dict[str, list[float]]:
    """Processor seconds of every arm, turn by turn; the first two turns warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeat + 2):
        for name in list(arms) if turn % 2 else reversed(list(arms)):
            start_s = time.process_time()
            await arms[name]()
            if turn >= 2:
                seconds[name].append(time.process_time() - start_s)
    return seconds


def _ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, others, strict=True))


# -- time to the first token -----------------------------------------------------------------------------------------


async def first_tokens(args: argparse.Namespace) -> dict[str, Any]:
    """Short requests that arrive all the time, while prompts of 3,000 tokens do; by the processor's clock."""
    found: dict[str, Any] = {}
    for drafter in args.first_token_drafters:
        llm = loaded(None if drafter == "none" else drafter)
        waits: dict[int | None, tuple[list[float], list[float]]] = {256: ([], []), None: ([], [])}
        for turn in range(args.turns):
            for chunk in list(waits) if turn % 2 else reversed(list(waits)):
                llm.engine.serve(32, None, chunk, 0)
                _beside_long_prompts(llm, args, *waits[chunk])
        for chunk, (short, long) in waits.items():
            name = f"{drafter}, {'no pieces' if chunk is None else f'pieces of {chunk}'}"
            found[name] = {
                **{f"short_p{round(100 * q)}_ms": round(1e3 * percentile(short, q)) for q in (0.5, 0.9, 0.99)},
                "long_p50_ms": round(1e3 * statistics.median(long)),
                "short": len(short),
                "long": len(long),
            }
            print(f"  {name}: {found[name]}", flush=True)
    return found


def _beside_long_prompts(llm: Llm, args: argparse.Namespace, short: list[float], long: list[float]) -> None:
    """Arrivals by the processor's clock, which stands still while other processes run and is put forward when idle."""
    rng = random.Random(0)
    arrivals = [(args.long_every * (0.5 + i), LONG) for i in range(int(args.seconds / args.long_every))]
    arrivals += [(args.short_every * i, 20) for i in range(int(args.seconds / args.short_every))]
    arrivals.sort(reverse=True)
    busy, came, skipped, start_s = llm.engine, {}, 0.0, time.process_time()
    while arrivals or busy.busy:
        now_s = time.process_time() - start_s + skipped
        if not busy.busy and arrivals[-1][0] > now_s:
            skipped += arrivals[-1][0] - now_s
            now_s = arrivals[-1][0]
        while arrivals and arrivals[-1][0] <= now_s:
            when, length = arrivals.pop()
            prompt = [rng.randrange(3, 1_000) for _ in range(length)]
            came[busy.add(Request(prompt, max_new_tokens=16, ignore_eos=True))] = (when, length)
        for run, emission in busy.step():
            if emission.token_ids and run.id in came:
                when, length = came.pop(run.id)
                (long if length == LONG else short).append(time.process_time() - start_s + skipped - when)


# -- memory and chats ------------------------------------------------------------------------------------------------


async def memory(args: argparse.Namespace) -> dict[str, Any]:
    """One text of 3,000 tokens among fifteen of 100, and one of 4,000 beside one of 100."""
    return {
        "3,000 among 15 of 100": await _taken([LONG, *([SHORT] * 15)]),
        "4,000 and 100": await _taken([4_000, SHORT]),
    }


async def _taken(lengths: Sequence[int]) -> dict[str, float]:
    llm, new = loaded(None), 16
    async with running(llm) as engine:
        requests = [engine.generate([5 + i] * n, max_new_tokens=new, ignore_eos=True) for i, n in enumerate(lengths)]
        await asyncio.gather(*requests)
        memory = llm.memory()
    needed = sum(length + new for length in lengths) * memory["kv_bytes_per_token"]
    rectangle = (max(lengths) + new) * len(lengths) * memory["kv_bytes_per_token"]
    return {
        "peak_over_needed": round(memory["kv_peak_bytes"] / needed, 3),
        "one_rectangle_over_needed": round(rectangle / needed, 3),
        "bytes_after": memory["kv_bytes"],
    }


async def chat(args: argparse.Namespace) -> dict[str, Any]:
    """What is read of the prompts of a conversation."""
    llm = ft.load("builtin", drafter=None)
    engine = AsyncLlm(llm)
    await engine.start()
    found, text = {}, "User: " + CODE[0] * 8 + "\nAgent:"
    for turn in range(1, 5):
        output = await engine.generate(text, max_new_tokens=48, ignore_eos=True)
        stats = output.stats
        found[f"turn {turn}"] = f"{stats.num_prompt_tokens_computed} of {stats.num_prompt_tokens}"
        text += output.text + "\nUser: and now?\nAgent:"
    await engine.close(0.0)
    return found


# -- cancelling and seeds --------------------------------------------------------------------------------------------


async def cancelling(args: argparse.Namespace) -> dict[str, Any]:
    """From the moment that one of eight streams is closed until its place and its memory are free."""
    llm, rounds, found = loaded("model,k=4"), [], []
    llm.engine.on_round = lambda runs, trees, verdicts, times: rounds.append(times[-1])
    async with running(llm, max_running=8) as engine:
        options: dict[str, Any] = {"max_new_tokens": 900, "ignore_eos": True}
        others = [asyncio.create_task(engine.generate(text, **options)) for text in TEXTS[:7]]
        for i in range(10):
            pieces = engine.stream(TEXTS[7 + i], **options)
            for _ in range(3):
                await anext(pieces)
            before, start_s = engine.status.running, time.perf_counter()
            await pieces.aclose()
            while engine.status.running == before and time.perf_counter() - start_s < 5:
                await asyncio.sleep(0)
            found.append(time.perf_counter() - start_s)
        for task in others:
            task.cancel()
    return {
        "p50_ms": round(1e3 * statistics.median(found), 1),
        "worst_ms": round(1e3 * max(found), 1),
        "round_p50_ms": round(1e3 * statistics.median(rounds), 1),
        "round_worst_ms": round(1e3 * max(rounds), 1),
    }


async def seeds(args: argparse.Namespace) -> dict[str, Any]:
    """Texts of 32 requests with seeds that arrive in waves, and that differ from those that each writes alone."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "float64"):
        alone = ft.load("builtin", drafter=None, dtype=dtype, prefix_cache=False)
        references = [alone.generate(text, **options).token_ids for text, options in map(_seeded, range(32))]
        for spec in (None, *args.seed_drafters):
            engine = AsyncLlm(ft.load("builtin", drafter=spec, dtype=dtype), prefill_chunk=48, max_running=12)
            await engine.start()

            async def asked(i: int, engine: AsyncLlm = engine) -> Output:
                await asyncio.sleep(0.05 * (i % 5))
                text, options = _seeded(i)
                return await engine.generate(text, **options)

            outputs = await asyncio.gather(*map(asked, range(32)))
            await engine.close(0.0)
            reused = sum(output.stats.num_prompt_tokens - output.stats.num_prompt_tokens_computed for output in outputs)
            different = sum(output.token_ids != right for output, right in zip(outputs, references, strict=True))
            found[f"{dtype}, {spec}"] = f"{different} of 32 differ, {reused} prompt tokens taken over"
            print(f"  {dtype}, {spec}: {found[f'{dtype}, {spec}']}", flush=True)
    return found


def _seeded(i: int) -> tuple[str, dict[str, Any]]:
    """A text that others begin with, and options with a seed; every fourth request is greedy."""
    text = TEXTS[i // 3] * (1 + i % 3)
    return text, {"max_new_tokens": 16 + 5 * (i % 7), "temperature": float(i % 4 > 0), "top_p": 0.95, "seed": i}


# -- drafting under load ---------------------------------------------------------------------------------------------


async def drafting(args: argparse.Namespace) -> dict[str, Any]:
    """The default drafter and controller against plain decoding: a queue that is never empty, and bursts."""
    found = {}
    for name, places, requests in (("queue never empty, 8 places", 8, 64), ("bursts of 12", 32, 12)):
        plain, auto = loaded(None), loaded("auto")
        async with running(plain, max_running=places) as plain_engine, running(auto, max_running=places) as auto_engine:
            for _ in range(args.warm_up):
                await _served(auto_engine, requests, args.new_tokens)
            arms = {
                "plain": lambda plain_engine=plain_engine, n=requests: _served(plain_engine, n, args.new_tokens),
                "auto": lambda auto_engine=auto_engine, n=requests: _served(auto_engine, n, args.new_tokens),
            }
            seconds = await _in_turns(arms, args.repeat)
            found[name] = {
                "ratio": round(_ratio(seconds["plain"], seconds["auto"]), 3),
                "plain_tokens_per_s": round(requests * args.new_tokens / statistics.median(seconds["plain"])),
            }
        print(f"  {name}: {found[name]}", flush=True)
    return found


async def _served(engine: AsyncLlm, requests: int, new_tokens: int) -> None:
    texts = [TEXTS[i % len(TEXTS)] for i in range(requests)]
    lengths = [new_tokens + (i % 5 - 2) * (new_tokens // 4) for i in range(requests)]
    pairs = zip(texts, lengths, strict=True)
    await asyncio.gather(*(engine.generate(text, max_new_tokens=n, ignore_eos=True) for text, n in pairs))


SECTIONS: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]]] = {
    "throughput": throughput,
    "first_tokens": first_tokens,
    "memory": memory,
    "chat": chat,
    "cancelling": cancelling,
    "seeds": seeds,
    "drafting": drafting,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--long-every", type=float, default=5.0)
    parser.add_argument("--short-every", type=float, default=0.2)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--drafters", nargs="+", default=["none", "ngram", "model,k=4"])
    parser.add_argument("--first-token-drafters", nargs="+", default=["none", "model,k=4"])
    parser.add_argument("--seed-drafters", nargs="+", default=list(ZOO))
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(environment())
    found: dict[str, Any] = {}
    for name in args.only:
        print(f"{name}: {(SECTIONS[name].__doc__ or '').strip()}", flush=True)
        found[name] = asyncio.run(SECTIONS[name](args))
        print(json.dumps(found[name], indent=2), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
