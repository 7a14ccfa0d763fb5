"""A benchmark in Markdown: the numbers, and everything that they depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretoken.lab.bench.specs import PLAIN


def card(cells: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """The card of a run: machine, versions, threads, dtype and load above one table per setting."""
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
    yield f"- dtype: {machine['dtype']}"
    yield f"- prompts: {prompts}; {settings['max_new_tokens']} new tokens each" + (
        "" if settings["ignore_eos"] else " at most"
    )
    yield f"- runs per prompt: {settings['repeat']}, arms interleaved, prefill not counted; seed {settings['seed']}\n"


def _tables(cells: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Iterator[str]:
    everything = [*cells, *summary["overall"]]
    for setting in dict.fromkeys((c["temperature"], c["batch"]) for c in everything):
        here = [c for c in everything if (c["temperature"], c["batch"]) == setting]
        categories = list(dict.fromkeys(c["category"] for c in here))
        yield f"## Temperature {setting[0]:g}, batch {setting[1]}\n"
        yield "Tokens per second of plain decoding, speed-up over it of the others (95 % interval).\n"
        yield f"| arm | {' | '.join(categories)} | tokens/round | predicted | same output |"
        yield "|---" * (len(categories) + 4) + "|"
        for arm in dict.fromkeys(c["arm"] for c in here):
            row = {c["category"]: c for c in here if c["arm"] == arm}
            yield f"| `{arm}` | {' | '.join(_speed(row[name]) for name in categories)} | {_rest(row[categories[-1]])} |"
        yield ""


def _speed(cell: Mapping[str, Any]) -> str:
    if cell["arm"] == PLAIN:
        return f"{cell['tokens_per_s']:.1f} tokens/s"
    low, high = cell["speedup_ci95"]
    return f"{cell['speedup']:.2f} ({low:.2f}-{high:.2f})"


def _rest(overall: Mapping[str, Any]) -> str:
    length, predicted, same = (overall[name] for name in ("mean_acceptance_length", "predicted_speedup", "identical"))
    shown = ("" if value is None else f"{value:.2f}" for value in (length, predicted))
    return " | ".join([*shown, "not compared" if same is None else "yes" if same else "no"])


def _notes(summary: Mapping[str, Any]) -> Iterator[str]:
    for found in summary["equality"]:
        if found["ties"] or found["differences"]:
            total = found["identical"] + found["ties"] + found["differences"]
            yield (
                f"- `{found['arm']}`, {found['category']}, temperature {found['temperature']:g}, batch "
                f"{found['batch']}: {found['identical']} of {total} outputs equal plain decoding's, {found['ties']} "
                f"differ by a numerical tie, {found['differences']} really"
            )
    for skipped in summary["skipped"]:
        yield f"- left out: {skipped}"
    if summary["settings"]["cut_prompts"]:
        yield f"- {summary['settings']['cut_prompts']} prompts were too long and lost their beginning"
