"""Throughput through HTTP against ``llm.generate`` of the same prompts in one batch: what the server costs.

``python benchmarks/http_overhead.py --batch 8,32``: a server in a process of its own and the library in this one take
turns, wave by wave; a wave is a batch of prompts that begin together and have equal lengths.  Prints tokens per second
of both and the median ratio, by the clock and by processor time (the client's not counted: it needs a core of its
own), which a busy machine disturbs less.  Answers are streamed, a chunk a round; ``--whole`` asks for one piece each.
On two cores give the model one (``OMP_NUM_THREADS=1``), so that the client has the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter, process_time

import httpx
import psutil

import foretoken as ft
from foretoken.lab.bench.load.run import run_load
from foretoken.lab.bench.load.settings import Level, LoadSettings, Server
from foretoken.lab.prompts import BenchPrompt, load_prompts


@contextlib.contextmanager
def server(model: str, drafter: str, dtype: str, batch: int) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server on a free port, once it is ready, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", model, "--port", str(port), "--drafter", drafter]
    command += ["--dtype", dtype, "--max-running", str(batch)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):
                break
            time.sleep(0.5)
        else:
            raise SystemExit("the server did not start")
        yield url, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def streamed(url: str, prompts: list[BenchPrompt], new_tokens: int) -> tuple[float, int]:
    """Seconds and tokens of one wave."""
    settings = LoadSettings(
        [Level("concurrency", len(prompts))],
        requests=len(prompts),
        warmup=0,
        max_tokens=new_tokens,
        ignore_eos=True,
    )
    (cell,) = run_load([Server("server", url)], {"all": prompts}, settings).cells
    if cell["errors"]:
        raise SystemExit(str(cell["errors"]))
    return cell["new_tokens"] / cell["tokens_per_s"], cell["new_tokens"]


def whole(url: str, prompts: list[BenchPrompt], new_tokens: int) -> tuple[float, int]:
    """Seconds and tokens of one wave of answers in one piece."""

    async def ask(client: httpx.AsyncClient, served: str, prompt: str) -> int:
        body = {"model": served, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        answer = await client.post(f"{url}/v1/completions", json={"cache_salt": str(time.time_ns()), **body})
        return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

    async def wave() -> tuple[float, int]:
        async with httpx.AsyncClient(timeout=300) as client:
            served = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
            start_s = perf_counter()
            counts = await asyncio.gather(*(ask(client, served, prompt.text) for prompt in prompts))
            return perf_counter() - start_s, sum(counts)

    return asyncio.run(wave())


def measure(
    llm: ft.Llm,
    ask: Callable[[], tuple[float, int]],
    process: psutil.Process,
    texts: list[str],
    new_tokens: int,
    waves: int,
) -> dict[str, object]:
    """Ratios of one batch size."""
    direct, http, processor, equal = [], [], [], []
    for wave in range(waves + 1):
        start_s, start_cpu_s = perf_counter(), process_time()
        outputs = llm.generate(texts, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        spent, spent_cpu = perf_counter() - start_s, process_time() - start_cpu_s
        tokens = sum(len(output.token_ids) for output in outputs)
        before = process.cpu_times()
        served_s, served = ask()
        after = process.cpu_times()
        if wave:  # the first wave warms both up
            direct.append(tokens / spent)
            http.append(served / served_s)
            server_cpu = after.user + after.system - before.user - before.system
            processor.append(spent_cpu / server_cpu)
            equal.append(served == tokens)
    return {
        "batch": len(texts),
        "generate_tokens_per_s": statistics.median(direct),
        "http_tokens_per_s": statistics.median(http),
        "ratio": statistics.median(h / d for h, d in zip(http, direct, strict=True)),
        "processor_ratio": statistics.median(processor),
        "ratios": [round(h / d, 3) for h, d in zip(http, direct, strict=True)],
        "same_number_of_tokens": all(equal),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="8,32")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--waves", type=int, default=5)
    options = parser.parse_args()
    drafter = None if options.drafter == "none" else options.drafter
    prompts = load_prompts(None)
    for batch in map(int, options.batch.split(",")):
        llm = ft.load(options.model, drafter, dtype=options.dtype, known=True)
        chosen = [prompts[i % len(prompts)] for i in range(batch)]
        way = whole if options.whole else streamed
        with server(options.model, options.drafter, options.dtype, batch) as (url, process):
            ask = partial(way, url, chosen, options.new_tokens)
            texts = [prompt.text for prompt in chosen]
            found = measure(llm, ask, process, texts, options.new_tokens, options.waves)
        print(
            json.dumps({"drafter": options.drafter, "way": way.__name__, **found, "load": os.getloadavg()[0]}),
            flush=True,
        )


if __name__ == "__main__":
    main()
