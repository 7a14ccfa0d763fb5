"""Is what comes through HTTP the target's own text, whoever drafts?

    python benchmarks/http_lossless.py --prompts 200 [--target FOLDER --dtype bfloat16 --drafters "ngram|quantized,k=4"]

Starts ``foretoken serve`` (the built-in model, in float32) with all drafters as members of one router, so that
every request names its drafter.  For every prompt the answers without drafts are compared with those of every drafter:
greedy, and sampled with a seed (the same tokens are promised), by text, token ids, usage and finish reason; a stream
is compared with the whole answer.  Where greedy ids differ, plain decoding's two best tokens at the first difference
are looked at: a gap below 1e-3 is a numerical tie.  Unseeded sampling is compared by a two-sample chi-square test of
the last of three tokens out of five, with Holm's correction over the drafters.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

TEXTS = ["def ", "class ", "import ", "The ", "In the ", "for i in ", "return ", "She said ", "# ", "if x "]
WORDS = ["fib", "Stack", "os", "river", "beginning", "range", "self.value", "that it", "TODO", "is None"]

DRAFTERS = [
    "model,k=4",
    "shared_vocab,k=4",
    "retokenize,k=4",
    "ngram",
    "jacobi,m=8",
    "lookahead,w=7,n=5,g=7",
    "ngram_cache",
    "suffix",
    "sam",
    "recycling",
    "known,inner=ngram",
    "retrieval",
    "early_exit",
    "layer_skip",
    "swift",
    "quantized,bits=8,k=5",
    "ensemble,drafters=(model,k=4|ngram)",
    "cascade,k=8,inner=(ngram,n=3,k=8)",
    "staged,k=6,width=3",
    "sparse_kv,budget=64",
    "medusa",
    "hydra",
    "bpd",
    "eagle",
    "eagle3",
    "mtp",
    "kangaroo",
    "pass_tokens",
    "uno",
]
"""Examples of the catalogue that draft without the caller's help."""


def served(target: str, dtype: str, drafters: str) -> tuple[subprocess.Popen[bytes], httpx.Client]:
    """A server that is ready."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", target, "--port", str(port), "--dtype", dtype]
    command += ["--served-name", "builtin"]
    command += ["--drafter", f"router,drafters=({drafters})", "--no-prefix-cache"]
    log = tempfile.TemporaryFile()  # noqa: SIM115 (the server's own from here on)
    process = subprocess.Popen(command, stderr=log)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)
    while process.poll() is None:
        try:
            if client.get("/ready").status_code == 200:
                return process, client
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    log.seek(0)
    raise SystemExit(log.read().decode()[-500:])


def ask(client: httpx.Client, prompt: str | list[str], method: str | None, **body: Any) -> dict[str, Any]:
    """An answer; ``method`` ``None`` is plain decoding."""
    speculative = {"enabled": False} if method is None else {"method": method}
    sent = {"model": "builtin", "prompt": prompt, "return_token_ids": True, "speculative": speculative, **body}
    answer = client.post("/v1/completions", json=sent)
    if answer.status_code != 200:
        raise SystemExit(f"{method}: {answer.text[:300]}")
    found: dict[str, Any] = answer.json()
    return found


def said(answer: dict[str, Any]) -> tuple[list[list[Any]], list[int]]:
    """What must be the same: of every prompt the text, ids and finish reason, and the usage of all."""
    counts = [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return [[choice["text"], choice["token_ids"], choice["finish_reason"]] for choice in answer["choices"]], counts


def streamed(client: httpx.Client, prompt: str, method: str, **body: Any) -> tuple[str, list[int]]:
    """Text and ids of a stream, put together."""
    sent = {"model": "builtin", "prompt": prompt, "return_token_ids": True, "speculative": {"method": method}}
    text, ids = "", []
    with client.stream("POST", "/v1/completions", json={**sent, **body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text, ids = text + choice["text"], ids + choice["token_ids"]
    return text, ids


def is_tie(client: httpx.Client, prompt: str, plain: list[int], other: list[int], body: dict[str, Any]) -> bool:
    """Whether the first difference lies where two tokens are equally likely but for rounding."""
    place = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if place is None:
        return False
    values = ask(client, prompt, None, **body, logprobs=2)["choices"][0]["logprobs"]["top_logprobs"][place]
    best = sorted(values.values(), reverse=True)
    return len(best) > 1 and best[0] - best[1] < 1e-3


def p_value(client: httpx.Client, method: str, plain: Counter[int], samples: int, body: dict[str, Any]) -> float:
    """Of the hypothesis that a drafter's third tokens are distributed as plain decoding's."""
    from scipy.stats import chi2_contingency

    other = thirds(client, method, samples, body)
    tokens = sorted(set(plain) | set(other))
    return float(chi2_contingency([[plain[t] for t in tokens], [other[t] for t in tokens]]).pvalue)


def thirds(client: httpx.Client, method: str | None, samples: int, body: dict[str, Any]) -> Counter[int]:
    """Third tokens of unseeded answers."""
    found: Counter[int] = Counter()
    for _ in range(samples // 8):
        answer = ask(
            client, "def fib(n):\n    return", method, n=8, max_tokens=3, temperature=1, ignore_eos=True, **body
        )
        found.update(choice["token_ids"][2] for choice in answer["choices"])
    return found


def holm(values: dict[str, float]) -> dict[str, float]:
    """Holm's corrected p values."""
    found, largest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(values) - rank)))
        found[name] = largest
    return found


