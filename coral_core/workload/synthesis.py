"""A synthetic trace from stated statistics.

Data: rate and burstiness of arrivals; mean and coefficient of variation, or quantiles, of prompt and response lengths.
Arrivals: gaps are gamma distributed with shape 1/b^2 and mean 1/rate, so that their coefficient of variation is b
(b = 1 is a Poisson process, b = 0 a steady beat; below 0.001 it is taken as 0).
Lengths: prompt and response are drawn independently of each other and of time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.workload import Trace
from coral_core.errors import InputError
from coral_core.workload.summary import check_rate

MOST_REQUESTS = 100_000_000
MOST_TOKENS = 100_000_000
MOST_CV = 1_000.0
"""For gaps and lengths: far beyond any trace; above it draws leave the range of numbers."""
LEAST_BURSTINESS = 1e-3
"""Below it arrivals are a steady beat: no trace tells the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMoments:
    """Lengths with this mean (at least 1) and coefficient of variation: one token plus a log-normal rest.

    Whole numbers are made by rounding up or down at random so that the mean is exact.
    """

    mean_tokens: float
    cv: float

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """`n` lengths before rounding."""
        rest = self.mean_tokens - 1
        if rest == 0 or self.cv == 0:
            return np.full(n, self.mean_tokens)
        sigma2 = math.log1p((self.cv * self.mean_tokens / rest) ** 2)
        drawn: NDArray[np.float64] = rng.lognormal(math.log(rest) - sigma2 / 2, math.sqrt(sigma2), n)
        return 1 + drawn

    def check(self, where: str) -> None:
        """InputError where no lengths have these moments."""
        if not 1 <= self.mean_tokens <= MOST_TOKENS:
            raise InputError(f"mean_tokens is {self.mean_tokens}, must be from 1 to {MOST_TOKENS}", where=where)
        if not 0 <= self.cv <= MOST_CV:
            raise InputError(f"cv is {self.cv}, must be from 0 to {MOST_CV:g}", where=where)
        if self.mean_tokens == 1 and self.cv > 0:
            raise InputError(f"a mean of 1 token allows no cv of {self.cv}, every length is 1 then", where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenQuantiles:
    """Lengths with these quantiles: (fraction, tokens) in rising order from fraction 0 to 1, linear in between."""

    points: tuple[tuple[float, float], ...]

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """`n` lengths before rounding."""
        fracs, tokens = zip(*self.points, strict=True)
        drawn: NDArray[np.float64] = np.interp(rng.random(n), fracs, tokens)
        return drawn

    def check(self, where: str) -> None:
        """InputError where the points are no quantiles."""
        fracs = [frac for frac, _ in self.points]
        if len(self.points) < 2 or fracs[0] != 0 or fracs[-1] != 1:
            raise InputError("quantiles must run from fraction 0 to fraction 1", where=where)
        for index, (frac, tokens) in enumerate(self.points):
            if not (math.isfinite(frac) and math.isfinite(tokens) and 1 <= tokens <= MOST_TOKENS):
                raise InputError(f"quantile {index} is ({frac}, {tokens}), tokens must be from 1 on", where=where)
        for index, (lower, upper) in enumerate(pairwise(self.points), start=1):
            if not (lower[0] < upper[0] and lower[1] <= upper[1]):
                raise InputError(f"quantile {index} {upper} does not rise above {lower}", where=where)


def synthesize(
    *,
    name: str,
    requests: int,
    requests_per_s: float,
    input_tokens: TokenMoments | TokenQuantiles,
    output_tokens: TokenMoments | TokenQuantiles,
    rng: np.random.Generator,
    burstiness: float = 1.0,
) -> Trace:
    """A trace of `requests` requests with the stated statistics (as expected values); the same `rng`, the same trace.

    `burstiness` is the coefficient of variation of the gaps between arrivals. Lengths are at least 1.
    InputError names the statistic that is impossible.
    """
    if not 1 <= requests <= MOST_REQUESTS:
        raise InputError(f"requests is {requests}, must be from 1 to {MOST_REQUESTS}", where=name)
    check_rate(requests_per_s, where=name)
    if not 0 <= burstiness <= MOST_CV:
        raise InputError(f"burstiness is {burstiness}, must be from 0 to {MOST_CV:g}", where=name)
    input_tokens.check(f"{name}.input_tokens")
    output_tokens.check(f"{name}.output_tokens")
    gaps_s = _gaps_s(requests - 1, requests_per_s, burstiness, rng)
    return Trace(
        name=name,
        arrival_s=np.concatenate(([0.0], np.cumsum(gaps_s))),
        input_tokens=_whole(input_tokens.draw(requests, rng), rng),
        output_tokens=_whole(output_tokens.draw(requests, rng), rng),
        source=f"synthetic: {requests_per_s:g} requests/s, burstiness {burstiness:g}, "
        f"prompts {input_tokens}, responses {output_tokens}",
    )


def _gaps_s(n: int, rate: float, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    if burstiness < LEAST_BURSTINESS:
        return np.full(n, 1 / rate)
    shape = burstiness**-2
    return rng.gamma(shape, 1 / (rate * shape), n)


def _whole(tokens: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Rounded up with the probability of the fraction, else down: the mean stays."""
    return np.floor(tokens + rng.random(len(tokens))).astype(np.int64)
