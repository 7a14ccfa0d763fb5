"""Makes ``docs/methods/README.md``, the gallery, from the registry; with ``--pictures`` its pictures from real runs.

The branches are those of the articles and the survey behind them (Xia et al. 2024, arXiv 2401.07851).
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
class Branch:
    """A branch of the taxonomy: its name in both languages, what its methods have in common, and their names."""

    title: str
    chinese: str
    role: str
    names: Sequence[str]
    words: str = ""


BRANCHES = (
    Branch("Independent drafting", "产生草稿 · Independent Drafting（独立的草稿模型）", "drafter",
           ("model", "pard", "ahead", "online", "shared_vocab", "retokenize")),
    Branch("Self-drafting: trained heads", "产生草稿 · Self-Drafting（多头、自回归头、lookahead token）", "drafter",
           ("bpd", "medusa", "hydra", "eagle", "eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark",
            "pass_tokens", "uno")),
    Branch("Self-drafting: a cheaper form of the target",
           "产生草稿 · Self-Drafting（Early-Exiting、Layer-Skipping 等）", "drafter",
           ("early_exit", "layer_skip", "swift", "kangaroo", "jump", "quantized", "sparse_kv")),
    Branch("Retrieval", "产生草稿 · 基于检索的方法", "drafter",
           ("ngram", "ngram_cache", "suffix", "sam", "recycling", "retrieval", "prediction", "known"),
           "No network is run."),
    Branch("Parallel decoding", "并行解码 · Jacobi 与 Lookahead", "drafter", ("jacobi", "lookahead")),
    Branch("Several drafters", "产生草稿 · 集成与级联（Cascade、Staged）", "drafter",
           ("ensemble", "router", "cascade", "staged")),
    Branch("For tests", "测试用", "drafter", ("scripted",)),
    Branch("Termination: static", "终止条件 · Static Setting", "controller", ("constant",)),
    Branch("Termination: adaptive thresholds", "终止条件 · Adaptive Thresholding", "controller",
           ("confidence", "draft_verify", "adaedl", "svip", "specdec_pp", "tapout")),
    Branch("Termination: heuristic rules", "终止条件 · Heuristic Rules", "controller", ("heuristic",)),
    Branch("Termination: measured cost", "终止条件 · 系统服务的角度（按实测开销）", "controller",
           ("auto", "goodput", "prefix", "bandit")),
    Branch("Verification: exact match", "验收标准 · 精确匹配", "verifier", ("greedy", "match", "coupled")),
    Branch("Verification: rejection sampling", "验收标准 · 拒绝采样（Rejection Sampling）", "verifier",
           ("rejection", "block", "point")),
    Branch("Verification: token trees", "验证方案 · Token Tree Verification", "verifier",
           ("multi_round", "without_replacement", "kseq", "traversal")),
    Branch("Verification: relaxed (lossy)", "验收标准 · Typical Acceptance 等有损标准", "verifier",
           ("typical", "lenient", "top_k", "distance", "min_block"),
           "These rules change the output distribution and need `allow_lossy=True`."),
    Branch("Shapes of trees", "如何组织树", "tree",
           ("expansion", "medusa_tree", "sequoia", "eagle2", "opt_tree", "cost_aware")),
)  # fmt: skip

INTRO = """# Gallery

<!-- Made by docs/make_gallery.py from the registry: change that, not this. -->

`foretoken methods NAME` lists a method's needs, options and training settings, which also end its page on the site;
`foretoken drafters MODEL` lists a model's drafters. *Trained* methods come from [`foretoken train`](../training.md).
Chinese names are those of the [articles](../zh/articles.md). Pictures are rounds of the built-in model
(`foretoken show`).
"""


def page() -> str:
    """The gallery.

    Raises:
        ValueError: a method is on no branch, or on several.
    """
    _check()
    return "\n".join([INTRO, *(line for branch in BRANCHES for line in _section(branch))])


def _check() -> None:
    placed = [(branch.role, name) for branch in BRANCHES for name in branch.names]
    known = [(row.role, row.name) for row in rows()]
    wrong = {one for one in known if placed.count(one) != 1} | (set(placed) - set(known))
    if wrong:
        raise ValueError(f"put each method on one branch in BRANCHES of docs/make_gallery.py: {sorted(wrong)}")


def _section(branch: Branch) -> Iterator[str]:
    yield f"## {branch.title}\n"
    yield f"*{branch.chinese}.* {branch.words}".rstrip() + "\n"
    for name in branch.names:
        yield from _entry(find(branch.role, name), branch)  # type: ignore[arg-type]


def _entry(row: Row, branch: Branch) -> Iterator[str]:
    """A method: what it does, whether it is trained unless the title says so, and its picture."""
    trained = " (trained)" if row.needs_training and "trained" not in branch.title else ""
    yield f"**[`{row.name}`]({row.name}.md)** {row.summary}{trained}\n"
    if picture(row).is_file():
        yield f"![{row.name}](../figures/methods/{picture(row).name})\n"


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
    copiers = next(branch.names for branch in BRANCHES if branch.title == "Retrieval")
    for row in rows("drafter"):
        if (not names or row.name in names) and row.name != "scripted":
            _draw(row, SPECS.get(row.name, row.example), "auto", 0.0, COPYING if row.name in copiers else PROMPT)
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
    tree = draw_tree(nodes, one.next_token, one.origin)
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
