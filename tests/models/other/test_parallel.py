"""Tensor parallelism: the leader's bookkeeping in memory, and real processes over gloo on the CPU."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import checkpoint, new_model, save

import foretoken as ft
from foretoken import llm
from foretoken.core.io.checkpoints import ZOO
from foretoken.engine.background import AsyncLlm
from foretoken.engine.errors import EngineDead
from foretoken.llm import Llm
from foretoken.loading import load_model, parallel
from foretoken.loading.parallel import check_split
from foretoken.models.base import CapabilityError, Feed, LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.other.parallel import ParallelModel, PartLost, follow

PROMPTS = ["def fib(n):", "class Stack:\n    def __init__(self", "The captain looked out over the sea"]


# -- in memory: the follower is another copy of the model ---------------------------------------------


class Listener:
    """A follower that only listens; ``inner`` is what it would run."""

    def __init__(self, inner: HuggingFaceModel) -> None:
        self.inner, self.how, self.ends = inner, "", 0
        self.lines: list[dict[str, Any]] = []

    def ended(self) -> str | None:
        return self.how or None

    def send(self, line: str) -> None:
        self.lines.append(json.loads(line))

    def end(self) -> None:
        self.ends += 1


def in_memory(folder: Path) -> tuple[ParallelModel, Listener]:
    """A leader whose one follower only listens; the leader's part is the whole model."""
    source = save(new_model("qwen3"), folder / "model")
    parts = [load_model(source, dtype="float32", lean=False, pack=False) for _ in range(2)]
    assert all(isinstance(part, HuggingFaceModel) for part in parts)
    listener = Listener(parts[1])  # type: ignore[arg-type]
    return ParallelModel(parts[0], [listener]), listener  # type: ignore[arg-type]


def used(model: LanguageModel) -> list[torch.Tensor]:
    """Logits of a life with everything in it: two texts, trees, paths, kept text, cut text."""
    logits = []
    a, b = model.open(), model.open()
    model.prefill(a, [5, 6, 7, 8])
    model.prefill(b, list(range(10, 20)))
    rows = model.forward([Feed(a, [9, 1, 2, 3, 4], [-1, 0, 0, 1, 2]), Feed(b, [20, 21], wanted=1)])
    logits += [row.logits for row in rows]
    model.commit(a, [0, 2, 4])
    model.commit(b, [0])
    kept = model.snapshot(a, 6)
    assert kept is not None
    model.rewind(b, 8)
    model.release(a)
    c = model.open()
    model.restore(c, kept, 5)
    rows = model.forward([Feed(c, [2, 3]), Feed(b, [30, 31, 32], [-1, -1, 1])])
    logits += [row.logits for row in rows]
    assert c.tokens == [5, 6, 7, 8, 9] and b.tokens == list(range(10, 18))
    model.release(b)
    model.release(c)
    return logits


def test_followers_can_do_what_they_are_told(tmp_path: Path) -> None:
    """A follower that makes the calls has the same texts, and computes the same."""
    leader, listener = in_memory(tmp_path)
    seen: list[list[torch.Tensor]] = []
    other = listener.inner
    run = other.forward
    other.forward = lambda feeds, taps=(): seen.append([row.logits for row in run(feeds)]) or []  # type: ignore[method-assign,assignment,return-value]
    leader_logits = used(leader)
    follow(other, [json.dumps(line) for line in listener.lines])
    follower_logits = [logits for logits in (part for call in seen for part in call) if len(logits)]
    assert len(leader_logits) == len(follower_logits) == 4
    assert all(torch.equal(left, right) for left, right in zip(leader_logits, follower_logits, strict=True))
    assert not other._sequences


def test_kept_texts_are_forgotten_everywhere(tmp_path: Path) -> None:
    leader, listener = in_memory(tmp_path)
    text = leader.open()
    leader.prefill(text, [1, 2, 3])
    kept = leader.snapshot(text, 3)
    key = listener.lines[-1]["key"]
    leader.rewind(text, 1)
    assert listener.lines[-1]["forget"] == []
    del kept
    gc.collect()
    leader.rewind(text, 0)
    assert listener.lines[-1]["forget"] == [key]
    leader.rewind(text, 0)
    assert listener.lines[-1]["forget"] == []


