"""Milliseconds of a draft level of trained heads, in our library and by their networks' PyTorch calls, in turns.

    python benchmarks/head_levels.py                    # heads of SmolLM2's width with random weights
    python benchmarks/head_levels.py --builtin          # rounds of the built-in heads, texts compared

The random heads have the initial weights of training; what they guess does not matter here.  A level is one call for a
chain's node, or for the four nodes of a tree, behind 100 tokens, up to the lists of the four best tokens.  One thread
by default, whose own time is taken: other processes then count as little as possible.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.core import TokenTree
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, load_model
from foretoken.loading.tokenizers import load_tokenizer
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.features import FeatureDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.methods.drafters.nets.mtp import MtpConfig, MtpNet
from foretoken.models.base import Feed
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.heads.native import HeadRows
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.native import library

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
SPECS = ("eagle,nodes=16,depth=5", "eagle3,nodes=16,depth=5", "mtp", "medusa,nodes=16", "hydra,nodes=16")
TEXTS = ("def area(width, height):\n    return", "import os\nfor name in", "The city of London")
TOP, BEHIND, TURNS = 4, 100, 3


def clock() -> Callable[[], float]:
    """Of this thread where there is one only."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def level_ms(model: FeatureModel, rows: int, count: int) -> float:
    """What the quicker half of the calls takes at most."""
    read_clock, sequence, spent = clock(), model.open(), list[float]()
    states = torch.randn(BEHIND, model.parts.hidden_size)
    model.forward([Feed(sequence, list(range(BEHIND)), wanted=0, states=states)])
    model.commit(sequence, range(BEHIND))
    for _ in range(count):
        start_s = read_clock()
        row = model.forward([Feed(sequence, list(range(rows)), [-1] * rows, states=states[:rows])])[0]
        if not isinstance(row, HeadRows):
            best = torch.log_softmax(row.logits, -1).topk(TOP, -1)
            best.values.tolist(), best.indices.tolist()
        spent.append(read_clock() - start_s)
        model.commit(sequence, ())
    model.release(sequence)
    return 1e3 * statistics.median(spent)


def at_width(count: int) -> None:
    """Heads on a random target of SmolLM2's width."""
    torch.manual_seed(0)
    config = LlamaConfig(**SMOLLM2, num_hidden_layers=2, vocab_size=49152, tie_word_embeddings=True)
    target = HuggingFaceModel(LlamaForCausalLM(config).to(torch.bfloat16).eval())
    parts = TargetParts(target)
    shape: Any = asdict(LayerConfig.of_target(parts.config))
    nets = {
        "eagle": EagleNet(EagleConfig(**shape)),
        "mtp": MtpNet(MtpConfig(**shape)),
        "eagle3": Eagle3Net(Eagle3Config(**shape, vocab_size=parts.vocab_size, layers="1,1,2", share_head=True)),
    }
    for name, net in nets.items():
        for size in (parts.vocab_size, 16384):
            model = FeatureModel(net, parts, target, DraftHead(parts, None if size > 16384 else torch.arange(size)))
            native, model.top, found = model.native, TOP, dict[tuple[str, int], list[float]]()
            for _ in range(TURNS):
                for arm in ("library", "PyTorch"):
                    model.native = native if arm == "library" else None
                    for rows in (1, 4):
                        found.setdefault((arm, rows), []).append(level_ms(model, rows, count))
            figures = ", ".join(f"{arm} {rows} rows {statistics.median(ms):.2f}" for (arm, rows), ms in found.items())
            print(f"{name}, {size} tokens, ms a level: {figures}", flush=True)


def rounds_of(spec: str, target: Any, prompts: Sequence[Sequence[int]], native: bool) -> tuple[list[float], Any, float]:
    """Seconds of every round's draft, the texts, and the mean acceptance length."""
    drafter: Any = build_drafter(spec, target)
    if not native and isinstance(drafter, FeatureDrafter):
        drafter.model.native = None
    elif not native:
        drafter._native = []
        if getattr(drafter, "reader", None) is not None:
            drafter.reader.model.native = None
    propose, read_clock, spent = drafter.propose_batch, clock(), list[float]()

    def timed(*arguments: Any) -> list[TokenTree]:
        start_s = read_clock()
        found: list[TokenTree] = propose(*arguments)
        spent.append(read_clock() - start_s)
        return found

    drafter.propose_batch = timed
    runs = [text_of(Engine(target, drafter, None, ConstantController()), prompt) for prompt in prompts]
    accepted, drafts = (sum(getattr(run.stats, key) for run in runs) for key in ("num_accepted_tokens", "num_drafts"))
    return spent, [run.output for run in runs], 1 + accepted / drafts


def text_of(engine: Engine, prompt: Sequence[int]) -> Any:
    """One request, alone."""
    engine.add(Request(list(prompt), SamplingParams(), 64, seed=0))
    last: Any = None
    while engine.busy:
        for run, emission in engine.step():
            if emission.error is not None:
                raise emission.error
            last = run
    return last


def builtin() -> None:
    """The built-in heads on the built-in target."""
    target, tokenizer = load_model("builtin"), load_tokenizer("builtin")
    prompts = [tokenizer.encode(text) for text in TEXTS]  # type: ignore[union-attr]
    for spec in SPECS:
        spent, texts, lengths = dict[bool, list[float]](), list[Any](), dict[bool, float]()
        for turn in range(TURNS):
            for native in (True, False):
                seconds, text, lengths[native] = rounds_of(spec, target, prompts, native)
                texts.append(text)
                spent.setdefault(native, []).extend(seconds if turn else [])  # the first turn warms up
        new, old = (1e3 * statistics.median(spent[native]) for native in (True, False))
        same = "equal" if all(text == texts[0] for text in texts) else "NOT EQUAL"
        figures = f"library {new:.2f} ({lengths[True]:.2f} tokens), PyTorch {old:.2f} ({lengths[False]:.2f})"
        print(f"{spec}, ms a round: {figures}, texts {same}", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builtin", action="store_true", help="rounds of the built-in heads")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="levels of a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"kernels: {library.level()}, {library.why_not() or 'compiled'}; threads {arguments.threads}", flush=True)
    if arguments.builtin:
        builtin()
    else:
        at_width(arguments.count)


if __name__ == "__main__":
    main()
