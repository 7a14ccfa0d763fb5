"""A draft model with a vocabulary of its own for SmolLM2: tokenizer, text, and the weights that training starts from.

Takes the SIZE tokens that are most frequent in the target's answers, with the tokens that each is merged from, so that
a word whose token is among them is written as the target writes it, and every other one in smaller tokens.  Embeddings
start as the first principal components of the target's.

    python benchmarks/smollm2_draft.py TARGET ANSWERS.jsonl OUT [--size 8192] [--hidden 256] [--layers 2]
    foretoken train lm --data OUT/text.jsonl --out OUT/draft --init-from OUT/init --hidden 256 --layers 2 --heads 4 \\
        --kv-heads 2 --ffn 768 --vocab 8192 --context 512 --batch-size 8 --steps 1200
    foretoken generate TARGET "..." --drafter shared_vocab:OUT/draft,k=4 --compare

TARGET is a Transformers folder, ANSWERS what ``benchmarks/smollm2_text.py`` writes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from foretoken.core.io.files import save_model
from foretoken.training.config import LmConfig
from foretoken.training.lm import build_model

SPECIAL = (0, 1, 2)
"""End of text, and the two that begin and end a turn."""
END = "<|im_end|>"


def main() -> None:
    """Write OUT/text.jsonl and OUT/init."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=768)
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    theirs = AutoTokenizer.from_pretrained(args.target)
    with args.answers.open() as file:
        texts = [rendered(theirs, json.loads(line)["messages"]) for line in file]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    described = json.loads((args.target / "tokenizer.json").read_text())
    whole = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    counts = Counter(i for text in whole.encode_batch(texts, add_special_tokens=False) for i in text.ids)
    token_ids = frequent(described, counts, args.size)
    folder = args.out / "init"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(reduced(described, token_ids), ensure_ascii=False))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text((args.target / name).read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shape = {key: getattr(args, key) for key in ("hidden", "layers", "heads", "kv_heads", "ffn", "context")}
    network = build_model(LmConfig(vocab=len(token_ids), **shape), tokenizer.eos_token_id)
    embedding = load_file(args.target / "model.safetensors")["model.embed_tokens.weight"].float()[token_ids]
    with torch.no_grad():
        network.model.embed_tokens.weight.copy_(components(embedding, args.hidden))
    save_model(network, tokenizer, folder)
    covered = sum(counts[i] for i in token_ids) / counts.total()
    size = sum(p.numel() for p in network.parameters())
    print(f"{len(token_ids)} tokens cover {covered:.1%} of {counts.total():,}; {size:,} parameters")


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """A conversation up to its last answer, whose end the corpus adds."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False)).removesuffix(f"{END}\n")


def frequent(described: dict[str, Any], counts: Counter[int], size: int) -> list[int]:
    """The target's ids of the new vocabulary: single bytes, then the most frequent tokens with all that they are merged
    from, as long as there is room."""
    vocabulary = described["model"]["vocab"]
    pieces = {a + b: (a, b) for a, b in described["model"]["merges"]}
    added = {token["id"] for token in described["added_tokens"]}
    tokens = {token for token, i in vocabulary.items() if token not in pieces and i not in added}
    name = {i: token for token, i in vocabulary.items()}
    for i, _ in counts.most_common():
        more, open_ = set[str](), [] if i in added else [name[i]]
        while open_:
            token = open_.pop()
            if token not in tokens and token not in more:
                more.add(token)
                open_ += pieces.get(token, ())
        if len(tokens) + len(more) + len(SPECIAL) <= size:
            tokens |= more
    return [*SPECIAL, *sorted(vocabulary[token] for token in tokens)]


def reduced(described: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
    """The tokenizer over the kept ids, numbered in their order."""
    model = described["model"]
    names = {i: token for token, i in model["vocab"].items()} | {
        t["id"]: t["content"] for t in described["added_tokens"]
    }
    vocabulary = {names[i]: place for place, i in enumerate(token_ids)}
    merges = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= vocabulary.keys()]
    added = [{**t, "id": vocabulary[t["content"]]} for t in described["added_tokens"] if t["id"] in SPECIAL]
    return {**described, "added_tokens": added, "model": {**model, "vocab": vocabulary, "merges": merges}}


def components(embedding: torch.Tensor, width: int) -> torch.Tensor:
    """[V, width] the first principal components of rows [V, D], as large as a new embedding."""
    centred = embedding - embedding.mean(0)
    found = centred @ torch.linalg.svd(centred, full_matrices=False)[2][:width].T
    return found / found.std() * 0.02


if __name__ == "__main__":
    main()