def test_values_that_are_not_finite_are_forgotten_everywhere(tmp_path: Path) -> None:
    """A masked slot still adds 0 times its value, which NaN would poison."""
    leader, listener = in_memory(tmp_path)
    text = leader.open()
    leader.prefill(text, [1, 2, 3])
    leader.forward([Feed(text, [4, 5])])

    def scratch() -> list[torch.Tensor]:
        return [values[text.row, :, 3:] for values in leader.inner.cache.values if values is not None]

    with torch.inference_mode():
        for values in scratch():
            values.fill_(torch.inf)
    leader.forget(text)
    assert scratch() and not any(values.any() for values in scratch())
    follow(listener.inner, [json.dumps(line) for line in listener.lines])
    written = [values for values in listener.inner.cache.values if values is not None]
    assert written and not any(values[0, :, 3:].any() for values in written)


def test_followers_keep_nothing_of_a_snapshot_that_the_leader_cannot_take(tmp_path: Path) -> None:
    leader, listener = in_memory(tmp_path)
    text = leader.open()
    assert leader.snapshot(text, 0) is None  # nothing is read yet
    key = listener.lines[-1]["key"]
    leader.prefill(text, [1])
    assert key in [gone for line in listener.lines for gone in line["forget"]]


def test_what_cannot_be_fed_is_refused_before_anybody_is_told(tmp_path: Path) -> None:
    leader, listener = in_memory(tmp_path)
    text = leader.open()
    before = len(listener.lines)
    for feeds, taps in (
        ([Feed(text, [97])], ()),
        ([Feed(text, [1]), Feed(text, [2])], ()),
        ([Feed(text, [1])], ("last",)),
    ):
        with pytest.raises(ValueError, match=r"vocabulary|same sequence|hidden states"):
            leader.forward(feeds, taps)
    assert len(listener.lines) == before and leader.trouble is None
    leader.forward([Feed(text, [1])])


def test_a_call_that_fails_in_the_middle_ends_all(tmp_path: Path) -> None:
    leader, listener = in_memory(tmp_path)
    text = leader.open()

    def broken(*_: Any) -> Any:
        raise MemoryError("full")

    leader.inner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(PartLost, match=r"out of step: MemoryError: full"):
        leader.forward([Feed(text, [1])])
    assert listener.ends == 1 and leader.trouble is not None
    with pytest.raises(PartLost):
        leader.open()
    leader.release(text)


def test_a_follower_that_is_gone_is_noticed(tmp_path: Path) -> None:
    leader, listener = in_memory(tmp_path)
    text = leader.open()
    assert leader.trouble is None
    listener.how = "process 1 has ended (signal 9)"
    with pytest.raises(PartLost, match="process 1 has ended"):
        leader.forward([Feed(text, [1])])
    assert leader.trouble == "process 1 has ended (signal 9)" and listener.ends == 1


# -- what cannot be split ----------------------------------------------------------------------------------------------


def test_a_load_that_fails_ends_the_processes_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, listener = in_memory(tmp_path)
    with pytest.raises(CapabilityError, match="hidden states"):
        ft.load(model, "eagle3:anything")
    assert listener.ends == 0, "the caller's own"
    monkeypatch.setattr(llm, "load_model", lambda *args, **options: model)
    with pytest.raises(CapabilityError, match="hidden states"):
        ft.load(tmp_path / "model", "eagle3:anything")
    assert listener.ends == 1
    with pytest.raises(PartLost, match="the model was closed"):
        model.open()


