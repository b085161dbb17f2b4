"""Baseline `cauchy` against enumeration: every number of decode replicas, every set of combos."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation.baselines.cauchy import cauchy
from coral_core.domain.allocation import AllocationOptions, AllocationProblem, DemandRow, TemplateColumns
from coral_core.domain.workload import Phase


def combos(problem, region, keep):
    """The `keep` best (served, price, nodes) of one model, at most one per pair of configurations."""
    ids = range(len(problem.templates))
    side = {phase: [t for t in ids if problem.templates.phases[t] is phase] for phase in (Phase.PREFILL, Phase.DECODE)}
    need = {row.phase: row.tokens_per_s for row in problem.demand}
    price = problem.price_usd_per_h[region]
    best = {}
    for p, q in itertools.product(side[Phase.PREFILL], side[Phase.DECODE]):
        f_p = problem.templates.throughput[p] / need[Phase.PREFILL]
        f_q = problem.templates.throughput[q] / need[Phase.DECODE]
        for n in range(1, math.ceil(1 / f_q) + 1):
            nodes = problem.templates.nodes[p] + n * problem.templates.nodes[q]
            if (nodes > problem.available[region]).any():
                continue
            served, cost = min(f_p, n * f_q, 1.0), float(nodes @ price)
            pair = (int(problem.templates.nodes[p].argmax()), int(problem.templates.nodes[q].argmax()))
            key = (-served / cost, cost, p, q, n)
            if pair not in best or key < best[pair][0]:
                best[pair] = (key, served, cost, nodes)
    return [item[1:] for item in sorted(best.values(), key=lambda item: item[0][:2])][:keep]


def best_plan(problem, keep):
    """(missing share, cost) of the best set of combos in the only region."""
    chosen = combos(problem, 0, keep)
    most = [math.ceil(1 / served - 1e-9) for served, _, _ in chosen]
    best = (1.0, 0.0)
    for counts in itertools.product(*(range(m + 1) for m in most)):
        nodes = sum((n * item[2] for n, item in zip(counts, chosen, strict=True)), np.zeros(2))
        if (nodes > problem.available[0]).any():
            continue
        served = sum(n * item[0] for n, item in zip(counts, chosen, strict=True))
        cost = sum(n * item[1] for n, item in zip(counts, chosen, strict=True))
        missing = max(0.0, 1.0 - served)
        best = min(best, (0.0 if missing < 1e-9 else round(missing, 9), cost))
    return best


throughputs = st.integers(2, 12).map(lambda tenths: tenths * 10.0)


@st.composite
def problems(draw):
    n = draw(st.integers(2, 4))
    phases = [
        Phase.PREFILL,
        Phase.DECODE,
        *(draw(st.sampled_from([Phase.PREFILL, Phase.DECODE])) for _ in range(n - 2)),
    ]
    config = [draw(st.integers(0, 1)) for _ in range(n)]
    nodes = np.zeros((n, 2), dtype=np.int64)
    nodes[np.arange(n), config] = [draw(st.integers(1, 2)) for _ in range(n)]
    return AllocationProblem(
        regions=("r",),
        configs=("a", "b"),
        available=np.array([[draw(st.integers(0, 9)), draw(st.integers(0, 9))]]),
        price_usd_per_h=np.array([[draw(st.sampled_from([1.0, 1.7])), draw(st.sampled_from([0.9, 2.3]))]]),
        templates=TemplateColumns(
            ids=tuple(f"t{i}" for i in range(n)),
            models=("m",) * n,
            phases=tuple(phases),
            nodes=nodes,
            throughput=np.array([draw(throughputs) for _ in range(n)]),
        ),
        demand=(
            DemandRow(model="m", phase=Phase.PREFILL, tokens_per_s=100.0),
            DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=90.0),
        ),
        options=AllocationOptions(gap_frac=1e-9, solver="highs", time_limit_s=600),
    )


@given(problem=problems(), keep=st.integers(1, 4))
@settings(max_examples=120, deadline=None)
def test_no_set_of_kept_combos_serves_more_or_serves_it_for_less(problem, keep):
    result = cauchy(problem, candidates=keep)
    missing, cost = best_plan(problem, keep)
    # combos share what they leave over: a plan may serve more than its combos promise one by one, never less
    assert max(item.frac for item in result.shortfall) <= missing + 1e-8
    if missing == 0:
        assert result.full
        assert result.cost_usd_per_h <= cost * (1 + 1e-6)
        assert result.cost_usd_per_h >= cost * (1 - 1e-6)
