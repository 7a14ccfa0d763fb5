"""aiperf, which reads ``metrics.speculative_decoding`` of every answer and checks that its counts add up."""

from __future__ import annotations

import json
import os
from pathlib import Path

from _checks import TOKENIZER, URL, WORK, check, report, shell

os.environ.pop("HF_HUB_OFFLINE", None)  # with it, it looks for names in its cache only, and not at folders

for kind in ("completions", "chat"):
    out = Path(WORK) / kind
    # fmt: off
    shell("aiperf", "profile", "--model", "builtin", "--url", URL, "--endpoint-type", kind, "--streaming",
          "--tokenizer", TOKENIZER,
          "--request-count", "6", "--concurrency", "2", "--isl", "32", "--osl", "12",
          "--extra-inputs", "ignore_eos:true", "--ui-type", "none", "--no-gpu-telemetry", "--artifact-dir", str(out))
    # fmt: on
    (found,) = out.rglob("profile_export_aiperf.json")
    told = json.loads(found.read_text(encoding="utf-8"))
    check(f"{kind}: all requests succeed", told["request_count"]["avg"] == 6, told)
    speculative = sorted(name for name in told if name.startswith("spec_decode_"))
    check(f"{kind}: statistics of speculation are taken", bool(speculative), sorted(told))
report("aiperf")