def test_what_cannot_be_split_says_why(tmp_path: Path) -> None:
    odd = save(new_model("llama"), tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "rms_norm_eps": "x"}))
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ("builtin", {"tensor_parallel": 3}, "does not divide the 2 key-value heads of this model: choose 2"),
        ("builtin", {"tensor_parallel": 0}, "at least 1, not 0"),
        ("builtin", {"quantize": "int8"}, "tensor_parallel and quantize cannot be combined"),
        ("builtin", {"inflate": "300m"}, "tensor_parallel and inflate cannot be combined"),
        ("builtin", {"device": "cuda:1"}, "device must be cuda, cpu or auto"),
        (new_model("llama"), {}, "needs the path or name of a model"),
        (str(tmp_path / "model.gguf"), {}, "GGUF"),
        (str(save(new_model("opt"), tmp_path / "opt")), {}, "no plan for splitting opt"),
        (str(tmp_path / "nowhere"), {}, "nowhere"),
        (str(odd), {}, "read the configuration of"),
        (str(odd), {}, "'rms_norm_eps': TypeError: Field 'rms_norm_eps' expected float, got str"),
    ]
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for source, options, words in refused:
        with pytest.raises(ValueError) as caught:
            ft.load(source, None, **{"tensor_parallel": 2, **options})
        assert words in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_both_kinds_of_heads_are_looked_at() -> None:
    config = SimpleNamespace(base_model_tp_plan={"layers": "colwise"}, num_attention_heads=12, num_key_value_heads=4)
    check_split(config, 4)
    for count, words in ((8, "12 attention heads of this model: choose 2 or 3 or 4"), (3, "4 key-value heads")):
        with pytest.raises(ValueError, match=words):
            check_split(config, count)


# -- two processes -----------------------------------------------------------------------------------------------------

pytest.importorskip("accelerate", reason="accelerate, which Transformers splits models with, is not installed")


def test_the_leader_has_its_own_settings_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second split model shared out again what the first had left of the threads."""
    variables = parallel.INTERFACES
    monkeypatch.setenv(variables[0], "lo")  # the user's own choice; gloo refuses names that do not exist
    monkeypatch.delenv(variables[1], raising=False)
    model, _ = in_memory(tmp_path)
    threads, hook = torch.get_num_threads(), sys.excepthook
    torch.set_num_threads(4)
    try:
        give_back = parallel._own_settings()
        parallel.join(0, {"threads": 2, "kind": "cpu", "store": str(tmp_path / "store"), "world": 1})
        assert torch.get_num_threads() == 2
        ParallelModel(model.inner, [], give_back).close()
        assert torch.get_num_threads() == 4 and sys.excepthook is hook
        assert [os.environ.get(name) for name in variables] == ["lo", None]
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def split() -> Iterator[LanguageModel]:
    """The built-in target over two processes."""
    hook = sys.excepthook
    target = load_model("builtin", dtype="float32", tensor_parallel=2)
    assert isinstance(target, ParallelModel)
    try:
        yield target
    finally:
        target.close()
        sys.excepthook = hook  # the last test has put the model's own back


@pytest.fixture(scope="module")
def whole() -> LanguageModel:
    return load_model("builtin", dtype="float32", pack=False)


def beside(target: LanguageModel, drafter: str | None) -> Llm:
    return ft.load(target, drafter, controller="constant", tokenizer=ft.load("builtin", None).tokenizer)


@pytest.mark.parametrize(
    "drafter",
    [None, "ngram,n=2,k=6", "suffix", f"model:{ZOO / 'draft'},tree=3x2x1"],
    ids=["none", "ngram", "suffix", "tree"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_processes_write_what_one_writes(
    split: LanguageModel, whole: LanguageModel, drafter: str | None, temperature: float
) -> None:
    """Ragged batches, chains and trees, greedy and with a seed."""
    outputs = [
        beside(target, drafter).generate(PROMPTS, max_new_tokens=32, temperature=temperature, seed=7)
        for target in (split, whole)
    ]
    assert [output.token_ids for output in outputs[0]] == [output.token_ids for output in outputs[1]]
    assert sum(output.stats.num_accepted_tokens for output in outputs[0]) > 0 or drafter is None


def test_each_has_a_part(split: LanguageModel, whole: LanguageModel) -> None:
    llm = beside(split, None)
    prompt = llm.generate(PROMPTS[0], max_new_tokens=40).token_ids
    again = llm.generate(prompt, max_new_tokens=4)
    assert again.stats.num_prompt_tokens == len(prompt)
    assert split.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert split.weight_bytes < 0.51 * sum(weight.nbytes for weight in whole.model.parameters())  # type: ignore[attr-defined]
    assert split.kv_bytes == 0 < split.kv_peak_bytes


def test_kept_texts_are_read_again_from_both_parts(split: LanguageModel, whole: LanguageModel) -> None:
    texts = []
    for target in (split, whole):
        llm = beside(target, "ngram")
        first = llm.generate(PROMPTS[1], max_new_tokens=40).token_ids
        prompt = [*llm.encode(PROMPTS[1]), *first]
        second = llm.generate([*prompt, 5, 6], max_new_tokens=12)
        assert second.stats.num_prompt_tokens_computed <= 4 < len(prompt)
        texts.append(second.token_ids)
    assert texts[0] == texts[1]


def test_drafters_that_run_the_targets_layers_are_refused(split: LanguageModel) -> None:
    for drafter in ("early_exit", "swift", "medusa", "eagle3"):
        with pytest.raises(CapabilityError, match=r"split over 2 processes|hidden states"):
            beside(split, drafter)


def test_there_is_one_split_model_at_a_time(split: LanguageModel) -> None:
    with pytest.raises(ValueError, match="has a split model already"):
        load_model("builtin", tensor_parallel=2)


def in_a_process(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


LOADED = """
import sys, time
from foretoken.loading import load_model
target = load_model(sys.argv[1], dtype="float32", tensor_parallel=2)
print(*(part.process.pid for part in target.followers), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_no_process_outlives_a_leader_that_is_killed() -> None:
    leader = in_a_process(LOADED, "builtin")
    assert leader.stdout is not None
    try:
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        assert len(pids) == 1 and all(alive(pid) for pid in pids)
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait(30)
        assert gone(pids)
    finally:
        leader.kill()


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
def test_other_families(name: str, tmp_path: Path, split: LanguageModel) -> None:
    """Sliding windows and experts; in a process of their own, since this one has a split model, and ends nothing."""
    code = """
import json, sys
from foretoken import load
split = load(sys.argv[1], "ngram,n=2,k=5", dtype="float32", controller="constant", tensor_parallel=2)
prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11], [3, 4, 3, 4, 3, 4, 3]]
found = [one.token_ids for one in split.generate(prompts, max_new_tokens=24)]
print(json.dumps([found, [part.process.pid for part in split.target.followers]]))
"""
    whole = ft.load(checkpoint(tmp_path, name, "float32"), "ngram,n=2,k=5", controller="constant")
    running = in_a_process(code, str(tmp_path / name))
    stdout, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11], [3, 4, 3, 4, 3, 4, 3]]
    texts, pids = json.loads(stdout)
    assert texts == [output.token_ids for output in whole.generate(prompts, max_new_tokens=24)]
    if Path("/proc/self/stat").exists():
        assert len(pids) == 1 and gone(pids)


