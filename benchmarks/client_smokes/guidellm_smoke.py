"""guidellm, two streams at once."""

from __future__ import annotations

import json
from pathlib import Path

from _checks import TOKENIZER, URL, WORK, check, report, shell

for path in ("/v1/completions", "/v1/chat/completions"):
    out = Path(WORK) / f"{path.count('/')}.json"
    # fmt: off
    shell("guidellm", "run", "--backend", f"kind=openai_http,target={URL},model=builtin,request_format={path}",
          "--profile", "kind=concurrent,streams=[2]", "--constraint", "kind=max_requests,count=6",
          "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
          "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=12",
          "--output", f"kind=json,path={out}", "--disable-console")
    # fmt: on
    (run,) = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    totals = run["metrics"]["request_totals"]
    check(f"{path}: all requests succeed", totals["successful"] == 6 and not totals["errored"], totals)
    tokens = run["metrics"]["output_token_count"]["successful"]["mean"]
    check(f"{path}: ignore_eos gives the tokens asked for", tokens == 12, tokens)
report("guidellm")
