"""Measured facts of this machine: versions, threads, dtypes, and the cost of scoring and drafting."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretoken.models import native
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import COUNTS, measure_target
from foretoken.models.clock import now
from foretoken.models.linear.packing import Projection, shapes_of
from foretoken.models.linear.product_costs import known_times
from foretoken.models.machine import any_text
from foretoken.models.native.library import cpu_info
from foretoken.options import Options

if TYPE_CHECKING:
    from foretoken.llm import Llm

ROWS = 16
"""Rows of a product in speculation."""


def versions() -> dict[str, str]:
    """Versions of everything that affects measurements."""
    import transformers

    import foretoken

    return {
        "foretoken": foretoken.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def hardware() -> dict[str, Any]:
    """Processor and accelerators."""
    flags = cpu_info("flags").split()
    matrix_flags = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
    return {
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "cpu_flags": [flag for flag in matrix_flags if flag in flags],
        "kernels": native.described(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "mps": bool(torch.backends.mps.is_available()),
    }


def threads() -> dict[str, Any]:
    """Thread count, the variables that control it, and the load average over one minute."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    thread_variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND")
    variables = {name: os.environ.get(name) for name in thread_variables}
    return {"torch_threads": torch.get_num_threads(), "variables": variables, "load": load}


def median_ms(run: Callable[[], Any], repeat: int, device: Any) -> float:
    """Median milliseconds of ``run`` after one warm-up."""
    times = []
    for _ in range(repeat + 1):
        start_s = now(device)
        run()
        times.append(1000 * (now(device) - start_s))
    return statistics.median(times[1:])


@torch.inference_mode()
def dtype_costs(width: int, device: Any) -> list[dict[str, Any]]:
    """Milliseconds of [1, width] x [width, width] products per dtype, in its fastest layout, and of ``ROWS`` such rows
    at once; ``None`` if the device does not support the dtype."""
    table: list[dict[str, Any]] = []
    draws = torch.Generator().manual_seed(0)  # not torch's global generator, which is the caller's
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        costs: list[float | None] = []
        layout = None
        for rows in (1, ROWS):
            try:
                x = torch.randn(rows, width, generator=draws).to(device, dtype)
                product = Projection(torch.randn(width, width, generator=draws).to(device, dtype), None)
                layout = product.layout.name
                costs.append(median_ms(lambda x=x, product=product: product(x), 30, x.device))  # type: ignore[misc]
            except (RuntimeError, TypeError):
                costs.append(None)
        row = {"dtype": str(dtype).removeprefix("torch."), "supported": costs[0] is not None, "layout": layout}
        table.append({**row, "linear_ms": costs[0], "linear_rows_ms": costs[1]})
    return table


def layout_costs(target: LanguageModel) -> list[dict[str, Any]]:
    """Measured times of the target's matrices in every layout, in microseconds by number of rows."""
    model, dtype = target.model, target.dtype
    if not isinstance(model, torch.nn.Module) or dtype is None:
        return []
    measured_times = known_times(dtype, shapes_of(model))
    return [
        {"product": key, **{f"rows_{n}_us": 1e6 * s for n, s in times.items()}} for key, times in measured_times.items()
    ]


def scoring_costs(target: LanguageModel, repeat: int = 10, counts: Sequence[int] = COUNTS) -> list[dict[str, Any]]:
    """Median milliseconds of scoring 1 to 64 tokens in one call, after a committed prefix."""
    cost = measure_target(target, any_text(target, 128), counts, repeat)
    return [{"tokens": n, "median_ms": 1e3 * s, "ratio": cost.relative(n)} for n, s in cost.seconds.items()]


