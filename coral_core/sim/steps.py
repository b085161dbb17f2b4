"""Pipelines: one scheduler per instance, and whole steps on their way through its stages.

A step is what is computed next of the requests of the instance, split by the nodes that they are bound to. At most
`micro_batches` are under way; vLLM's own scheduler (instances without balanced steps) asks for the next ones only when the
oldest is through (`EngineCore.step_with_batch_queue` of vLLM 0.32 blocks on it). A node computes its parts step by step, each once all of it has arrived from the stage
before; so nodes of one stage work side by side, and none waits for an iteration of requests that it does not know. A
step's results are merged, in the order of steps, when its last part is through the last stage: tokens are then there, and
requests that go on may be part of the next step.
"""

from __future__ import annotations

from coral_core.sim.batches import add_item, admit_arrived, clear_batch, form_entry_batch, has_batch
from coral_core.sim.blocks import stage_count
from coral_core.sim.columns import (
    DECODING,
    I_BALANCED,
    I_END_STAGE,
    I_FIRST_STAGE,
    I_FIRST_STEP,
    I_FORMED,
    I_MERGED,
    I_MICRO_BATCHES,
    I_THROUGH,
    N_BATCH_HEAD,
    N_BUSY,
    N_INSTANCE,
    N_NEXT_STEP,
    N_STAGE,
    R_STATE,
    R_VERSION,
    S_END,
    S_FIRST,
    T_EMITS,
    T_NEXT,
    T_REQUEST,
    T_STEP,
    T_TOKENS,
    T_VERSION,
    U_HEAD,
    U_TAIL,
    U_TOKENS,
    V_DUE,
    V_HEAD,
    V_TAIL,
    Y_HEAD,
    Y_LEFT,
    Y_NUMBER,
    Y_TAIL,
    Z_PARTS,
)
from coral_core.sim.journey import emit
from coral_core.sim.network import send_items
from coral_core.sim.queues import append, decode_list, free_item, free_items, mark_entries, mark_node, prefill_list
from coral_core.sim.world import World


def form_steps(w: World, i: int) -> None:
    """Schedule as much as there is work and room for; without balanced steps, only when one is through."""
    if w.inst[i, I_BALANCED] == 0:
        if w.inst[i, I_THROUGH] == 0 and _is_under_way(w, i):
            return
        w.inst[i, I_THROUGH] = 0
    while w.step[_row(w, i, w.inst[i, I_FORMED]), Y_NUMBER] < 0:
        if not _form_step(w, i):
            return


def _is_under_way(w: World, i: int) -> bool:
    """Whether the scheduler waits for a step."""
    first = w.inst[i, I_FIRST_STEP]
    under_way = 0
    for row in range(first, first + w.inst[i, I_MICRO_BATCHES]):
        under_way += int(w.step[row, Y_NUMBER] >= 0)
    return under_way > 0


def _form_step(w: World, i: int) -> bool:
    """Schedule a step over all entry nodes; false where nothing can run."""
    number, micro_batches = w.inst[i, I_FORMED], w.inst[i, I_MICRO_BATCHES]
    first, end = _nodes(w, i)
    # Steps whose row this one takes are over, also for nodes that had no part in them.
    for n in range(first, end):
        w.node[n, N_NEXT_STEP] = max(w.node[n, N_NEXT_STEP], number - micro_batches + 1)
    entry_end = w.stage[w.inst[i, I_FIRST_STAGE], S_END]
    for n in range(first, entry_end):
        admit_arrived(w, n)
    decodes = int(w.inst[i, I_BALANCED] == 0 or has_batch(w, first, entry_end, micro_batches))
    items = 0
    for n in range(first, entry_end):
        computed = w.node[n, N_BATCH_HEAD]
        form_entry_batch(w, n, decodes)
        head = w.node[n, N_BATCH_HEAD]
        w.node[n, N_BATCH_HEAD] = computed
        w.part[_part(w, i, number, n), V_HEAD] = head
        items += _announce(w, i, n, head)
        if head >= 0:
            mark_node(w, n)
    if items == 0:
        return False
    row = _row(w, i, number)
    w.step[row, Y_NUMBER] = number
    w.step[row, Y_LEFT] = items
    w.step[row, Y_HEAD] = -1
    w.step[row, Y_TAIL] = -1
    w.inst[i, I_FORMED] += 1
    return True


def _announce(w: World, i: int, n: int, head: int) -> int:
    """Tell the later stages' nodes what to wait for; prompts may go on with their next chunk. Returns the items."""
    number, count, item = w.inst[i, I_FORMED], 0, head
    while item >= 0:
        r = w.item[item, T_REQUEST]
        w.item[item, T_STEP] = number
        count += 1
        for s in range(1, stage_count(w, i)):
            w.part[_part(w, i, number, w.bound[r, s]), V_DUE] += 1
        if w.item[item, T_EMITS] == 0 and w.item[item, T_VERSION] == w.req[r, R_VERSION]:
            append(w, prefill_list(w, n), r)
        item = w.item[item, T_NEXT]
    return count


