"""Turns what other engines log about speculation into a trace that `foretoken show` opens.

python examples/trace_from_logs.py vllm answers.jsonl > trace.jsonl     (or vllm-log, sglang, llama.cpp)
"""

import json
import re
import sys
from pathlib import Path

SAMPLES = {
    "vllm": '{"id": "a", "metrics": {"speculative_decoding": {"per_step_drafted": [3, 3], "per_step_accepted": [3, 1]}}}',  # noqa: E501
    "vllm-log": "INFO 08-04 20:51:08 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.50, Accepted "
    "throughput: 0.90 tokens/s, Drafted throughput: 1.80 tokens/s, Accepted: 9 tokens, Drafted: 18 tokens, "
    "Per-position acceptance rate: 0.833, 0.500, 0.167, Avg Draft acceptance rate: 50.0%",
    "sglang": "[2026-11-26 12:00:00] Decode batch. #running-req: 1, accept len: 2.45, accept rate: 0.36, "
    "gen throughput (token/s): 88.10, #queue-req: 0",
    "llama.cpp": "slot print_timing: id  3 | task 7 |\n       eval time =     161.86 ms /     8 tokens "
    "(   20.23 ms per token,    49.43 tokens per second)\n"
    "draft acceptance rate = 0.37500 (    3 accepted /     8 generated)",
}
INTERVAL = re.compile(r"(\d\d-\d\d [\d:]{8}) .*length: ([\d.]+).*Accepted: (\d+).*Drafted: (\d+).*rate: (.*), Avg")
BATCH = re.compile(r"\[([^]\n]*)\] Decode .*accept len: ([\d.]+), accept rate: ([\d.]+).*\(token/s\): ([\d.]+)")
TASK = re.compile(r"\| task (\d+)| eval time .* ([\d.]+) tokens per second|rate = .*\( *(\d+) accepted / *(\d+) gen")


def vllm(text):  # answers of a server with --per-request-spec-decode-metrics detailed, one JSON object a line
    for answer in map(json.loads, text.splitlines()):
        steps = answer["metrics"]["speculative_decoding"]
        for drafted, accepted in zip(steps["per_step_drafted"], steps["per_step_accepted"], strict=True):
            path = list(range(1, accepted + 1))
            yield {"type": "round", "request": answer["id"], "draft": [None] * drafted, "accepted": path}


def vllm_log(text):  # one line per interval
    for when, length, accepted, drafted, shares in INTERVAL.findall(text):
        counts = {"tokens_per_round": float(length), "accepted": int(accepted), "drafted": int(drafted)}
        yield {"type": "total", "label": when, **counts, "per_position": [float(share) for share in shares.split(", ")]}


def sglang(text):  # one line per interval
    for when, length, rate, speed in BATCH.findall(text):
        counts = {"tokens_per_round": float(length), "acceptance_rate": float(rate), "tokens_per_s": float(speed)}
        yield {"type": "total", "label": when, **counts}


def llama_cpp(text):  # a block of lines per request: its task, its speed, then its drafts
    task, speed = "", ""
    for number, rate, accepted, drafted in TASK.findall(text):
        task, speed = number or task, rate or speed
        if drafted:
            counts = {"accepted": int(accepted), "drafted": int(drafted), "tokens_per_s": float(speed)}
            yield {"type": "total", "request": f"task {task}", **counts}


READERS = {"vllm": vllm, "vllm-log": vllm_log, "sglang": sglang, "llama.cpp": llama_cpp}
for engine in sys.argv[1:2] or READERS:
    log = Path(sys.argv[2]).read_text(errors="replace") if len(sys.argv) > 2 else SAMPLES[engine]
    for row in ({"foretoken_trace": 1, "engine": engine}, *READERS[engine](log)):
        print(json.dumps(row))