def draft_costs(llm: Llm, target_ms: float, tokens: int = 48) -> dict[str, Any]:
    """Cost of one draft token in a real greedy run, and its ratio c to a plain target step."""
    prompt = any_text(llm.target, 16)
    options = Options(max_new_tokens=min(tokens, llm.target.context_length // 2), ignore_eos=True)
    llm.generate(prompt, **options)
    stats = llm.generate(prompt, **options).stats
    steps = stats.num_draft_tokens or stats.num_drafts
    step_ms = 1000 * stats.draft_s / max(1, steps)
    return {
        "drafter": llm.drafter.name if llm.drafter else "none",
        "step_ms": step_ms,
        "c": step_ms / target_ms if target_ms else 0.0,
        "overhead_share": stats.overhead_s / max(1e-12, stats.total_s - stats.prefill_s),
    }


def thread_check(target: LanguageModel, repeat: int = 5) -> list[dict[str, Any]]:
    """Milliseconds of scoring 1 and 16 tokens with one thread and with all; the thread count is restored."""
    before = torch.get_num_threads()
    rows = []
    try:
        for count in sorted({1, before, os.cpu_count() or 1}):
            torch.set_num_threads(count)
            costs = {row["tokens"]: row["median_ms"] for row in scoring_costs(target, repeat, (1, 16))}
            rows.append({"threads": count, "one_token_ms": costs.get(1), "sixteen_tokens_ms": costs.get(16)})
    finally:
        torch.set_num_threads(before)
    return rows


def recommendations(report: dict[str, Any]) -> list[str]:
    """Advice from the measurements."""
    return [*_about_scoring(report["scoring"]), *_about_draft(report), *_about_threads(report), *_about_dtype(report)]


def _about_scoring(scoring: Sequence[dict[str, Any]]) -> list[str]:
    free = max((row["tokens"] for row in scoring if row["ratio"] <= 1.3), default=1)
    if len(scoring) < 2:
        return ["this target scores one token at a time (its state cannot be rolled back): plain decoding only"]
    if free >= 16:
        return [f"scoring {free} tokens costs at most 1.3 times one: trees of up to {free} nodes are nearly free"]
    if free >= 4:
        return [f"scoring {free} tokens costs at most 1.3 times one: drafts of up to {free - 1} tokens, no large trees"]
    return ["every scored token costs time here: short drafts (k = 1 to 3) that are often accepted, no trees"]


def _about_draft(report: dict[str, Any]) -> list[str]:
    draft = report["draft"]
    if draft is None:
        return []
    c, name = draft["c"], draft["drafter"]
    lines = []
    if c > 0.5:
        lines.append(
            f"one {name} draft token costs {c:.2f} of a target step: too slow to gain, try ngram or a bigger target"
        )
    elif c > 0.15:
        lines.append(f"one {name} draft token costs {c:.2f} of a target step: keep k small (2 to 4)")
    else:
        lines.append(f"one {name} draft token costs {c:.2f} of a target step: cheap, longer drafts can pay")
    if draft["overhead_share"] > 0.1:
        lines.append(f"{draft['overhead_share']:.0%} of a round is bookkeeping: this target is too small to gain much")
    return lines


def _about_threads(report: dict[str, Any]) -> list[str]:
    timed = [row for row in report["thread_check"] if row["one_token_ms"]]
    if len(timed) < 2:
        return []
    best = min(timed, key=lambda row: row["one_token_ms"])
    present = next((row for row in timed if row["threads"] == report["threads"]["torch_threads"]), best)
    if present["one_token_ms"] > 1.15 * best["one_token_ms"]:
        return [
            f"{best['threads']} thread(s) score a token in {best['one_token_ms']:.1f} ms, {present['threads']} in "
            f"{present['one_token_ms']:.1f} ms: set OMP_NUM_THREADS={best['threads']}"
            + (" (the machine is busy; measure again when it is quiet)" if _busy(report) else "")
        ]
    return [f"{present['threads']} thread(s) are a good choice for this target"]


def _busy(report: dict[str, Any]) -> bool:
    load = report["threads"]["load"]
    return load is not None and load > report["hardware"]["cores"] + 0.5


def _about_dtype(report: dict[str, Any]) -> list[str]:
    """Plain decoding multiplies single rows, speculation several; both may be faster in another dtype."""
    lines = []
    for key, claim, so in (
        ("linear_ms", "a matrix of this target's width runs", "try"),
        ("linear_rows_ms", f"{ROWS} rows at once, as drafts are checked, run", "drafts pay more with"),
    ):
        costs = {row["dtype"]: row[key] for row in report["dtypes"] if row[key]}
        target_ms = costs.get(report["target"]["dtype"])
        usable = {name: ms for name, ms in costs.items() if name in ("float32", "bfloat16")}
        if target_ms is None or not usable:
            continue
        best = min(usable, key=lambda name: usable[name])
        if target_ms > 1.3 * usable[best]:
            lines.append(f"{claim} {target_ms / usable[best]:.1f} times faster in {best}: {so} --dtype {best}")
    return lines