def fill_from_step(w: World, n: int) -> None:
    """Fill an idle node's batch with its part of the next step, if all of it is there."""
    i = w.node[n, N_INSTANCE]
    while w.node[n, N_BUSY] == 0 and w.node[n, N_NEXT_STEP] < w.inst[i, I_FORMED]:
        part = _part(w, i, w.node[n, N_NEXT_STEP], n)
        if w.part[part, V_DUE] > 0:
            return
        item = w.part[part, V_HEAD]
        w.part[part, V_HEAD] = -1
        w.part[part, V_TAIL] = -1
        w.node[n, N_NEXT_STEP] += 1
        clear_batch(w, n)
        while item >= 0:
            after = w.item[item, T_NEXT]
            if w.item[item, T_VERSION] == w.req[w.item[item, T_REQUEST], R_VERSION]:
                add_item(w, n, item)
            else:
                _drop(w, i, item, w.node[n, N_STAGE])
            item = after
        _merge(w, i, n)
        if w.node[n, N_BATCH_HEAD] >= 0:
            return


def pass_on(w: World, head: int, n: int) -> None:
    """A part is computed: its items go to the nodes of the next stage, or, after the last one, are merged."""
    i, s = w.node[n, N_INSTANCE], w.node[n, N_STAGE]
    if s == stage_count(w, i) - 1:
        _collect(w, i, head)
    else:
        _spread(w, i, n, head)
    _merge(w, i, n)


def _collect(w: World, i: int, head: int) -> None:
    item = head
    while item >= 0:
        after = w.item[item, T_NEXT]
        row = _row(w, i, w.item[item, T_STEP])
        if w.step[row, Y_NUMBER] == w.item[item, T_STEP]:
            w.step[row, Y_LEFT] -= 1
            w.item[item, T_NEXT] = -1
            if w.step[row, Y_HEAD] < 0:
                w.step[row, Y_HEAD] = item
            else:
                w.item[w.step[row, Y_TAIL], T_NEXT] = item
            w.step[row, Y_TAIL] = item
        else:
            free_item(w, item)
        item = after


def _spread(w: World, i: int, n: int, head: int) -> None:
    s = w.node[n, N_STAGE]
    to_stage = w.inst[i, I_FIRST_STAGE] + s + 1
    first, end = w.stage[to_stage, S_FIRST], w.stage[to_stage, S_END]
    for k in range(end - first):
        w.group[k, U_HEAD] = -1
        w.group[k, U_TOKENS] = 0
    item = head
    while item >= 0:
        after = w.item[item, T_NEXT]
        r = w.item[item, T_REQUEST]
        if w.item[item, T_VERSION] == w.req[r, R_VERSION]:
            _group(w, w.bound[r, s + 1] - first, item)
        else:
            _drop(w, i, item, s)
        item = after
    for k in range(end - first):
        if w.group[k, U_HEAD] >= 0:
            send_items(w, n, first + k, w.group[k, U_HEAD], w.group[k, U_TOKENS])


def _group(w: World, k: int, item: int) -> None:
    w.item[item, T_NEXT] = -1
    if w.group[k, U_HEAD] < 0:
        w.group[k, U_HEAD] = item
    else:
        w.item[w.group[k, U_TAIL], T_NEXT] = item
    w.group[k, U_TAIL] = item
    w.group[k, U_TOKENS] += w.item[item, T_TOKENS]


def receive(w: World, head: int, n: int) -> None:
    """Items reach a node: part of a step for a later stage, or, at an entry node, what goes on of a merged step."""
    if w.node[n, N_STAGE] == 0:
        _resume(w, head, n)
        return
    i, s = w.node[n, N_INSTANCE], w.node[n, N_STAGE]
    item = head
    while item >= 0:
        after = w.item[item, T_NEXT]
        number = w.item[item, T_STEP]
        if w.step[_row(w, i, number), Y_NUMBER] != number:
            free_item(w, item)
        else:
            part = _part(w, i, number, n)
            w.part[part, V_DUE] -= 1
            if w.item[item, T_VERSION] == w.req[w.item[item, T_REQUEST], R_VERSION]:
                _append_to_part(w, part, item)
            else:
                _drop(w, i, item, s)
        item = after
    mark_node(w, n)
    _merge(w, i, n)


