"""``vllm bench serve``, which also reads the counters of speculation."""

from __future__ import annotations

import json
from pathlib import Path

from _checks import TOKENIZER, URL, WORK, check, report, shell

# fmt: off
for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    shell("vllm", "bench", "serve", "--backend", backend, "--base-url", URL, "--endpoint", path, "--model", "builtin",
          "--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len", "32", "--random-output-len",
          "12", "--num-prompts", "6", "--max-concurrency", "2", "--ignore-eos", "--disable-tqdm", "--save-result",
          "--result-dir", WORK, "--result-filename", f"{backend}.json")
    found = json.loads((Path(WORK) / f"{backend}.json").read_text(encoding="utf-8"))
    check(f"{path}: all requests succeed", found["completed"] == 6 and not found.get("failed"), found)
    check(f"{path}: ignore_eos gives the tokens asked for", found["total_output_tokens"] == 72, found)
    rate = found.get("spec_decode_acceptance_rate")
    check(f"{path}: acceptance rate from the counters", rate is not None and rate > 0, sorted(found))
# fmt: on
report("vllm")
