"""``python -O`` removes asserts and nothing else: texts are the same, and every mistake is still refused in one line.

The option belongs to the interpreter, so a process of its own is asked; ``tests/server/test_contract.py`` asks a
server, and ``tests/test_supply_chain.py`` reads the library for asserts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import foretoken as ft

PROMPT = "def read_lines(path):"
SCRIPT = """
import contextlib, io, json, sys
import foretoken as ft
from foretoken.cli.main import main

def refused(call):
    try:
        return f"not refused: {call()!r}"
    except ValueError as error:
        return type(error).__name__ if str(error) and "\\n" not in str(error).strip() else f"unclear: {error!r}"

llm = ft.load("builtin", drafter="model,k=3", dtype="float32")
prompt = sys.argv[1]
texts = {
    "greedy": llm.generate(prompt, max_new_tokens=16).token_ids,
    "seeded": llm.generate(prompt, max_new_tokens=16, temperature=1.0, seed=3).token_ids,
}
mistakes = {
    "drafter": lambda: ft.load("builtin", drafter="nobody"),
    "option": lambda: ft.load("builtin", drafter="ngram,nope=1"),
    "number": lambda: ft.load("builtin", drafter="ngram,k=-1"),
    "verifier": lambda: ft.load("builtin", drafter="ngram", verifier="nobody"),
    "pair": lambda: ft.load("builtin", drafter="model,tree=2x2", verifier="block"),
    "lossy": lambda: ft.load("builtin", drafter="ngram", verifier="typical"),
    "controller": lambda: ft.load("builtin", drafter="ngram", controller="nobody"),
    "target": lambda: ft.load("no/such/folder-or-model"),
    "temperature": lambda: llm.generate(prompt, temperature=-1.0),
    "top_p": lambda: llm.generate(prompt, temperature=1.0, top_p=0.0),
    "tokens": lambda: llm.generate(prompt, max_new_tokens=-1),
    "length": lambda: llm.generate(prompt, max_new_tokens=10**6),
    "ids": lambda: llm.generate([10**9]),
}

def answer(arguments):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
    return [code, len(said.getvalue().splitlines())]

commands = [
    ["generate", "x", "--drafter", "nobody"],
    ["generate", "x", "--temperature", "-1"],
    ["generate", "x", "--drafter", "model,tree=2x2", "--verifier", "block"],
]
print(json.dumps({
    "debug": __debug__,
    "texts": texts,
    "mistakes": {name: refused(call) for name, call in mistakes.items()},
    "commands": [answer(one) for one in commands],
}))
"""


def test_texts_and_refusals_are_those_of_a_run_with_asserts() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(ft.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-O", "-c", SCRIPT, PROMPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["debug"] is False
    wrong = {name: what for name, what in report["mistakes"].items() if not what.endswith(("Error", "UnknownName"))}
    assert not wrong
    assert report["commands"] == [[2, 1]] * 3
    plain = ft.load("builtin", drafter=None, dtype="float32")
    assert report["texts"] == {
        "greedy": plain.generate(PROMPT, max_new_tokens=16).token_ids,
        "seeded": plain.generate(PROMPT, max_new_tokens=16, temperature=1.0, seed=3).token_ids,
    }
