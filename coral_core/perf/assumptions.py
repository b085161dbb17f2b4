"""What capacity estimates assume beyond hardware, model and workload; every figure can be set, none is hidden."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError
from coral_core.perf.factors import load_engine_costs
from coral_core.units import GIB, US


def _full_load() -> dict[Phase, float]:
    return dict.fromkeys(Phase, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityAssumptions:
    """Assumptions of the analytic estimates.

    * `usable_memory_frac`: share of GPU memory the engine may use (vLLM's default 0.9); `workspace_bytes` of it, per
      GPU, go to context, communication buffers and CUDA graphs; activations are counted on top.
    * `kernel_overhead_s` per small kernel of a layer, `quantised_gemm_overhead_s` per GEMM that quantises its
      activations, `step_overhead_s` (scheduling and sampling) per step of each internal stage: as fitted to serving
      runs (`factors.EngineCosts`).
    * `hop_latency_s` and `nic_usable_frac`: a message between nodes, and the share of the NIC's rate it gets.
      `inner_hop_latency_s`: the same between internal stages. `hop_tensors`: hidden-sized 16-bit tensors sent per
      token (vLLM sends hidden states and residual).
    * `max_batch_requests`, `max_prefill_tokens`: the engine's limits per step and replica; a single prompt longer
      than the latter still runs alone in the prefill phase.
    * `slo_frac`: share of the latency bounds that a step of mean lengths may take, per phase; the rest is for waiting and
      for requests longer than the mean. `max_utilization_frac`: factor on the resulting throughput, so that queues stay
      short. Both are 1.0 until calibrated; what counts as within the SLO is judged by the whole bounds.
    * `pessimistic`: estimated times are stretched so that nine of ten comparisons took no longer (`perf.errors`);
      measured profiles are taken as they are.
    * `allow_estimates`: whether estimates may be used at all; without, and without profiles, there is a data gap.
    """

    usable_memory_frac: float = 0.9
    workspace_bytes: float = 1.5 * GIB
    kernel_overhead_s: float = field(default_factory=lambda: load_engine_costs().kernel_overhead_s)
    quantised_gemm_overhead_s: float = field(default_factory=lambda: load_engine_costs().quantised_gemm_overhead_s)
    step_overhead_s: float = field(default_factory=lambda: load_engine_costs().step_overhead_s)
    hop_latency_s: float = 500 * US
    inner_hop_latency_s: float = 50 * US
    nic_usable_frac: float = 0.8
    hop_tensors: int = 2
    max_batch_requests: int = 1024
    max_prefill_tokens: int = 16384
    slo_frac: Mapping[Phase, float] = field(default_factory=_full_load)
    max_utilization_frac: Mapping[Phase, float] = field(default_factory=_full_load)
    allow_estimates: bool = True
    pessimistic: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                for phase in Phase:
                    _check_frac(f"{item.name}.{phase}", value.get(phase, math.nan))
            elif item.name.endswith("_frac"):
                _check_frac(item.name, value)
            elif not math.isfinite(value) or value < 0 or (item.name.startswith(("max_", "hop_t")) and value < 1):
                raise InputError(f"{value!r} is not a usable value", where=f"assumptions.{item.name}")

    def planned_slo(self, phase: Phase, slo: Slo) -> Slo:
        """The latency bounds that steps of mean lengths are planned against."""
        frac = self.slo_frac[phase]
        return Slo(ttft_s=frac * slo.ttft_s, tpot_s=frac * slo.tpot_s)

    def facts(self, phase: Phase) -> dict[str, object]:
        """What capacities of one phase depend on, for hashing."""
        facts = asdict(self)
        if not self.pessimistic:
            del facts["pessimistic"]  # as before there was a choice
        return {
            **facts,
            "slo_frac": self.slo_frac[phase],
            "max_utilization_frac": self.max_utilization_frac[phase],
        }


def _check_frac(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise InputError(f"{value!r} is not in (0, 1]", where=f"assumptions.{name}")
