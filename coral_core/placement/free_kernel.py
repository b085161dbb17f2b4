"""Compiled loops of the free latency split (see `free` for the mathematics).

Conventions, besides those of `lattice_kernel`:
- inside one combination a sub-multiset is a mixed-radix code of its nodes per run, the first run most significant, so
  the code of a difference is the difference of codes; `whole` is the combination itself, 0 is empty;
- `cap` (C, grid, L) is T^ by type, budget - 1, layers - 1;
- `held[x, b]` = lam_x(t, b) and `most[x, B]` = F_x(t, B) for 0 <= b, B < grid, non-decreasing, 0 where impossible:
  whole numbers as 32-bit floats, because adding those is what compilers turn into vector instructions.
  `held_from[x]`, `most_from[x]` are the first budgets at which they are positive, `grid` where there is none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.placement.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Shorts = NDArray[np.int16]
Layers = NDArray[np.float32]
Kinds = tuple[Shorts, Floats]
Work = tuple[Layers, Ints, Layers, Ints]

_KINDS = "Tuple((i2[::1], f8[::1]))"
_WORK = "Tuple((f4[:, ::1], i8[::1], f4[:, ::1], i8[::1]))"


@compiled(f"f8(f8[:, :, ::1], {_KINDS}, i8, i8, i8)")
def value_of(cap: Floats, stage: Kinds, n: int, budget: int, layers: int) -> float:
    """T_A(layers, budget) of a stage of n kinds of nodes, summed in the order of runs as everywhere."""
    types, counts = stage
    value = 0.0
    for i in range(n):
        value += counts[i] * cap[types[i], budget - 1, layers - 1]
    return value


@compiled(f"i8(f8[:, :, ::1], {_KINDS}, i8, f8, f4[::1])")
def fill_held(cap: Floats, stage: Kinds, n: int, throughput: float, held: Layers) -> int:
    """lam_A(throughput, b) for b < grid, one walk up the staircase of budgets and layers; returns the first budget."""
    grid, layers = cap.shape[1], cap.shape[2]
    held[:] = np.float32(0)
    if value_of(cap, stage, n, grid - 1, 1) < throughput:
        return int(grid)
    low, high = 1, grid - 1
    while low < high:
        middle = (low + high) >> 1
        if value_of(cap, stage, n, middle, 1) >= throughput:
            high = middle
        else:
            low = middle + 1
    first, j = low, 1
    for budget in range(first, grid):
        while j < layers and value_of(cap, stage, n, budget, j + 1) >= throughput:
            j += 1
        held[budget] = j
    return first


@compiled("void(f4[::1], i8, f4[::1], i8, f4[::1])")
def add_stage(held: Layers, held_from: int, most: Layers, most_from: int, best: Layers) -> None:
    """best(B) = max(best(B), held(b) + most(B - b)) where both are possible; only steps of `held` can matter."""
    grid = len(best)
    for b in range(held_from, grid - most_from):
        layers = held[b]
        if layers > held[b - 1]:
            for k in range(most_from, grid - b):
                value, before = layers + most[k], best[b + k]
                best[b + k] = value if value > before else before  # noqa: FURB136 - max() is not vectorised


@compiled("UniTuple(i8, 2)(f4[::1], i8, f4[::1], i8, i8)")
def most_of_two(held: Layers, held_from: int, most: Layers, most_from: int, budget: int) -> tuple[int, int]:
    """The most layers of one stage and a rest within a budget, and the stage's part of it; 0 where impossible."""
    grid = len(held)
    best, of_stage = 0, 0
    for b in range(max(held_from, budget - grid + 1), min(grid - 1, budget - most_from) + 1):
        layers = int(held[b] + most[budget - b])
        if layers > best:
            best, of_stage = layers, b
    return best, of_stage


