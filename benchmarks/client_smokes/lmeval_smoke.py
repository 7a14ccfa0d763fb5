"""lm-eval's ``local-completions``: log-likelihoods by echo and texts with stop strings, on a task of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path

from _checks import TOKENIZER, URL, WORK, check, post, report, shell

work = Path(WORK)
rows = [
    {"question": "def fib(n):\n    return", "choices": [" n", " zebra", " the"], "answer": 0},
    {"question": "import", "choices": [" os", " apple", " of"], "answer": 0},
    {"question": "for i in", "choices": [" range", " yesterday", " them"], "answer": 0},
    {"question": "class Stack:\n    def __init__(", "choices": ["self", "banana", "and"], "answer": 0},
]
(work / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {work}/rows.jsonl\ntest_split: test\n"
(work / "pick.yaml").write_text(
    f"task: pick\n{common}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\ndoc_to_choice: choices\n"
    "doc_to_target: answer\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n",
    encoding="utf-8",
)
(work / "write.yaml").write_text(
    f"task: write\n{common}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\ndoc_to_target: ' x'\n"
    "generation_kwargs:\n  until: ['\\n\\n', 'zzz1', 'zzz2', 'zzz3', 'zzz4', 'zzz5']\n  max_gen_toks: 12\n"
    "  temperature: 0\nmetric_list:\n  - metric: exact_match\n",
    encoding="utf-8",
)
for name, how in (
    ("ids", f"tokenizer={TOKENIZER},tokenized_requests=True,num_concurrent=2"),
    ("texts", f"tokenizer={TOKENIZER},tokenized_requests=False"),
    ("remote tokenizer", "tokenizer_backend=remote,tokenized_requests=True"),
):
    out = work / name.replace(" ", "_")
    arguments = f"model=builtin,base_url={URL}/v1/completions,max_length=512,{how}"
    # fmt: off
    shell("lm-eval", "run", "--model", "local-completions", "--model_args", arguments, "--tasks", "pick,write",
          "--include_path", str(work), "--output_path", str(out), "--log_samples", "--batch_size", "2")
    # fmt: on
    (found,) = out.rglob("results_*.json")
    results = json.loads(found.read_text(encoding="utf-8"))["results"]
    check(f"{name}: accuracy", results["pick"]["acc,none"] >= 0.75, results)
    (samples,) = out.rglob("samples_pick_*.jsonl")
    scored = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    for one in scored:
        doc = one["doc"]
        for (value, _), choice in zip([r[0] for r in one["resps"]], doc["choices"], strict=True):
            ids = post("/tokenize", prompt=doc["question"] + choice)["tokens"]
            head = len(post("/tokenize", prompt=doc["question"])["tokens"])
            asked = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
            wanted = sum(post("/v1/completions", **asked)["choices"][0]["logprobs"]["token_logprobs"][head:-1])
            close = math.isclose(float(value), wanted, abs_tol=1e-3)
            check(f"{name}: log-likelihoods are the server's own", close, (value, wanted))
report("lm_eval")
