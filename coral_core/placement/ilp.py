"""The published placement program (DESIGN 3.2), one integer program per number of stages.

Data: T^_j(g_k, l/S) for nodes k = 1..n and layers j = 1..L; a number of stages S <= min(n, L).
Variables: x[s,j] = 1 where stage s holds j layers; y[s,k] = 1 where node k is in stage s; z[s,j,k] = x[s,j] y[s,k]; T.
Constraints: sum_j x[s,j] = 1 for each s; sum_s y[s,k] = 1 for each k; sum_sj j x[s,j] = L;
  z[s,j,k] <= x[s,j]; z[s,j,k] <= y[s,k]; z[s,j,k] >= x[s,j] + y[s,k] - 1; T <= sum_jk z[s,j,k] T^_j(g_k) for each s.
Objective: maximise T.

Two bounds on T are added that cut off no better placement: at least the best found so far, and at most U, first what the
nodes give at ceil(L/S) layers, which some stage must hold (each other stage takes a node away). U scales T and caps each
T^. A solver's tolerances are absolute, so it is blind to a T far below U, and calls such a program worthless or
infeasible. Therefore, for each S, in turn:
  confirm: T is fixed just above the best and everything scaled by it (with no best: by the smallest positive T^,
    which makes all coefficients 0 or 1). Only that this is infeasible, and that T without that
    bound stays below it too, proves the best; else there is a better one.
  search: T is maximised from there. Where the best stays far below U, the solver's bound proves no more than a lower U:
    again with that, until both are of one magnitude.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations, PlacementProblem, PlacementResult, PlacementStatus
from coral_core.domain.templates import Placement, Stage
from coral_core.errors import InputError
from coral_core.placement.problem import check_capacity, check_counts, problem_arrays, problem_at
from coral_core.solver.builder import ProgramBuilder
from coral_core.solver.choose import Preference, choose_solver
from coral_core.solver.program import Floats, IntegerProgram, SolveOptions, SolveResult, SolveStatus

GAP_FRAC: Final = 1e-9
PROOF_FRAC: Final = 1e-7
"""How far above the best placement no other may be; room for the solvers' tolerances of 1e-9."""
SEEN_FRAC: Final = 1e-2
"""The least best placement, relative to U, at which a solver sees better ones."""
BLUR_FRAC: Final = 1e-5
"""What a bound of the solver may be wrong by, relative to U: dual values are good to 1e-6."""
MAX_COLUMNS: Final = 1_000_000
"""Hundreds of times what a solver can do in hours; some GB of memory."""
DUST: Final = 1e-9
"""What no solver can tell from 0: smaller coefficients are left out, as HiGHS does, for they spoil the arithmetic."""


