"""Data shared by the alignment runs of one target: the student's network and the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.loading import check_same_tokenizer, check_vocabularies, load_model, load_tokenizer, resolve
from foretoken.models import wrap
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.network.capabilities import detect
from foretoken.training.config import DistillConfig, check_context
from foretoken.training.corpus import build_corpus, corpus_blocks, read_tokens, text_identity
from foretoken.training.joint import check_trainable
from foretoken.training.text_sources import PolicyText, TrainingText, written_rows, written_text
from foretoken.training.written import write_continuations


def load_draft_model(
    draft: str | Path, target: LanguageModel, tokenizer: Any, device: str | None = None
) -> LanguageModel:
    """The draft model in float32.  Raises ``ValueError`` unless it has the target's tokenizer and vocabulary."""
    loaded = load_model(draft, role="draft", dtype="float32", device=device, exact="approximate")
    check_vocabularies(target, loaded, str(draft))
    check_same_tokenizer(tokenizer, load_tokenizer(resolve(draft, "draft")), str(draft))
    return loaded


def load_student(draft: str | Path, target: LanguageModel, tokenizer: Any, device: str | None = None) -> Any:
    """The trainable network of a draft model (:func:`load_draft_model`).  Raises ``ValueError`` as
    :func:`foretoken.training.joint.check_trainable` does, too."""
    network: Any = getattr(load_draft_model(draft, target, tokenizer, device), "model", None)
    check_trainable(network, draft)
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    return network


def check_student(student: Any, config: DistillConfig) -> None:
    """Raise ``ValueError`` for rows longer than the draft model's context, and for masks in a draft model without tree
    masks: there a mask's row would read the tokens that it must predict, which stand before it."""
    longest = int(getattr(student.config.get_text_config(), "max_position_embeddings", 0) or 2**20)
    check_context(config.context, longest, "draft model's")
    why = detect(student).missing.get("tree_mask") if config.places > 1 else None
    if why:
        raise ValueError(f"places={config.places} needs a draft model that can hide tokens from a mask: {why}")


class Workshop:
    """Data shared by all students of one target: its text, cut into rows, and the text it wrote, both stored in
    ``folder``.  Raises ``ValueError`` for empty or too short data, and for a context longer than the target's.

    ``on_rows`` is called with (rows done, all rows) while the target generates text, ``on_read`` with the number of
    documents read while text is encoded.
    """

    def __init__(
        self,
        target: LanguageModel,
        tokenizer: Any,
        data: Sequence[str | Path],
        folder: Path,
        config: DistillConfig,
        on_rows: Callable[[int, int], None] | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        check_context(config.context, target.context_length)
        self.target, self.tokenizer, self.folder, self.config = target, tokenizer, folder, config
        self.parts = TargetParts(target)
        self.on_rows = on_rows
        self.corpus = build_corpus(data, tokenizer, folder, on_read=on_read)
        self.text = text_identity(folder, self.corpus)
        if self.corpus.get("chat") and config.text != "fixed":
            raise ValueError(
                f"text={config.text} continues texts, not conversations: learn those with train distill --text fixed"
            )
        self.blocks = corpus_blocks(folder, self.corpus, tokenizer, config.context, config.batch_size, config.seed)

    def held_prompts(self, count: int, length: int) -> Tensor:
        """Evenly spaced pieces of the held-out text, int64 [at most count, length]."""
        tokens = read_tokens(self.folder / "held.bin", self.corpus["dtype"])
        last = len(tokens) - length
        if last < 0:
            return torch.empty(0, length, dtype=torch.long)
        starts = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
        return torch.tensor([tokens[s : s + length].tolist() for s in starts])

    def written_rows(self) -> Tensor:
        """Rows written by the target, int64 [at most ``config.written``, context + 1]; generated once, then read."""
        config = self.config
        return written_rows(
            self.folder, self.target, asdict(self.parts.fingerprint()), self.blocks,
            min(config.written, self.blocks.num_blocks), config.prompt_tokens, config.temperature,
            len(self.tokenizer), self.on_rows,
        )  # fmt: skip

    def written_weights(self, rows: Tensor) -> Tensor:
        """Float32 [n, context]: 1 for positions before written tokens, else 0."""
        weights = torch.ones(rows.shape[0], rows.shape[1] - 1)
        weights[:, : self.config.prompt_tokens - 1] = 0
        return weights

    def source(self, student: Any) -> TrainingText:
        """The text of ``config.text``."""
        config = self.config
        if config.text == "fixed":
            return self.blocks
        if config.text == "teacher":
            rows = self.written_rows()
            return written_text(rows, self.written_weights(rows), config.batch_size, config.seed)
        prompt = config.prompt_tokens

        def write(prompts: Tensor, numbers: Sequence[int]) -> Tensor:
            model = wrap(student, exact="approximate")  # as it will run when it drafts
            new, width = config.context + 1 - prompt, len(self.tokenizer)
            return write_continuations(
                model, prompts, new, config.temperature, config.seed, numbers=numbers, vocab_size=width
            )

        mix = 1.0 if config.text == "policy" else config.mix
        return PolicyText(self.blocks, write, prompt, config.refresh, mix, config.seed)
