"""``foretoken train lm``: a small Llama-architecture language model from a folder of text.

Matrices of the transformer blocks are trained with Muon or AdamW, everything else with AdamW; the learning rate
warms up, stays, and falls linearly to zero (so that a run can be given more or fewer steps when it is resumed).  The
data order is a pure function of (seed, step), so a run that was killed continues as if it had not been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.io.documents import iter_documents
from foretoken.training.card import CardInfo, command_line, write_card
from foretoken.training.checkpoint import latest_checkpoint, load_checkpoint, read_meta, save_checkpoint
from foretoken.training.corpus import (
    BlockSampler,
    build_corpus,
    read_tokens,
    stored_corpus,
    train_tokenizer,
)
from foretoken.training.curves import LossCurve
from foretoken.training.folders import load_weights, save_model, write_report
from foretoken.training.hybrid import build_hybrid, is_llama, start_from_llama
from foretoken.training.optimizers import autocast, build_optimizers, check_choices
from foretoken.training.updates import descend, learning_rate_factor, set_learning_rate


@dataclass(frozen=True)
class LmConfig:
    """Architecture and recipe of one run; stored in every checkpoint and compared on resume."""

    hidden: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    ffn: int = 1024
    context: int = 1024
    vocab: int = 8192
    steps: int = 2000
    batch_size: int = 8
    lr: float = 4e-3
    warmup: float = 0.02
    decay: float = 0.35
    weight_decay: float = 0.05
    seed: int = 0
    hybrid: bool = False
    optimizer: str = "muon"
    precision: str = "bfloat16"

    def __post_init__(self) -> None:
        check_choices(self.optimizer, self.precision)
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden={self.hidden} must be an even multiple of heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")


def build_model(config: LmConfig, eos_token_id: int) -> Any:
    """A freshly initialised ``LlamaForCausalLM`` (float32, tied embeddings), or a hybrid."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(config.seed)
    if config.hybrid:
        return build_hybrid(config, eos_token_id)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            bos_token_id=eos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=eos_token_id,
        )
    )


def next_token_loss(model: Any, blocks: Tensor, chunk: int = 2048) -> Tensor:
    """Mean cross-entropy in nats per token of ``blocks`` int64 [batch, block + 1].

    Logits are made for ``chunk`` rows at a time: the full [rows, vocab] float32 matrix would dominate memory traffic.
    """
    hidden = model.model(input_ids=blocks[:, :-1], use_cache=False).last_hidden_state
    rows, labels = hidden.flatten(0, 1), blocks[:, 1:].flatten()
    parts = [
        F.cross_entropy(model.lm_head(r).float(), y, reduction="sum")
        for r, y in zip(rows.split(chunk), labels.split(chunk), strict=True)
    ]
    return torch.stack(parts).sum() / labels.numel()


def distillation_loss(model: Any, teacher: Any, blocks: Tensor, weight: float, chunk: int = 1024) -> Tensor:
    """``weight`` x KL(teacher || model) + (1 - weight) x cross-entropy, in nats per token of ``blocks``.

    Forward KL on the training text: DistillSpec, arXiv 2310.08461, with fixed data.
    """
    hidden = model.model(input_ids=blocks[:, :-1], use_cache=False).last_hidden_state
    with torch.no_grad():
        wanted = teacher.model(input_ids=blocks[:, :-1], use_cache=False).last_hidden_state
    total = hidden.new_zeros((), dtype=torch.float32)
    labels = blocks[:, 1:].flatten()
    for rows, goal, y in zip(
        hidden.flatten(0, 1).split(chunk), wanted.flatten(0, 1).split(chunk), labels.split(chunk), strict=True
    ):
        log_q = torch.log_softmax(model.lm_head(rows).float(), -1)
        with torch.no_grad():
            p = torch.softmax(teacher.lm_head(goal).float(), -1)
            entropy = torch.special.entr(p).sum()
        divergence = -(p * log_q).sum() - entropy
        total = total + weight * divergence + (1 - weight) * F.nll_loss(log_q, y, reduction="sum")
    return total / labels.numel()


