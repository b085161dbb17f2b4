"""The published placement program (DESIGN 3.2), one integer program per number of stages.

Data: T^_j(g_k, l/S) for nodes k = 1..n and layers j = 1..L; a number of stages S <= min(n, L).
Variables: x[s,j] = 1 where stage s holds j layers; y[s,k] = 1 where node k is in stage s; z[s,j,k] = x[s,j] y[s,k]; T.
Constraints: sum_j x[s,j] = 1 for each s; sum_s y[s,k] = 1 for each k; sum_sj j x[s,j] = L;
  z[s,j,k] <= x[s,j]; z[s,j,k] <= y[s,k]; z[s,j,k] >= x[s,j] + y[s,k] - 1; T <= sum_jk z[s,j,k] T^_j(g_k) for each s.
Objective: maximise T.

Two bounds on T are added that cut off no better placement: at least the best found with fewer stages, and at most what
all nodes together give at ceil(L/S) layers, which some stage must hold. The latter scales T and caps each T^, so that
coefficients lie in 0..1 and the solver's absolute tolerances are relative to the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations, PlacementProblem, PlacementResult, PlacementStatus
from coral_core.domain.templates import Placement, Stage
from coral_core.placement.problem import check_capacity, check_counts, problem_arrays, problem_at
from coral_core.solver.builder import ProgramBuilder
from coral_core.solver.choose import Preference, choose_solver
from coral_core.solver.program import Floats, IntegerProgram, SolveOptions, SolveResult, SolveStatus

GAP_FRAC: Final = 1e-9
PROOF_FRAC: Final = 1e-7
"""A bound this close to the best placement proves it; room for the solver's own tolerances."""


