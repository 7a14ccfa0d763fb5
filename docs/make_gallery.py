"""Makes ``docs/methods/README.md``, the gallery, from the registry; with ``--pictures`` its pictures from real runs.

The places are those of the articles and the survey behind them (Xia et al. 2024, arXiv 2401.07851).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.lab.report.markup import tag
from foretoken.lab.report.show.picture import LEAST, MARGIN, framed, reasons, text, wrapped
from foretoken.lab.report.show.run import Round
from foretoken.lab.report.show.tree import draw_tree
from foretoken.lab.report.show.why import TraceNode
from foretoken.registry import Row, find, rows

DOCS = Path(__file__).parent
PAGE = DOCS / "methods" / "README.md"
PICTURES = DOCS / "figures" / "methods"


@dataclass(frozen=True)
class Place:
    """A branch of the taxonomy: what it is called, in both languages, and the methods on it."""

    title: str
    chinese: str
    words: str
    role: str
    names: Sequence[str]


PLACES = (
    Place("Independent drafting", "产生草稿 · Independent Drafting（独立的草稿模型）",
          "A second, smaller language model guesses.", "drafter",
          ("model", "pard", "ahead", "online", "shared_vocab", "retokenize")),
    Place("Self-drafting: trained heads", "产生草稿 · Self-Drafting（多头、自回归头、lookahead token）",
          "Small networks on the target's hidden states guess.", "drafter",
          ("bpd", "medusa", "hydra", "eagle", "eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark", "pass_tokens",
           "uno")),
    Place("Self-drafting: a cheaper form of the target", "产生草稿 · Self-Drafting（Early-Exiting、Layer-Skipping 等）",
          "The target guesses with fewer layers, fewer bits or less context.", "drafter",
          ("early_exit", "layer_skip", "swift", "kangaroo", "jump", "quantized", "sparse_kv")),
    Place("Retrieval", "产生草稿 · 基于检索的方法",
          "Text that was seen before is copied; no network is run.", "drafter",
          ("ngram", "ngram_cache", "suffix", "sam", "recycling", "retrieval", "prediction", "known")),
    Place("Parallel decoding", "并行解码 · Jacobi 与 Lookahead",
          "The target's own parallel predictions become the next guesses.", "drafter", ("jacobi", "lookahead")),
    Place("Several drafters", "产生草稿 · 集成与级联（Cascade、Staged）",
          "Drafters are combined, chosen between, or accelerated by each other.", "drafter",
          ("ensemble", "router", "cascade", "staged")),
    Place("For tests", "测试用", "Proposes what it is told.", "drafter", ("scripted",)),
    Place("Termination: static", "终止条件 · Static Setting", "Always the same length.", "controller", ("constant",)),
    Place("Termination: adaptive thresholds", "终止条件 · Adaptive Thresholding",
          "Drafting stops where the draft's own confidence, entropy or a trained head says so.", "controller",
          ("confidence", "draft_verify", "adaedl", "svip", "specdec_pp", "tapout")),
    Place("Termination: heuristic rules", "终止条件 · Heuristic Rules",
          "The length follows the last rounds.", "controller", ("heuristic",)),
    Place("Termination: measured cost", "终止条件 · 系统服务的角度（按实测开销）",
          "Length and drafter follow from measured time, acceptance and batch.", "controller",
          ("auto", "goodput", "bandit")),
    Place("Verification: exact match", "验收标准 · 精确匹配",
          "The target takes its own token, and a draft that equals it is accepted.", "verifier",
          ("greedy", "match", "coupled")),
    Place("Verification: rejection sampling", "验收标准 · 拒绝采样（Rejection Sampling）",
          "A drawn token is accepted as often as the target allows; the rest comes from the residual.", "verifier",
          ("rejection", "block", "point")),
    Place("Verification: token trees", "验证方案 · Token Tree Verification",
          "Several siblings are tried, or whole trees are decided at once.", "verifier",
          ("multi_round", "without_replacement", "kseq", "traversal")),
    Place("Verification: relaxed (lossy)", "验收标准 · Typical Acceptance 等有损标准",
          "More is accepted, and the distribution changes. They need `allow_lossy=True`.", "verifier",
          ("typical", "lenient", "top_k", "distance", "min_block")),
    Place("Shapes of trees", "如何组织树", "Which nodes a tree has.", "tree",
          ("expansion", "medusa_tree", "sequoia", "eagle2", "opt_tree", "cost_aware")),
)  # fmt: skip

INTRO = """# Gallery