@compiled("i8(i2[::1], i8, i2[:, ::1], i8[::1])")
def fill_digits(counts: Shorts, n_runs: int, digits: Shorts, place: Ints) -> int:
    """Nodes per run of every code, and what a node of each run adds to a code; returns the code of the whole."""
    size = 1
    for run in range(n_runs - 1, -1, -1):
        place[run] = size
        size *= counts[run] + 1
    digits[0] = 0
    for code in range(1, size):
        digits[code] = digits[code - 1]
        run = n_runs - 1
        while digits[code, run] == counts[run]:
            digits[code, run] = 0
            run -= 1
        digits[code, run] += 1
    return size - 1


@compiled("i8(i2[:, ::1], i8[::1], i8, i8)")
def first_part(digits: Shorts, place: Ints, n_runs: int, whole: int) -> int:
    """One node of the first run that `whole` holds."""
    for run in range(n_runs):
        if digits[whole, run] > 0:
            return int(place[run])
    return 0


@compiled("i8(i2[:, ::1], i8[::1], i8, i8, i8)")
def next_part(digits: Shorts, place: Ints, n_runs: int, whole: int, part: int) -> int:
    """The sub-multiset of `whole` after `part`, counting up digit by digit; 0 after the last."""
    for run in range(n_runs - 1, -1, -1):
        if digits[part, run] < digits[whole, run]:
            return int(part + place[run])
        part -= digits[part, run] * place[run]
    return 0


@compiled(f"i8(i2[::1], i2[::1], i8, {_KINDS})")
def load_stage(types: Shorts, counts: Shorts, n_runs: int, stage: Kinds) -> int:
    """The kinds of nodes of a stage given by its nodes per run; returns how many."""
    n = 0
    for run in range(n_runs):
        if counts[run] > 0:
            stage[0][n] = types[run]
            stage[1][n] = counts[run]
            n += 1
    return n


@compiled(f"i8(i2[:, ::1], i8[::1], i8, i8, i8, {_WORK}, i8[::1])")
def peel(  # noqa: PLR0917 - compiled code takes arrays, not objects
    digits: Shorts, place: Ints, n_runs: int, part: int, rest: int, work: Work, codes: Ints
) -> int:
    """The stages behind `part` and the most of `rest` at the best cut of the SLO; returns how many.

    At most len(codes), as there may be fewer layers than nodes: the last stage then takes all nodes that are left, which
    makes it no slower, and a layer each is all that such stages need to hold.
    """
    held, held_from, most, most_from = work
    budget = held.shape[1]
    n_stages = 0
    while part != 0:
        codes[n_stages] = part
        n_stages += 1
        budget -= most_of_two(held[part], held_from[part], most[rest], most_from[rest], budget)[1]
        part = 0
        if n_stages < len(codes) - 1 and most[rest, budget] != held[rest, budget]:
            due = int(most[rest, budget])
            part = first_part(digits, place, n_runs, rest)
            while most_of_two(held[part], held_from[part], most[rest - part], most_from[rest - part], budget)[0] != due:
                part = next_part(digits, place, n_runs, rest, part)
            rest -= part
    codes[n_stages] = rest
    return n_stages + 1


@compiled(f"i8(f8[:, :, ::1], f8, i2[::1], i2[:, ::1], i8[::1], i8, i8, {_WORK}, {_KINDS}, i8[::1])")
def find_partition(  # noqa: PLR0917 - compiled code takes arrays, not objects
    cap: Floats,
    throughput: float,
    types: Shorts,
    digits: Shorts,
    place: Ints,
    n_runs: int,
    whole: int,
    work: Work,
    stage: Kinds,
    codes: Ints,
) -> int:
    """A partition of the combination into stages that reach `throughput`; the number of stages, 0 if there is none."""
    held, held_from, most, most_from = work
    grid, layers = cap.shape[1], cap.shape[2]
    for code in range(1, whole):
        n = load_stage(types, digits[code], n_runs, stage)
        held_from[code] = fill_held(cap, stage, n, throughput, held[code])
    for code in range(1, whole - place[0] + 1):  # a rest lacks a node of the first run
        most[code] = held[code]
        most_from[code] = held_from[code]
        part = first_part(digits, place, n_runs, code)
        while part != code:
            rest = code - part
            if held_from[part] + most_from[rest] < grid:
                add_stage(held[part], held_from[part], most[rest], most_from[rest], most[code])
                most_from[code] = min(most_from[code], held_from[part] + most_from[rest])
            part = next_part(digits, place, n_runs, code, part)
    part, best, best_part = place[0], layers - 1, 0
    while part != whole:
        rest = whole - part
        layers_of_two = most_of_two(held[part], held_from[part], most[rest], most_from[rest], grid)[0]
        if layers_of_two > best:
            best, best_part = layers_of_two, part
        part = next_part(digits, place, n_runs, whole, part)
    return 0 if best_part == 0 else peel(digits, place, n_runs, best_part, whole - best_part, work, codes)