class IlpPlacement:
    """The reference method: the published integer program on Gurobi or HiGHS.

    `time_limit_s` is per program, so per combination and number of stages. A combination is `unproven` where a program
    hit it and its bound leaves room for a better placement than the best found.
    """

    name = "ilp"

    def __init__(
        self, *, preference: Preference = "auto", time_limit_s: float = 60.0, threads: int = 1, seed: int = 0
    ) -> None:
        self._preference: Preference = preference
        self._options = SolveOptions(time_limit_s=time_limit_s, gap_frac=GAP_FRAC, threads=threads, seed=seed)

    def solve(self, problem: PlacementProblem) -> PlacementResult:
        """The best placement of one combination; raises InputError for a malformed problem, SolverError."""
        started = time.perf_counter()
        types, counts, capacity = problem_arrays(problem)
        names = np.repeat(types, counts)
        best, best_placement, bound = 0.0, None, 0.0
        for n_stages in range(1, len(capacity) + 1):
            table = capacity[n_stages - 1][np.repeat(np.arange(len(types)), counts)]
            placement, throughput, stages_bound = self._solve_stages(table, names, n_stages, best)
            bound = max(bound, stages_bound)
            if placement is not None and throughput > best:
                best, best_placement = throughput, placement
        proven = bound <= best * (1 + PROOF_FRAC)
        ended = PlacementStatus.OPTIMAL if best_placement else PlacementStatus.INFEASIBLE
        return PlacementResult(
            status=ended if proven else PlacementStatus.UNPROVEN,
            throughput_tokens_per_s=best,
            placement=best_placement,
            method=self.name,
            solve_s=time.perf_counter() - started,
        )

    def place(self, table: CapacityTable, counts: NDArray[np.int16]) -> PlacedCombinations:
        """The best placements of many combinations, one by one; see `PlacementMethod.place`.

        An unproven combination is kept with the best placement found, and left out where none was.
        """
        check_counts(counts, table)
        check_capacity(table.throughput, table.configs)
        results = [self.solve(problem_at(table, row)) for row in counts]
        return _packed(table, counts, results)

    def _solve_stages(
        self, table: Floats, names: NDArray[np.str_], n_stages: int, best: float
    ) -> tuple[Placement | None, float, float]:
        """(placement, throughput, upper bound) at S = n_stages; `table` is (n, L), `best` what fewer stages reach."""
        layers = table.shape[1]
        cap = float(table[:, -(-layers // n_stages) - 1].sum())
        if cap <= best:
            return None, 0.0, cap
        program = placement_program(np.minimum(table, cap) / cap, n_stages, at_least=best / cap)
        result = choose_solver(program, self._preference).solve(program, self._options)
        if result.status is SolveStatus.INFEASIBLE:
            return None, 0.0, best  # nothing above `best`, which is this program's lower bound
        bound = cap if result.bound is None else min(cap, result.bound * cap)
        placement = _placement(result, names, n_stages, layers)
        if placement is None:
            return None, 0.0, bound
        stage_of, held = placement
        throughput = min(float(table[stage_of == s, held[s] - 1].sum()) for s in range(n_stages))
        stages = tuple(
            Stage(layers=int(held[s]), nodes=tuple(str(name) for name in names[stage_of == s])) for s in range(n_stages)
        )
        return Placement(stages=stages), throughput, bound


def placement_program(table: Floats, n_stages: int, *, at_least: float = 0.0) -> IntegerProgram:
    """The program of the module's head for one S; `table` is T^ as (n, L), scaled so that no placement exceeds 1.

    Columns in order: T, x (S, L), y (S, n), z (S, L, n).
    """
    n, layers = table.shape
    S = n_stages
    builder = ProgramBuilder(name=f"placement of {n} nodes in {S} stages", maximize=True)
    throughput = builder.add_columns("throughput", 1, objective=1.0, lower=at_least, upper=1.0)
    x = builder.add_columns("x", S * layers, upper=1.0, integer=True).reshape(S, layers, 1)
    y = builder.add_columns("y", S * n, upper=1.0, integer=True).reshape(S, 1, n)
    z = builder.add_columns("z", S * layers * n, upper=1.0, integer=True).reshape(S, layers, n)
    stages = np.arange(S)[:, np.newaxis]
    builder.add_rows(
        "one_layer_count_per_stage", S, rows=np.repeat(stages, layers), columns=x.ravel(), lower=1.0, upper=1.0
    )
    builder.add_rows("one_stage_per_node", n, rows=np.tile(np.arange(n), S), columns=y.ravel(), lower=1.0, upper=1.0)
    builder.add_rows(
        "all_layers",
        1,
        rows=np.zeros(S * layers, dtype=np.int32),
        columns=x.ravel(),
        values=np.tile(np.arange(1.0, layers + 1), S),
        lower=layers,
        upper=layers,
    )
    linked = np.arange(z.size)
    for family, other in (("z_needs_x", x), ("z_needs_y", y)):
        rows = builder.add_rows(family, z.size, rows=linked, columns=z.ravel(), upper=0.0)
        builder.add_entries(rows, np.broadcast_to(other, z.shape).ravel(), -1.0)
    rows = builder.add_rows("z_is_both", z.size, rows=linked, columns=z.ravel(), lower=-1.0)
    for other in (x, y):
        builder.add_entries(rows, np.broadcast_to(other, z.shape).ravel(), -1.0)
    slowest = builder.add_rows(
        "slowest_stage",
        S,
        rows=np.repeat(stages, layers * n),
        columns=z.ravel(),
        values=np.tile(table.T.ravel(), S),
        lower=0.0,
    )
    builder.add_entries(slowest, throughput[0], -1.0)
    return builder.build()


def _placement(
    result: SolveResult, names: NDArray[np.str_], n_stages: int, layers: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """(stage of each node, layers of each stage) of a solution, None where there is none that is a placement."""
    if result.x is None:
        return None
    n = len(names)
    x, y = np.split(result.x[1 : 1 + n_stages * (layers + n)], [n_stages * layers])
    held = x.reshape(n_stages, layers).argmax(axis=1) + 1
    stage_of = y.reshape(n_stages, n).argmax(axis=0)
    if held.sum() != layers or len(np.unique(stage_of)) < n_stages:
        return None  # a solution worth nothing may leave a stage empty
    return stage_of, held


def _packed(table: CapacityTable, counts: NDArray[np.int16], results: Sequence[PlacementResult]) -> PlacedCombinations:
    kept = [row for row, result in enumerate(results) if result.placement is not None]
    s_max = min(int(counts.sum(axis=1).max(initial=1)), table.layers)
    n_stages = np.zeros(len(kept), dtype=np.int16)
    stage_layers = np.zeros((len(kept), s_max), dtype=np.int16)
    stage_counts = np.zeros((len(kept), s_max, len(table.configs)), dtype=np.int16)
    index = {config: c for c, config in enumerate(table.configs)}
    for at, row in enumerate(kept):
        placement = results[row].placement
        assert placement is not None
        n_stages[at] = len(placement.stages)
        for s, stage in enumerate(placement.stages):
            stage_layers[at, s] = stage.layers
            for node in stage.nodes:
                stage_counts[at, s, index[node]] += 1
    statuses = [result.status for result in results]
    return PlacedCombinations(
        counts=counts[kept],
        throughput=np.array([results[row].throughput_tokens_per_s for row in kept]),
        n_stages=n_stages,
        stage_layers=stage_layers,
        stage_counts=stage_counts,
        proven=np.array([statuses[row] is PlacementStatus.OPTIMAL for row in kept], dtype=np.bool_),
        method=IlpPlacement.name,
        statistics={
            "combinations": float(len(results)),
            "infeasible": float(statuses.count(PlacementStatus.INFEASIBLE)),
            "unproven": float(statuses.count(PlacementStatus.UNPROVEN)),
            "solve_s": sum(result.solve_s for result in results),
        },
    )