def _append_to_part(w: World, part: int, item: int) -> None:
    w.item[item, T_NEXT] = -1
    if w.part[part, V_HEAD] < 0:
        w.part[part, V_HEAD] = item
    else:
        w.item[w.part[part, V_TAIL], T_NEXT] = item
    w.part[part, V_TAIL] = item


def _resume(w: World, head: int, n: int) -> None:
    """The scheduler knows a step's results: there is room for another one, and its requests may be part of that."""
    i = w.node[n, N_INSTANCE]
    row = _row(w, i, w.item[head, T_STEP])
    if w.step[row, Y_NUMBER] == w.item[head, T_STEP]:
        w.step[row, Y_NUMBER] = -1
        w.inst[i, I_THROUGH] = 1
    item = head
    while item >= 0:
        after = w.item[item, T_NEXT]
        r = w.item[item, T_REQUEST]
        if w.item[item, T_VERSION] == w.req[r, R_VERSION]:
            append(w, decode_list(w, w.bound[r, 0]), r)
        free_item(w, item)
        item = after
    mark_entries(w, i)


def _drop(w: World, i: int, item: int, s: int) -> None:
    """An item of stage `s` is void (its request was preempted): later stages need not wait for it."""
    r, number = w.item[item, T_REQUEST], w.item[item, T_STEP]
    row = _row(w, i, number)
    if w.step[row, Y_NUMBER] == number:
        w.step[row, Y_LEFT] -= 1
        for later in range(s + 1, stage_count(w, i)):
            # Preempted requests stay bound to their nodes.
            w.part[_part(w, i, number, w.bound[r, later]), V_DUE] -= 1
            mark_node(w, w.bound[r, later])
    free_item(w, item)


def _merge(w: World, i: int, n: int) -> None:
    """Give out the tokens of steps that are through, in their order; `n` is where the last of it was."""
    while w.inst[i, I_MERGED] < w.inst[i, I_FORMED]:
        row = _row(w, i, w.inst[i, I_MERGED])
        if w.step[row, Y_LEFT] > 0:
            return
        w.inst[i, I_MERGED] += 1
        head, tail, item = -1, -1, w.step[row, Y_HEAD]
        while item >= 0:
            after = w.item[item, T_NEXT]
            if _goes_on(w, item):
                w.item[item, T_NEXT] = -1
                if head < 0:
                    head = item
                else:
                    w.item[tail, T_NEXT] = item
                tail = item
            else:
                free_item(w, item)
            item = after
        w.step[row, Y_HEAD] = -1
        w.step[row, Y_TAIL] = -1
        if head >= 0:
            send_items(w, n, w.bound[w.item[head, T_REQUEST], 0], head, 0)
        else:
            w.step[row, Y_NUMBER] = -1
            w.inst[i, I_THROUGH] = 1
            mark_entries(w, i)


def _goes_on(w: World, item: int) -> bool:
    """Emit the item's token, if it makes one; whether its request goes on decoding here."""
    r = w.item[item, T_REQUEST]
    if w.item[item, T_VERSION] != w.req[r, R_VERSION] or w.item[item, T_EMITS] == 0:
        return False
    emit(w, r)
    return bool(w.req[r, R_STATE] == DECODING)


def forget_steps(w: World, i: int) -> None:
    """The instance has failed: nothing of its steps will ever be through."""
    first, end = _nodes(w, i)
    for number in range(w.inst[i, I_MICRO_BATCHES]):
        row = _row(w, i, number)
        free_items(w, w.step[row, Y_HEAD])
        w.step[row, Y_HEAD] = -1
        w.step[row, Y_TAIL] = -1
        w.step[row, Y_NUMBER] = -1
        for n in range(first, end):
            part = _part(w, i, number, n)
            free_items(w, w.part[part, V_HEAD])
            w.part[part, V_HEAD] = -1
            w.part[part, V_TAIL] = -1
            w.part[part, V_DUE] = 0
            w.node[n, N_NEXT_STEP] = w.inst[i, I_FORMED]
    w.inst[i, I_MERGED] = w.inst[i, I_FORMED]


def _nodes(w: World, i: int) -> tuple[int, int]:
    return int(w.stage[w.inst[i, I_FIRST_STAGE], S_FIRST]), int(w.stage[w.inst[i, I_END_STAGE] - 1, S_END])


def _row(w: World, i: int, number: int) -> int:
    """World.step's row of the instance's step."""
    return int(w.inst[i, I_FIRST_STEP] + number % w.inst[i, I_MICRO_BATCHES])


def _part(w: World, i: int, number: int, n: int) -> int:
    """World.part's row of what node `n` has of the instance's step."""
    return int(_row(w, i, number) * w.fixed[Z_PARTS] + n - w.stage[w.inst[i, I_FIRST_STAGE], S_FIRST])
