"""The catalogue: one row per method, whose class is imported when used.

A spec string is ``name[:path][,key=value...]``; keys and types come from the class's constructor, so a new option needs
no code here.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from foretoken.core.names import unknown
from foretoken.core.outside import check_code, class_in_file, installed, installed_class, is_code
from foretoken.core.specs import Option, described_options
from foretoken.core.specs import Spec as Spec
from foretoken.core.specs import convert_options as convert_options
from foretoken.core.specs import options_of as options_of
from foretoken.core.specs import parse_spec as parse_spec
from foretoken.core.specs import split_specs as split_specs

Role = Literal["drafter", "verifier", "controller", "tree"]
EXAMPLES: dict[Role, tuple[str, ...]] = {
    "drafter": ("model", "ngram", "eagle3"),
    "verifier": ("coupled", "block", "traversal"),
    "controller": ("auto", "constant", "goodput"),
}
"""Examples from the long lists."""


@dataclass(frozen=True)
class Row:
    """One method of the catalogue.

    Attributes:
        name: registry key = file name = method name.
        role: its axis.
        target: ``module:Class`` below ``foretoken``.
        paper: title or arXiv number with its year; empty for folklore.
        summary: one sentence.
        kind: how a drafter's siblings are drawn, or the kinds that a verifier supports.
        lossless: whether the target's distribution is kept.
        needs_training: whether it needs trained weights.
        improves_by_training: whether it runs on any target, but better on one trained for it.
        needs: requirements beyond the target's logits, in words.
        reads: object at the path in its spec: a language model or a datastore; empty for its own trained weights, or no
            path.
        draft_model: what a row that reads a language model asks of it, besides the target's tokenizer.
        example: for a drafter, a spec string that runs on the built-in target as shipped.
    """

    name: str
    role: Role
    target: str
    paper: str
    summary: str
    kind: str = ""
    lossless: bool = True
    needs_training: bool = False
    improves_by_training: bool = False
    needs: str = ""
    reads: Literal["", "model", "datastore"] = ""
    draft_model: Literal["", "mask token", "any tokenizer", "tree attention"] = ""
    example: str = ""

    def load(self) -> type[Any]:
        """Import and return the class."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(f"foretoken.{module}"), name)

    def public(self) -> dict[str, Any]:
        """The row in the JSON of ``foretoken methods``."""
        keys = ("name", "role", "paper", "lossless", "needs_training", "needs", "kind", "example", "summary")
        return {key: getattr(self, key) for key in keys}

    def options(self) -> list[Option]:
        """The options of its spec; imports the class."""
        return described_options(self.load())


@dataclass(frozen=True)
class OutsideRow(Row):
    """A drafter from outside the package: its name is ``file.py:Class``, or an entry point's."""

    def load(self) -> type[Any]:
        """Import and return the class. Raises ``ValueError`` with class, rule and line if it is no drafter."""
        return class_in_file(self.name) if is_code(self.name) else installed_class(self.name)


def _row(role: Role, name: str, cls: str, paper: str, summary: str, kind: str = "", **more: Any) -> Row:
    more.setdefault("example", name)
    return Row(name, role, f"methods.{role}s.{name}:{cls}", paper, summary, kind, **more)


_drafter, _verifier = partial(_row, "drafter"), partial(_row, "verifier")
_controller, _tree = partial(_row, "controller"), partial(_row, "tree")

