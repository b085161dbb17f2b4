"""The simulator's containers over plain arrays: event heap, request queues, running lists, work items, marks.

Everything is O(1), the heap O(log n). Events are totally ordered by (time, rank, sequence).
"""

from __future__ import annotations

import math

from coral_core.sim.columns import (
    C_EVENTS,
    C_FREE_HEAD,
    C_FREE_ITEMS,
    C_HASH_A,
    C_HASH_B,
    C_HEAP,
    C_NEXT_NODE,
    C_NEXT_POOL,
    C_PENDING_NODES,
    C_PENDING_POOLS,
    C_SEQUENCE,
    H_A,
    H_B,
    H_KEY,
    I_FIRST_STAGE,
    I_RUN_HEAD,
    I_RUN_TAIL,
    N_PENDING,
    P_PENDING,
    R_COMPUTED,
    R_LIST,
    R_NEXT,
    R_PREV,
    R_RUN_NEXT,
    R_RUN_PREV,
    R_VERSION,
    S_END,
    S_FIRST,
    T_DECODE,
    T_EMITS,
    T_NEXT,
    T_REQUEST,
    T_START,
    T_STEP,
    T_TOKENS,
    T_VERSION,
    Z_NODES,
    Z_POOLS,
)
from coral_core.sim.world import World

RANK_SHIFT = 48
MANTISSA = 9007199254740992.0  # 2**53: a double's mantissa becomes a whole number without loss.
PRIME = 2147483647  # 2**31 - 1; a product of two residues still fits 64 bits.
FACTOR_A = 1103515245
FACTOR_B = 1664525003


def push(w: World, time_s: float, rank: int, a: int, b: int) -> None:
    """Add an event; later pushes of the same time and rank come later."""
    key = (rank << RANK_SHIFT) + w.counter[C_SEQUENCE]
    w.counter[C_SEQUENCE] += 1
    at = w.counter[C_HEAP]
    w.counter[C_HEAP] += 1
    while at > 0:
        parent = (at - 1) >> 1
        if w.heap_s[parent] < time_s or (w.heap_s[parent] == time_s and w.heap_key[parent, H_KEY] < key):
            break
        _copy_entry(w, parent, at)
        at = parent
    w.heap_s[at] = time_s
    w.heap_key[at, H_KEY] = key
    w.heap_key[at, H_A] = a
    w.heap_key[at, H_B] = b


def pop(w: World) -> tuple[float, int, int, int]:
    """Remove the first event: (time, rank, a, b); it enters the digest."""
    time_s, key = w.heap_s[0], w.heap_key[0, H_KEY]
    a, b = w.heap_key[0, H_A], w.heap_key[0, H_B]
    w.counter[C_HEAP] -= 1
    size = w.counter[C_HEAP]
    # The last entry sinks from the top until neither child comes before it.
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(w, child + 1, child):
            child += 1
        if _before(w, size, child):
            break
        _copy_entry(w, child, at)
        at = child
    _copy_entry(w, size, at)
    rank = key >> RANK_SHIFT
    w.counter[C_EVENTS] += 1
    _mix(w, time_s, rank, a, b)
    return time_s, rank, a, b


def _before(w: World, left: int, right: int) -> bool:
    if w.heap_s[left] != w.heap_s[right]:
        return bool(w.heap_s[left] < w.heap_s[right])
    return bool(w.heap_key[left, H_KEY] < w.heap_key[right, H_KEY])


def _copy_entry(w: World, source: int, target: int) -> None:
    w.heap_s[target] = w.heap_s[source]
    w.heap_key[target, H_KEY] = w.heap_key[source, H_KEY]
    w.heap_key[target, H_A] = w.heap_key[source, H_A]
    w.heap_key[target, H_B] = w.heap_key[source, H_B]


def _mix(w: World, time_s: float, rank: int, a: int, b: int) -> None:
    """Fold an event, to the last bit of its time, into two rolling polynomial hashes."""
    mantissa, exponent = math.frexp(time_s)
    whole = int(mantissa * MANTISSA)
    first, second = w.counter[C_HASH_A], w.counter[C_HASH_B]
    for value in (whole & PRIME, (whole >> 31) + 2048 + exponent, rank, a + 1, b + 1):
        first = (first * FACTOR_A + value) % PRIME
        second = (second * FACTOR_B + value) % PRIME
    w.counter[C_HASH_A] = first
    w.counter[C_HASH_B] = second


def waiting_list(w: World, node: int) -> int:
    """Requests at an entry node that do not run yet."""
    return int(w.fixed[Z_POOLS] + node)


def decode_list(w: World, node: int) -> int:
    """Running requests at an entry node whose next token may be computed."""
    return int(w.fixed[Z_POOLS] + w.fixed[Z_NODES] + node)


def prefill_list(w: World, node: int) -> int:
    """Running requests at an entry node whose next chunk of prompt may be computed."""
    return int(w.fixed[Z_POOLS] + 2 * w.fixed[Z_NODES] + node)


def arrived_list(w: World, node: int) -> int:
    """Requests at an entry node whose KV has come from a prefill instance, and which do not run yet."""
    return int(w.fixed[Z_POOLS] + 3 * w.fixed[Z_NODES] + node)


def append(w: World, queue: int, r: int) -> None:
    """Put a request at the end of a queue; it must stand in none."""
    tail = w.lists[queue, 1]
    w.req[r, R_LIST] = queue
    w.req[r, R_PREV] = tail
    w.req[r, R_NEXT] = -1
    if tail >= 0:
        w.req[tail, R_NEXT] = r
    else:
        w.lists[queue, 0] = r
    w.lists[queue, 1] = r