<!-- Made by docs/make_gallery.py from the registry: change that, not this. -->

`foretoken methods NAME` says what a method needs and lists its options and training settings, which also end its page
on the site. `foretoken drafters MODEL` says which drafters a model has. *Trained* methods come from
[`foretoken train`](../training.md). The Chinese names are those of the [articles](../zh/articles.md).
Pictures are rounds of the built-in model, drawn by `foretoken show`.
"""


def page() -> str:
    """The gallery.

    Raises:
        ValueError: a method has no place, or several.
    """
    _check()
    return "\n".join([INTRO, *(line for place in PLACES for line in _section(place))])


def _check() -> None:
    placed = [(place.role, name) for place in PLACES for name in place.names]
    known = [(row.role, row.name) for row in rows()]
    wrong = {one for one in known if placed.count(one) != 1} | (set(placed) - set(known))
    if wrong:
        raise ValueError(f"give each method one place in PLACES of docs/make_gallery.py: {sorted(wrong)}")


def _section(place: Place) -> Iterator[str]:
    yield f"## {place.title}\n"
    yield f"*{place.chinese}.* {place.words}\n"
    for name in place.names:
        yield from _entry(find(place.role, name))  # type: ignore[arg-type]


def _entry(row: Row) -> Iterator[str]:
    """A method: what it does, how it is asked for, and its picture; its page names the paper."""
    yield " ".join([f"**[`{row.name}`]({row.name}.md)** {row.summary}", *_notes(row)]) + "\n"
    if picture(row).is_file():
        yield f"![{row.name}](../figures/methods/{picture(row).name})\n"


def _notes(row: Row) -> Iterator[str]:
    if row.example != row.name:
        yield f"`{row.example}`"
    if row.needs_training:
        yield "(trained)"


def picture(row: Row) -> Path:
    """Where a method's picture is, if it has one."""
    return PICTURES / f"{row.role}-{row.name}.svg"


# -- pictures --------------------------------------------------------------------------------------------------------

PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as file:\n        return '
COPYING = (
    "def load(path):\n    with open(path) as file:\n        return file.read()\n\n"
    "def load_lines(path):\n    with open(path) as file:\n        return file.read().splitlines()\n\n"
    "def load_json(path):\n    with open(path) as"
)
COPIERS = ("ngram", "ngram_cache", "suffix", "sam", "known", "retrieval", "recycling")
MOST_NODES = 12
SPECS = {
    "eagle": "eagle,nodes=8,depth=4", "eagle3": "eagle3,nodes=8,depth=4", "medusa": "medusa,nodes=8",
    "peagle": "peagle,nodes=8", "dflash": "dflash,nodes=8", "dflash2": "dflash2,nodes=8", "dspark": "dspark,nodes=8",
    "ahead": "ahead,k=4,fanout=2",
    "pard": "pard,mask=0,k=4,nodes=8", "uno": "uno,k=4,nodes=8",
    "hydra": "hydra,nodes=8", "lookahead": "lookahead,w=3,n=3,g=3", "recycling": "recycling,nodes=8",
    "model": "model,tree=2x2x1", "jacobi": "jacobi,m=4",
    "known": "known,inner=ngram",
}  # fmt: skip
RULES = {
    "greedy": ("model,tree=2x2x1", 0.0), "match": ("model,k=3", 1.0), "coupled": ("model,tree=2x2x1", 1.0),
    "rejection": ("model,k=4", 1.0), "block": ("model,k=4", 1.0), "point": ("ngram,k=4", 1.0),
    "multi_round": ("model,tree=2x2x1,draw=iid", 1.0), "kseq": ("model,tree=2x2x1,draw=iid", 1.0),
    "without_replacement": ("model,tree=2x2x1", 1.0), "traversal": ("model,tree=2x2x1", 1.0),
}  # fmt: skip