ROWS: tuple[Row, ...] = (
    # Drafters without training.
    _drafter("model", "ModelDrafter", "Leviathan et al. 2023, arXiv 2211.17192; SpecInfer, arXiv 2305.09781",
             "Drafts a chain or a tree with a smaller language model of the same tokenizer.",
             kind="iid, without_replacement or point", needs="draft model", reads="model",
             example="model,k=4"),
    _drafter("pard", "PardDrafter", "PARD, arXiv 2504.18583",
             "Drafts all positions in one forward of a draft model trained to predict mask tokens.",
             kind="iid or point", needs="draft model with a mask token; tree attention", reads="model",
             draft_model="mask token", example="pard,mask=0,k=4"),
    _drafter("ahead", "AheadDrafter", "Speculative speculative decoding (Saguaro), arXiv 2603.03251",
             "Drafts for the likely outcomes of a round while the target is still verifying it.",
             kind="iid or point", needs="draft model", reads="model", example="ahead,k=4,fanout=2"),
    _drafter("online", "OnlineDrafter", "Online speculative decoding, arXiv 2310.07177",
             "Drafts with a model that is trained while serving, on positions the target rejected.",
             kind="iid, without_replacement or point", needs="draft model", reads="model",
             example="online,k=4"),
    _drafter("shared_vocab", "SharedVocabDrafter", "TLI, Timor et al. 2025, arXiv 2502.05202",
             "Drafts with a model of another tokenizer, restricted to the shared vocabulary.",
             kind="iid, without_replacement or point", needs="draft model and its tokenizer",
             reads="model", draft_model="any tokenizer", example="shared_vocab,k=4"),
    _drafter("retokenize", "RetokenizeDrafter", "SLEM, Timor et al. 2025, arXiv 2502.05202",
             "Drafts with a model of any tokenizer and re-encodes its text for the target.", kind="point",
             needs="draft model and its tokenizer", reads="model", draft_model="any tokenizer",
             example="retokenize,k=4"),
    _drafter("ngram", "NgramDrafter", "Prompt lookup decoding, Saxena 2023",
             "Copies the tokens after the latest occurrence of the longest matching n-gram.", kind="point"),
    _drafter("jacobi", "JacobiDrafter", "Santilli et al. 2023, arXiv 2305.10427",
             "Drafts a window of tokens and refines it with the target's predictions (Jacobi).", kind="point",
             improves_by_training=True, example="jacobi,m=8"),
    _drafter("lookahead", "LookaheadDrafter", "Fu et al. 2024, arXiv 2402.02057",
             "Drafts from a pool of n-grams collected by parallel Jacobi iterations (lookahead).",
             kind="point", needs="tree attention", example="lookahead,w=7,n=5,g=7"),
    _drafter("ngram_cache", "NgramCacheDrafter", "llama.cpp's lookup, 2024",
             "Drafts frequent n-gram continuations from the request, past outputs and a corpus.",
             kind="point"),
    _drafter("suffix", "SuffixDrafter", "SuffixDecoding, arXiv 2411.04975",
             "Drafts the most frequent continuation of a suffix in the request and past outputs.",
             kind="point"),
    _drafter("sam", "SamDrafter", "SAM-Decoding, arXiv 2411.10666",
             "Copies the tokens after the longest earlier suffix match, by a suffix automaton.", kind="point"),
    _drafter("recycling", "RecyclingDrafter", "Token Recycling, arXiv 2408.08696",
             "Drafts a tree from a table of the target's latest top-8 tokens after every token.", kind="point",
             needs="tree attention"),
    _drafter("prediction", "PredictionDrafter", "OpenAI's predicted outputs, 2024",
             "Drafts from an expected answer and realigns with it after every mismatch.", kind="point",
             needs="prediction=... in generate"),
    _drafter("known", "KnownDrafter", "jump-forward decoding, SGLang 2024; predicted outputs, 2024",
             "Drafts tokens that a grammar forces or the caller predicts, else uses a drafter.", kind="any",
             needs="constraint=... or prediction=... in generate for its own drafts", example="known,inner=ngram"),
    _drafter("retrieval", "RetrievalDrafter", "REST, arXiv 2311.08252",
             "Drafts a trie of the most frequent continuations of the context in a datastore.", kind="point",
             needs="tree attention; datastore (a small one of Python sources by default)", reads="datastore"),
    _drafter("early_exit", "EarlyExitDrafter", "LayerSkip, arXiv 2404.16710",
             "Drafts with the target's first layers and reuses their KV cache in verification.",
             kind="iid, without_replacement or point", needs="layer windows", improves_by_training=True),
    _drafter("layer_skip", "LayerSkipDrafter", "Draft & Verify, arXiv 2309.08168",
             "Drafts with the target, skipping a set of its attention and MLP sublayers.",
             kind="iid, without_replacement or point", needs="layer windows"),
    _drafter("swift", "SwiftDrafter", "SWIFT, arXiv 2410.06916",
             "Drafts with the target, skipping sublayers chosen by a search during generation.", kind="point",
             needs="layer windows, tree attention"),
    _drafter("quantized", "QuantizedDrafter", "ML-SpecQD, arXiv 2503.13565; QSpec, arXiv 2410.11305",
             "Drafts with the target's weights quantised to 8 or 4 bits, on the target's KV cache.",
             kind="iid, without_replacement or point", needs="a target with nn.Linear layers on a CPU",
             example="quantized,bits=8,k=5"),
    _drafter("ensemble", "EnsembleDrafter", "SpecInfer, arXiv 2305.09781",
             "Merges the drafts of several drafters into one tree for verification.",
             kind="iid, without_replacement or point", needs="tree attention; what its members need",
             example="ensemble,drafters=(model,k=4|ngram)"),
    _drafter("router", "RouterDrafter", "",
             "Drafts with one of several drafters, chosen per round by the controller or a rule.",
             kind="iid, without_replacement or point", needs="what its members need",
             example="router,drafters=(model,k=4|ngram|suffix)"),
    _drafter("cascade", "CascadeDrafter", "Chen et al. 2023, arXiv 2312.11462",
             "Drafts with a draft model that a smaller drafter accelerates, to any depth.",
             kind="iid or point", needs="draft model", reads="model",
             example="cascade,k=8,inner=(ngram,n=3,k=8)"),
    _drafter("staged", "StagedDrafter", "Spector, Re 2023, arXiv 2308.04623",
             "Drafts as cascade does, and adds siblings from the draft model's distributions.",
             kind="without_replacement, iid or point", needs="draft model; tree attention", reads="model",
             draft_model="tree attention", example="staged,k=6,width=3"),
    _drafter("sparse_kv", "SparseKvDrafter", "TriForce, arXiv 2404.11912",
             "Drafts with the target on the chunks of its KV cache that match the last query best.",
             kind="iid, without_replacement or point", needs="KV cache", example="sparse_kv,budget=64"),
    # Drafters that are trained for one target.
    _drafter("medusa", "MedusaDrafter", "Medusa, arXiv 2401.10774",
             "Drafts a tree with heads that predict the next positions from the last hidden state.",
             kind="point", needs="hidden states; tree attention; trained heads", needs_training=True),
    _drafter("hydra", "HydraDrafter", "Hydra, arXiv 2402.05109",
             "Drafts a tree level by level with heads that also read the tokens drafted before.",
             kind="point", needs="hidden states; tree attention; trained heads", needs_training=True),
    _drafter("bpd", "BpdDrafter", "Stern et al. 2018, arXiv 1811.03115",
             "Drafts a block with extra heads, in the forward that verifies the previous block.",
             kind="point", needs="hidden states; trained heads", needs_training=True),
    _drafter("eagle", "EagleDrafter", "EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858",
             "Drafts a dynamic tree with one decoder layer over the target's hidden states.",
             kind="iid or point", needs="hidden states; tree attention; trained head", needs_training=True),
    _drafter("eagle3", "Eagle3Drafter", "EAGLE-3, arXiv 2503.01840",
             "Drafts a dynamic tree with one layer over features of three depths of the target.",
             kind="iid or point", needs="hidden states; tree attention; trained network", needs_training=True),
    _drafter("peagle", "PeagleDrafter", "P-EAGLE, arXiv 2602.01469",
             "Drafts all positions in one forward of an EAGLE-3 network, from a learned state.",
             kind="iid or point", needs="hidden states; tree attention; trained network", needs_training=True),
    _drafter("mtp", "MtpDrafter", "DeepSeek-V3, arXiv 2412.19437",
             "Drafts with multi-token prediction modules, trained or from the target's checkpoint.",
             kind="iid or point", needs="hidden states; trained module", needs_training=True),
    _drafter("dflash", "DflashDrafter", "DFlash, arXiv 2602.06036",
             "Drafts a block in one forward of a small network over the target's hidden states.",
             kind="iid or point", needs="hidden states; tree attention; trained network", needs_training=True),
    _drafter("dflash2", "Dflash2Drafter", "DFlash2, z-lab 2026; JetSpec, arXiv 2606.18394",
             "Drafts as dflash does, with convolutions along the block and scores of token pairs.",
             kind="iid or point", needs="hidden states; tree attention; trained network", needs_training=True),
    _drafter("dspark", "DsparkDrafter", "DSpark, arXiv 2607.05147",
             "Drafts a block in one forward, with a token-pair correction and a trained stop head.",
             kind="iid or point", needs="hidden states; tree attention; trained network", needs_training=True),
    _drafter("kangaroo", "KangarooDrafter", "Kangaroo, arXiv 2404.18911",
             "Drafts with the target's first layers and a trained attention block (adapter).",
             kind="iid, without_replacement or point", needs="layer windows; hidden states; trained adapter",
             needs_training=True),
    _drafter("jump", "JumpDrafter", "economize 0.3.2 (jump drafting)",
             "Drafts with a few middle layers of the target, on input that a network predicts.",
             kind="iid, without_replacement or point", needs="layer windows; hidden states; trained predictor",
             needs_training=True),
    _drafter("pass_tokens", "PassTokensDrafter", "PaSS, arXiv 2311.13581",
             "Drafts with learned look-ahead tokens in the forward that verifies the last draft.",
             kind="iid or point", needs="tree attention; trained token embeddings", needs_training=True),
    _drafter("uno", "UnoDrafter", "UNO, arXiv 2609.04010",
             "Drafts in one target forward over noise inputs, with low-rank updates in their rows.",
             kind="iid, without_replacement or point", needs="layer windows; trained updates", needs_training=True),
    _drafter("scripted", "ScriptedDrafter", "", "Drafts tokens from a script, for tests and demonstrations.",
             kind="point", example="scripted,tokens=32 262 13"),
    # Verifiers: lossless.
    _verifier("greedy", "GreedyVerifier", "Stern et al. 2018, arXiv 1811.03115",
              "Accepts the longest path of argmax tokens (temperature 0).", "any"),
    _verifier("match", "MatchVerifier", "naive speculative decoding; NSS in arXiv 2310.15141",
              "Samples the target's token at each node and accepts the child that equals it.", "any"),
    _verifier("rejection", "RejectionVerifier", "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, 2302.01318",
              "Accepts a chain's tokens with probability min(1, p/q), else samples the residual.", "iid, point"),
    _verifier("block", "BlockVerifier", "Sun et al. 2024, arXiv 2403.10444",
              "Verifies a whole chain jointly; no lossless rule accepts more of a chain.", "iid, point"),
    _verifier("point", "PointVerifier", "EAGLE-2, arXiv 2406.16858",
              "Accepts deterministic children, each with its remaining target probability.", "point"),
    _verifier("coupled", "CoupledVerifier", "Daliri, Musco, Suresh 2024, arXiv 2408.07978",
              "Couples target and draft sampling by Gumbel noise, so the seed fixes the output.", "any"),
    _verifier("multi_round", "MultiRoundVerifier", "SpecInfer, arXiv 2305.09781",
              "Verifies independent siblings one by one, by rejection sampling on the residual.", "iid, point"),
    _verifier("without_replacement", "WithoutReplacementVerifier", "arXiv 2402.14160; Sequoia, arXiv 2402.12374",
              "Verifies siblings drawn without replacement by recursive rejection sampling.",
              "without_replacement, point"),
    _verifier("kseq", "KseqVerifier", "SpecTr, arXiv 2310.15141",
              "Verifies k independent siblings with one joint threshold (optimal transport).", "iid"),
    _verifier("traversal", "TraversalVerifier", "Weng et al. 2025, arXiv 2505.12398",
              "Verifies any tree from the leaves to the root; equals block on a chain.", "any"),
    # Verifiers: lossy.
    _verifier("typical", "TypicalVerifier", "Medusa, arXiv 2401.10774",
              "Accepts tokens whose target probability exceeds an entropy-dependent threshold.", "any", lossless=False),
    _verifier("lenient", "LenientVerifier", "Leviathan et al. 2023, appendix, arXiv 2211.17192",
              "Accepts as rejection does, with the draft distribution scaled by a factor below 1.", "iid, point",
              lossless=False),
    _verifier("top_k", "TopKVerifier", "Stern et al. 2018, arXiv 1811.03115",
              "Accepts any of the target's k most likely tokens.", "any", lossless=False),
    _verifier("distance", "DistanceVerifier", "Stern et al. 2018, arXiv 1811.03115",
              "Accepts token ids within a distance of the argmax, for ordinal outputs.", "any", lossless=False),
    _verifier("min_block", "MinBlockVerifier", "Stern et al. 2018, arXiv 1811.03115",
              "Accepts argmax tokens, but never fewer than a minimum number of draft tokens.", "any", lossless=False),
    # Trees: fixed shapes first, then those that grow by the draft's confidence.
    _tree("expansion", "Expansion", "SpecInfer, arXiv 2305.09781",
          "Builds a static tree with the same number of children for all nodes of a level.",
          "iid, without_replacement or point", example="expansion,widths=3x2x1"),
    _tree("medusa_tree", "MedusaTree", "Medusa, arXiv 2401.10774",
          "Builds a static tree greedily from accuracies by position and rank.", "iid, without_replacement or point",
          example="medusa_tree,nodes=16"),
    _tree("sequoia", "Sequoia", "Sequoia, arXiv 2402.12374",
          "Builds the best static tree for acceptance rates by rank (dynamic programming).",
          "without_replacement, iid or point", example="sequoia,nodes=16,depth=6"),
    _tree("eagle2", "Eagle2", "EAGLE-2, arXiv 2406.16858",
          "Expands the likeliest nodes of each level and keeps the likeliest of all levels.", "point"),
    _tree("opt_tree", "OptTree", "OPT-Tree, arXiv 2406.17276",
          "Maximises expected tokens for a size; deepens while a level adds enough of them.", "point",
          example="opt_tree,threshold=0.2"),
    _tree("cost_aware", "CostAware", "SmartSpec, arXiv 2406.14066",
          "Adds nodes and levels while their expected tokens exceed their measured cost.", "point",
          example="cost_aware,node_cost=0.01,step_cost=0.1"),
    # Controllers.
    _controller("auto", "AutoController", "SmartSpec, arXiv 2406.14066",
                "Chooses drafter and draft length, or plain decoding, by measured cost and acceptance."),
    _controller("goodput", "GoodputController", "SmartSpec, arXiv 2406.14066",
                "Chooses one draft length per batch to maximise expected tokens per second."),
    _controller("prefix", "PrefixController", "DSpark 2026, arXiv 2607.05147",
                "Scores the likeliest drafts of all requests while each adds tokens per second."),
    _controller("constant", "ConstantController", "Leviathan et al. 2023, arXiv 2211.17192",
                "Drafts the same number of tokens in every round.", example="constant,k=5"),
    _controller("heuristic", "HeuristicController", "Transformers' assisted generation",
                "Raises the draft length by 2 after a full acceptance, else lowers it by 1."),
    _controller("confidence", "ConfidenceController", "Transformers' assisted generation; DISCO, arXiv 2405.04304",
                "Stops drafting after a token whose draft probability is below a threshold."),
    _controller("draft_verify", "DraftVerifyController", "Draft & Verify, arXiv 2309.08168",
                "Stops drafting below a confidence threshold that follows the acceptance rate."),
    _controller("adaedl", "AdaedlController", "AdaEDL, arXiv 2410.18351",
                "Stops drafting when an entropy-based bound on acceptance falls below a threshold."),
    _controller("svip", "SvipController", "SVIP, arXiv 2411.18462",
                "Stops drafting when the entropy of the draft distribution exceeds a threshold."),
    _controller("specdec_pp", "SpecdecPpController", "SpecDec++, arXiv 2405.19715",
                "Stops drafting when a trained head on the draft model predicts a rejection.",
                needs="draft model with hidden states; trained head", needs_training=True),
    _controller("tapout", "TapoutController", "TapOut, arXiv 2511.02017",
                "Stops drafting by one of five stop rules, chosen online per request by a bandit."),
    _controller("bandit", "BanditController", "BanditSpec, arXiv 2505.15141",
                "Chooses drafter and draft length, or plain decoding, with a UCB bandit on speed.",
                example="bandit,c=0.1"),
)  # fmt: skip


