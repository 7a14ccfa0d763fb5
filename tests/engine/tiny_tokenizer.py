"""A byte-level BPE tokenizer that is trained on the spot, and a table model that writes a given text with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from toys import MarkovTable

TEXT = (
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n"
    "The cat sat on the mat. The dog ran to the cat. STOP here and END there.\n"
    "Größe, naïve, 東京, 🙂🚀, café; größer als der Ärger: naïve cafés in 東京.\n"
)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """About 330 tokens; ``<eos>`` is special; characters outside ASCII often take several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT.split("Größe")[0]] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


def ids_of(text: str) -> list[int]:
    """Token ids of a text."""
    ids: list[int] = tokenizer()(text)["input_ids"]
    return ids


class Writer(MarkovTable):
    """Writes a given output, whatever the prompt: the distribution is one-hot at the next token, then ``<eos>``."""

    def __init__(self, output: Sequence[int], prompt_length: int) -> None:
        super().__init__(lambda prefix: [], len(tokenizer()), eos_token_ids={eos()})
        self.output, self.prompt_length = list(output), prompt_length

    def distribution(self, prefix: Sequence[int]):  # type: ignore[no-untyped-def]
        """[V] one-hot."""
        import torch

        at = len(prefix) - self.prompt_length
        token = self.output[at] if at < len(self.output) else eos()
        return torch.nn.functional.one_hot(torch.tensor(token), self.vocab_size).double()


def eos() -> int:
    """The id of ``<eos>``."""
    return int(tokenizer().convert_tokens_to_ids("<eos>"))


TEMPLATE = (
    "{{ '<eos>' }}{% for message in messages %}"
    "{% if message['role'] == 'robot' %}{{ raise_exception('no robots here') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if mood is defined %}{{ mood + '\\n' }}{% endif %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def chat_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """The same tokens, with a chat template and a beginning-of-text token that both it and the tokenizer write."""
    from tokenizers import processors

    backend = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", eos())])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<eos>", eos_token="<eos>", pad_token="!", chat_template=template
    )
