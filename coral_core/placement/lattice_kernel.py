"""Compiled loops of the lattice method (see `lattice` for the mathematics).

Conventions:
- a multiset is given by runs: `types[row, i]` with `counts[row, i]` > 0 nodes, padded by counts of 0;
- its key is the sum of its nodes' weights modulo 2^64, so the key of a difference is the difference of keys;
- `index` = (weights by type, slot keys, slot rows, shift) finds the lattice row of a key;
- `tables` = (lists, reach, base): row r of G[S,k,.] is lists[base[k] + r], of which reach[base[k] + r] are positive.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.placement.compiled import compiled

Floats = NDArray[np.float64]
Keys = NDArray[np.uint64]
Rows = NDArray[np.int32]
Ints = NDArray[np.int64]
Shorts = NDArray[np.int16]
Index = tuple[Keys, Keys, Rows, int]
Tables = tuple[Floats, Ints, Ints]

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads consecutive keys (Knuth, multiplicative hashing)
_INDEX = "Tuple((u8[::1], u8[::1], i4[::1], i8))"
_TABLES = "Tuple((f8[:, ::1], i8[::1], i8[::1]))"


@compiled("void(u8[::1], u8[::1], i4[::1], i8)")
def insert_keys(keys: Keys, slot_keys: Keys, slot_rows: Rows, shift: int) -> None:
    """Fill an open-addressing table (a power of two of slots, row -1 = free) with row numbers by key."""
    last = len(slot_keys) - 1
    for row in range(len(keys)):
        slot = np.int64((keys[row] * _MIX) >> np.uint64(shift))
        while slot_rows[slot] >= 0:
            slot = (slot + 1) & last
        slot_keys[slot] = keys[row]
        slot_rows[slot] = row


@compiled(f"i8(u8, {_INDEX})")
def find_row(key: np.uint64, index: Index) -> int:
    """The row of a key that is in the lattice."""
    _, slot_keys, slot_rows, shift = index
    last = len(slot_keys) - 1
    slot = np.int64((key * _MIX) >> np.uint64(shift))
    while slot_keys[slot] != key:
        slot = (slot + 1) & last
    row: int = slot_rows[slot]
    return row


@compiled("i8(u8[::1], i8[::1], i8, u8[::1], i8[::1])")
def list_splits(weights: Keys, counts: Ints, n_runs: int, keys: Keys, sizes: Ints) -> int:
    """All sub-multisets with at least one node of the first run: keys and sizes, in mixed-radix order of run counts.

    The last of them is the whole multiset. Returns how many there are.
    """
    n = 0
    for taken in range(1, counts[0] + 1):
        keys[n] = weights[0] * np.uint64(taken)
        sizes[n] = taken
        n += 1
    for run in range(1, n_runs):
        block = n
        for taken in range(1, counts[run] + 1):
            for i in range(block):
                keys[n] = keys[i] + weights[run] * np.uint64(taken)
                sizes[n] = sizes[i] + taken
                n += 1
    return n


@compiled("i8(i2[::1], i2[::1], u8[::1], u8[::1], i8[::1])")
def load_runs(types: Shorts, counts: Shorts, weights: Keys, run_weights: Keys, run_counts: Ints) -> int:
    """Copy one multiset's runs; returns how many there are."""
    n_runs = 0
    while n_runs < len(counts) and counts[n_runs] > 0:
        run_weights[n_runs] = weights[types[n_runs]]
        run_counts[n_runs] = counts[n_runs]
        n_runs += 1
    return n_runs


@compiled("f8(f8[::1], f8[::1], i8)")
def best_of_two(a: Floats, b: Floats, layers: int) -> float:
    """The most of min(a(i), b(layers - i)) over i = 1..layers-1, both descending: two parts, each holding a layer."""
    low, high = 1, layers  # the first i at which a(i) <= b(layers - i), or `layers`
    while low < high:
        middle = (low + high) >> 1
        if a[middle - 1] <= b[layers - middle - 1]:
            high = middle
        else:
            low = middle + 1
    value = 0.0
    if low < layers:
        value = a[low - 1]
    if low > 1:
        value = max(value, b[layers - low])
    return value


