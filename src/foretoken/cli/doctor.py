"""``foretoken doctor``: versions, threads, dtypes, and the cost of scoring and drafting on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import Common, Json, with_common
from foretoken.cli.output import json_only, print_json, print_table, progress_bar, screen, table
from foretoken.options import COMMAND_LINE

if TYPE_CHECKING:
    from rich.console import Console

THREAD_TIMES = {"one_token_ms": "1 token, ms", "sixteen_tokens_ms": "16 tokens, ms"}


@with_common(omit=COMMAND_LINE)
def doctor_command(
    repeat: Annotated[int, typer.Option(help="Timed runs per size; medians are shown.")] = 10,
    as_json: Json = False,
    *,
    common: Common,
) -> None:
    """Measure the cost of scoring and drafting on this machine, and recommend settings."""
    common.check()
    if repeat < 1:
        raise ValueError(f"--repeat must be at least 1, not {repeat}")
    with json_only(as_json):
        report = _measure(common, repeat)
    if as_json:
        print_json(report)
    else:
        _print(report)


def _measure(common: Common, repeat: int) -> dict[str, Any]:
    from foretoken.loading.measured import machine

    with progress_bar() as tell:
        tell(0, 4, "loading")
        llm = common.load()
        target = llm.target
        report: dict[str, Any] = {
            "versions": machine.versions(),
            "hardware": machine.hardware(),
            "threads": machine.threads(),
            "target": _about(common.target, target),
        }
        tell(0, 4, "dtypes")
        width = getattr(getattr(target, "config", None), "hidden_size", 0) or 512
        report["dtypes"] = machine.dtype_costs(width, target.device or "cpu")
        report["layouts"] = machine.layout_costs(target)
        tell(1, 4, "scoring 1 to 64 tokens")
        report["scoring"] = machine.scoring_costs(target, repeat)
        tell(2, 4, "drafting")
        drafts = llm.drafter is not None
        report["draft"] = machine.draft_costs(llm, report["scoring"][0]["median_ms"]) if drafts else None
        tell(3, 4, "threads")
        report["thread_check"] = machine.thread_check(target, max(3, repeat // 2))
    report["recommendations"] = machine.recommendations(report)
    return report


def _about(source: str, target: Any) -> dict[str, Any]:
    from foretoken.lab.workload import target_name
    from foretoken.models.huggingface import HuggingFaceModel
    from foretoken.models.linear.packing import num_parameters

    model = target.model
    huggingface = target if isinstance(target, HuggingFaceModel) else None
    return {
        "source": target_name(target, source),
        "parameters": num_parameters(model) if model is not None else None,
        "weight_bytes": target.weight_bytes,
        "dtype": str(target.dtype or "").removeprefix("torch."),
        "computes_in": str(huggingface.forwards.run_dtype if huggingface else target.dtype or "").removeprefix(
            "torch."
        ),
        "layout": huggingface.forwards.packing.layout if huggingface else "plain",
        "lean": huggingface is not None and huggingface.is_lean,
        **target.describe(),
        "device": str(target.device or "cpu"),
        "context": target.context_length,
        "trees": target.capabilities.tree_mask,
    }


def _print(report: dict[str, Any]) -> None:
    console = screen()
    _print_facts(console, report)
    rows = [(str(row["tokens"]), f"{row['median_ms']:.2f}", f"{row['ratio']:.2f}") for row in report["scoring"]]
    _print_table(console, "scoring n tokens in one call", [], ["tokens", "median ms", "ratio to 1"], rows)
    if report["layouts"]:
        keys = [key for key in report["layouts"][0] if key != "product"]
        heads = [key.removesuffix("_us").replace("rows_", "") + " rows" for key in keys]
        layouts = [[row["product"], *(f"{row[key]:.0f}" for key in keys)] for row in report["layouts"]]
        _print_table(console, "products x W^T in each layout, us", ["weight"], heads, layouts)
    threads = [
        [str(row["threads"]), *("" if row[key] is None else f"{row[key]:.2f}" for key in THREAD_TIMES)]
        for row in report["thread_check"]
    ]
    _print_table(console, "threads", [], ["threads", *THREAD_TIMES.values()], threads)
    if report["draft"]:
        draft = report["draft"]
        console.print(
            f"draft ({draft['drafter']}): {draft['step_ms']:.2f} ms per draft token, "
            f"c = {draft['c']:.2f} of a target step; overhead {draft['overhead_share']:.0%} of a round",
        )
    console.print("recommendations", style="bold")
    for line in report["recommendations"]:
        console.print(f"- {line}")


def _print_table(
    console: Console, title: str, words: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    grid = table(title, words, numbers)
    for row in rows:
        grid.add_row(*row)
    print_table(console, grid)


def _print_facts(console: Console, report: dict[str, Any]) -> None:
    from foretoken.models.words import exactness_line, refused_lines

    versions, hardware, threads, target = (report[key] for key in ("versions", "hardware", "threads", "target"))
    refused = refused_lines(target)
    variables = ", ".join(f"{k}={v}" for k, v in threads["variables"].items() if v is not None) or "none set"
    load = "" if threads["load"] is None else f", load {threads['load']:.1f}"
    size = "" if target["parameters"] is None else f", {target['parameters'] / 1e6:.1f}M parameters"
    facts = {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "CPU": f"{hardware['cpu']}, {hardware['cores']} cores, {' '.join(hardware['cpu_flags'])}".rstrip(", "),
        "kernels": hardware["kernels"],
        "GPU": ", ".join(hardware["gpus"]) or ("Apple MPS" if hardware["mps"] else "none"),
        "threads": f"{threads['torch_threads']} in use{load}; {variables}",
        "target": f"{target['source']}{size}, {target['dtype']} on {target['device']}, context {target['context']}, "
        + ("takes trees" if target["trees"] else "no tree support"),
        "weights": f"{target['weight_bytes'] / 1e6:.0f} MB of {target['weights'] or 'no dtype of their own'}, layout "
        f"{target['layout']}, computes in {target['computes_in'] or 'its own way'}",
        "forward": f"{target['forward']}, {target['threads']} thread{'' if target['threads'] == 1 else 's'}",
        "exactness": exactness_line(target),
        "refused": refused[0] if refused else "nothing",
        "1-row product": _by_dtype(report, "linear_ms"),
        "16-row product": _by_dtype(report, "linear_rows_ms"),
    }
    for name, value in facts.items():
        console.print(f"{name:<14} {value}")
        if name == "refused":
            for line in refused[1:]:
                console.print(f"{'':<14} {line}")


def _by_dtype(report: dict[str, Any], key: str) -> str:
    return ", ".join(
        f"{row['dtype']} ({row['layout']}) {row[key] * 1000:.0f} us"
        if row[key] is not None
        else f"{row['dtype']} not supported"
        for row in report["dtypes"]
    )