def compare(client: httpx.Client, name: str, groups: list[list[str]], plain: dict[str, list[Any]]) -> dict[str, Any]:
    """A drafter against plain decoding."""
    row: dict[str, Any] = {"drafter": name, "greedy": 0, "ties": 0, "seeded": 0, "streams": 0, "different": []}
    row["drafted"] = 0
    for index, group in enumerate(groups):
        for mode, body in bodies(index).items():
            answer = ask(client, group, name, **body)
            row["drafted"] += answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
            (choices, counts), (expected, expected_counts) = said(answer), plain[mode][index]
            for prompt, found, right in zip(group, choices, expected, strict=True):
                if found == right:
                    row[mode] += 1
                elif mode == "greedy" and is_tie(client, prompt, right[1], found[1], body):
                    row["ties"] += 1
                else:
                    row["different"].append([mode, prompt])
            if choices == expected and counts != expected_counts:
                row["different"].append(["usage", group[0]])
        text, ids = streamed(client, group[0], name, **bodies(index)["seeded"])
        row["streams"] += [text, ids] == plain["seeded"][index][0][0][:2]
    row["streams"] = f"{row['streams']} of {len(groups)}"
    return row


def bodies(index: int) -> dict[str, dict[str, Any]]:
    """What is asked, greedy and sampled."""
    common = {"max_tokens": 16, **({"stop": ["\n\n"]} if index % 3 == 0 else {})}
    return {"greedy": {**common, "temperature": 0}, "seeded": {**common, "temperature": 1, "seed": index}}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--drafters", default="|".join(DRAFTERS))
    parser.add_argument("--target", default="builtin", help="a model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    prompts = [TEXTS[i % 10] + WORDS[i // 10 % 10] + (f"_{i}" if i >= 100 else "") for i in range(args.prompts)]
    groups = [prompts[i : i + 20] for i in range(0, len(prompts), 20)]
    process, client = served(args.target, args.dtype, args.drafters)
    try:
        names = client.get("/v1/spec").json()["members"]
        answers = {
            mode: [said(ask(client, group, None, **bodies(i)[mode])) for i, group in enumerate(groups)]
            for mode in ("greedy", "seeded")
        }
        rows = [compare(client, name, groups, answers) for name in names]
        allowed = {
            "allowed_token_ids": client.post(
                "/tokenize", json={"prompt": "nself10(", "add_special_tokens": False}
            ).json()["tokens"][:5]
        }
        plain = thirds(client, None, args.samples, allowed)
        values = {name: p_value(client, name, plain, args.samples, allowed) for name in names}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    corrected = holm(values)
    for row in rows:
        row["p_value"], row["p_holm"] = round(values[row["drafter"]], 4), round(corrected[row["drafter"]], 4)
    passed = all(not row["different"] and row["p_holm"] > 0.01 and row["drafted"] for row in rows)
    text = json.dumps({"passed": passed, "prompts": len(prompts), "rows": rows})
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