@compiled("i8(f8[::1], f8)")
def holds(values: Floats, throughput: float) -> int:
    """How many layers a descending list holds at `throughput`."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) >> 1
        if values[middle] >= throughput:
            low = middle + 1
        else:
            high = middle
    return low


@compiled("i8(f8[::1], f8[::1], f8[::1])")
def merge_into(a: Floats, b: Floats, best: Floats) -> int:
    """best(l) = max(best(l), min(l-th largest of a and b, a(1), b(1))): two parts, each holding a layer."""
    layers = len(best)
    cap, floor = min(a[0], b[0]), best[layers - 1]
    if cap <= floor:
        return 0
    i, j = holds(a, cap), holds(b, cap)
    start = min(i + j, layers)
    for layer in range(start):
        best[layer] = max(best[layer], cap)
    for layer in range(start, layers):
        from_a, from_b = a[i], b[layer - i]
        value = max(from_a, from_b)
        if value <= floor:
            break
        best[layer] = max(best[layer], value)
        i += from_a >= from_b
    return 0


@compiled("void(f8[:, ::1], i2[:, ::1], i2[:, ::1], f8[:, ::1], i8[::1])")
def fill_single_stages(capacity: Floats, types: Shorts, counts: Shorts, lists: Floats, reach: Ints) -> None:
    """T_A(j) of every multiset as one stage: the sum of its nodes' capacities. `capacity` (C, L), `lists` (rows, L)."""
    for row in range(lists.shape[0]):
        lists[row] = 0.0
        for run in range(types.shape[1]):
            if counts[row, run] == 0:
                break
            for j in range(lists.shape[1]):
                lists[row, j] += counts[row, run] * capacity[types[row, run], j]
        reach[row] = holds(lists[row], 5e-324)  # the smallest positive number


@compiled(f"void({_TABLES}, i8, i8, i8, i2[:, ::1], i2[:, ::1], {_INDEX}, i8)")
def fill_stages(  # noqa: PLR0917 - compiled code takes arrays, not objects
    tables: Tables, k: int, first: int, end: int, types: Shorts, counts: Shorts, index: Index, max_splits: int
) -> None:
    """G[S,k,M] for the lattice's rows first..end-1, from G[S,1,.] and G[S,k-1,.]."""
    lists, reach, base = tables
    run_weights, run_counts = np.empty(types.shape[1], np.uint64), np.empty(types.shape[1], np.int64)
    keys, sizes = np.empty(max_splits, np.uint64), np.empty(max_splits, np.int64)
    for row in range(first, end):
        n_runs = load_runs(types[row], counts[row], index[0], run_weights, run_counts)
        n_splits = list_splits(run_weights, run_counts, n_runs, keys, sizes)
        whole, size = keys[n_splits - 1], sizes[n_splits - 1]
        best = lists[base[k] + row]
        best[:] = 0.0
        for split in range(n_splits):
            if size - sizes[split] < k - 1:
                continue
            a = base[1] + find_row(keys[split], index)
            b = base[k - 1] + find_row(whole - keys[split], index)
            if reach[a] > 0 and reach[b] > 0:
                merge_into(lists[a], lists[b], best)
        reach[base[k] + row] = holds(best, 5e-324)  # the smallest positive number


@compiled(f"void({_TABLES}, i8, f8, u8[::1], i8[::1], i8, {_INDEX}, u8[::1], i8[::1], i2[:, ::1])")
def rebuild(  # noqa: PLR0917 - compiled code takes arrays, not objects
    tables: Tables,
    n_stages: int,
    throughput: float,
    run_weights: Keys,
    run_counts: Ints,
    n_runs: int,
    index: Index,
    keys: Keys,
    sizes: Ints,
    stage_counts: Shorts,
) -> None:
    """Stages of a multiset that reach `throughput`, the value that G gives it: peel off one stage at a time."""
    lists, _, base = tables
    left, left_weights = run_counts[:n_runs].copy(), run_weights[:n_runs].copy()
    run_of = np.arange(n_runs)
    stage_counts[:] = 0
    due = lists.shape[1]
    for stage in range(n_stages - 1):
        rest_stages = n_stages - 1 - stage
        n_splits = list_splits(left_weights, left, n_runs, keys, sizes)
        whole, size = keys[n_splits - 1], sizes[n_splits - 1]
        code = 0
        for split in range(n_splits):
            if size - sizes[split] < rest_stages:
                continue
            held = holds(lists[base[1] + find_row(keys[split], index)], throughput)
            if held == 0:
                continue
            rest_held = holds(lists[base[rest_stages] + find_row(whole - keys[split], index)], throughput)
            if rest_held > 0 and held + rest_held >= due:
                due -= held
                code = split
                break
        kept = 0
        for run in range(n_runs):
            # Undo the mixed radix of `list_splits`: the first run counts from 1.
            radix = left[run] if run == 0 else left[run] + 1
            taken = code % radix + (1 if run == 0 else 0)
            code //= radix
            stage_counts[stage, run_of[run]] = taken
            if left[run] > taken:
                left[kept], left_weights[kept], run_of[kept] = left[run] - taken, left_weights[run], run_of[run]
                kept += 1
        n_runs = kept
    for run in range(n_runs):
        stage_counts[n_stages - 1, run_of[run]] = left[run]


