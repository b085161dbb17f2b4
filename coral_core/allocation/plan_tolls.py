"""What nodes are worth where they are scarce and every plan of a unit in a region is known (`unit_plans`).

Data: units u of weight w_u; regions r with A_rc nodes; plans g in G_ur: price p_g, nodes U_g, fraction v_g; the weighted
  shortfall S that may remain.
Variables: y_g binary, at most one per (u, r); s_u in [0, m_u], m_u the most that S leaves it.
Constraints: sum over u, g of U_g y_g <= A_r;  sum over r, g of v_g y_g + s_u >= 1;  sum w_u s_u <= S.
Objective: k sum p_g y_g, or with k = 0 the shortfall sum w_u s_u, without the row of S.
Bound: with tolls t_rc >= 0 and a price q >= 0 of the shortfall (1 where it is the objective, S then 0), the least over plans,
  sum over units of min (k p + t U + q w_u s_u) - sum A t - q S, holds for every plan, whatever the prices' quality (weak
  duality). A unit's minimum is found exactly: the front of (price, fraction) of each region, joined. The prices come from
  column generation over whole plans of units, smoothed towards the best ones so far.
A plan that uses g costs at least bound - z_u + (k p_g + t U_g + the least of the rest beside it).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from coral_core.allocation.coverage import Floats, Ints
from coral_core.allocation.unit_plans import UnitPlans
from coral_core.allocation.wide import Effort
from coral_core.solver.program import IntegerProgram, Solver, SolveStatus

SERVED_TOLERANCE_FRAC = 1e-9
_ITERATIONS = 200
_SMOOTHING = 0.5
_PENALTY_FACTOR = 20.0
_SHORTFALL_FACTOR = 1e4
_CELLS_MAX = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBook:
    """`plans[u][r]` of unit u in region r, weights (units,) and nodes available (R, C)."""

    weight: Floats
    available: Ints
    plans: list[list[UnitPlans]]

    @property
    def reach_frac(self) -> Floats:
        """(units,): the most that can be served of a unit if all nodes are its own."""
        return np.array([min(math.fsum(plans.most_frac for plans in own), 1.0) for own in self.plans])

    @property
    def least_shortfall(self) -> float:
        """Weighted shortfall that is lost whatever is done."""
        return math.fsum(self.weight * (1.0 - self.reach_frac))

    def shortfall(self, choice: Ints) -> float:
        """Weighted shortfall of a choice of plans (units, regions)."""
        missing = 1.0 - np.array(
            [
                math.fsum(float(plans.served_frac[g]) for plans, g in zip(own, chosen, strict=True))
                for own, chosen in zip(self.plans, choice.tolist(), strict=True)
            ]
        )
        return math.fsum(self.weight * np.where(missing > SERVED_TOLERANCE_FRAC, missing, 0.0))

    def price_usd_per_h(self, choice: Ints) -> float:
        """What a choice of plans costs."""
        return math.fsum(
            float(plans.price_usd_per_h[g])
            for own, chosen in zip(self.plans, choice.tolist(), strict=True)
            for plans, g in zip(own, chosen, strict=True)
        )

    def most_missing_frac(self, shortfall: float | None) -> Floats:
        """(units,): the most of a unit that may be missing where no more than `shortfall` (None: any) is."""
        least = 1.0 - self.reach_frac
        if shortfall is None:
            return np.ones(len(self.weight))
        room = np.maximum(shortfall - self.least_shortfall, 0.0) / self.weight
        return np.asarray(np.minimum(least + room, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What is sought: the least shortfall (`shortfall` None), or the least cost at no more than that."""

    shortfall: float | None

    @property
    def by_cost(self) -> bool:
        """Whether cost is the objective."""
        return self.shortfall is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Plans that no other beats in value (price with toll) and fraction served: both ascend; `pick` (f, parts): where each comes from."""

    served_frac: Floats
    value: Floats
    pick: Ints

    @classmethod
    def of(cls, served_frac: Floats, price: Floats, pick: Ints) -> Front:
        """The front of plans (n,)."""
        order = np.argsort(price, kind="stable")
        most = np.maximum.accumulate(served_frac[order])
        order = order[np.concatenate(([True], most[1:] > most[:-1]))]
        return cls(served_frac=served_frac[order], value=price[order], pick=pick[order])

    def beside(self, other: Front) -> Front:
        """The front of both together, regions apart; more than everything is everything."""
        a, b = (part.ravel() for part in np.indices((len(self.value), len(other.value))))
        served = self.served_frac[a] + other.served_frac[b]
        served = np.where(served >= 1.0 - SERVED_TOLERANCE_FRAC, 1.0, served)
        front = Front.of(served, self.value[a] + other.value[b], np.arange(len(a)))
        pick = np.concatenate((self.pick[a[front.pick]], other.pick[b[front.pick]]), axis=1)
        return Front(served_frac=front.served_frac, value=front.value, pick=pick)

    def least_beside(self, served_frac: Floats, most_missing: float, missing_price: float) -> Floats:
        """(n,): least price of the front, and of what is missing then, beside plans that serve `served_frac`."""
        if missing_price == 0.0 or most_missing <= SERVED_TOLERANCE_FRAC:
            need = 1.0 - most_missing - served_frac - 2 * SERVED_TOLERANCE_FRAC
            price = np.append(self.value, np.inf)
            return np.asarray(price[np.searchsorted(self.served_frac, need, side="left")])
        found = np.empty(len(served_frac))
        step = max(_CELLS_MAX // max(len(self.value), 1), 1)
        for start in range(0, len(served_frac), step):
            missing = 1.0 - served_frac[start : start + step, None] - self.served_frac[None, :]
            price = self.value + missing_price * np.maximum(missing, 0.0)
            price[missing > most_missing + 2 * SERVED_TOLERANCE_FRAC] = np.inf
            found[start : start + step] = price.min(axis=1)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitColumn:
    """A whole plan of a unit in the master: its price, what is missing of it, its nodes (R, C), what regions (R,) serve.

    `origin` (R, 2): where the plans of the regions come from (`UnitPlans.kept`, `state`).
    """

    unit: int
    origin: Ints
    price_usd_per_h: float
    missing_frac: float
    nodes: Ints
    served_frac: Floats

    @property
    def use(self) -> Floats:
        """(R, C + 1): nodes, and the fraction served."""
        return np.column_stack((self.nodes, self.served_frac))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrices:
    """Tolls (R, C), the price of the shortfall, the bound they prove, and what follows for every unit.

    `least` (units,): z_u; `fronts[u][r]`, `priced[u][r]` (p,): the plans' prices with tolls; `cheapest`: plans of that price.
    """

    toll: Floats
    missing_worth: float
    bound: float
    least: Floats
    fronts: list[list[Front]]
    priced: list[list[Floats]]
    cheapest: list[UnitColumn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The best prices found, the columns generated, and the weights (columns,) that the last master gave them.

    `complete`: the master can do no better with any other column.
    """

    prices: PlanPrices
    pool: list[UnitColumn]
    weight: Floats
    complete: bool


