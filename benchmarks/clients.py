"""Clients that people already have, each in an environment of its own, against a server on the built-in model.

    python benchmarks/clients.py --environments /tmp/clients            # all
    python benchmarks/clients.py --environments /tmp/clients openai llm # some

Makes ``FOLDER/NAME`` for each (``uv`` where it is there, else ``venv`` and ``pip``) unless it exists, starts
``foretoken serve`` with ``--metrics-compat vllm``, runs the client's smoke test, and prints a line of the table in
``docs/serve.md`` for each.  A smoke test is a script in ``benchmarks/client_smokes`` that runs inside the client's
environment, uses the client as its own documentation says, and prints one JSON object with what it has checked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

SMOKES = Path(__file__).with_name("client_smokes")
BUILTIN = Path(__file__).parents[1] / "src" / "foretoken" / "zoo" / "target"
PACKAGES = {
    "openai": ["openai"],
    "litellm": ["litellm"],
    "langchain": ["langchain-openai"],
    "llm": ["llm"],
    "lmeval": ["lm-eval[api]", "transformers"],
    "guidellm": ["guidellm"],
    "vllm": ["vllm", "pandas", "datasets"],
    "aiperf": ["aiperf"],
}
SHOWN = {"langchain": "langchain-openai", "lmeval": "lm-eval"}


def environment(name: str, folder: Path) -> Path:
    """The interpreter of a client's own environment, which is made where there is none."""
    home = folder / name
    python = home / "bin" / "python"
    if python.exists():
        return python
    uv = shutil.which("uv")
    if uv is not None:
        subprocess.run([uv, "venv", "-q", str(home)], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", str(python), *PACKAGES[name]], check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES[name]], check=True)
    return python


def served(target: str, drafter: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server that is ready."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", target, "--port", str(port), "--metrics-compat", "vllm"]
    command += ["--served-name", "builtin", "--drafter", drafter]
    command += ["--controller", "constant"]  # drafts in every round, so there is what to count
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return process, url
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    process.kill()
    raise SystemExit("the server did not get ready")


def run(name: str, python: Path, url: str, work: Path, tokenizer: str) -> dict[str, object]:
    """What a client's smoke test says."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    env |= {"BASE_URL": url, "TOKENIZER": tokenizer, "WORK": str(work), "HF_HUB_OFFLINE": "1"}
    env |= {"PATH": f"{python.parent}:{env['PATH']}", "OPENAI_API_KEY": "none", "LLM_USER_PATH": str(work / "llm")}
    start_s = time.monotonic()
    process = subprocess.run(
        [str(python), str(SMOKES / f"{name}_smoke.py")], env=env, cwd=work, capture_output=True, text=True, timeout=1800
    )
    lines = process.stdout.strip().splitlines() or [""]
    try:
        report = json.loads(lines[-1])
    except json.JSONDecodeError:
        report = {}
    if process.returncode:
        report["error"] = (process.stderr.strip().splitlines() or ["no output"])[-1][:300]
        (work / "stderr.txt").write_text(process.stderr, encoding="utf-8")
    return {
        "client": SHOWN.get(name, name),
        **report,
        "ok": process.returncode == 0,
        "s": round(time.monotonic() - start_s),
    }


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], help=", ".join(PACKAGES))
    parser.add_argument("--environments", type=Path, required=True, help="folder for them")
    parser.add_argument("--target", default="builtin", help="a model, or the folder of one")
    parser.add_argument("--drafter", default="model,k=4")
    parser.add_argument(
        "--tokenizer", help="a folder with the target's tokenizer, for clients that cannot read a GGUF file"
    )
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(PACKAGES))
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(PACKAGES)}")
    names = args.names or list(PACKAGES)
    args.environments.mkdir(parents=True, exist_ok=True)
    pythons = {name: environment(name, args.environments) for name in names}
    tokenizer = str(BUILTIN if args.target == "builtin" else Path(args.tokenizer or args.target).resolve())
    process, url = served(args.target, args.drafter)
    failed = 0
    try:
        for name in names:
            work = Path(tempfile.mkdtemp(prefix=f"{name}-"))
            report = run(name, pythons[name], url, work, tokenizer)
            failed += not report["ok"]
            print(json.dumps(report), flush=True)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