@compiled(f"void({_TABLES}, i8, f8[:, ::1], i2[:, ::1], i2[:, ::1], {_INDEX}, i8, f8[::1], i2[::1], i2[:, :, ::1])")
def improve(  # noqa: PLR0917 - compiled code takes arrays, not objects
    tables: Tables,
    n_stages: int,
    capacity: Floats,
    types: Shorts,
    counts: Shorts,
    index: Index,
    max_splits: int,
    throughput: Floats,
    stages: Shorts,
    stage_counts: Shorts,
) -> None:
    """Where S = n_stages beats `throughput` (n,), replace it and rebuild the stages.

    `stages` (n,) is the number of stages, `stage_counts` (n, S_max, runs) the nodes of each stage by run.
    """
    lists, reach, base = tables
    layers, runs = capacity.shape[1], types.shape[1]
    some_stage_layers = (layers + n_stages - 1) // n_stages
    run_weights, run_counts = np.empty(runs, np.uint64), np.empty(runs, np.int64)
    keys, sizes = np.empty(max_splits, np.uint64), np.empty(max_splits, np.int64)
    for row in range(len(throughput)):
        n_runs = load_runs(types[row], counts[row], index[0], run_weights, run_counts)
        size, limit = 0, 0.0
        for run in range(n_runs):
            size += run_counts[run]
            limit += run_counts[run] * capacity[types[row, run], some_stage_layers - 1]
        # Some stage holds at least ceil(L/S) layers, and no more nodes than all: `limit` is never exceeded.
        if size < n_stages or limit <= throughput[row]:
            continue
        if n_stages == 1:
            throughput[row] = limit
            stages[row] = 1
            stage_counts[row, 0] = counts[row]
            continue
        n_splits = list_splits(run_weights, run_counts, n_runs, keys, sizes)
        whole = keys[n_splits - 1]
        best = throughput[row]
        for split in range(n_splits):
            if size - sizes[split] < n_stages - 1:
                continue
            a = base[1] + find_row(keys[split], index)
            b = base[n_stages - 1] + find_row(whole - keys[split], index)
            if reach[a] + reach[b] >= layers and lists[a, 0] > best and lists[b, 0] > best:
                best = max(best, best_of_two(lists[a], lists[b], layers))
        if best > throughput[row]:
            throughput[row] = best
            stages[row] = n_stages
            rebuild(
                tables, n_stages, best, run_weights, run_counts, n_runs, index, keys, sizes, stage_counts[row]
            )  # fmt: skip


@compiled("f8(f8[:, ::1], i2[::1], i2[::1], i8)")
def stage_throughput(capacity: Floats, types: Shorts, counts: Shorts, layers: int) -> float:
    """T_A(layers) of one stage; 0 for more layers than the model has."""
    value = 0.0
    if layers <= capacity.shape[1]:
        for run in range(len(types)):
            value += counts[run] * capacity[types[run], layers - 1]
    return value


@compiled("void(f8[:, :, ::1], i2[:, ::1], i2[::1], i2[:, :, ::1], f8[::1], i2[:, ::1])")
def share_layers(  # noqa: PLR0917 - compiled code takes arrays, not objects
    capacity: Floats, types: Shorts, stages: Shorts, stage_counts: Shorts, throughput: Floats, stage_layers: Shorts
) -> None:
    """Layers of each stage: what it holds above `throughput` (at least 1), then at it, in the order of stages.

    `capacity` (S_max, C, L); `stage_layers` (n, S_max) is filled, `throughput` (n,) replaced by the slowest stage's.
    """
    layers = capacity.shape[2]
    for row in range(len(stages)):
        table = capacity[stages[row] - 1]
        held = stage_layers[row]
        left = layers - stages[row]  # every stage has one
        for strict in (True, False):
            for stage in range(stages[row]):
                start = max(np.int64(held[stage]), np.int64(1))
                low, high = start, min(layers, start + left)
                while low < high:  # the most layers, low..high, at which the stage is fast enough
                    middle = (low + high + 1) >> 1
                    value = stage_throughput(table, types[row], stage_counts[row, stage], middle)
                    if value > throughput[row] or (value == throughput[row] and not strict):
                        low = middle
                    else:
                        high = middle - 1
                held[stage] = low
                left -= low - start
        slowest = np.inf
        for stage in range(stages[row]):
            slowest = min(slowest, stage_throughput(table, types[row], stage_counts[row, stage], held[stage]))
        throughput[row] = slowest
