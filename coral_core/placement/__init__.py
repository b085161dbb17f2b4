"""How a model lies over a combination of nodes: enumeration, methods, verification."""

from coral_core.placement.combinations import enumerate_combinations
from coral_core.placement.methods import placement_method
from coral_core.placement.verify import verify_placed, verify_placement

__all__ = ["enumerate_combinations", "placement_method", "verify_placed", "verify_placement"]
