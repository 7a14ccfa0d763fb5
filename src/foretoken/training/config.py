"""Settings of the training commands: every option of ``foretoken train`` that is not a path or a device.

The command options are made from these classes, so nothing here may import PyTorch before a value is checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.core.settings import flag, setting
from foretoken.methods.drafters.learning.losses import check_loss

BLOCK_TEXTS = ("fixed", "target")
"""Text of a drafter: the corpus, or the target's continuations of the beginnings of its blocks."""
TEXTS = ("fixed", "teacher", "policy", "mixed")
"""Text of an alignment: the corpus, the target's text, the student's text, or the last two mixed."""

TEACHER_WEIGHT = 0.7
"""Weight of the teacher in a language model's loss."""
OPTIMIZER_HELP = "muon (AdamW for all but matrices) or adamw (faster on most CPUs)."
PRECISION_HELP = "Precision of matrix products: bfloat16, or float32 (faster on CPUs without bfloat16)."


@dataclass(frozen=True)
class RunConfig:
    """Settings of every run, stored in its checkpoints and compared on resume, except for the schedule.

    Attributes:
        warmup: share of the steps in which the learning rate rises.
        decay: share of the steps in which the learning rate falls to zero.
    """

    steps: int = setting(500, "Optimizer steps.", 1)
    batch_size: int = setting(4, "Blocks per step.", 1)
    context: int = setting(512, "Tokens per block.", 16)
    lr: float = setting(1e-3, "Peak learning rate.", 0.0)
    warmup: float = 0.05
    decay: float = 0.4
    seed: int = setting(0, "Seed of the data order and of all random draws.", 0, 2**31 - 1)

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_size * self.context

    def learning_rate_factor(self, step: int) -> float:
        """Warm-up, plateau, linear decay to zero; in (0, 1] for ``0 <= step < steps``."""
        warm, fall = max(1, round(self.warmup * self.steps)), max(1, round(self.decay * self.steps))
        return min((step + 1) / warm, (self.steps - step) / fall, 1.0)


@dataclass(frozen=True)
class LmConfig(RunConfig):
    """Architecture and recipe of a language model."""

    steps: int = setting(2000, "Optimizer steps.", 1)
    batch_size: int = setting(8, "Blocks per step.", 1)
    context: int = setting(1024, "Tokens per block and the model's context.", 8)
    lr: float = setting(4e-3, "Peak learning rate.", 0.0)
    warmup: float = setting(0.02, "Share of the steps with a rising learning rate.", 0.0, 1.0)
    decay: float = setting(0.35, "Share of the steps in which it falls to zero.", 0.0, 1.0)
    hidden: int = setting(384, "Width of the residual stream.", 8)
    layers: int = setting(8, "Decoder layers.", 1)
    heads: int = setting(6, "Attention heads of a layer.", 1)
    kv_heads: int = setting(2, "Heads of keys and values, by which --heads must be divisible.", 1)
    ffn: int = setting(1024, "Units of a layer's MLP.", 8)
    vocab: int = setting(8192, "Size of a newly trained tokenizer.", 300)
    weight_decay: float = 0.05
    hybrid: bool = setting(
        False, "Qwen3.5's layers, every second one recurrent; --init-from a Llama with half of them."
    )
    optimizer: str = setting("muon", OPTIMIZER_HELP)
    precision: str = setting("bfloat16", PRECISION_HELP)

    def __post_init__(self) -> None:
        check_choices(self.optimizer, self.precision)
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden={self.hidden} must be an even multiple of heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """Settings of a drafter's run.

    Attributes:
        text: ``"fixed"`` (the corpus) or ``"target"`` (the target's continuations of the beginnings of its blocks).
        optimizer: ``"muon"`` (for matrices, AdamW for the rest) or ``"adamw"``.
        precision: precision of products, ``"bfloat16"`` (by autocast) or ``"float32"``.
    """

    text: str = setting("fixed", "fixed (the corpus) or target (text that the target writes).")
    written_blocks: int = setting(256, "Blocks for the target to write.", 1)
    written_temperature: float = setting(1.0, "Temperature at which it writes.", 0.0)
    optimizer: str = setting("muon", OPTIMIZER_HELP)
    precision: str = setting("bfloat16", PRECISION_HELP)

    def __post_init__(self) -> None:
        check_choices(self.optimizer, self.precision)
        if self.text not in BLOCK_TEXTS:
            raise ValueError(f"text must be one of {', '.join(BLOCK_TEXTS)}, not {self.text!r}")