def make_pictures(names: Sequence[str]) -> None:
    """Draw a round of every drafter and of every lossless verifier; drafters that cannot be drawn are told."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for row in rows("drafter"):
        if (not names or row.name in names) and row.name != "scripted":
            copies = row.name in (
                "ngram",
                "ngram_cache",
                "suffix",
                "sam",
                "known",
                "retrieval",
                "prediction",
                "recycling",
            )
            _draw(row, SPECS.get(row.name, row.example), "auto", 0.0, COPYING if copies else PROMPT)
    for name, (spec, temperature) in RULES.items():
        if not names or name in names:
            _draw(find("verifier", name), spec, name, temperature, COPYING if spec.startswith("ngram") else PROMPT)


def _draw(row: Row, spec: str, verifier: str, temperature: float, prompt: str) -> None:
    import foretoken as ft
    from foretoken.lab.report.show.run import shown_run

    try:
        llm = ft.load("builtin", spec, verifier, "constant", dtype="float32")
        seed = 7 if verifier in ("auto", "coupled") and temperature else None
        if row.name == "prediction":  # right but for some words
            expected = llm.plain.generate(prompt, max_new_tokens=40).text.replace("file", "text")
            options = {"prediction": expected}
        else:
            options = {}
        out = llm.generate(prompt, max_new_tokens=40, temperature=temperature, seed=seed, explain=True, **options)
    except (ValueError, OSError) as error:
        print(f"{row.name}: {error}", file=sys.stderr)
        return
    run = shown_run(out, llm.tokenizer, "", ())
    picture(row).write_text(tree_picture(run.rounds[run.best()], f"{row.name}: {spec}", MOST_NODES), encoding="utf-8")
    print(f"{row.name}: {out.stats.mean_acceptance_length:.2f} tokens a round", file=sys.stderr)


def tree_picture(one: Round, title: str, most: int) -> str:
    """A round alone, with a title and its reasons; nodes that were never tried are left out above ``most`` nodes."""
    nodes = list(one.nodes)
    dropped = 0
    for kinds in (("probe",), ("untried",), ("rejected",)):
        while len(nodes) > most and (spare := _spare(nodes, kinds)) is not None:
            nodes.remove(spare)
            dropped += 1
    tree = draw_tree(nodes, one.next_token)
    wide = max(LEAST, tree.width + 2 * MARGIN)
    more = f" ({dropped} nodes are not drawn)" if dropped else ""
    parts = [text(MARGIN, 24, title, "title")]
    lines = wrapped(one.caption.split("; draft")[0] + more, int((wide - 2 * MARGIN) / 6.6))
    parts += [text(MARGIN, 44 + 18 * i, line, "soft") for i, line in enumerate(lines)]
    y = 40.0 + 18 * len(lines)
    parts.append(tag("g", tree.markup, transform=f"translate({MARGIN:.0f},{y:.0f})"))
    why, y = reasons(one, y + tree.height + 14)
    return framed([*parts, *why], wide, y + 2, f"{title}; {one.caption}")


def _spare(nodes: Sequence[TraceNode], kinds: Sequence[str]) -> TraceNode | None:
    """The last leaf of such a kind."""
    parents = {node.parent for node in nodes}
    return next((n for n in reversed(nodes) if n.status in kinds and n.index not in parents), None)


def main() -> None:
    """Write the page, and the pictures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", action="store_true", help="draw them anew, which runs every drafter")
    parser.add_argument("names", nargs="*", help="only these pictures")
    arguments = parser.parse_args()
    if arguments.pictures:
        make_pictures(arguments.names)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
