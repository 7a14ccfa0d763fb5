"""Cards of finished benchmarks, with names and fingerprints but no local folders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretoken.core.io.checkpoints import is_builtin, is_gguf
from foretoken.lab.bench.results import interval
from foretoken.lab.bench.specs import PLAIN, is_foreign, split_arm
from foretoken.lab.bench.summary import BenchResult
from foretoken.lab.parity.weights import Checksums, drafter_checksums, model_checksums
from foretoken.lab.report.cards.card import COUNTS, Card
from foretoken.loading import read_profile
from foretoken.registry import parse_spec

_PATH = re.compile(r"[^:=,()|]*/[^:=,()|]*")
"""A path in a spec, blanks included."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Origin:
    """Model and drafters of a run, known before it begins.

    Attributes:
        source: the model argument.
        model: the card's fields that identify it.
        drafters: checksums of each arm's own files; those of ``auto`` are without a profile.
    """

    source: str
    model: dict[str, Any]
    drafters: dict[str, Checksums]


def origin(source: str, options: Mapping[str, str | None], arms: Sequence[str]) -> Origin:
    """Fingerprint the files before a long run.  Raises ``ValueError`` for files that are not on this machine, or if
    only plain decoding is measured.

    ``options`` has the load options ``quantize``, ``inflate`` and ``backend``; ``arms`` are specs beside plain
    decoding.
    """
    if all(arm in ("none", PLAIN) for arm in arms):
        raise ValueError("a card compares a drafter with plain decoding: give --drafter")
    kind = "built-in" if is_builtin(source) else "gguf" if is_gguf(source) else "transformers"
    model = {
        "name": _without_folder(source).removesuffix(".gguf"),
        "kind": kind,
        "fingerprint": fingerprint(model_checksums(source)),
        **options,
    }
    return Origin(source, model, {arm: _drafter(arm, source) for arm in arms})


def _drafter(arm: str, source: str) -> Checksums:
    return {} if is_foreign(arm) or arm in ("none", PLAIN) else drafter_checksums(split_arm(arm)[0], source)


def _files(arm: str, about: Origin, profile: str | None) -> Checksums:
    """Checksums of an arm's own files; none if those of ``auto`` with a profile are unknown."""
    if split_arm(arm)[0] != "auto" or profile is None:
        return about.drafters.get(arm, {})
    try:
        drafter = read_profile(profile).get("drafter", "auto")
        return {} if drafter is None else drafter_checksums(drafter, about.source)
    except ValueError:  # the profile was changed after it was used, which must not cost the card
        return {}


def fingerprint(checksums: Checksums) -> str:
    """SHA-256 over the checksums of files, independent of their names."""
    digest = hashlib.sha256("\n".join(sorted(checksums.values())).encode()).hexdigest()
    return f"sha256:{digest}"


def without_folders(text: str) -> str:
    """A spec with each local path shortened to its last name; hub ids are kept."""

    return _PATH.sub(lambda match: _without_folder(match[0]), text)


def _without_folder(path: str) -> str:
    if _HUB_ID.fullmatch(path) and not Path(path).exists():
        return path
    return Path(path).name


def card_of(result: BenchResult, about: Origin) -> Card:
    summary = result.summary
    machine, settings = summary["machine"], summary["settings"]
    hardware, threads = machine["hardware"], machine["threads"]
    overall = summary["overall"]
    plain = {(c["temperature"], c["batch"]): c for c in overall if c["arm"] == PLAIN}
    rows = [c for c in overall if c["arm"] != PLAIN]
    figures = [_figure(cell, plain[cell["temperature"], cell["batch"]], summary, about) for cell in rows]
    keys = ("max_new_tokens", "ignore_eos", "repeat", "seed", "filters", "allow_lossy")
    return Card(
        written=datetime.now(UTC).date().isoformat(),
        model={**about.model, **summary["runs_as"]},
        machine={
            "cpu": hardware["cpu"],
            "cores": hardware["cores"],
            "threads": threads["torch_threads"],
            "matrix": hardware["cpu_flags"],
            "gpus": hardware["gpus"],
            "kernels": hardware["kernels"],
            "load": threads["load"],
        },
        versions=machine["versions"],
        workload={
            "prompts_sha256": settings["prompts"]["sha256"],
            "categories": settings["prompts"]["categories"],
            **{key: settings[key] for key in keys},
        },
        figures=figures,
    )


