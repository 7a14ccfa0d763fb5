"""The text that SmolLM2's drafters learn from: questions of many kinds, and SmolLM2's own answers to them.

Questions are those of data sets that are given (JSONL with ``turns``, ``question``, ``prompt`` or ``text``; HumanEval's
tasks as they are), questions made of topics and tasks, and such as the model asks itself when it is given the beginning
of a user's turn (Magpie, arXiv 2406.08464).  Three answers in five are greedy, the others at T=1, all of at most 144
tokens.  Sixty-four are written at once: about 550 tokens/s on two cores with AMX.

    python benchmarks/smollm2_text.py MODEL [--data FILE.jsonl ...] --out answers.jsonl [--made 1200] [--asked 3200]

MODEL is SmolLM2-135M-Instruct: ``smollm2``, a GGUF file or a folder.  The file goes to ``foretoken train METHOD
--data``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from smollm2_heads import QUESTIONS

import foretoken as ft

BATCH, NEW_TOKENS, LONGEST = 64, 144, 900
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
        model: a GGUF file or a Transformers folder.
    """

    def __init__(self, model: str) -> None:
        self.llm = ft.load(model, drafter=None, prefix_cache=False, generation_config=None)
        self.tokenizer: Any = self.llm.tokenizer

    def ids(self, text: str) -> list[int]:
        """Tokens of a text that has its special tokens already."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def write(self, prompts: Sequence[Any], temperature: float, most: int, seed: int) -> list[tuple[str, bool]]:
        """What the model writes behind each prompt (ids or messages), and whether it came to an end."""
        seeds = [1000 * seed + number for number in range(len(prompts))]
        outs = self.llm.generate(list(prompts), max_new_tokens=most, temperature=temperature, seed=seeds)
        end = self.tokenizer.eos_token_id
        texts = [self.tokenizer.decode([token for token in out.token_ids if token != end]) for out in outs]
        return [(text, out.finish_reason != "length") for text, out in zip(texts, outs, strict=True)]


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
        completions = writer.write([writer.ids(before + start) for start in starts], 0.9, 80, first)
        for start, (rest, ended) in zip(starts, completions, strict=True):
            text = start + rest
            if ended and "<|" not in text and len(text) > 15:
                yield text


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--made", type=int, default=1200)
    parser.add_argument("--asked", type=int, default=3200)
    args = parser.parse_args()
    writer, draw = Writer(args.model), random.Random(0)
    held_out = {text for texts in QUESTIONS.values() for text in texts}
    questions = [*given(args.data), *sorted(composed(args.made, draw)), *asked(writer, args.asked)]
    texts = [text.strip() for text in dict.fromkeys(questions) if len(text) < LONGEST and text.strip() not in held_out]
    draw.shuffle(texts)
    with args.out.open("w", encoding="utf-8") as file:
        for first in range(0, len(texts), BATCH):
            group = texts[first : first + BATCH]
            chats = [[{"role": "user", "content": text}] for text in group]
            hot = float(first // BATCH % 5 > 2)
            for chat, (text, ended) in zip(chats, writer.write(chats, hot, NEW_TOKENS, first), strict=True):
                answer = {"role": "assistant", "content": text}
                row = {"messages": [*chat, answer], **({} if ended else {"unfinished": [1]})}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            print(f"{first + len(group)} of {len(texts)} answered", flush=True)


if __name__ == "__main__":
    main()