def find_plan_prices(
    book: PlanBook,
    aim: Aim,
    solver: Solver,
    effort: Effort,
    *,
    before: Generated | None = None,
    enough: float = math.inf,
) -> Generated:
    """The best prices found within the effort, from those `before`, until their bound is `enough`."""
    pool = list(before.pool) if before else []
    toll = before.prices.toll if before else np.zeros(book.available.shape)
    missing_price = before.prices.missing_worth if before else 0.0
    best = price_units(book, aim, toll, missing_price if aim.by_cost else 1.0)
    found, weight, complete = best, np.zeros(0), False
    for _ in range(_ITERATIONS):
        pool += found.cheapest
        if best.bound >= enough or math.isinf(best.bound):
            break
        master = _master(book, aim, pool, solver, effort)
        if master is None:
            break
        weight = master.weight
        complete = master.value - best.bound <= max(effort.gap_frac / 4, 1e-7) * abs(master.value) + 1e-9
        if complete or time.perf_counter() > effort.deadline_s:
            break
        toll = _SMOOTHING * best.toll + (1 - _SMOOTHING) * master.toll
        missing_price = _SMOOTHING * best.missing_worth + (1 - _SMOOTHING) * master.missing_worth
        found = price_units(book, aim, toll, missing_price)
        best = found if found.bound > best.bound else best
    weight = np.append(weight, np.zeros(len(pool) - len(weight)))
    return Generated(prices=best, pool=pool, weight=weight, complete=complete)


