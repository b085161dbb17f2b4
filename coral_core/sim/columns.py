"""Names of the columns of the simulator's arrays, and of the values that states, ranks and results take.

Every group is one array of the `World`; a row is one request, node, instance, ... Plain integers, because the kernel is
compiled from the same source that runs as it is.
"""

from __future__ import annotations

# World.fixed: sizes and switches. Z_PARTS are the rows of World.part for each of World.step.
(
    Z_POOLS,
    Z_NODES,
    Z_REQUESTS,
    Z_MAX_STAGES,
    Z_LIFE,
    Z_EPOCHS,
    Z_BLOCK_TOKENS,
    Z_RESERVE_FULL,
    Z_MAX_RETRIES,
    Z_STREAM_KV,
    Z_LEAST_WORK,
    Z_HEAP_MARGIN,
    Z_ITEM_MARGIN,
    Z_PARTS,
    Z_COLUMNS,
) = range(15)

# World.counter: what moves as the run goes on.
(
    C_HEAP,
    C_SEQUENCE,
    C_FREE_HEAD,
    C_FREE_ITEMS,
    C_ARRIVED,
    C_LIFE,
    C_EVENTS,
    C_HASH_A,
    C_HASH_B,
    C_PENDING_NODES,
    C_PENDING_POOLS,
    C_NEXT_NODE,
    C_NEXT_POOL,
    C_EPOCH,
    C_EMITTED,
    C_DISCARDED,
    C_COLUMNS,
) = range(17)

# World.heap_key: tie-break (rank and sequence in one number), payload.
H_KEY, H_A, H_B, H_COLUMNS = range(4)
# Events in the order in which those of one instant are handled.
E_ITERATION, E_DELIVER, E_MESSAGE, E_TRANSFER, E_READY, E_LIFE, E_EPOCH, E_ARRIVAL = range(8)

# World.req: whole numbers of a request. R_VERSION outdates work in flight; R_LIST is the queue it stands in, or -1;
# R_COUNTED is one more than the pool among whose waiting requests it is counted, or 0; R_WORK is what is booked of it as
# unfinished work where it was sent.
(
    R_MODEL,
    R_INPUT,
    R_OUTPUT,
    R_STATE,
    R_INSTANCE,
    R_SOURCE,
    R_BLOCKS,
    R_SOURCE_BLOCKS,
    R_COMPUTED,
    R_TARGET,
    R_GENERATED,
    R_VERSION,
    R_RETRIES,
    R_LIST,
    R_PREV,
    R_NEXT,
    R_RUN_PREV,
    R_RUN_NEXT,
    R_PREEMPTIONS,
    R_ENTRY_INSTANCE,
    R_LAST_INSTANCE,
    R_COUNTED,
    R_WORK,
    R_COLUMNS,
) = range(24)
# World.reqf: instants of a request, NaN until they come.
Q_ARRIVAL, Q_SCHEDULED, Q_FIRST, Q_SECOND, Q_DECODE, Q_FINISH, Q_COLUMNS = range(7)

# States of a request.
FUTURE, QUEUED, WAITING, PREFILLING, DECODING, MOVING, DONE, FAILED, REJECTED, TOO_LONG = range(10)

# World.item: one request's tokens in one pass through the pipeline. T_STEP is the step of its instance that it is part of.
T_REQUEST, T_VERSION, T_TOKENS, T_START, T_DECODE, T_EMITS, T_STEP, T_NEXT, T_COLUMNS = range(9)

# World.inst and World.instf. Of a pipeline's steps, counted from 0: I_FORMED are scheduled, I_MERGED of them done;
# I_FIRST_STEP is the first of its I_MICRO_BATCHES rows of World.step. I_BALANCED: see SimInstance.balanced_steps; where it
# is 0, I_THROUGH says that a step is through since the last ones were scheduled.
(
    I_POOL,
    I_NEXT_POOL,
    I_MODEL,
    I_FIRST_STAGE,
    I_END_STAGE,
    I_STATE,
    I_INCARNATION,
    I_OUTSTANDING,
    I_MAX_OUTSTANDING,
    I_MICRO_BATCHES,
    I_FIRST_STEP,
    I_BALANCED,
    I_THROUGH,
    I_FORMED,
    I_MERGED,
    I_RUN_HEAD,
    I_RUN_TAIL,
    I_GROUP,
    I_COLUMNS,
) = range(19)
J_BOOT, J_HOP, J_SINCE, J_COLUMNS = range(4)
# States of an instance.
OFF, BOOTING, READY, DRAINING, BROKEN = range(5)

