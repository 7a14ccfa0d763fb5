"""``foretoken train lm``: a small language model of Llama's architecture from a folder of text.

Matrices of the transformer blocks are trained with Muon or AdamW, everything else with AdamW.  The learning rate warms
up, stays, and falls linearly to zero, so a resumed run can have more or fewer steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.core.io.documents import iter_documents
from foretoken.core.io.files import files_checksum, save_model
from foretoken.loading import check_folder, check_same_tokenizer, load_tokenizer, parse_device
from foretoken.loading.networks import from_pretrained
from foretoken.models.forward.parts import weights_digest
from foretoken.training.cards import BIAS, SMALL, CardInfo, command, write_card
from foretoken.training.checkpoint import latest_checkpoint
from foretoken.training.config import TEACHER_WEIGHT, LmConfig
from foretoken.training.corpus import (
    BlockSampler,
    build_corpus,
    check_end_of_text,
    no_text,
    read_tokens,
    spread_blocks,
    stored_corpus,
    text_identity,
    train_tokenizer,
)
from foretoken.training.curves import LM
from foretoken.training.hybrid import (
    build_hybrid,
    check_same_function,
    common_shape,
    is_llama,
    other_function,
    start_from_llama,
)
from foretoken.training.loop import Loop, Progress, Saving
from foretoken.training.optimizers import autocast, build_optimizers, vocabulary_of


def build_model(config: LmConfig, eos_token_id: int) -> Any:
    """A freshly initialised ``LlamaForCausalLM`` (float32, tied embeddings), or a hybrid."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        if config.hybrid:
            return build_hybrid(config, eos_token_id)
        shape = common_shape(config, eos_token_id)
        return LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=config.context))