class IlpPlacement:
    """The reference method: the published integer program on Gurobi or HiGHS.

    `time_limit_s` is per combination and number of stages. A combination is `unproven` where that ended, or the
    solver's answers contradict each other, before a better placement than the best found was ruled out.
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
        _check_size(len(problem.nodes), problem.layers)
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

    def _solve_stages(  # noqa: C901 - two steps that alternate, stated in the module's head
        self, table: Floats, names: NDArray[np.str_], n_stages: int, best: float
    ) -> tuple[Placement | None, float, float]:
        """(placement, throughput, upper bound) at S = n_stages; `table` is (n, L), `best` what fewer stages reach."""
        placement: Placement | None = None
        deadline = time.perf_counter() + self._options.time_limit_s

        def ask(scale: float, at_least: float) -> tuple[SolveResult, bool]:
            """What the solver says at that U, and whether it found a better placement."""
            nonlocal placement, best
            # A bound below the tolerance means nothing, and has misled HiGHS.
            lower = at_least if at_least >= DUST else 0.0
            result = self._run(placement_program(_scaled(table, scale), n_stages, at_least=lower), deadline)
            found = _stages(result, table, n_stages)
            if found is None or found[2] <= best:
                return result, False
            placement, best = _named(found[0], found[1], names), found[2]
            return result, True

        least, most = table.min(where=table > 0, initial=np.inf), _most(table, n_stages)
        upper, better = most, False
        while most >= least and most > best * (1 + PROOF_FRAC):
            if best > upper:
                upper = most  # a bound that lowered it was wrong
            if best > 0 and (better or best < SEEN_FRAC * upper):
                result, better = ask(upper, best / upper)[0], False
                lower = max(best, _bound(result) * upper) + BLUR_FRAC * upper
                if result.status not in (SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE):
                    return placement, best, most
                if best < SEEN_FRAC * upper and lower > upper / 2:
                    return placement, best, most  # the solver's bound is not that of what it found
                upper = lower if best < SEEN_FRAC * upper else upper
            else:
                above = best * (1 + PROOF_FRAC) if best > 0 else least
                result, better = ask(above, 1.0)
                if result.status is SolveStatus.INFEASIBLE:
                    # HiGHS 1.16 has called such programs infeasible that are not, never without the bound below T.
                    result, better = ask(above, 0.0)
                    if not better and result.status is SolveStatus.OPTIMAL and _bound(result) < 1 - PROOF_FRAC / 2:
                        return placement, best, above if best > 0 else 0.0
                if not better:
                    return placement, best, most
        return placement, best, best

    def _run(self, program: IntegerProgram, deadline: float) -> SolveResult:
        left_s = max(0.0, deadline - time.perf_counter())
        return choose_solver(program, self._preference).solve(program, replace(self._options, time_limit_s=left_s))


def placement_program(table: Floats, n_stages: int, *, at_least: float) -> IntegerProgram:
    """The program of the module's head for one S; `table` is T^ as (n, L), scaled so that U is 1.

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


def _check_size(n: int, layers: int) -> None:
    columns = min(n, layers) * layers * n
    if columns > MAX_COLUMNS:
        what = f"{n} nodes and {layers} layers need {columns} variables, more than {MAX_COLUMNS}"
        raise InputError(what, where="nodes", fix="use method lattice")


def _most(table: Floats, n_stages: int) -> float:
    """U to begin with: the nodes of a stage that holds ceil(L/S) layers, when each other stage has but one."""
    layers = table.shape[1]
    return float(np.sort(table[:, -(-layers // n_stages) - 1])[n_stages - 1 :].sum())


def _scaled(table: Floats, upper: float) -> Floats:
    scaled = np.minimum(table, upper) / upper
    return np.where(scaled < DUST, 0.0, scaled)


def _bound(result: SolveResult) -> float:
    """The solver's bound on T, relative to U; infeasible: nothing above the program's lower bound on T."""
    if result.status is SolveStatus.INFEASIBLE:
        return 0.0
    return 1.0 if result.bound is None else result.bound


def _stages(
    result: SolveResult, table: Floats, n_stages: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], float] | None:
    """(stage of each node, layers of each stage, throughput by T^ itself), None where the solution is no placement."""
    if result.x is None:
        return None
    n, layers = table.shape
    x, y = np.split(result.x[1 : 1 + n_stages * (layers + n)], [n_stages * layers])
    held = x.reshape(n_stages, layers).argmax(axis=1) + 1
    stage_of = y.reshape(n_stages, n).argmax(axis=0)
    if held.sum() != layers or len(np.unique(stage_of)) < n_stages:
        return None  # a solution worth nothing may leave a stage empty
    throughput = min(float(table[stage_of == s, held[s] - 1].sum()) for s in range(n_stages))
    return stage_of, held, throughput


def _named(stage_of: NDArray[np.int64], held: NDArray[np.int64], names: NDArray[np.str_]) -> Placement:
    stages = (
        Stage(layers=int(layers), nodes=tuple(str(name) for name in names[stage_of == s]))
        for s, layers in enumerate(held)
    )
    return Placement(stages=tuple(stages))


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