@compiled(f"f8(f8[:, :, ::1], i2[::1], i8, i2[:, ::1], i8, {_KINDS}, i2[::1], i2[::1])")
def share_at_budgets(  # noqa: PLR0917 - compiled code takes arrays, not objects
    cap: Floats,
    types: Shorts,
    n_runs: int,
    stages: Shorts,
    n_stages: int,
    stage: Kinds,
    budgets: Shorts,
    layers_of: Shorts,
) -> float:
    """The best layers for given budgets, one layer at a time to the stage that stays fastest; the slowest's value."""
    layers = cap.shape[2]
    ahead = np.empty(n_stages)
    slowest = np.inf
    for s in range(n_stages):
        n = load_stage(types, stages[s], n_runs, stage)
        layers_of[s] = 1
        slowest = min(slowest, value_of(cap, stage, n, budgets[s], 1))
        ahead[s] = value_of(cap, stage, n, budgets[s], 2) if layers > 1 else 0.0
    for _ in range(layers - n_stages):
        s = 0
        for other in range(1, n_stages):
            if ahead[other] > ahead[s]:
                s = other
        slowest = min(slowest, ahead[s])
        layers_of[s] += 1
        n = load_stage(types, stages[s], n_runs, stage)
        ahead[s] = value_of(cap, stage, n, budgets[s], layers_of[s] + 1) if layers_of[s] < layers else 0.0
    return slowest


@compiled(f"f8(f8[:, :, ::1], f8, i2[::1], i8, i2[:, ::1], i8, {_WORK}, {_KINDS}, i2[::1], i2[::1])")
def improve_partition(  # noqa: PLR0917 - compiled code takes arrays, not objects
    cap: Floats,
    throughput: float,
    types: Shorts,
    n_runs: int,
    stages: Shorts,
    n_stages: int,
    work: Work,
    stage: Kinds,
    budgets: Shorts,
    layers_of: Shorts,
) -> float:
    """The best throughput of a fixed partition (S, runs) if it is above `throughput`, with its budgets and layers.

    Jumps: where a throughput is reached, the best layers for those budgets give a larger one, until none is reached.
    Returns `throughput` where it is not exceeded.
    """
    held, held_from, most, most_from = work
    grid, layers = cap.shape[1], cap.shape[2]
    while True:
        above = np.nextafter(throughput, np.inf)
        for s in range(n_stages - 1, -1, -1):
            n = load_stage(types, stages[s], n_runs, stage)
            held_from[s] = fill_held(cap, stage, n, above, held[s])
            if held_from[s] == grid:
                return throughput
            if s == n_stages - 1:
                most[s] = held[s]
                most_from[s] = held_from[s]
            elif s > 0:
                most[s] = np.float32(0)
                most_from[s] = min(grid, held_from[s] + most_from[s + 1])
                add_stage(held[s], held_from[s], most[s + 1], most_from[s + 1], most[s])
        left = grid
        for s in range(n_stages - 1):
            reached, budget = most_of_two(held[s], held_from[s], most[s + 1], most_from[s + 1], left)
            if s == 0 and reached < layers:
                return throughput
            budgets[s] = budget
            left -= budget
        budgets[n_stages - 1] = left
        throughput = share_at_budgets(cap, types, n_runs, stages, n_stages, stage, budgets, layers_of)