@dataclass(frozen=True)
class DistillConfig(RunConfig):
    """Settings of an alignment run.

    Attributes:
        places: positions predicted in one pass, from masks in all but the first (PARD); 1: no masks.
        taps: hidden states of the target that the student reads beside the tokens (PARD-2), in Transformers' numbering,
            joined by ``+``; ``usual`` for those of the published models; empty for none.
        mask_token: id of the mask; -1: the id in the student's configuration, else a new token after its vocabulary.
        distinct_masks: whether every position after the first has a mask of its own (SpecDec, arXiv 2203.16487), with
            consecutive ids, instead of one for all.
    """

    batch_size: int = setting(4, "Rows per step.", 1)
    context: int = setting(256, "Tokens per row.", 8)
    decay: float = 0.5
    loss: str = setting("fkl", "fkl, rkl, jsd or tvd.")
    text: str = setting("fixed", "fixed, teacher, policy or mixed.")
    mix: float = setting(0.5, "Share of the student's own rows in mixed text.", 0.0, 1.0)
    beta: float = setting(0.5, "Share of the target in the mean distribution of jsd.")
    temperature: float = setting(1.0, "Temperature of written text; 0 writes the most likely tokens.", 0.0)
    prompt: int = setting(0, "Tokens of a row given to a writing model; 0: a quarter.", 0)
    written: int = setting(1024, "Rows for the target to write; they are reused.", 1)
    refresh: int = setting(8, "Steps between two writings of the student.", 1)
    places: int = setting(1, "Draft this many tokens in one pass, by masks (PARD: 8).", 1)
    mask_token: int = setting(-1, "Id of the mask; -1: as configured, else a new token.")
    distinct_masks: bool = flag("With --places: a mask of its own for every position (SpecDec).")
    taps: str = setting("", "With --places: hidden states of the target read beside the tokens (PARD-2): usual.")

    def __post_init__(self) -> None:
        check_loss(self.loss, self.beta)
        if self.text not in TEXTS:
            raise ValueError(f"unknown text {self.text!r}: choose one of {', '.join(TEXTS)}")
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix must be between 0 and 1, not {self.mix}")
        if self.context < 2 or not 0 <= self.prompt < self.context:
            raise ValueError(f"prompt={self.prompt} must leave room to write in a context of {self.context}")
        if self.mask_token < -1 or (self.places == 1 and self.mask_token != -1):
            raise ValueError("mask_token must be a token's id, and goes with places above 1")
        if self.taps and self.layers and self.places == 1:  # a run without taps is checked without importing PyTorch
            raise ValueError("taps, the target's states beside the tokens, go with places above 1")
        if self.distinct_masks and (self.places < 3 or self.taps):
            raise ValueError("distinct_masks goes with places above 2, and without taps")
        if self.places >= self.context:
            raise ValueError(f"places={self.places} must be fewer than the {self.context} tokens of a row")
        for name in ("steps", "batch_size", "written", "refresh", "places"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a row that serve as the prompt of a generating model."""
        return self.prompt or max(1, self.context // 4)

    @property
    def layers(self) -> tuple[int, ...]:
        """The hidden states of :attr:`taps`.  Raises ``ValueError`` unless they are ``usual`` or numbers joined by
        ``+``."""
        from foretoken.training.state_rows import layers_of

        return layers_of(self.taps)


@dataclass(frozen=True)
class AnswerConfig:
    """Settings of the target's answers.  The draws of an answer depend on ``seed`` and the conversation's number."""

    tokens: int = setting(256, "Most tokens of such an answer.", 1)
    temperature: float = setting(0.7, "Temperature of such answers; 0 is greedy.", 0.0)
    batch: int = setting(64, "Chats that are answered at once.", 1)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class Intervals:
    """Intervals between checkpoints and measurements."""

    save_every: int = setting(100, "Steps between two checkpoints.", 1)
    save_minutes: float = setting(5.0, "Minutes between two checkpoints; SIGTERM and Ctrl-C write one, too.", 0.0)
    eval_every: int = setting(100, "Steps between two measurements on held-out text.", 1)


def check_context(context: int, longest: int, whose: str = "target's") -> None:
    """Raise ``ValueError`` for rows longer than a model's context."""
    if context > longest:
        raise ValueError(f"--context {context} is longer than the {whose} {longest}: give a smaller one")


def check_choices(optimizer: str, precision: str) -> None:
    """Raise ``ValueError`` for an unknown optimizer or precision."""
    # Muon orthogonalises in bfloat16, which costs more than the rest of a step on a CPU without bfloat16 products.
    optimizers, precisions = ("muon", "adamw"), ("bfloat16", "float32")
    for name, value, choices in (("optimizer", optimizer, optimizers), ("precision", precision, precisions)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
