"""NICs: activations between stages and KV from prefill to decode, each NIC shared by all that a machine sends.

Every direction of a NIC works off its backlog of bytes at its rate. A message joins the sender's and the receiver's
backlog at once and is there when both are through: one fast receiver takes from several slow senders side by side.
Activations go first; KV transfers go behind them, and each activation message sent meanwhile makes the next transfer
start that much later: no direction ever carries more than its rate.

Streamed KV (`stream_kv`) leaves layer by layer as prefill computes it, for the decode instance that takes the request
over as it is done: the transfer is booked as if begun with the prompt's computation, with the prompt's own activations on
top, and ends no sooner than one layer's time after the last is computed (the fluid limit of pieces made and sent at
constant rates). A request that no decode instance has room for at that moment, or that was preempted, sends all its KV when
it is taken over.
"""

from __future__ import annotations

from coral_core.sim.blocks import kept_tokens, stage_count
from coral_core.sim.columns import (
    E_MESSAGE,
    E_TRANSFER,
    I_FIRST_STAGE,
    I_MODEL,
    J_HOP,
    M_ACTIVATION_BYTES,
    M_KV_BYTES,
    N_INSTANCE,
    N_NIC,
    Q_FIRST,
    Q_SCHEDULED,
    R_INPUT,
    R_INSTANCE,
    R_MODEL,
    R_PREEMPTIONS,
    R_SOURCE,
    R_VERSION,
    S_END_LAYER,
    S_FIRST_LAYER,
    X_IN,
    X_KV_IN,
    X_KV_OUT,
    X_OUT,
    X_RATE,
    Z_MAX_STAGES,
    Z_STREAM_KV,
)
from coral_core.sim.queues import push
from coral_core.sim.world import World


def send_items(w: World, source: int, target: int, head: int, tokens: int) -> None:
    """Send a chain of items with the activations of `tokens` from one node to another of the same instance."""
    i = w.node[source, N_INSTANCE]
    out, into = w.node[source, N_NIC], w.node[target, N_NIC]
    arrival_s = w.now[0]
    if out != into:
        size_bytes = tokens * w.model[w.inst[i, I_MODEL], M_ACTIVATION_BYTES]
        send_s, receive_s = size_bytes / w.nic[out, X_RATE], size_bytes / w.nic[into, X_RATE]
        w.nic[out, X_OUT] = max(w.now[0], w.nic[out, X_OUT]) + send_s
        w.nic[into, X_IN] = max(w.now[0], w.nic[into, X_IN]) + receive_s
        arrival_s = max(w.nic[out, X_OUT], w.nic[into, X_IN])
        if w.nic[out, X_KV_OUT] > w.now[0]:
            w.nic[out, X_KV_OUT] += send_s
        if w.nic[into, X_KV_IN] > w.now[0]:
            w.nic[into, X_KV_IN] += receive_s
    push(w, arrival_s + w.instf[i, J_HOP], E_MESSAGE, head, target)


def send_kv(w: World, r: int) -> None:
    """Send a prompt's KV from the nodes that computed it to those that will decode, layer by layer where it belongs."""
    source, target = w.req[r, R_SOURCE], w.req[r, R_INSTANCE]
    m = w.req[r, R_MODEL]
    layer_bytes = kept_tokens(w, m, w.req[r, R_INPUT]) * w.model[m, M_KV_BYTES]
    done_s = begun_s = w.now[0]
    other_bytes = 0.0
    streamed = w.fixed[Z_STREAM_KV] and w.req[r, R_PREEMPTIONS] == 0 and w.reqf[r, Q_FIRST] == w.now[0]
    if streamed:
        begun_s = w.reqf[r, Q_SCHEDULED]
        if stage_count(w, source) > 1:
            other_bytes = w.req[r, R_INPUT] * w.model[m, M_ACTIVATION_BYTES]
    for a in range(stage_count(w, source)):
        from_stage = w.inst[source, I_FIRST_STAGE] + a
        out = w.node[w.bound[r, w.fixed[Z_MAX_STAGES] + a], N_NIC]
        for b in range(stage_count(w, target)):
            to_stage = w.inst[target, I_FIRST_STAGE] + b
            first = max(w.stage[from_stage, S_FIRST_LAYER], w.stage[to_stage, S_FIRST_LAYER])
            layers = min(w.stage[from_stage, S_END_LAYER], w.stage[to_stage, S_END_LAYER]) - first
            into = w.node[w.bound[r, b], N_NIC]
            if layers <= 0 or out == into:
                continue
            size_bytes = layers * layer_bytes + other_bytes
            w.nic[out, X_KV_OUT] = max(begun_s, w.nic[out, X_KV_OUT]) + size_bytes / w.nic[out, X_RATE]
            w.nic[into, X_KV_IN] = max(begun_s, w.nic[into, X_KV_IN]) + size_bytes / w.nic[into, X_RATE]
            done_s = max(done_s, w.nic[out, X_KV_OUT], w.nic[into, X_KV_IN])
            done_s = max(done_s, w.now[0] + layer_bytes / min(w.nic[out, X_RATE], w.nic[into, X_RATE]))
    push(w, done_s + w.instf[target, J_HOP], E_TRANSFER, r, w.req[r, R_VERSION])
