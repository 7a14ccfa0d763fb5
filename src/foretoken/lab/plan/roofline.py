"""An estimate of v(n) from the size of a model and two figures of the device, for use without measurements.

A call reads all weights once and multiplies them with every token; the slower of both counts (the roofline model;
section 3.4 of Leviathan et al., https://arxiv.org/abs/2211.17192; MagicDec, 2408.11049, for the cache; MoESD,
2505.19645, for experts).  It uses peak figures: measured costs are better, ``foretoken doctor`` shows some.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def experts_touched(experts: int, active: int, tokens: float) -> float:
    """Expected number of distinct experts of a layer that ``tokens`` tokens use: E (1 - (1 - a/E)^n).

    Every token chooses ``active`` of ``experts`` experts, uniformly and independently (MoESD, 2505.19645, section 3).
    """
    if not 1 <= active <= experts or tokens < 0:
        raise ValueError(f"experts touched need 1 <= active <= experts, tokens >= 0; not {active}, {experts}, {tokens}")
    if active == experts:
        return float(experts) if tokens else 0.0
    return -experts * math.expm1(tokens * math.log1p(-active / experts))


@dataclass(frozen=True)
class Roofline:
    """Seconds of a target call: t = fixed_s + max(bytes read / bandwidth, operations / flops).

    Attributes:
        parameters: P, all weights, including the embedding.
        bandwidth: bytes per second.
        flops: operations per second.
        bytes: per weight (2 for bfloat16).
        context: tokens in the cache of each request.
        kv_bytes: bytes of keys and values per token of context.
        fixed_s: constant cost of a call (kernel launches, Python).
        experts: per layer; 0 for a dense model.
        active: experts per token.
        expert_parameters: share of ``parameters`` in experts, in [0, 1].
    """

    parameters: float
    bandwidth: float
    flops: float
    bytes: float = 2.0
    context: int = 0
    kv_bytes: float = 0.0
    fixed_s: float = 0.0
    experts: int = 0
    active: int = 1
    expert_parameters: float = 0.9

    def __post_init__(self) -> None:
        for name in ("parameters", "bandwidth", "flops", "bytes", "context", "kv_bytes", "fixed_s", "experts"):
            value, above = getattr(self, name), name in ("parameters", "bandwidth", "flops", "bytes")
            if not (math.isfinite(value) and (value > 0 if above else value >= 0)):
                raise ValueError(f"{name} must be a finite number {'>' if above else '>='} 0, not {value}")
        if self.experts:
            experts_touched(self.experts, self.active, 1)
            if not 0 <= self.expert_parameters <= 1:
                raise ValueError(f"expert_parameters must be a share in [0, 1], not {self.expert_parameters}")

    def seconds(self, nodes: int, batch: int = 1) -> float:
        """Time of one call that scores ``nodes`` tokens of each of ``batch`` requests."""
        if nodes < 1 or batch < 1:
            raise ValueError(f"a call needs nodes and requests >= 1, not {nodes} and {batch}")
        tokens = nodes * batch
        share = self.expert_parameters if self.experts else 0.0
        in_experts, dense = self.parameters * share, self.parameters * (1.0 - share)
        read = computed = 0.0
        if self.experts:
            read = in_experts * experts_touched(self.experts, self.active, tokens) / self.experts
            computed = in_experts * self.active / self.experts
        read_s = ((dense + read) * self.bytes + batch * self.context * self.kv_bytes) / self.bandwidth
        return self.fixed_s + max(read_s, 2.0 * (dense + computed) * tokens / self.flops)

    def __call__(self, nodes: int, batch: int = 1) -> float:
        """v: the same, relative to a call with one token of one request."""
        return self.seconds(nodes, batch) / self.seconds(1)
