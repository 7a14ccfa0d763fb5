"""Rollback of a hybrid target: forwards, rows and time of lazy, eager and capture replay, over plain decoding.

A random Qwen3.5-like model (Gated DeltaNet and attention 3:1) of ``--parameters`` million; the drafts are what it will
write, wrong at random places, so that each is accepted with probability ``--accept``.  All arms take turns on the same
prompts and their tokens are compared.  ``busy`` is the ratio by processor seconds, which other work on the machine
disturbs less.

    python benchmarks/hybrid.py [--accept 0.5 0.8] [--k 4] [--tokens 64] [--dtype float32]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from typing import Any

import torch
from common import Arm, environment, interleaved, median_ratio
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

import foretoken as ft
from foretoken.llm import Llm
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.models.stateful import StatefulModel

VOCAB = 4096
CHOICES: dict[str, dict[str, Any]] = {
    "lazy, flush 8": {"replay": "lazy", "flush": 8},
    "lazy, flush 4": {"replay": "lazy", "flush": 4},
    "eager": {"replay": "lazy", "flush": 0},
    "capture": {"replay": "capture"},
}


def network(width: int, layers: int, dtype: torch.dtype) -> Any:
    """A random model whose weights keep the size of what goes through them."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        head_dim=64,
        linear_num_key_heads=width // 64,
        linear_num_value_heads=width // 64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape) * 1.3 / min(weight.shape[-2:]) ** 0.5)
    return model.to(dtype)


def half_right(truth: list[int], accept: float, seed: int) -> ScriptedDrafter:
    """Drafts that are right with probability ``accept``."""
    dice = random.Random(seed)
    return ScriptedDrafter(as_output=True, script=[t if dice.random() < accept else (t + 1) % VOCAB for t in truth])


class Decoder:
    """One arm; counts the forwards, rows and rounds of its runs."""

    def __init__(self, model: StatefulModel, truths: dict[int, list[int]], accept: float | None, k: int) -> None:
        self.model, self.truths, self.accept, self.k = model, truths, accept, k
        self.rounds = self.forwards = self.rows = 0
        self.busy_s: list[float] = []

    def __call__(self, prompt: list[int]) -> list[int]:
        """New tokens behind a prompt."""
        truth = self.truths[prompt[0]]
        drafter = None if self.accept is None else half_right(truth, self.accept, prompt[0])
        llm: Llm = ft.load(self.model, drafter=drafter, controller=f"constant,k={self.k}")
        before = self.model.num_forwards, self.model.run_rows
        start_s = time.process_time()
        output = llm.generate(prompt, max_new_tokens=len(truth), ignore_eos=True)
        self.busy_s.append(time.process_time() - start_s)
        self.rounds += output.stats.num_drafts
        self.forwards += self.model.num_forwards - before[0] - 1  # the prompt's
        self.rows += self.model.run_rows - before[1] - len(prompt) + 1
        return list(output.token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accept", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = network(options.width, options.layers, getattr(torch, options.dtype))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.0f}M parameters, {options.dtype}, k={options.k}; {torch.backends.cpu.get_cpu_capability()}")
    print(environment())
    dice = random.Random(0)
    prompts = [[i, *(dice.randrange(VOCAB) for _ in range(63))] for i in range(options.prompts)]
    plain = StatefulModel(model)
    truths = {
        p[0]: list(ft.load(plain, drafter=None).generate(p, max_new_tokens=options.tokens, ignore_eos=True).token_ids)
        for p in prompts
    }
    for accept in options.accept:
        decoders = {"plain": Decoder(plain, truths, None, options.k)}
        for name, choice in CHOICES.items():
            decoders[name] = Decoder(StatefulModel(model, **choice), truths, accept, options.k)
        arms = [Arm(name, decoder) for name, decoder in decoders.items()]
        interleaved(arms, prompts, options.repeat)
        print(f"\naccepted with probability {accept}", flush=True)
        print(f"{'':14} forwards  rows  tokens (a round)   over plain  busy   same ids")
        for arm, decoder in zip(arms, decoders.values(), strict=True):
            runs = options.repeat * len(prompts) + 1
            same = all(o == truths[p[0]] for o, p in zip(arm.outputs, prompts, strict=True))
            busy = statistics.median(
                plain_s / arm_s for plain_s, arm_s in zip(decoders["plain"].busy_s[1:], decoder.busy_s[1:], strict=True)
            )
            counts = (decoder.forwards, decoder.rows, runs * options.tokens)
            a_round = "  ".join(f"{count / decoder.rounds:7.2f}" for count in counts)
            print(f"{arm.name:14} {a_round}  {median_ratio(arm, arms[0]):12.2f}  {busy:6.2f}   {same}", flush=True)


if __name__ == "__main__":
    main()