def rows(role: Role | None = None) -> list[Row]:
    """The catalogue, or one role of it."""
    return [row for row in ROWS if role is None or row.role == role]


def methods() -> list[dict[str, Any]]:
    """The catalogue: one row per drafter, verifier, tree and controller."""
    return [row.public() for row in (*ROWS, *installed_rows())]


def installed_rows() -> list[Row]:
    """The drafters that installed packages offer as entry points; our names take precedence."""
    builtin_names = {row.name for row in rows("drafter")}
    return [
        OutsideRow(
            name, "drafter", point.value, "", f"Comes from the installed package {point.dist.name}.", example=name
        )
        for name, point in installed().items()
        if name not in builtin_names
    ]


def find(role: Role, name: str) -> Row:
    """The row of a name. Raises :class:`UnknownName`, and ``ValueError`` for a ``file.py:Class`` that does not exist or
    is no drafter's."""
    if role == "drafter" and is_code(name):  # not cached: a relative file depends on the present folder
        check_code(name)
        return OutsideRow(name, role, name, "", "", example=name)
    return _find(role, name)


def path_is_no_drafter(path: Path | str) -> ValueError:
    return ValueError(f"a path is not a drafter: give model:{path} for a draft model, or NAME:{path}")


@cache
def _find(role: Role, name: str) -> Row:
    for row in rows(role):
        if row.name == name:
            return row
    if is_code(name) and role in ("verifier", "controller"):
        raise ValueError(
            f"{name} is a class in a file: a {role} from outside is given in Python, ft.load(..., {role}=OBJECT)"
        )
    others = installed_rows() if role == "drafter" else []
    for row in others:
        if row.name == name:
            return row
    if role == "drafter" and ("/" in name or os.sep in name):
        raise path_is_no_drafter(name)
    names = [row.name for row in (*rows(role), *others)]
    catalogue = f"`foretoken methods --role {role}` lists all"
    raise unknown(f"unknown {role} {name!r}", name, names, catalogue=catalogue, examples=EXAMPLES.get(role, ()))


