"""Stage capacity: memory, roofline, network."""

from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import capacity_table

__all__ = ["CapacityAssumptions", "capacity_table"]
