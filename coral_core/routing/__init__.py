"""Routing and admission decisions, pure: the gateway and the simulator call the very same functions.

The functions work on small arrays that their caller owns and use nothing that a compiler for numerical Python lacks,
so the simulator's kernel compiles them and the gateway runs them as they are.
"""

from coral_core.routing.admission import admits, expected_wait_s, max_handover_s, max_wait_s, may_retry, retry_after_s
from coral_core.routing.least_work import pick_least_work
from coral_core.routing.round_robin import Rotation, pick_weighted
from coral_core.routing.scale_down import least_loaded

__all__ = [
    "Rotation",
    "admits",
    "expected_wait_s",
    "least_loaded",
    "max_handover_s",
    "max_wait_s",
    "may_retry",
    "pick_least_work",
    "pick_weighted",
    "retry_after_s",
]
