"""Perplexity of the same model with its weights and activations in fewer bits.

    python benchmarks/perplexity.py ARM [ARM ...] --text FILE [--tokens 4096] [--window 512] [--json FILE]

An arm is a model and options, as in ``row_costs.py``; the first is the one that others are compared with.  The text is
cut into windows, each read from its first token; a window's first half is context and is not counted.  With the
perplexity stands the mean Kullback-Leibler divergence from the first arm, in nats, and how often both agree on the best
token: these tell two arms apart that perplexity, on so few tokens, cannot.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from common import environment
from quantized import instructions
from row_costs import opened

from foretoken.loading import load_tokenizer
from foretoken.models.base import Feed, LanguageModel

CHUNK = 64
"""Rows of a forward: as many as a prompt's."""


def window_log_probs(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    """log p of every next token behind the second half of a window: [half, vocabulary], float32."""
    half = len(ids) // 2
    sequence = model.open()
    model.prefill(sequence, ids[:half])
    rows = []
    for start in range(half, len(ids) - 1, CHUNK):
        chunk = ids[start : min(start + CHUNK, len(ids) - 1)]
        rows.append(model.forward([Feed(sequence, chunk)])[0].logits.float().log_softmax(-1))
        model.commit(sequence, list(range(len(chunk))))
    model.release(sequence)
    return torch.cat(rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", metavar="ARM")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.arms[0].split(",")[0])
    ids = tokenizer(options.text.read_text(encoding="utf-8")[: 8 * options.tokens])["input_ids"][: options.tokens]
    windows = [ids[at : at + options.window] for at in range(0, len(ids) - options.window + 1, options.window)]
    print(f"{instructions()}; {environment()}; {len(windows)} windows of {options.window} tokens", flush=True)
    print("| arm | perplexity | divergence from the first | same best token |\n|---|---|---|---|", flush=True)
    report: list[dict[str, float | str]] = []
    judge: list[torch.Tensor] = []
    for arm in options.arms:
        model = opened(arm)
        loss, apart, same, count = 0.0, 0.0, 0, 0
        for number, window in enumerate(windows):
            logs = window_log_probs(model, window)
            if len(judge) == number:
                judge.append(logs)
            right, width = judge[number], min(judge[number].shape[1], logs.shape[1])
            wanted = torch.tensor(window[len(window) // 2 + 1 :])
            loss -= float(logs.gather(1, wanted[:, None]).sum())
            apart += float((right[:, :width].exp() * (right[:, :width] - logs[:, :width])).sum())
            same += int((right.argmax(-1) == logs.argmax(-1)).sum())
            count += len(wanted)
        perplexity = math.exp(loss / count)
        report.append({"arm": arm, "perplexity": perplexity, "divergence": apart / count, "same": same / count})
        print(f"| {arm} | {perplexity:.3f} | {apart / count:.4f} | {same / count:.3f} |", flush=True)
        del model
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