@compiled("void(i2[:, ::1], i2[:, ::1], i8[::1])")
def match_rows(counts: Shorts, kept: Shorts, start: Ints) -> None:
    """For each row of `counts` its row in `kept`, a subsequence without some of the distinct rows; -1 where left out."""
    at = 0
    for row in range(len(counts)):
        start[row] = -1
        if at < len(kept) and (counts[row] == kept[at]).all():
            start[row] = at
            at += 1


@compiled("UniTuple(i8, 2)(i2[:, ::1])")
def largest(counts: Shorts) -> tuple[int, int]:
    """The most codes and the most runs of any combination."""
    max_codes, max_runs = 1, 1
    for row in range(len(counts)):
        codes, runs = 1, 0
        for c in range(counts.shape[1]):
            codes *= int(counts[row, c]) + 1
            runs += int(counts[row, c] > 0)
        max_codes, max_runs = max(max_codes, codes), max(max_runs, runs)
    return max_codes, max_runs


@compiled("void(f8[:, :, ::1], i2[:, ::1], f8[::1], i2[::1], i2[:, :, ::1], i2[:, ::1], i2[:, ::1], i8[::1])")
def improve_free(  # noqa: PLR0917 - compiled code takes arrays, not objects
    cap: Floats,
    counts: Shorts,
    throughput: Floats,
    n_stages: Shorts,
    stage_counts: Shorts,
    budgets: Shorts,
    layers_of: Shorts,
    tests: Ints,
) -> None:
    """Raise `throughput` (n,) to the optimum over all partitions, budgets and layers, and replace what goes with it.

    `counts` (n, C), `n_stages` (n,), `stage_counts` (n, S, C), `budgets` and `layers_of` (n, S): on entry a placement
    that gives `throughput`, or 0 stages. `budgets` stay 0 where it is not exceeded. `tests` (n,) counts the throughputs
    that were tested on all partitions.
    """
    grid, n_types, most_stages = cap.shape[1], cap.shape[0], stage_counts.shape[1]
    max_codes, runs = largest(counts)
    digits, place = np.zeros((max_codes, runs), np.int16), np.zeros(runs, np.int64)
    rows = max(max_codes, most_stages)
    work = (
        np.zeros((rows, grid), np.float32), np.zeros(rows, np.int64),
        np.zeros((rows, grid), np.float32), np.zeros(rows, np.int64),
    )  # fmt: skip
    stage = (np.zeros(runs, np.int16), np.zeros(runs))
    types, own = np.zeros(runs, np.int16), np.zeros(runs, np.int16)
    stages = np.zeros((most_stages, runs), np.int16)
    codes_of = np.zeros(most_stages, np.int64)
    for row in range(len(throughput)):
        n_runs = 0
        for c in range(n_types):
            if counts[row, c] > 0:
                types[n_runs], own[n_runs] = c, counts[row, c]
                stages[:, n_runs] = stage_counts[row, :, c]
                n_runs += 1
        whole = fill_digits(own, n_runs, digits, place)
        best, found = throughput[row], int(n_stages[row])
        while True:
            if found > 1:
                best = improve_partition(
                    cap, best, types, n_runs, stages, found, work, stage, budgets[row], layers_of[row]
                )
            tests[row] += 1
            above = np.nextafter(best, np.inf)
            again = find_partition(cap, above, types, digits, place, n_runs, whole, work, stage, codes_of)
            if again == 0:
                break
            found = again
            n_stages[row] = found
            stage_counts[row] = 0
            layers_of[row] = 0
            budgets[row] = 0
            for s in range(found):
                for run in range(n_runs):
                    stages[s, run] = digits[codes_of[s], run]
                    stage_counts[row, s, types[run]] = stages[s, run]
        throughput[row] = best