def read_spec(role: Any, spec: str) -> tuple[type[Any], str | None, dict[str, Any]]:
    """Class, path and options of a spec string ``name[:path][,key=value...]``.

    Raises ``ValueError`` for an unknown name or option, or a path for a method that takes none.
    """
    parsed = parse_spec(spec)
    row = find(role, parsed.name)
    cls = row.load()
    options = convert_options(role, parsed.name, cls, parsed.options)
    if parsed.path is not None and not hasattr(cls, "build"):
        more = f"; its options: {', '.join(options_of(cls)) or 'none'}" if role == "drafter" else ""
        raise ValueError(f"{role} {parsed.name!r} takes no path{more}")
    return cls, parsed.path, options


def construct(cls: type[Any], path: str | None, context: Any, options: dict[str, Any]) -> Any:
    """An instance of a method's class, by its class method ``build(path, context, **options)`` if it has one;
    ``context`` provides its dependencies."""
    builder = getattr(cls, "build", None)
    return cls(**options) if builder is None else builder(path, context, **options)


def make(role: Literal["verifier", "controller", "tree"], spec: str, context: Any = None) -> Any:
    """Build a verifier, a controller or a tree from a spec string; drafters need models, see :mod:`foretoken.loading`.

    ``context`` comes from :func:`foretoken.loading.build_controller`. Raises as :func:`read_spec` does.
    """
    cls, path, options = read_spec(role, spec)
    return construct(cls, path, context, options)