# World.route_inst, World.route_node: rows, so that the routing functions get contiguous slices.
ROUTE_CREDIT, ROUTE_WEIGHT, ROUTE_OPEN, ROUTE_WORK, ROUTE_ROWS = range(5)

# World.stage.
S_FIRST, S_END, S_FIRST_LAYER, S_END_LAYER, S_COLUMNS = range(5)

# World.node and World.nodef. N_RUNNING counts what entered at this (entry) node, N_LIVE the decoding ones bound to it;
# N_NEXT_STEP is the step whose part it computes next.
(
    N_INSTANCE,
    N_STAGE,
    N_TABLE,
    N_NIC,
    N_BLOCKS,
    N_FREE,
    N_PEAK,
    N_BUSY,
    N_PENDING,
    N_RUNNING,
    N_LIVE,
    N_MAX_TOKENS,
    N_MAX_SEQS,
    N_NEXT_STEP,
    N_BATCH_HEAD,
    N_BATCH_TAIL,
    N_BATCH_TOKENS,
    N_BATCH_DECODES,
    N_BATCH_ROWS,
    N_COLUMNS,
) = range(20)
F_KEPT, F_PAIRS, F_BUSY_SINCE, F_KV_SINCE, F_DELAY, F_DELIVERED, F_COLUMNS = range(7)

# World.step: a step under way: its number (-1: the row is free), its items that are not through yet, and those that are.
Y_NUMBER, Y_LEFT, Y_HEAD, Y_TAIL, Y_COLUMNS = range(5)
# World.part: what a node has of a step: items that are there, and how many are still on their way.
V_HEAD, V_TAIL, V_DUE, V_COLUMNS = range(4)

# World.nic: rate, and when each direction is free again for activations and for KV transfers.
X_RATE, X_OUT, X_IN, X_KV_OUT, X_KV_IN, X_COLUMNS = range(6)

# World.pool and World.poolf.
P_FIRST, P_END, P_MODEL, P_WAITING, P_PENDING, P_COLUMNS = range(6)
G_RATE, G_SINCE, G_COLUMNS = range(3)

# World.model.
(
    M_WINDOW,
    M_WINDOW_FRAC,
    M_KV_BYTES,
    M_ACTIVATION_BYTES,
    M_MAX_WAIT,
    M_PROMPT,
    M_PROMPT_TOKEN,
    M_MAX_HANDOVER,
    M_COLUMNS,
) = range(9)

# World.coef: the terms of an iteration's time beside its tables (rows TABLE_TOKENS and TABLE_ROWS of World.table).
K_FIXED, K_KEPT, K_PAIR, K_EXTRA_DEPTH, K_INNER, K_INNER_TOKEN, K_COLUMNS = range(7)
TABLE_TOKENS, TABLE_ROWS, TABLE_KINDS = range(3)

# World.life: kind and subject of a lifecycle event.
L_KIND, L_SUBJECT, L_COLUMNS = range(3)
START, DRAIN, FAIL, DRAIN_ONE = range(4)

# World.node_stat, World.inst_stat, World.pool_stat: sums per epoch.
A_BUSY, A_KV, A_ITERATIONS, A_TOKENS, A_COLUMNS = range(5)
B_PAID, B_UP, B_EMITTED, B_FIRST, B_DONE, B_LOST, B_PREEMPTED, B_COLUMNS = range(8)
D_WAITING, D_MAX_WAITING, D_ARRIVED, D_REJECTED, D_COLUMNS = range(5)

# World.group: work sorted by the node it goes to.
U_HEAD, U_TAIL, U_TOKENS, U_COLUMNS = range(4)

# How a run of the kernel ends.
RAN_OUT, NEEDS_ROOM = range(2)
