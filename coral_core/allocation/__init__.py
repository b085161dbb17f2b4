"""Which templates to run how often in which region."""

from coral_core.allocation.baselines.homo import homo
from coral_core.allocation.baselines.homo_joint import homo_joint
from coral_core.allocation.explain import explain_allocation
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.verify import verify_allocation
from coral_core.allocation.why_not import why_not

__all__ = ["explain_allocation", "homo", "homo_joint", "solve_allocation", "verify_allocation", "why_not"]
