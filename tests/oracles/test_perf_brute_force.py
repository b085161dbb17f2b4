"""The search against a plain triple loop over layouts, layers and every batch, written from the formulas alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape, Moe, SlidingWindow
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import capacity_table
from tests.fakes.perf_cases import REAL, REAL_EXPERTS, factors, gpu, lengths, model, node

BUS, RING_LATENCY_S = 5e10, 1e-5


def interpolate(x: float, xs: tuple[int, ...], ys: tuple[float, ...]) -> float:
    if x <= xs[0]:
        return ys[0]
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False):
        if x <= x1:
            return y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0))
    return ys[-1]


@dataclass
class Oracle:
    shape: ModelShape
    config: NodeConfig
    phase: Phase
    slo: Slo
    lengths: Lengths
    given: CapacityAssumptions

    def gemm(self, params: float, rows: float) -> float:
        g = self.config.gpu
        share = interpolate(rows, (128, 512, 2048, 8192), REAL.gemm_peak_frac)
        memory = 2 * params / (g.memory_bandwidth_bytes_per_s * REAL.gemm_bandwidth_frac)
        return max(memory, 2 * params * rows / (g.compute_flops_per_s["bf16"] * share))

    def kept(self, context: float) -> float:
        w = self.shape.sliding_window
        if w is None:
            return context
        return (w.layers * min(w.window_tokens, context) + (self.shape.layers - w.layers) * context) / self.shape.layers

    def layer(self, tp: int, decode: float, prompt: float, heads_rows: float) -> float:
        s, g, m = self.shape, self.config.gpu, decode + prompt
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        bandwidth, peak = g.memory_bandwidth_bytes_per_s, g.compute_flops_per_s["bf16"]
        dense = s.hidden * (2 * q + 2 * kv) + 2 * s.hidden + s.hidden / s.layers
        if s.moe is None:
            dense += 3 * s.hidden * s.intermediate
        else:
            dense += s.hidden * s.moe.experts
        time = self.gemm(dense / tp, m) + self.gemm(s.vocab * s.hidden / s.layers / tp, heads_rows)
        width = s.intermediate
        if s.moe is not None:
            expert = 3 * s.hidden * s.moe.intermediate / tp
            touched = s.moe.experts * (1 - (1 - s.moe.top_k / s.moe.experts) ** m)
            time += REAL_EXPERTS.fixed_s + touched * expert * 2 / (bandwidth * REAL_EXPERTS.bandwidth_frac)
            time += 2 * expert * s.moe.top_k * m / (peak * REAL_EXPERTS.peak_frac)
            time += REAL_EXPERTS.activation_passes * m * s.moe.top_k * s.hidden * 2 / bandwidth
            width = 0
        tokens_in = self.lengths.mean_input_tokens
        share = interpolate(tokens_in, (1024, 4096, 16384), REAL.attention_peak_frac)
        context = self.kept(tokens_in + self.lengths.mean_output_tokens / 2)
        read = context * 4 * kv / min(tp, s.kv_heads) / (bandwidth * REAL.attention_bandwidth_frac)
        time += decode * max(read, 4 * q * context / (peak * share * tp))
        # Causal attention, token by token.
        n = int(tokens_in)
        pairs = n * n / 2
        if s.sliding_window is not None and s.sliding_window.window_tokens < n:
            w = s.sliding_window.window_tokens
            full = (s.layers - s.sliding_window.layers) / s.layers
            pairs = full * pairs + (1 - full) * (w * w / 2 + (n - w) * w)
        time += prompt * pairs / n * 4 * q / (peak * share * tp)
        time += m * 2 * (8 * s.hidden + (2 * (q + 2 * kv) + 3 * width) / tp) / (bandwidth * REAL.gemm_bandwidth_frac)
        if tp > 1:
            time += 2 * (RING_LATENCY_S + 2 * (tp - 1) / tp * m * s.hidden * 2 / min(BUS / tp, g.link_bytes_per_s))
        # Two norms, QKV, output, rotary, cache write, attention in two parts; two GEMMs and activation, or a router.
        return time + (11 if s.moe is None else 9) * self.given.kernel_overhead_s

    def rate(  # noqa: PLR0917  a loop's variables, in the loop's order
        self, stages: int, layers: int, tp: int, pp: int, dp: int, batch: int
    ) -> float:
        s, a, g = self.shape, self.given, self.config.gpu
        tokens_in, tokens_out = self.lengths.mean_input_tokens, self.lengths.mean_output_tokens
        decode, prompt, prompts, made = {
            Phase.DECODE: (batch, 0.0, 0.0, batch),
            Phase.PREFILL: (0.0, batch * tokens_in, batch, batch * tokens_in),
            Phase.AGGREGATED: (batch, batch * tokens_in / tokens_out, batch / tokens_out, batch / tokens_out),
        }[self.phase]
        if self.phase is not Phase.DECODE and prompt > a.max_prefill_tokens and batch > 1:
            return 0.0
        m, held = decode + prompt, math.ceil(layers / pp)
        t = self.layer(tp, decode, prompt, decode + prompts)
        hop_bytes = s.hidden * 2 * a.hop_tensors
        latency = layers * t + pp * a.step_overhead_s
        latency += (pp - 1) * (a.inner_hop_latency_s + m * hop_bytes / g.link_bytes_per_s)
        nic = self.config.nic_bytes_per_s * a.nic_usable_frac
        hop = 0.0 if stages == 1 else a.hop_latency_s + m * hop_bytes * dp / nic
        total = self.slo.ttft_s if self.phase is Phase.PREFILL else self.slo.tpot_s
        if latency + hop > total / stages:
            return 0.0
        chunks = math.ceil(tokens_out / batch)
        if self.phase is Phase.AGGREGATED and chunks * latency + hop > self.slo.ttft_s / stages:
            return 0.0
        kv_token = 4 * s.kv_heads * s.head_dim
        per_unit = (0 if stages == 1 else hop_bytes) * (tokens_in + tokens_out if self.phase is Phase.AGGREGATED else 1)
        if self.phase is not Phase.AGGREGATED:
            per_unit += (
                layers * kv_token * self.kept(tokens_in) / (tokens_in if self.phase is Phase.PREFILL else tokens_out)
            )
        rate = dp * made / (held * t + a.step_overhead_s)
        if per_unit:
            rate = min(rate, nic / per_unit)
        if not self.fits(held, tp, dp, batch, m, decode + prompts, 0.0, 0.0):
            return 0.0
        residence = latency + hop + total * (stages - 1) / stages
        if self.fits(held, tp, dp, batch, m, decode + prompts, rate, residence):
            return rate
        low, high = 0.0, rate  # the node idles between steps until its memory suffices
        for _ in range(60):
            middle = (low + high) / 2
            if self.fits(held, tp, dp, batch, m, decode + prompts, middle, residence):
                low = middle
            else:
                high = middle
        return low

    def fits(  # noqa: PLR0917  the quantities of one formula
        self, held: int, tp: int, dp: int, batch: int, m: float, rows: float, rate: float, residence: float
    ) -> bool:
        s, a = self.shape, self.given
        kv_token = 4 * s.kv_heads * s.head_dim / min(tp, s.kv_heads)
        tokens_in, tokens_out = self.lengths.mean_input_tokens, self.lengths.mean_output_tokens
        decoding_kv = self.kept(tokens_in + tokens_out / 2) * kv_token
        prompt_kv = self.kept(tokens_in) * kv_token
        if self.phase is Phase.PREFILL:
            kv = (max(rate * residence / dp / tokens_in, batch) + batch) * prompt_kv
        elif self.phase is Phase.DECODE:
            kv = max(rate * residence / dp, batch) * decoding_kv
        else:
            kv = max(rate * tokens_out * residence / dp, batch) * decoding_kv
            kv += max(rate * math.ceil(tokens_out / batch) * residence / dp, 1) * prompt_kv
        q, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        weights = s.layers * s.hidden * (2 * q + 2 * kv_width) + (2 * s.layers + 1) * s.hidden
        weights += 2 * s.vocab * s.hidden
        width = s.intermediate
        if s.moe is None:
            weights += s.layers * 3 * s.hidden * s.intermediate
        else:
            weights += s.layers * s.moe.experts * (3 * s.hidden * s.moe.intermediate + s.hidden)
            width = s.moe.intermediate * s.moe.top_k
        activations = m * 2 * (4 * s.hidden + 3 * width / tp) + rows * s.vocab * 6 / tp
        usable = self.config.gpu.memory_bytes * a.usable_memory_frac - a.workspace_bytes
        return held * (2 * weights / s.layers / tp + kv) + activations <= usable

    def table(self, stages: int) -> list[float]:
        n, s = self.config.gpu_count, self.shape
        best = [0.0] * s.layers
        for tp in (1, 2, 4, 8):
            if n % tp or s.heads % tp or (s.kv_heads % tp and tp % s.kv_heads):
                continue
            for pp in range(1, n // tp + 1):
                if n // tp % pp:
                    continue
                for layers in range(pp, s.layers + 1):
                    for batch in range(1, self.given.max_batch_requests + 1):
                        value = self.rate(stages, layers, tp, pp, n // tp // pp, batch)
                        best[layers - 1] = max(best[layers - 1], value)
        for layers in range(s.layers - 1, 0, -1):
            best[layers - 1] = max(best[layers - 1], best[layers])
        return best


MOE = model(layers=4, intermediate=2048, moe=Moe(experts=16, top_k=2, intermediate=1024))
WINDOWED = model(layers=4, kv_heads=2, window=SlidingWindow(window_tokens=128, layers=2))


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(
    ("shape", "count", "memory_gb", "nic", "slo"),
    [
        (model(layers=4), 1, 0.9, 2e9, Slo(ttft_s=0.5, tpot_s=0.05)),
        (model(layers=4), 4, 0.5, 1e8, Slo(ttft_s=0.2, tpot_s=0.02)),
        (MOE, 2, 0.8, 5e9, Slo(ttft_s=0.2, tpot_s=0.03)),
        (WINDOWED, 8, 0.35, 5e8, Slo(ttft_s=0.3, tpot_s=0.04)),
    ],
    ids=["dense", "slow-nic", "experts", "windows"],
)
def test_search_finds_what_brute_force_finds(
    *, shape: ModelShape, count: int, memory_gb: float, nic: float, slo: Slo, phase: Phase
) -> None:
    given = CapacityAssumptions(
        workspace_bytes=5e7,
        kernel_overhead_s=1e-6,
        step_overhead_s=3e-4,
        hop_latency_s=2e-4,
        max_batch_requests=100,
        max_prefill_tokens=4096,
    )
    config = node(count=count, nic=nic, of=gpu(memory_bytes=int(memory_gb * 1e9)))
    table = capacity_table(
        shape=shape,
        variant="bf16",
        phase=phase,
        slo=slo,
        lengths=lengths(400.0, 60.0),
        configs=[config],
        max_stages=3,
        assumptions=given,
        factors=factors(bus=BUS, latency_s=RING_LATENCY_S),
    )
    oracle = Oracle(shape=shape, config=config, phase=phase, slo=slo, lengths=lengths(400.0, 60.0), given=given)
    expected = np.array([oracle.table(stages) for stages in (1, 2, 3)])
    found = table.throughput[:, 0]
    assert expected.max() > 0
    assert np.all(found <= expected * (1 + 1e-9))
    assert np.all(found >= expected * (1 - 2e-3))