def next_token_loss(model: Any, blocks: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token of ``blocks`` int64 [batch, block + 1].

    Logits are computed for some rows at a time: the full [rows, vocab] float32 matrix would dominate memory traffic.
    """
    hidden = model.model(input_ids=blocks[:, :-1], use_cache=False).last_hidden_state
    rows, labels = hidden.flatten(0, 1), blocks[:, 1:].flatten()
    parts = [
        F.cross_entropy(model.lm_head(r).float(), y, reduction="sum")
        for r, y in zip(rows.split(2048), labels.split(2048), strict=True)
    ]
    return torch.stack(parts).sum() / labels.numel()


def distillation_loss(model: Any, teacher: Any, blocks: Tensor, weight: float) -> Tensor:
    """``weight`` x KL(teacher || model) + (1 - weight) x cross-entropy, in nats per token of ``blocks``.

    Forward KL on the training text, as in DistillSpec (arXiv 2310.08461) with fixed data.
    """
    hidden = model.model(input_ids=blocks[:, :-1], use_cache=False).last_hidden_state
    total = hidden.new_zeros((), dtype=torch.float32)
    labels = blocks[:, 1:]
    rows_at_once = max(1, 1024 // labels.shape[1])  # logits of all rows would be too many
    for states, some in zip(hidden.split(rows_at_once), blocks.split(rows_at_once), strict=True):
        log_q = torch.log_softmax(model.lm_head(states.flatten(0, 1)).float(), -1)
        with torch.no_grad():
            # The whole forward: some families scale or cap their logits.
            p = torch.softmax(teacher(input_ids=some[:, :-1], use_cache=False).logits.flatten(0, 1).float(), -1)
            entropy = torch.special.entr(p).sum()
        divergence = -(p * log_q).sum() - entropy
        text_loss = F.nll_loss(log_q, some[:, 1:].flatten(), reduction="sum")
        total = total + weight * divergence + (1 - weight) * text_loss
    return total / labels.numel()


def make_optimizers(model: Any, config: LmConfig) -> list[torch.optim.Optimizer]:
    """Optimizers of all trainable parameters; only the blocks' matrices have weight decay."""
    return build_optimizers([(model, 1.0)], vocabulary_of(model), config.lr, config.optimizer, config.weight_decay)


@torch.no_grad()
def evaluate(model: Any, file: Path, dtype: str, context: int, precision: str, max_blocks: int = 32) -> float | None:
    """Held-out loss in nats per token over up to ``max_blocks`` evenly spaced blocks of ``file``.

    ``None`` if nothing was held out (a corpus of few documents).
    """
    tokens = read_tokens(file, dtype)
    if len(tokens) < 2:
        return None
    context = min(context, len(tokens) - 1)
    rows = torch.from_numpy(np.stack(spread_blocks(tokens, max_blocks, context + 1)))
    losses = []
    for part in rows.split(4):  # rows at once
        with autocast(model.device.type, precision):
            losses.append(next_token_loss(model, part.to(model.device)) * len(part))
    return float(torch.stack(losses).sum() / len(rows))


def train_lm(
    data: Sequence[str | Path],
    out: Path,
    config: LmConfig,
    *,
    tokenizer_from: Path | None = None,
    init_from: Path | None = None,
    teacher: Path | None = None,
    teacher_weight: float = TEACHER_WEIGHT,
    device: str = "cpu",
    eval_every: int = 100,
    save_every: int = 100,
    compiled: bool = False,
    on_read: Callable[[int], None] | None = None,
    on_step: Callable[[Progress], None] | None = None,
    saving: Saving | None = None,
    card: CardInfo | None = None,
) -> dict[str, Any]:
    """Train, resuming from ``out/checkpoints`` if possible; return the final report.

    ``out`` receives the model in Hugging Face's layout (bfloat16 safetensors, tokenizer), ``losses.csv``,
    ``losses.png`` and ``training.json``.  ``tokenizer_from`` shares another model's tokenizer; ``init_from`` starts
    from another model's weights (and tokenizer) with fresh optimizers.  With a ``teacher`` the loss is mostly the
    divergence from that model's distribution, as a draft model needs.

    Raises ``ValueError`` for empty or too short data, a checkpoint of other settings, text, start or teacher or of more
    steps in ``out``, weights of another architecture in ``init_from``, a folder without a model, and a missing device;
    and ``FloatingPointError`` if the loss becomes NaN or infinite: the last checkpoint is then intact.
    """
    torch_device = parse_device(device) or torch.device("cpu")
    if teacher is not None:
        check_folder(teacher)
    tokenizer_from = tokenizer_from or init_from
    tokenizer = _tokenizer(data, out, config, tokenizer_from)
    if teacher is not None:
        _check_teacher(teacher, tokenizer)
    shared = None if tokenizer_from is None else tokenizer_from / "corpus"  # of a run on the same text
    corpus_folder = (
        shared if shared is not None and stored_corpus(data, tokenizer, shared) is not None else out / "corpus"
    )
    corpus = build_corpus(data, tokenizer, corpus_folder, on_read=on_read)
    if corpus.get("chat"):
        raise ValueError("train lm learns texts, not conversations: give rows with text, or use train distill")
    model = build_model(config, int(tokenizer.eos_token_id)).to(torch_device)
    if init_from is not None and config.hybrid and is_llama(init_from):
        start_from_llama(model, init_from, read_tokens(corpus_folder / "train.bin", corpus["dtype"]))
    elif init_from is not None:
        _load_weights(model, init_from)
    sampler = BlockSampler(corpus_folder / "train.bin", corpus["dtype"], config.context, config.batch_size, config.seed)
    guide = None if teacher is None else _load_teacher(model, teacher, torch_device)
    identity = {
        "text": text_identity(corpus_folder, corpus),
        "init_from": None if init_from is None else files_checksum(sorted(init_from.glob("*.safetensors"))),
        "teacher": None if guide is None else {"weights": weights_digest(guide), "weight": teacher_weight},
    }
    loop = Loop(out, config, model, make_optimizers(model, config), LM, identity)

    def block_loss(blocks: Tensor) -> Tensor:
        if guide is None:
            return next_token_loss(model, blocks)
        return distillation_loss(model, guide, blocks, teacher_weight)

    compute = torch.compile(block_loss) if compiled else block_loss
    held_loss = partial(
        evaluate, model, corpus_folder / "held.bin", corpus["dtype"], config.context, precision=config.precision
    )

    def loss_of(step: int) -> Tensor:
        blocks = torch.from_numpy(sampler(step)).to(torch_device)
        with autocast(torch_device.type, config.precision):
            return compute(blocks)

    loop.run(
        loss_of, save_every=save_every, eval_every=eval_every, measure=lambda: _measured(held_loss()),
        on_step=on_step, saving=saving,
    )  # fmt: skip
    held_out_loss = held_loss(max_blocks=128)
    loop.curve.add(config.steps, None, _measured(held_out_loss))
    report = _report(model, config, corpus, held_out_loss, loop.spent_s)
    save_model(model.to(torch.bfloat16), tokenizer, out)
    loop.finish(report)
    changed = {key: value for key, value in asdict(config).items() if value != getattr(LmConfig, key)}
    changed.pop("weight_decay", None)  # not an option of the command
    if teacher is not None and teacher_weight != TEACHER_WEIGHT:
        changed["teacher_weight"] = teacher_weight
    others = {"tokenizer_from": None if init_from else tokenizer_from, "init_from": init_from, "teacher": teacher}
    command_line = command("lm", data, out, changed, others)
    write_card(out, out.resolve().name, SMALL, report, data, command_line, card or CardInfo(), [BIAS])
    return report


def _measured(held_out_loss: float | None) -> dict[str, float] | None:
    return None if held_out_loss is None else {"held_loss": held_out_loss}


def _check_teacher(teacher: Path, tokenizer: Any) -> None:
    """Raise ``ValueError`` if the teacher's folder holds another tokenizer."""
    own = load_tokenizer(str(teacher))
    try:
        check_same_tokenizer(own, tokenizer, str(teacher))
    except ValueError:
        raise ValueError(
            f"the teacher {teacher} has another tokenizer: use --tokenizer-from with the teacher's folder"
        ) from None


def _load_teacher(model: Any, teacher: Path, device: torch.device) -> Any:
    """The teacher network.  Raises ``ValueError`` for an encoder-decoder model, and if its vocabulary differs from that
    of ``model``."""
    guide = from_pretrained(str(teacher), torch.bfloat16, device).eval()
    if getattr(guide.config, "is_encoder_decoder", False):
        raise ValueError(f"the teacher {teacher} is an encoder-decoder model: give one that continues texts")
    if guide.config.get_text_config().vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the teacher {teacher} has another vocabulary: use --tokenizer-from with the teacher's folder"
        )
    return guide