def make_optimizers(model: Any, config: LmConfig) -> list[torch.optim.Optimizer]:
    """Muon or AdamW for the blocks' matrices, AdamW for embeddings and norms; nothing that is frozen."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in trained if id(p) not in chosen]
    groups: list[list[dict[str, Any]]] = [[{"params": found}] if found else [] for found in (matrices, rest)]
    return build_optimizers(groups[0], groups[1], config.optimizer, config.lr, config.weight_decay)


@torch.no_grad()
def evaluate(
    model: Any,
    file: Path,
    dtype: str,
    context: int,
    max_blocks: int = 32,
    batch: int = 4,
    precision: str = "bfloat16",
) -> float | None:
    """Held-out loss in nats per token over up to ``max_blocks`` evenly spaced blocks of ``file``.

    ``None`` when nothing was held out (a corpus of few documents).
    """
    tokens = read_tokens(file, dtype)
    if len(tokens) < 2:
        return None
    context = min(context, len(tokens) - 1)
    starts = np.unique(np.linspace(0, len(tokens) - context - 1, max_blocks).astype(int))
    rows = torch.from_numpy(np.stack([tokens[s : s + context + 1].astype(np.int64) for s in starts]))
    losses = []
    for part in rows.split(batch):
        with autocast(model.device.type, precision):
            losses.append(next_token_loss(model, part.to(model.device)) * len(part))
    return float(torch.stack(losses).sum() / len(rows))


@dataclass
class Progress:
    """What a caller is told after every step (losses in nats per token)."""

    step: int
    steps: int
    loss: float
    held_loss: float | None
    tokens_per_s: float


def train_lm(
    data: Sequence[str | Path],
    out: Path,
    config: LmConfig,
    *,
    tokenizer_from: Path | None = None,
    init_from: Path | None = None,
    teacher: Path | None = None,
    teacher_weight: float = 0.7,
    device: str = "cpu",
    eval_every: int = 100,
    save_every: int = 100,
    compiled: bool = False,
    on_step: Callable[[Progress], None] | None = None,
    card: CardInfo | None = None,
) -> dict[str, Any]:
    """Train, resuming from ``out/checkpoints`` when there is something to resume; return the final report.

    ``out`` receives the model in Hugging Face's layout (bfloat16 safetensors, tokenizer), ``losses.csv``,
    ``losses.png`` and ``training.json``.  ``tokenizer_from`` shares another model's tokenizer; ``init_from`` starts
    from another model's weights (and tokenizer) with fresh optimizers.  With a ``teacher`` the loss is mostly the
    divergence from that model's distribution, which is what a draft model needs.

    Raises:
        ValueError: empty or too short data, a checkpoint of another architecture in ``out``, or weights of another
            architecture in ``init_from``.
        FloatingPointError: the loss became NaN or infinite; the last checkpoint is intact.
    """
    tokenizer_from = tokenizer_from or init_from
    tokenizer, text = _text(data, out, config, tokenizer_from)
    corpus = build_corpus(data, tokenizer, text)
    model = build_model(config, int(tokenizer.eos_token_id)).to(device)
    if init_from is not None and config.hybrid and is_llama(init_from):
        start_from_llama(model, init_from, read_tokens(text / "train.bin", corpus["dtype"]))
    elif init_from is not None:
        load_weights(model, init_from)
    optimizers = make_optimizers(model, config)
    sampler = BlockSampler(text / "train.bin", corpus["dtype"], config.context, config.batch_size, config.seed)
    out.mkdir(parents=True, exist_ok=True)
    start, spent_s = _resume(out / "checkpoints", config, model, optimizers)
    curve = LossCurve(out / "losses.csv", start)
    loss_of = _loss(model, teacher, teacher_weight, device)
    loss_of = torch.compile(loss_of) if compiled else loss_of
    held_loss = partial(evaluate, model, text / "held.bin", corpus["dtype"], config.context, precision=config.precision)
    clock, tokens_per_step = time.perf_counter(), config.batch_size * config.context
    for step in range(start, config.steps):
        began = time.perf_counter()
        factor = learning_rate_factor(step, config.steps, config.warmup, config.decay)
        set_learning_rate(optimizers, config.lr, factor)
        blocks = torch.from_numpy(sampler(step)).to(device)
        with autocast(torch.device(device).type, config.precision):
            loss = loss_of(blocks)
        value = descend(loss, model.parameters(), optimizers, step)
        done = step + 1
        held: float | None = None
        if done % eval_every == 0 or done == config.steps:
            held = held_loss()
        curve.add(done, value, held)
        if done % save_every == 0 or done == config.steps:
            now = spent_s + time.perf_counter() - clock
            curve.write()
            save_checkpoint(out / "checkpoints", done, model, optimizers, {"config": asdict(config), "spent_s": now})
        if on_step is not None:
            on_step(Progress(done, config.steps, value, held, tokens_per_step / (time.perf_counter() - began)))
    held = held_loss(max_blocks=128)
    report = _report(model, config, corpus, held, spent_s + time.perf_counter() - clock)
    curve.write()
    curve.plot(out / "losses.png")
    save_model(model.to(torch.bfloat16), tokenizer, out)
    write_report(report, out)
    others = {"tokenizer_from": None if init_from else tokenizer_from, "init_from": init_from, "teacher": teacher}
    write_card(out, report, data, command_line(asdict(config), asdict(LmConfig()), data, out, others), card)
    return report


def _text(data: Sequence[str | Path], out: Path, config: LmConfig, source: Path | None) -> tuple[Any, Path]:
    """The tokenizer, and the folder of the encoded text: that of the run ``source`` if it has the same in it."""
    tokenizer = _tokenizer(data, out, config, source)
    if source is not None and stored_corpus(data, tokenizer, source / "corpus") is not None:
        return tokenizer, source / "corpus"
    return tokenizer, out / "corpus"


def _resume(folder: Path, config: LmConfig, model: Any, optimizers: list[torch.optim.Optimizer]) -> tuple[int, float]:
    """Steps and seconds of the latest checkpoint, which is loaded."""
    found = latest_checkpoint(folder)
    if found is None:
        return 0, 0.0
    _check_same(read_meta(found)["config"], config, found)
    meta = load_checkpoint(found, model, optimizers)
    return int(meta["step"]), float(meta["spent_s"])


def _loss(model: Any, teacher: Path | None, weight: float, device: str) -> Callable[[Tensor], Tensor]:
    if teacher is None:
        return lambda blocks: next_token_loss(model, blocks)
    from transformers import AutoModelForCausalLM

    guide: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16, trust_remote_code=False)
    guide = guide.to(device).eval()
    if guide.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the teacher {teacher} has another vocabulary: use --tokenizer-from with the teacher's folder"
        )
    return lambda blocks: distillation_loss(model, guide, blocks, weight)


def _tokenizer(data: Sequence[str | Path], out: Path, config: LmConfig, source: Path | None) -> Any:
    from transformers import AutoTokenizer

    folder = source or out / "tokenizer"
    if source is None and not (folder / "tokenizer.json").exists():
        documents = list(iter_documents(data))
        if not any(documents):
            raise ValueError(
                f"no text found below {', '.join(map(str, data))}: give a folder of .py, .txt, .md or .jsonl"
            )
        train_tokenizer(documents, config.vocab, folder)
    elif not (folder / "tokenizer.json").exists():
        folder = folder / "tokenizer"  # a run that has not finished yet
        if not (folder / "tokenizer.json").exists():
            raise ValueError(f"{source} holds no tokenizer.json: give the --out of another run, or a model folder")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder} has no end-of-text token, which separates documents")
    if len(tokenizer) > config.vocab:
        raise ValueError(f"the tokenizer in {folder} has {len(tokenizer)} tokens: --vocab {config.vocab} is too small")
    return tokenizer


def _check_same(stored: dict[str, Any], config: LmConfig, path: Path) -> None:
    """Only the number of steps (and so the schedule) may change between a run and its continuation."""
    mine = asdict(config)
    known = {**asdict(LmConfig()), **stored}
    other = [k for k in mine if k not in ("steps", "decay", "warmup") and known[k] != mine[k]]
    if other:
        raise ValueError(
            f"{path} was trained with other settings ({', '.join(f'{k}={stored.get(k)}' for k in other)}); "
            "give the same ones to resume, or another --out"
        )


def _report(model: Any, config: LmConfig, corpus: dict[str, Any], held: float | None, spent_s: float) -> dict[str, Any]:
    bytes_per_token = corpus["held"]["bytes"] / max(1, corpus["held"]["tokens"])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": config.steps,
        "tokens": config.steps * config.batch_size * config.context,
        "corpus": {k: corpus[k] for k in ("train", "held")},
        "held_loss_nats_per_token": held,
        "held_bits_per_byte": None if held is None else held / math.log(2) / bytes_per_token,
        "hours": spent_s / 3600,
        "config": asdict(config),
    }
