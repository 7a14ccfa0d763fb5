"""Cells of a benchmark that did not finish, from the results in its ``.partial`` file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.lab.bench.specs import PLAIN


def unfinished(objects: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Cells, and as much of a summary as can be made without the target.

    Args:
        objects: the file's lines: a header with ``config``, then ``result`` and ``note`` objects.

    Raises:
        ValueError: a result that is none.
    """
    from foretoken.lab.bench.results import UnitResult, cell, drafted, positions, time_split

    try:
        results = [UnitResult(**found["result"]) for found in objects if "result" in found]
    except TypeError as error:
        raise ValueError(f"this unfinished run is damaged ({error}): run it again") from None
    plain = {r.key[1:]: r for r in results if r.arm == PLAIN}
    groups: dict[tuple[Any, ...], list[UnitResult]] = {}
    for r in results:
        if r.key[1:] in plain:  # a unit is compared only where plain decoding has done it too
            groups.setdefault((r.arm, r.temperature, r.batch, r.category), []).append(r)
    cells = [
        cell(mine, [plain[r.key[1:]] for r in mine], mine[0].category, None, len({p for r in mine for p in r.prompts}))
        for mine in groups.values()
    ]
    arms = {arm: [r for r in results if r.arm == arm] for arm in dict.fromkeys(r.arm for r in results)}
    splits = {arm: split for arm, mine in arms.items() if (split := time_split(mine)) is not None}
    config = dict(objects[0]["config"])
    traces = [
        {"arm": r.arm, "category": r.category, "prompt": "", "temperature": r.temperature, "rounds": r.trace}
        for r in results
        if r.trace
    ]
    summary = {
        "target": config.get("target"),
        "arms": list(config.get("arms") or arms),
        "settings": config,
        "positions": {arm: positions(mine) for arm, mine in arms.items()},
        "rounds": splits,
        "drafted": [drafted(mine) for mine in groups.values()],
        "traces": traces,
    }
    return list(cells), summary