def test_the_command_line_splits_and_refuses(whole: LanguageModel) -> None:
    command = [sys.executable, "-m", "foretoken", "generate", "def f(", "--max-new-tokens", "8", "--json"]
    command += ["--dtype", "float32"]
    process = subprocess.run([*command, "--tensor-parallel", "2"], capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    alone = beside(whole, None).generate("def f(", max_new_tokens=8)
    assert json.loads(process.stdout)["token_ids"] == alone.token_ids
    wrong = subprocess.run([*command, "--tensor-parallel", "3"], capture_output=True, text=True, timeout=200)
    assert wrong.returncode == 2 and len(wrong.stderr.strip().splitlines()) == 1 and "choose 2" in wrong.stderr


def test_a_process_that_dies_ends_the_engine(split: LanguageModel) -> None:
    """The last test of the split model: running and later requests are told, and nobody waits."""
    part = split.followers[0].process  # type: ignore[attr-defined]

    async def run() -> None:
        engine = AsyncLlm(beside(split, "ngram"))
        await engine.start()
        task = asyncio.create_task(engine.generate(PROMPTS[0], max_new_tokens=600, ignore_eos=True))
        while not engine.status.rounds:
            await asyncio.sleep(0.01)
        part.kill()
        with pytest.raises(EngineDead, match=r"process 1 of the split model has ended \(signal 9\)"):
            await asyncio.wait_for(task, 30)
        assert "process 1" in str(engine.status.dead)
        with pytest.raises(EngineDead):
            await engine.generate(PROMPTS[0])

    hook = sys.excepthook
    try:
        asyncio.run(run())
        with pytest.raises(RuntimeError, match="process 1 of the split model has ended"):
            beside(split, None).generate(PROMPTS[0], max_new_tokens=2)
    finally:
        sys.excepthook = hook  # the model gives back the caller's when it ends, and a test must find its own