def prepend(w: World, queue: int, r: int) -> None:
    """Put a request at the front of a queue; it must stand in none."""
    head = w.lists[queue, 0]
    w.req[r, R_LIST] = queue
    w.req[r, R_PREV] = -1
    w.req[r, R_NEXT] = head
    if head >= 0:
        w.req[head, R_PREV] = r
    else:
        w.lists[queue, 1] = r
    w.lists[queue, 0] = r


def unlink(w: World, r: int) -> None:
    """Take a request out of the queue it stands in, if any."""
    queue = w.req[r, R_LIST]
    if queue < 0:
        return
    before, after = w.req[r, R_PREV], w.req[r, R_NEXT]
    if before >= 0:
        w.req[before, R_NEXT] = after
    else:
        w.lists[queue, 0] = after
    if after >= 0:
        w.req[after, R_PREV] = before
    else:
        w.lists[queue, 1] = before
    w.req[r, R_LIST] = -1


def start_running(w: World, i: int, r: int) -> None:
    """Note a request as the latest admitted of an instance."""
    tail = w.inst[i, I_RUN_TAIL]
    w.req[r, R_RUN_PREV] = tail
    w.req[r, R_RUN_NEXT] = -1
    if tail >= 0:
        w.req[tail, R_RUN_NEXT] = r
    else:
        w.inst[i, I_RUN_HEAD] = r
    w.inst[i, I_RUN_TAIL] = r


def stop_running(w: World, i: int, r: int) -> None:
    """Take a request out of an instance's admitted ones."""
    before, after = w.req[r, R_RUN_PREV], w.req[r, R_RUN_NEXT]
    if before >= 0:
        w.req[before, R_RUN_NEXT] = after
    else:
        w.inst[i, I_RUN_HEAD] = after
    if after >= 0:
        w.req[after, R_RUN_PREV] = before
    else:
        w.inst[i, I_RUN_TAIL] = before


def new_item(w: World, r: int, tokens: int, decode: int, emits: int) -> int:
    """A work item: the next `tokens` of request `r` after those computed; `emits` where its end yields a token."""
    item = int(w.counter[C_FREE_HEAD])
    w.counter[C_FREE_HEAD] = w.item[item, T_NEXT]
    w.counter[C_FREE_ITEMS] -= 1
    w.item[item, T_REQUEST] = r
    w.item[item, T_VERSION] = w.req[r, R_VERSION]
    w.item[item, T_TOKENS] = tokens
    w.item[item, T_START] = w.req[r, R_COMPUTED]
    w.item[item, T_DECODE] = decode
    w.item[item, T_EMITS] = emits
    w.item[item, T_STEP] = -1
    w.item[item, T_NEXT] = -1
    return item


def free_item(w: World, item: int) -> None:
    """Give an item back."""
    w.item[item, T_NEXT] = w.counter[C_FREE_HEAD]
    w.counter[C_FREE_HEAD] = item
    w.counter[C_FREE_ITEMS] += 1


def free_items(w: World, head: int) -> None:
    """Give a chain of items back."""
    item = head
    while item >= 0:
        after = w.item[item, T_NEXT]
        free_item(w, item)
        item = after


def append_item(w: World, node: int, head: int, tail: int, item: int) -> None:
    """Put an item at the end of the node's chain in columns `head` and `tail`."""
    w.item[item, T_NEXT] = -1
    if w.node[node, tail] >= 0:
        w.item[w.node[node, tail], T_NEXT] = item
    else:
        w.node[node, head] = item
    w.node[node, tail] = item


def mark_node(w: World, node: int) -> None:
    """Have the node looked at once all events of this instant are through."""
    if w.node[node, N_PENDING] == 0:
        w.node[node, N_PENDING] = 1
        w.pending_nodes[(w.counter[C_NEXT_NODE] + w.counter[C_PENDING_NODES]) % w.pending_nodes.shape[0]] = node
        w.counter[C_PENDING_NODES] += 1


def mark_entries(w: World, i: int) -> None:
    """Have all entry nodes of an instance looked at."""
    stage = w.inst[i, I_FIRST_STAGE]
    for node in range(w.stage[stage, S_FIRST], w.stage[stage, S_END]):
        mark_node(w, node)


def mark_pool(w: World, pool: int) -> None:
    """Have the pool's queue looked at."""
    if w.pool[pool, P_PENDING] == 0:
        w.pool[pool, P_PENDING] = 1
        w.pending_pools[(w.counter[C_NEXT_POOL] + w.counter[C_PENDING_POOLS]) % w.pending_pools.shape[0]] = pool
        w.counter[C_PENDING_POOLS] += 1


def next_marked_node(w: World) -> int:
    """The node marked first, its mark removed; there must be one. Each stands in the ring at most once."""
    node = w.pending_nodes[w.counter[C_NEXT_NODE]]
    w.counter[C_NEXT_NODE] = (w.counter[C_NEXT_NODE] + 1) % w.pending_nodes.shape[0]
    w.counter[C_PENDING_NODES] -= 1
    w.node[node, N_PENDING] = 0
    return int(node)


def next_marked_pool(w: World) -> int:
    """The pool marked first, its mark removed; there must be one."""
    pool = w.pending_pools[w.counter[C_NEXT_POOL]]
    w.counter[C_NEXT_POOL] = (w.counter[C_NEXT_POOL] + 1) % w.pending_pools.shape[0]
    w.counter[C_PENDING_POOLS] -= 1
    w.pool[pool, P_PENDING] = 0
    return int(pool)
