"""Request traces: readers, statistics, scaling, synthesis, and the demand they make."""

from coral_core.workload.demand import (
    NamedWorkload,
    demand_from_trace,
    named_lengths,
    named_workload,
    tokens_per_s_by_phase,
    trace_lengths,
    workload_names,
)
from coral_core.workload.readers import TraceFormat, read_trace
from coral_core.workload.summary import LengthStatistics, length_statistics, scale_rate
from coral_core.workload.synthesis import TokenMoments, TokenQuantiles, synthesize

__all__ = [
    "LengthStatistics",
    "NamedWorkload",
    "TokenMoments",
    "TokenQuantiles",
    "TraceFormat",
    "demand_from_trace",
    "length_statistics",
    "named_lengths",
    "named_workload",
    "read_trace",
    "scale_rate",
    "synthesize",
    "tokens_per_s_by_phase",
    "trace_lengths",
    "workload_names",
]
