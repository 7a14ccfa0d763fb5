"""Train a head, measure it, export it, and get the line with which vLLM uses it.

Four steps on a page of text show the way in a minute and teach the head nothing: take megabytes and thousands of
steps (docs/training.md).  For your own model name it with ``--target`` in each command.
"""

import tempfile
from pathlib import Path

from foretoken.cli.main import main

PAGE = '''def {name}(path):
    """Return the {name} of a file."""
    with open(path) as file:
        return file.read().{name}()

'''

with tempfile.TemporaryDirectory() as folder:
    text, head, exported = Path(folder, "text"), Path(folder, "head"), Path(folder, "exported")
    text.mkdir()
    for i in range(24):
        (text / f"{i}.py").write_text("".join(PAGE.format(name=f"field_{i}_{j}") for j in range(12)))
    size = ["--steps", "4", "--batch-size", "2", "--context", "64", "--eval-every", "4"]
    main(["train", "eagle3", "--data", str(text), "--out", str(head), *size])
    print(sorted(file.name for file in head.iterdir() if file.suffix in (".json", ".safetensors", ".md")))
    main(["generate", "def read(path):\n", "--drafter", f"eagle3:{head}", "--max-new-tokens", "16", "--compare",
          "--repeat", "1"])  # fmt: skip
    main(["export", f"eagle3:{head}", "--engine", "vllm", "--out", str(exported)])
    print(sorted(file.name for file in exported.iterdir()))
