"""``foretoken serve`` beside ``transformers serve`` and llama.cpp's server: same model, same machine, same load.

    python benchmarks/serve_side_by_side.py --llama llama-server [--size 300m | --target FOLDER --gguf FILE --file]
        [--concurrency 1,8] [--requests 16] [--drafters auto=auto "draft=model:{draft},k=4"] [--out run.jsonl]

The built-in target (``--size`` inflates it: its outputs at the cost of a bigger model) is written once as a
Transformers folder and as a GGUF file in the same dtype.  All servers run at once and ``foretoken bench serve`` asks
them in turns, so that each is alone while it is asked; prompt caches are off or salted.  Answers are greedy;
Transformers and llama.cpp have no drafts here.  ``transformers serve`` runs as it is by default;
``--continuous-batching`` adds it as it is meant for several clients, which on a CPU needs tens of seconds to begin.
``--file`` adds arms of ours on llama.cpp's own file, and ``--llama-python`` its Python server, which takes requests one
after the other, where there is no ``llama-server``.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from transformers import AutoModelForCausalLM

from foretoken.core.io.checkpoints import ZOO
from foretoken.lab.bench.gguf_export import write_gguf
from foretoken.loading import load_tokenizer
from foretoken.models.variants.inflation import inflate

WAIT_S = 240.0


def written(folder: Path, size: str, dtype: str) -> tuple[Path, Path]:
    """The model as a folder and as a GGUF file; made where they are missing."""
    checkpoint, gguf = folder / f"{size}-{dtype}", folder / f"{size}-{dtype}.gguf"
    if not (checkpoint / "config.json").exists() or not gguf.exists():
        network = AutoModelForCausalLM.from_pretrained(ZOO / "target", dtype=dtype)
        network = network if size == "builtin" else inflate(network, size)
        tokenizer = load_tokenizer("builtin")
        write_gguf(network, gguf, tokenizer)
        network.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
    return checkpoint, gguf


def commands(options: argparse.Namespace, checkpoint: Path, gguf: Path) -> dict[str, list[str]]:
    """Arms: how each server is started, but for its port."""
    most = max(int(value) for value in options.concurrency.split(","))
    own_command = [sys.executable, "-m", "foretoken", "serve", "--max-running", str(most), "--no-prefix-cache"]
    served = {"": checkpoint, **({"file_": gguf} if options.file else {})}
    theirs = [str(Path(sys.executable).parent / "transformers"), "serve", str(checkpoint)]
    theirs += ["--host", "127.0.0.1", "--dtype", "auto", "--device", "cpu"]
    found = {}
    for kind, model in served.items():
        found[f"{kind}plain"] = [*own_command, str(model), "--drafter", "none"]
        for entry in options.drafters:
            name, _, spec = entry.partition("=")
            found[kind + name] = [*own_command, str(model), "--drafter", spec.format(draft=ZOO / "draft")]
    found["transformers"] = theirs
    if options.continuous_batching:
        found["transformers_batching"] = [*theirs, "--continuous-batching"]
    if options.llama is not None:
        llama = [str(options.llama), "-m", str(gguf), "-t", str(options.threads), "-np", str(most)]
        found["llama.cpp"] = [*llama, "-c", str(1024 * most), "--host", "127.0.0.1", "--no-cache-prompt", "--no-webui"]
    if options.llama_python is not None:
        llama = [str(options.llama_python), "-m", "llama_cpp.server", "--model", str(gguf), "--n_ctx", "2048"]
        threads = ["--n_threads", str(options.threads), "--n_threads_batch", str(options.threads)]
        found["llama.cpp_python"] = [*llama, *threads, "--host", "127.0.0.1", "--interrupt_requests", "false"]
    return {name: command for name, command in found.items() if name not in options.without}


@contextmanager
def running(name: str, command: list[str]) -> Iterator[str]:
    """The address of a server that is ready.

    Raises:
        SystemExit: it did not start.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"{name} did not start: {log.read().decode(errors='replace')[-800:]}")
                time.sleep(0.3)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_ready(url: str) -> bool:
    """Ours has ``/ready``, most others only ``/health``, and llama.cpp's Python server neither."""
    try:
        for path in ("ready", "health", "v1/models"):
            answer = httpx.get(f"{url}/{path}", timeout=5)
            if answer.status_code != 404:
                return answer.status_code == 200
    except httpx.HTTPError:
        pass
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="builtin", help="builtin, 300m, 1b")
    parser.add_argument("--target", type=Path, help="a model's folder, instead of the built-in target")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--drafters", nargs="*", default=["auto=auto"], help="NAME=SPEC; {draft} is the built-in draft model"
    )
    parser.add_argument("--llama", type=Path, help="llama-server")
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama_cpp.server")
    parser.add_argument("--file", action="store_true", help="ours on the GGUF file as well")
    parser.add_argument("--without", nargs="*", default=[], help="arms to leave out")
    parser.add_argument("--continuous-batching", action="store_true", help="one more arm: transformers with it")
    parser.add_argument("--threads", type=int, default=2, help="of llama-server")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="keeps the written models")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint, gguf = (
            (options.target, options.gguf) if options.target else written(folder, options.size, options.dtype)
        )
        started = commands(options, checkpoint, gguf)
        urls = {name: stack.enter_context(running(name, command)) for name, command in started.items()}
        arguments = [f"{name}={url}" for name, url in urls.items()]
        arguments += ["--concurrency", options.concurrency, "--requests", str(options.requests)]
        arguments += ["--repeat", str(options.repeat), "--max-tokens", str(options.max_tokens)]
        arguments += ["--warmup", str(options.warmup)]
        arguments += ["--out", str(options.out)] if options.out else []
        sys.exit(subprocess.run([sys.executable, "-m", "foretoken", "bench", "serve", *arguments]).returncode)


if __name__ == "__main__":
    main()