def price_units(book: PlanBook, aim: Aim, toll: Floats, missing_worth: float) -> PlanPrices:
    """The cheapest plan of every unit at these prices, and the bound that they prove."""
    factor, most_missing = float(aim.by_cost), book.most_missing_frac(aim.shortfall)
    fronts, priced, least = [], [], []
    cheapest: list[UnitColumn] = []
    for u, own in enumerate(book.plans):
        missing_price = missing_worth * float(book.weight[u])
        priced.append([factor * p.price_usd_per_h + p.nodes @ toll[r] for r, p in enumerate(own)])
        fronts.append(
            [
                Front.of(plans.served_frac, price, np.arange(len(plans))[:, None])
                for plans, price in zip(own, priced[-1], strict=True)
            ]
        )
        front = fronts[-1][0]
        for other in fronts[-1][1:]:
            front = front.beside(other)
        missing = np.maximum(1.0 - front.served_frac, 0.0)
        total = front.value + missing_price * missing
        total[missing > most_missing[u] + 2 * SERVED_TOLERANCE_FRAC] = np.inf
        best = int(np.argmin(total))
        least.append(float(total[best]))
        parts = list(zip(own, front.pick[best].tolist(), strict=True))
        cheapest.append(
            UnitColumn(
                unit=u,
                origin=np.array([(plans.kept[g], plans.state[g]) for plans, g in parts]),
                price_usd_per_h=math.fsum(float(plans.price_usd_per_h[g]) for plans, g in parts),
                missing_frac=float(missing[best]),
                nodes=np.stack([plans.nodes[g] for plans, g in parts]),
                served_frac=np.array([plans.served_frac[g] for plans, g in parts]),
            )
        )
    paid = math.fsum((book.available * toll).ravel())
    allowed = missing_worth * aim.shortfall if aim.shortfall is not None else 0.0
    return PlanPrices(
        toll=toll,
        missing_worth=missing_worth,
        bound=math.fsum([*least, -paid, -allowed]),
        least=np.array(least),
        fronts=fronts,
        priced=priced,
        cheapest=cheapest,
    )


def bounds_if_used(book: PlanBook, aim: Aim, prices: PlanPrices) -> list[list[Floats]]:
    """[u][r] (p,): the objective is at least this where the plan is used; infinite where it cannot be."""
    most_missing = book.most_missing_frac(aim.shortfall)
    found = []
    for u, own in enumerate(book.plans):
        missing_price = prices.missing_worth * float(book.weight[u])
        base, rows = prices.bound - float(prices.least[u]), []
        for r, plans in enumerate(own):
            rest = Front(served_frac=np.zeros(1), value=np.zeros(1), pick=np.zeros((1, 0), dtype=np.int64))
            for k, other in enumerate(prices.fronts[u]):
                rest = rest.beside(other) if k != r else rest
            beside = rest.least_beside(plans.served_frac, float(most_missing[u]), missing_price)
            rows.append(base + np.maximum(prices.priced[u][r] + beside, prices.least[u]))
        found.append(rows)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Master:
    value: float
    weight: Floats
    toll: Floats
    missing_worth: float


def _master(book: PlanBook, aim: Aim, pool: list[UnitColumn], solver: Solver, effort: Effort) -> _Master | None:
    """The best mix of the pool's plans; None where the solver gives no prices."""
    n, n_units, cells = len(pool), len(book.plans), book.available.size
    table = np.zeros((n_units + cells + 1, n + cells + 1))
    unit = np.array([column.unit for column in pool])
    missing = np.array([column.missing_frac for column in pool]) * book.weight[unit]
    price = np.array([column.price_usd_per_h for column in pool])
    table[unit, np.arange(n)] = 1.0
    table[n_units:-1, :n] = np.stack([column.nodes.ravel() for column in pool], axis=1)
    table[-1, :n] = missing if aim.by_cost else 0.0
    table[n_units:, n:] = -np.eye(cells + 1)
    dearest = math.fsum(max(float(plans.price_usd_per_h.max()) for plans in own) for own in book.plans)
    penalty = _PENALTY_FACTOR * max(dearest, 1e-9) if aim.by_cost else float(book.weight.sum()) + 1.0
    cost = np.concatenate((price if aim.by_cost else missing, np.full(cells + 1, penalty)))
    cost[-1] *= _SHORTFALL_FACTOR / float(book.weight.min())
    row, column = np.nonzero(table)
    counted = np.bincount(row, minlength=len(table))
    answer = solver.solve(
        IntegerProgram(
            objective=cost,
            lower=np.zeros(len(cost)),
            upper=np.full(len(cost), np.inf),
            integer=np.zeros(len(cost), dtype=bool),
            indptr=np.concatenate(([0], np.cumsum(counted))).astype(np.int32),
            indices=column.astype(np.int32),
            values=table[row, column],
            row_lower=np.concatenate((np.ones(n_units), np.full(cells + 1, -np.inf))),
            row_upper=np.concatenate((np.full(n_units, np.inf), book.available.ravel(), [aim.shortfall or 0.0])),
            name="plan tolls",
        ),
        effort.options(),
    )
    if answer.status is not SolveStatus.OPTIMAL or answer.row_duals is None:
        return None
    assert answer.x is not None
    assert answer.objective is not None
    paid = np.maximum(-answer.row_duals[n_units:], 0.0)
    return _Master(
        value=answer.objective,
        weight=answer.x[:n],
        toll=paid[:-1].reshape(book.available.shape),
        missing_worth=float(paid[-1]) if aim.by_cost else 1.0,
    )
