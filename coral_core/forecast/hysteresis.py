"""How fast planned demand follows the forecast: a rise quickly, a fall slowly."""

from __future__ import annotations

import math

from coral_core.errors import InputError


def hysteresis(previous: float | None, demand: float, elapsed_s: float, up_s: float, down_s: float) -> float:
    """Planned demand `elapsed_s` seconds after it was `previous`, while the forecast is `demand` (all requests/s).

    Between the two: p = d + (previous - d) exp(-elapsed / tau), tau = `up_s` for a rise and `down_s` for a fall, the
    exact answer of dp/dt = (d - p) / tau; so steps add up: a plan every minute and one every ten come to the same.
    `tau` 0 follows at once. Without `previous` it is `demand`. Raises InputError for values that are negative or NaN,
    and for rates that are not finite (times may be infinite: never).
    """
    for name, value, finite in (
        ("previous", 0.0 if previous is None else previous, True),
        ("demand", demand, True),
        ("elapsed_s", elapsed_s, False),
        ("up_s", up_s, False),
        ("down_s", down_s, False),
    ):
        if not value >= 0 or (finite and math.isinf(value)):
            raise InputError(f"is {value}, must be at least 0", where=name)
    if previous is None:
        return demand
    tau_s = up_s if demand > previous else down_s
    left_frac = 0.0 if tau_s == 0 else 1.0 if math.isinf(tau_s) else math.exp(-elapsed_s / tau_s)
    planned = demand + (previous - demand) * left_frac
    return min(max(planned, min(previous, demand)), max(previous, demand))  # rounding leaves no value outside