def _tokenizer(data: Sequence[str | Path], out: Path, config: LmConfig, source: Path | None) -> Any:
    from transformers import AutoTokenizer

    folder = source or out / "tokenizer"
    if source is None and latest_checkpoint(out / "checkpoints") is None:  # a stored tokenizer may be of other text
        documents = list(iter_documents(data))
        if not any(documents):
            raise ValueError(no_text(data))
        train_tokenizer(documents, config.vocab, folder)
    elif not (folder / "tokenizer.json").exists():
        folder = folder / "tokenizer"  # an unfinished run
        if not (folder / "tokenizer.json").exists():
            if source is None:
                raise ValueError(
                    f"{out} holds a checkpoint and no tokenizer: copy its folder back, or give another --out"
                )
            raise ValueError(f"{source} holds no tokenizer.json: give the --out of another run, or a model folder")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    check_end_of_text(tokenizer)
    if len(tokenizer) > config.vocab:
        raise ValueError(f"the tokenizer in {folder} has {len(tokenizer)} tokens: --vocab {config.vocab} is too small")
    return tokenizer


def _load_weights(model: Any, source: Path) -> None:
    """Copy the weights of the model folder ``source``, which must have the same architecture and compute the same
    function of them, into ``model``."""
    from safetensors.torch import load_file

    file = source / "model.safetensors"
    if not file.exists():
        raise ValueError(f"{source} holds no model.safetensors to start from")
    stored, current = load_file(file), model.state_dict()
    if model.config.tie_word_embeddings:
        current.pop("lm_head.weight", None)
        stored.pop("lm_head.weight", None)
    other = [
        n
        for n in current.keys() | stored.keys()
        if n not in current or n not in stored or current[n].shape != stored[n].shape
    ]
    if other:
        raise ValueError(
            f"{source} is another architecture ({len(other)} tensors differ, {min(other)} among them): "
            "give its --hidden, --layers, --heads, --kv-heads and --ffn"
        )
    check_same_function(model.config, _stored_config(source, type(model.config)), source)
    for name, tensor in current.items():
        tensor.copy_(stored[name])


def _stored_config(source: Path, kind: Any) -> Any:
    """The configuration of the model folder ``source``.  Raises ``ValueError`` for another class than ``kind``."""
    file = source / "config.json"
    if not file.exists():
        raise ValueError(f"{source} holds no config.json to start from")
    stored = json.loads(file.read_text(encoding="utf-8"))
    if stored.get("model_type") != kind.model_type:  # whose keys may mean something else
        raise ValueError(other_function(source, "model_type", stored.get("model_type"), kind.model_type))
    return kind.from_dict(stored)


def _report(
    model: Any, config: LmConfig, corpus: dict[str, Any], held_out_loss: float | None, spent_s: float
) -> dict[str, Any]:
    bytes_per_token = corpus["held"]["bytes"] / max(1, corpus["held"]["tokens"])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": config.steps,
        "tokens": config.tokens,
        "corpus": {k: corpus[k] for k in ("train", "held")},
        "held_loss_nats_per_token": held_out_loss,
        "held_bits_per_byte": None if held_out_loss is None else held_out_loss / math.log(2) / bytes_per_token,
        "held_bits_per_token": None if held_out_loss is None else held_out_loss / math.log(2),
        "held_perplexity": None if held_out_loss is None else math.exp(held_out_loss),
        "passes_over_the_text": config.tokens / max(1, corpus["train"]["tokens"]),
        "hours": spent_s / 3600,
        "config": asdict(config),
    }