def _figure(
    cell: Mapping[str, Any], plain: Mapping[str, Any], summary: Mapping[str, Any], about: Origin
) -> dict[str, Any]:
    arm, setting = cell["arm"], (cell["temperature"], cell["batch"])
    settings, drafter, is_own = summary["settings"], split_arm(arm)[0], not is_foreign(arm)
    files = _files(arm, about, settings.get("profile"))
    ran = summary["ran"].get(arm, {"drafter": drafter, "controller": "none", "verifier": settings["verifier"]})
    members: dict[str, Checksums] = {}
    for name, checksum in files.items() if drafter == "auto" else ():
        members.setdefault(name.partition("/")[0], {})[name] = checksum
    (prefill,) = [p["prefill_s"] for p in summary["prefill"] if _setting_of(p) == (arm, *setting)]
    equality = [e for e in summary["equality"] if _setting_of(e) == (arm, *setting)]
    return {
        "method": parse_spec(drafter).name if is_own else arm,
        **{role: without_folders(ran[role]) for role in ("drafter", "controller", "verifier")},
        "fingerprint": fingerprint(files) if files else None,
        **({"drafters": {name: fingerprint(part) for name, part in members.items()}} if members else {}),
        "temperature": cell["temperature"],
        "batch": cell["batch"],
        "plain_tokens_per_s": _short(plain["tokens_per_s"]),
        "tokens_per_s": _short(cell["tokens_per_s"]),
        "speedup": _short(cell["speedup"]),
        "speedup_ci95": [_short(end) for end in cell["speedup_ci95"]],
        "tokens_per_round": None if (length := cell["mean_acceptance_length"]) is None else _short(length),
        "prefill_s": _short(prefill) if is_own else None,
        "ttft_s": None if is_own else _short(prefill),
        "equality": {name: sum(e[name] for e in equality) for name in COUNTS} if equality else None,
    }


def _setting_of(row: Mapping[str, Any]) -> tuple[str, float, int]:
    return row["arm"], row["temperature"], row["batch"]


def _short(value: float) -> float:
    """The value to four digits, more than a benchmark resolves."""
    return float(f"{value:.4g}")


def markdown_card(cells: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """A run's card in Markdown: machine, versions, threads, dtype, weights and load, then one table per setting."""
    return "\n".join([*_head(summary), *_tables(cells, summary), *_notes(summary)]) + "\n"


def _head(summary: Mapping[str, Any]) -> Iterator[str]:
    machine, settings = summary["machine"], summary["settings"]
    hardware, threads = machine["hardware"], machine["threads"]
    variables = ", ".join(f"{name}={value}" for name, value in threads["variables"].items() if value is not None)
    load = "unknown" if threads["load"] is None else f"{threads['load']:.2f}"
    prompts = ", ".join(f"{name} {count}" for name, count in settings["prompts"]["categories"].items())
    yield f"# Benchmark of {summary['target']}\n"
    yield f"- machine: {hardware['cpu']}, {hardware['cores']} cores" + "".join(f", {gpu}" for gpu in hardware["gpus"])
    yield "- versions: " + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield f"- threads: {threads['torch_threads']} ({variables or 'no variables set'}); load over one minute: {load}"
    yield f"- dtype: {machine['dtype']}; weights: {summary['runs_as']['weights']}"
    yield f"- prompts: {prompts}; {settings['max_new_tokens']} new tokens each" + (
        "" if settings["ignore_eos"] else " at most"
    )
    yield f"- runs per prompt: {settings['repeat']}, arms interleaved, prefill not counted; seed {settings['seed']}\n"


def _tables(cells: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Iterator[str]:
    everything = [*cells, *summary["overall"]]
    for setting in dict.fromkeys((c["temperature"], c["batch"]) for c in everything):
        at_setting = [c for c in everything if (c["temperature"], c["batch"]) == setting]
        categories = list(dict.fromkeys(c["category"] for c in at_setting))
        yield f"## Temperature {setting[0]:g}, batch {setting[1]}\n"
        yield "Tokens per second of plain decoding, speed-up over it of the others (95 % interval).\n"
        yield f"| arm | {' | '.join(categories)} | tokens/round | predicted | same output |"
        yield "|---" * (len(categories) + 4) + "|"
        for arm in dict.fromkeys(c["arm"] for c in at_setting):
            row = {c["category"]: c for c in at_setting if c["arm"] == arm}
            speeds = " | ".join(_speed_cell(row[name]) for name in categories)
            yield f"| `{arm}` | {speeds} | {_rest(row[categories[-1]])} |"
        yield ""


def _speed_cell(cell: Mapping[str, Any]) -> str:
    if cell["arm"] == PLAIN:
        return f"{cell['tokens_per_s']:.1f} tokens/s"
    return f"{cell['speedup']:.2f} ({interval(cell)})"


def _rest(overall: Mapping[str, Any]) -> str:
    length, predicted, same = (overall[name] for name in ("mean_acceptance_length", "predicted_speedup", "identical"))
    figures = ("" if value is None else f"{value:.2f}" for value in (length, predicted))
    return " | ".join([*figures, "not compared" if same is None else "yes" if same else "no"])


def _notes(summary: Mapping[str, Any]) -> Iterator[str]:
    for arm, ran in summary["ran"].items():
        if split_arm(arm)[0] == "auto":
            roles = (f"{role} `{without_folders(spec)}`" for role, spec in ran.items())
            yield f"- `{arm}` ran with {', '.join(roles)}"
    for row in summary["equality"]:
        if row["ties"] or row["differences"]:
            total = row["identical"] + row["ties"] + row["differences"]
            yield (
                f"- `{row['arm']}`, {row['category']}, temperature {row['temperature']:g}, batch "
                f"{row['batch']}: {row['identical']} of {total} outputs equal plain decoding's, {row['ties']} "
                f"differ by a numerical tie, {row['differences']} really"
            )
    for skipped in summary["skipped"]:
        yield f"- left out: {skipped}"
    if summary["settings"]["cut_prompts"]:
        yield f"- {summary['settings']['cut_prompts']} prompts were too long and lost their beginning"
