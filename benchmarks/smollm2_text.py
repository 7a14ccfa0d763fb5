"""The text that SmolLM2's drafters learn from: questions of many kinds, and SmolLM2's own answers to them.

Questions are those of data sets that are given (JSONL with ``turns``, ``question``, ``prompt`` or ``text``; HumanEval's
tasks as they are), questions made of topics and tasks, and such as the model asks itself when it is given the beginning
of a user's turn (Magpie, arXiv 2406.08464).  Three answers in five are greedy, the others at T=1, all of at most 128
tokens.  The model runs in batches of 128 in bfloat16, which is several times faster than one text at a time; a text
that differs from the engine's by a near-tie is as good to learn from.

    python benchmarks/smollm2_text.py FOLDER --data FILE.jsonl ... --out answers.jsonl [--made 720] [--asked 640]

FOLDER is SmolLM2-135M-Instruct as a Transformers folder.  The file goes to ``foretoken train METHOD --data``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from smollm2_heads import QUESTIONS
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH, NEW_TOKENS, LONGEST = 128, 128, 900
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
STARTS = ("", "", "What", "How", "Can you", "Write", "I", "Explain", "Why", "Please", "Create", "Tell me", "Describe")
TOPICS = (
    "volcanoes", "bicycles", "coffee", "honey bees", "chess", "renewable energy", "sleep", "the Moon", "bread",
    "black holes", "the stock market", "photosynthesis", "whales", "robots", "the printing press", "vaccines",
    "glaciers", "jazz", "maps", "inflation", "the Roman Empire", "electric cars", "friendship", "deserts", "dinosaurs",
    "recycling", "earthquakes", "trains", "the internet", "gravity", "knitting", "democracy", "satellites", "batteries",
    "mushrooms", "poetry", "penguins", "insurance", "gardening", "tides", "machine learning", "vitamins", "bridges",
    "spiders", "photography", "the brain", "the Olympics", "data privacy", "submarines", "clouds", "traffic jams",
)  # fmt: skip
PEOPLE = ("my neighbour", "my manager", "a new colleague", "my teacher", "a customer", "a hotel", "my bank", "my team")
MATTERS = (
    "a parcel that never arrived", "a birthday party on Saturday", "asking for a day off", "a broken washing machine",
    "a wrong bill", "moving to another city", "a project that is late", "a dinner invitation", "a missed appointment",
)  # fmt: skip
SKILLS = ("juggling", "Spanish", "cooking", "drawing", "swimming", "dancing", "calligraphy", "baking bread")
TASKS = (
    "What is interesting about {topic}?", "Give me three facts about {topic}.", "Write a short poem about {topic}.",
    "How do {topic} and {other} differ?", "Tell me a short story about {topic} and {other}.",
    "What is the history of {topic}?", "Explain {topic} in simple words.", "What would happen without {topic}?",
    "Write an introduction for an essay about {topic}.", "What are the advantages and disadvantages of {topic}?",
    "Write an email to {person} about {matter}.", "I have a problem: {matter}. What should I do?",
    "How do I begin with {skill}?", "What mistakes do beginners make in {skill}?", "Give me tips on {skill}.",
    "Write a dialogue between a student and a professor about {topic}.", "Write a quiz with four questions on {topic}.",
    "Suggest names for a podcast about {topic}.", "Write a blog post about {topic}.", "Which jobs are about {topic}?",
    "Describe {topic} to someone who has never heard of it.", "Write a speech of one minute on {topic}.",
)  # fmt: skip


class Writer:
    """Writes behind many prompts at once.

    Args:
        folder: the model.
    """

    def __init__(self, folder: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text that has its special tokens already."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    @torch.inference_mode()
    def write(
        self, prompts: Sequence[list[int]], temperatures: Sequence[float], most: int, seed: int
    ) -> list[list[int]]:
        """New tokens of each prompt, its end of turn included."""
        end, generator = self.tokenizer.eos_token_id, torch.Generator().manual_seed(seed)
        longest = max(map(len, prompts))
        ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        hot = torch.tensor(temperatures)
        rows, cache, found = torch.arange(len(prompts)), None, [list[int]() for _ in prompts]
        for _ in range(most):
            places = mask.cumsum(-1)[:, -ids.shape[1] :].sub(1).clamp_min(0)
            out = self.model(ids, attention_mask=mask, position_ids=places, past_key_values=cache, logits_to_keep=1)
            cache, logits = out.past_key_values, out.logits[:, -1].float()
            drawn = torch.softmax(logits / hot[rows, None].clamp_min(1e-3), -1)
            new = torch.where(hot[rows] > 0, drawn.multinomial(1, generator=generator)[:, 0], logits.argmax(-1))
            for row, token in zip(rows.tolist(), new.tolist(), strict=True):
                found[row].append(token)
            kept = (new != end).nonzero()[:, 0]
            if not len(kept):
                break
            if len(kept) < len(rows):  # what has ended costs nothing any more
                cache.batch_select_indices(kept)
            rows, ids = rows[kept], new[kept, None]
            mask = torch.cat([mask[kept], torch.ones(len(kept), 1, dtype=mask.dtype)], -1)
        return found


def given(files: Sequence[Path]) -> Iterator[str]:
    """The first questions of data sets."""
    for file in files:
        data = file.read_bytes()
        for row in map(json.loads, (gzip.decompress(data) if file.suffix == ".gz" else data).splitlines()):
            text = (row.get("turns") or [row.get("question") or row.get("prompt") or row["text"]])[0]
            yield f"Complete this function:\n\n{text}" if "entry_point" in row else text


def composed(count: int, draw: random.Random) -> set[str]:
    """Questions made of tasks and topics."""
    found = set[str]()
    while len(found) < count:
        topic, other = draw.sample(TOPICS, 2)
        parts = {"person": draw.choice(PEOPLE), "matter": draw.choice(MATTERS), "skill": draw.choice(SKILLS)}
        found.add(draw.choice(TASKS).format(topic=topic, other=other, **parts))
    return found


def asked(writer: Writer, count: int) -> Iterator[str]:
    """Questions that the model asks itself."""
    before = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    for first in range(0, count, BATCH):
        starts = [STARTS[number % len(STARTS)] for number in range(first, min(first + BATCH, count))]
        prompts = [writer.ids(before + start) for start in starts]
        for start, new in zip(starts, writer.write(prompts, [0.8] * len(prompts), 72, first), strict=True):
            text = start + writer.tokenizer.decode(new[:-1])
            if new[-1] == writer.tokenizer.eos_token_id and text.isascii() and "<|" not in text and len(text) > 15:
                yield text


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--data", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--made", type=int, default=720)
    parser.add_argument("--asked", type=int, default=640)
    args = parser.parse_args()
    writer, draw = Writer(args.folder), random.Random(0)
    held = {text for texts in QUESTIONS.values() for text in texts}
    questions = [*given(args.data), *sorted(composed(args.made, draw)), *asked(writer, args.asked)]
    texts = [text.strip() for text in dict.fromkeys(questions) if len(text) < LONGEST and text.strip() not in held]
    draw.shuffle(texts)
    with args.out.open("w", encoding="utf-8") as file:
        for first in range(0, len(texts), BATCH):
            group = texts[first : first + BATCH]
            chats = [[{"role": "user", "content": text}] for text in group]
            rendered = [
                writer.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats
            ]
            temperatures = [float(number % 5 > 2) for number in range(len(group))]
            written = writer.write([writer.ids(text) for text in rendered], temperatures, NEW_TOKENS, first)
            for chat, new in zip(chats, written, strict=True):
                ended = new[-1] == writer.tokenizer.eos_token_id
                answer = {"role": "assistant", "content": writer.tokenizer.decode(new[:-1] if ended else new)}
                row = {"messages": [*chat, answer], **({} if ended else {"unfinished": [1]})}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            print(f"{first + len(group)} of {len(texts)} answered", flush=True)


if __name__ == "__main__":
    main()
