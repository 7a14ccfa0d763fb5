"""Compare methods on your prompts and send the report: one HTML file that loads nothing.

Two short prompts show the way.  For figures to believe, give a file of your own prompts (``--prompts FILE``), more
tokens, and a quiet machine.
"""

import tempfile
from pathlib import Path

from foretoken.cli.main import main

with tempfile.TemporaryDirectory() as folder:
    prompts, run, report = (Path(folder, name) for name in ("prompts.txt", "run.jsonl", "report.html"))
    prompts.write_text("def read_lines(path):\nThe captain looked out over the sea and said\n")
    main(["bench", "--drafter", "ngram", "--drafter", "model,k=4", "--prompts", str(prompts), "--max-new-tokens", "16",
          "--out", str(run)])  # fmt: skip
    main(["bench", "report", str(run), "--out", str(report)])
    page = report.read_text()
    print(f"{len(page) // 1000} kB, loads nothing: {'https://' not in page and 'http://' not in page}")
