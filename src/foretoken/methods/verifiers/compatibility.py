"""Compatibility of verifiers and proposals: pairs that would not be lossless are refused."""

from __future__ import annotations

from collections.abc import Iterable

from foretoken.core import Kind, Rng, Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.block import BlockVerifier
from foretoken.methods.verifiers.coupled import CoupledVerifier
from foretoken.methods.verifiers.greedy import GreedyVerifier
from foretoken.methods.verifiers.point import PointVerifier
from foretoken.methods.verifiers.traversal import TraversalVerifier
from foretoken.registry import rows


def check_proposals(
    proposals: Iterable[tuple[Kind, bool]], verifier: Verifier, drafter_name: str, allow_lossy: bool, greedy: bool
) -> None:
    """Raise ``ValueError`` for a drafter-verifier pair that would not keep the target's distribution.

    Args:
        proposals: the drafter's possible proposals: how siblings are drawn, and whether they can branch.
        allow_lossy: whether the user allows rules that are lossy by design; a lossless rule on unsupported proposals
            stays refused.
        greedy: whether the request is at temperature 0, where all lossless rules coincide.

    Raises:
        ValueError: the pair is not lossless; the message lists the verifiers that are.
    """
    sorts = sorted(proposals)
    objections = (objection(kind, is_tree, type(verifier), greedy) for kind, is_tree in sorts)
    problem = next(filter(None, objections), None)
    if problem is None and not verifier.lossless and not allow_lossy:
        problem = "it is lossy by design and needs allow_lossy=True"
    if problem is not None:
        right = ", ".join(verifiers_for(sorts, greedy))
        raise ValueError(f"verifier {verifier.name!r} cannot verify drafter {drafter_name!r}: {problem}. Use {right}.")


def objection(kind: Kind, is_tree: bool, rule: type[Verifier], greedy: bool) -> str | None:
    """Why a rule does not support such proposals, or ``None``."""
    if rule.chains_only and is_tree:
        return "it supports chains only, and these drafts can branch"
    if greedy and rule.lossless:
        return None  # the target's distribution is one-hot, so every lossless rule follows the argmax
    if rule.greedy_only:
        return "it is lossless at temperature 0 only"
    # One draw is the same with and without replacement.
    drawn = {Kind.IID, Kind.WITHOUT_REPLACEMENT}
    fitting = {kind} if is_tree or kind not in drawn else drawn
    if not fitting & rule.kinds:
        kinds = " or ".join(k.value for k in Kind if k in rule.kinds)
        return f"it supports drafts of kind {kinds}, and these are {kind.value}"
    return None


def verifiers_for(proposals: Iterable[tuple[Kind, bool]], greedy: bool) -> list[str]:
    """Registry names of the lossless verifiers that support all these proposals (kind, can branch)."""
    sorts, names = list(proposals), []
    for row in rows("verifier"):
        rule: type[Verifier] = row.load()
        if rule.lossless and all(objection(kind, is_tree, rule, greedy) is None for kind, is_tree in sorts):
            names.append(row.name)
    return names


def inner_rule(tree: TokenTree, scores: Scores, rng: Rng) -> Verdict:
    """Verify inside a drafter that runs its own loop (``cascade``), by the best lossless rule for this tree."""
    sampler = scores.sampler
    return auto_verifier(tree.kind, not tree.is_chain, sampler.greedy, sampler.fixed).verify(tree, scores, rng)


def auto_verifier(kind: Kind, is_tree: bool, greedy: bool, fixed: bool = False) -> Verifier:
    """The best lossless rule for such proposals of a request that is greedy, fixed by its noise, or neither."""
    if greedy:
        return GreedyVerifier()
    if fixed:
        return CoupledVerifier()
    if kind is Kind.POINT:
        return PointVerifier()
    return TraversalVerifier() if is_tree else BlockVerifier()
