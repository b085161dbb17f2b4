"""Units: every quantity's name ends in its unit; these constants convert to the base units (bytes, seconds)."""

from __future__ import annotations

from typing import Final

GIB: Final = 2**30
MIB: Final = 2**20
GB: Final = 10**9
"""Decimal gigabyte, the unit of vendors' bandwidth figures."""
TERA: Final = 10**12
GBIT_PER_S: Final = 10**9 / 8
"""Bytes per second in one gigabit per second."""
MS: Final = 1e-3
US: Final = 1e-6
SECONDS_PER_H: Final = 3600.0
