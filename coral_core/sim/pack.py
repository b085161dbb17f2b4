"""From the records of a simulation's input to the arrays that the kernel works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coral_core.domain.workload import Phase
from coral_core.sim import columns as c
from coral_core.sim.inputs import LifecycleKind, NodeTiming, Routing, SimInput, SimInstance, SimNode, prolonged
from coral_core.sim.world import Floats, Ints, World

_KINDS = {
    LifecycleKind.START: c.START,
    LifecycleKind.DRAIN: c.DRAIN,
    LifecycleKind.FAIL: c.FAIL,
    LifecycleKind.DRAIN_ONE: c.DRAIN_ONE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The arrays, and what their rows are called: instances are sorted by pool, so that a pool is a slice."""

    world: World
    instances: tuple[SimInstance, ...]
    pools: tuple[str, ...]
    node_instance: Ints
    node_names: tuple[str, ...]


def pack(given: SimInput) -> Packed:
    """Arrays of a checked input, at time 0 and before the first event."""
    pools = _Pools(given)
    instances = tuple(sorted(given.instances, key=pools.of))
    nodes = [
        (i, s, k, node)
        for i, instance in enumerate(instances)
        for s, stage in enumerate(instance.stages)
        for k, node in enumerate(stage.nodes)
    ]
    requests, options = given.requests, given.options
    n, epochs = len(requests), len(options.epoch_starts_s)
    max_stages = max((len(instance.stages) for instance in instances), default=1)
    widest = max((len(stage.nodes) for instance in instances for stage in instance.stages), default=1)
    admitted = sum(min(instances[i].max_running_requests, n) for i, s, _, _ in nodes if s == 0)
    steps, under_way = sum(map(_step_rows, instances)), max(map(_step_rows, instances), default=0)
    parts = max((sum(len(stage.nodes) for stage in one.stages) for one in instances if _step_rows(one)), default=0)

    fixed = np.zeros(c.Z_COLUMNS, dtype=np.int64)
    fixed[c.Z_POOLS] = len(pools.names)
    fixed[c.Z_NODES] = len(nodes)
    fixed[c.Z_REQUESTS] = n
    fixed[c.Z_MAX_STAGES] = max_stages
    fixed[c.Z_LIFE] = len(given.lifecycle)
    fixed[c.Z_EPOCHS] = epochs
    fixed[c.Z_BLOCK_TOKENS] = options.block_tokens
    fixed[c.Z_RESERVE_FULL] = int(options.reserve_full_prompt)
    fixed[c.Z_MAX_RETRIES] = options.max_retries
    fixed[c.Z_STREAM_KV] = int(options.stream_kv)
    fixed[c.Z_LEAST_WORK] = int(options.routing is Routing.LEAST_WORK)
    fixed[c.Z_PARTS] = parts
    # Between two looks at the arrays' room, a request gets at most one new work item (in a pipeline one for every step
    # under way) or transfer, a node one iteration; a stage's results go to all nodes of the next, those of merged steps back.
    fixed[c.Z_ITEM_MARGIN] = min(admitted, n) * max(under_way, 1) + 1
    fixed[c.Z_HEAP_MARGIN] = min(admitted, n) + len(nodes) + widest + under_way + 8

    counter = np.zeros(c.C_COLUMNS, dtype=np.int64)
    counter[c.C_FREE_HEAD] = -1
    req, reqf = _requests(given)
    order = sorted(range(len(given.lifecycle)), key=lambda at: given.lifecycle[at].at_s)
    tables = {timing: row for row, timing in enumerate(dict.fromkeys(node.timing for *_, node in nodes))}
    grid, table, coef = _timings(list(tables))
    inst, instf, stage, nic_of, nics = _instances(instances, pools)
    world = World(
        now=np.zeros(1),
        fixed=fixed,
        counter=counter,
        heap_s=np.zeros(0),
        heap_key=np.zeros((0, c.H_COLUMNS), dtype=np.int64),
        req=req,
        reqf=reqf,
        bound=np.full((n, 2 * max_stages), -1, dtype=np.int64),
        item=np.zeros((0, c.T_COLUMNS), dtype=np.int64),
        step=_empty(steps, c.Y_COLUMNS),
        part=_empty(steps * parts, c.V_COLUMNS, zero=c.V_DUE),
        lists=np.full((len(pools.names) + 4 * len(nodes), 2), -1, dtype=np.int64),
        inst=inst,
        instf=instf,
        stage=stage,
        node=_nodes(nodes, instances, tables, nic_of),
        nodef=np.zeros((len(nodes), c.F_COLUMNS)),
        nic=nics,
        pool=pools.rows(instances),
        poolf=np.zeros((len(pools.names), c.G_COLUMNS)),
        route_inst=_route([instance.weight for instance in instances]),
        route_node=_route([node.weight for *_, node in nodes], is_open=1.0),
        model=np.array(
            [
                [
                    *(m.window_tokens, m.window_frac, m.kv_bytes_per_token, m.activation_bytes_per_token),
                    *(m.max_wait_s, m.prompt_s, m.prompt_token_s, m.max_handover_s),
                ]
                for m in given.models
            ]
        ),
        grid=grid,
        table=table,
        coef=coef,
        life_s=np.array([given.lifecycle[at].at_s for at in order]),
        life=_lifecycle(given, order, instances),
        epoch_s=np.array(options.epoch_starts_s),
        pending_nodes=np.zeros(max(len(nodes), 1), dtype=np.int64),
        pending_pools=np.zeros(len(pools.names), dtype=np.int64),
        group=np.zeros((widest, c.U_COLUMNS), dtype=np.int64),
        candidate=np.zeros(len(instances), dtype=np.int64),
        outstanding=np.zeros(len(instances), dtype=np.int64),
        node_stat=np.zeros((epochs, len(nodes), c.A_COLUMNS)),
        inst_stat=np.zeros((epochs, len(instances), c.B_COLUMNS)),
        pool_stat=np.zeros((epochs, len(pools.names), c.D_COLUMNS)),
    )
    return Packed(
        world=grown(world),
        instances=instances,
        pools=pools.names,
        node_instance=np.array([i for i, *_ in nodes], dtype=np.int64),
        node_names=tuple(f"{instances[i].name}/stage{s}/node{k}" for i, s, k, _ in nodes),
    )


def _step_rows(instance: SimInstance) -> int:
    """Steps that may be under way; only pipelines have any."""
    return instance.micro_batches if len(instance.stages) > 1 else 0


def _empty(rows: int, columns: int, *, zero: int | None = None) -> Ints:
    result = np.full((rows, columns), -1, dtype=np.int64)
    if zero is not None:
        result[:, zero] = 0
    return result


def grown(world: World) -> World:
    """The same world with twice the room for events and items."""
    heap = 2 * (len(world.heap_s) + int(world.fixed[c.Z_HEAP_MARGIN]))
    items, had = 2 * (len(world.item) + int(world.fixed[c.Z_ITEM_MARGIN])), len(world.item)
    item = np.zeros((items, c.T_COLUMNS), dtype=np.int64)
    item[:had] = world.item
    # New ones go in front of the free ones, the lowest first.
    item[had:, c.T_NEXT] = np.arange(had + 1, items + 1)
    item[-1, c.T_NEXT] = world.counter[c.C_FREE_HEAD]
    world.counter[c.C_FREE_HEAD] = had
    world.counter[c.C_FREE_ITEMS] += items - had
    heap_s, heap_key = np.zeros(heap), np.zeros((heap, c.H_COLUMNS), dtype=np.int64)
    heap_s[: len(world.heap_s)] = world.heap_s
    heap_key[: len(world.heap_s)] = world.heap_key
    return world._replace(heap_s=heap_s, heap_key=heap_key, item=item)


class _Pools:
    """Queues that the router serves: one per model for new requests, one per model, variant (and region) for decode."""

    def __init__(self, given: SimInput) -> None:
        self.models = [model.name for model in given.models]
        self.same_region = given.options.pd_same_region
        decodes = sorted({self._decode_key(one) for one in given.instances if one.phase is Phase.DECODE})
        self.decode = {key: len(self.models) + at for at, key in enumerate(decodes)}
        labels = (" ".join(filter(None, (self.models[m], variant, "decode", region))) for m, variant, region in decodes)
        self.names = (*self.models, *labels)

    def _decode_key(self, instance: SimInstance) -> tuple[int, str, str]:
        where = (instance.variant, instance.region) if self.same_region else ("", "")
        return self.models.index(instance.model), *where

    def of(self, instance: SimInstance) -> int:
        """The pool that hands requests to an instance."""
        if instance.phase is Phase.DECODE:
            return self.decode[self._decode_key(instance)]
        return self.models.index(instance.model)

    def after(self, instance: SimInstance) -> int:
        """The pool that its requests move on to after their first token, or -1."""
        return self.decode[self._decode_key(instance)] if instance.phase is Phase.PREFILL else -1

    def rows(self, instances: Sequence[SimInstance]) -> Ints:
        """World.pool; `instances` are sorted by pool."""
        owners = np.array([self.of(instance) for instance in instances], dtype=np.int64)
        rows = np.zeros((len(self.names), c.P_COLUMNS), dtype=np.int64)
        rows[:, c.P_FIRST] = np.searchsorted(owners, np.arange(len(self.names)), side="left")
        rows[:, c.P_END] = np.searchsorted(owners, np.arange(len(self.names)), side="right")
        rows[:, c.P_MODEL] = [*range(len(self.models)), *(m for m, _, _ in self.decode)]
        return rows


def _requests(given: SimInput) -> tuple[Ints, Floats]:
    requests = given.requests
    req = np.zeros((len(requests), c.R_COLUMNS), dtype=np.int64)
    req[:, c.R_MODEL] = requests.model
    req[:, c.R_INPUT] = requests.input_tokens
    req[:, c.R_OUTPUT] = requests.output_tokens
    req[:, c.R_STATE] = c.FUTURE
    for column in (c.R_INSTANCE, c.R_SOURCE, c.R_LIST, c.R_ENTRY_INSTANCE, c.R_LAST_INSTANCE):
        req[:, column] = -1
    reqf = np.full((len(requests), c.Q_COLUMNS), -1.0)
    reqf[:, c.Q_ARRIVAL] = requests.arrival_s
    return req, reqf


def _timings(timings: Sequence[NodeTiming]) -> tuple[Floats, Floats, Floats]:
    """All tables on the union of their grids: piecewise linear ones lose nothing by that."""
    grid = np.unique(np.concatenate([np.array([0.0, 1.0]), *(np.array(timing.grid) for timing in timings)]))
    table = np.zeros((len(timings), c.TABLE_KINDS, len(grid)))
    coef = np.zeros((len(timings), c.K_COLUMNS))
    for row, timing in enumerate(timings):
        for kind, values in ((c.TABLE_TOKENS, timing.token_s), (c.TABLE_ROWS, timing.row_s)):
            table[row, kind] = [prolonged(timing.grid, values, x) for x in grid]
        coef[row] = [
            timing.fixed_s,
            timing.kept_token_s,
            timing.pair_s,
            timing.depth - 1,
            timing.inner_hop_s,
            timing.inner_hop_token_s,
        ]
    return grid, table, coef


def _instances(
    instances: Sequence[SimInstance], pools: _Pools
) -> tuple[Ints, Floats, Ints, dict[tuple[int, int, int], int], Floats]:
    """World.inst, World.instf, World.stage, the NIC of every node, and World.nic."""
    inst = np.zeros((len(instances), c.I_COLUMNS), dtype=np.int64)
    instf = np.zeros((len(instances), c.J_COLUMNS))
    groups: dict[tuple[str, str], int] = {}
    machines: dict[tuple[int, str], int] = {}
    stages: list[list[int]] = []
    nic_of: dict[tuple[int, int, int], int] = {}
    rates: list[float] = []
    first_node = first_step = 0
    for i, instance in enumerate(instances):
        row = inst[i]
        row[c.I_POOL], row[c.I_NEXT_POOL] = pools.of(instance), pools.after(instance)
        row[c.I_MODEL] = pools.models.index(instance.model)
        row[c.I_FIRST_STAGE], row[c.I_END_STAGE] = len(stages), len(stages) + len(instance.stages)
        row[c.I_STATE] = c.OFF
        row[c.I_MAX_OUTSTANDING] = instance.max_outstanding_requests
        row[c.I_MICRO_BATCHES] = instance.micro_batches
        row[c.I_BALANCED] = int(instance.balanced_steps)
        row[c.I_FIRST_STEP] = first_step
        first_step += _step_rows(instance)
        row[c.I_RUN_HEAD] = row[c.I_RUN_TAIL] = -1
        row[c.I_GROUP] = groups.setdefault((instance.template, instance.region), len(groups))
        instf[i, c.J_BOOT], instf[i, c.J_HOP] = instance.boot_s, instance.hop_s
        first_layer = 0
        for s, stage in enumerate(instance.stages):
            stages.append([first_node, first_node + len(stage.nodes), first_layer, first_layer + stage.layers])
            first_node += len(stage.nodes)
            first_layer += stage.layers
            for k, node in enumerate(stage.nodes):
                machine = node.machine or f"\0{s}.{k}"
                nic_of[i, s, k] = machines.setdefault((i, machine), len(machines))
                if nic_of[i, s, k] == len(rates):
                    rates.append(node.nic_bytes_per_s)
    nics = np.zeros((len(rates), c.X_COLUMNS))
    nics[:, c.X_RATE] = rates
    return inst, instf, np.array(stages, dtype=np.int64).reshape(-1, c.S_COLUMNS), nic_of, nics


def _nodes(
    nodes: Sequence[tuple[int, int, int, SimNode]],
    instances: Sequence[SimInstance],
    tables: Mapping[NodeTiming, int],
    nic_of: Mapping[tuple[int, int, int], int],
) -> Ints:
    rows = np.zeros((len(nodes), c.N_COLUMNS), dtype=np.int64)
    for row, (i, s, k, node) in zip(rows, nodes, strict=True):
        row[c.N_INSTANCE], row[c.N_STAGE] = i, s
        row[c.N_TABLE], row[c.N_NIC] = tables[node.timing], nic_of[i, s, k]
        row[c.N_BLOCKS] = row[c.N_FREE] = node.kv_blocks
        row[c.N_MAX_TOKENS] = min(instances[i].max_batched_tokens, node.max_batched_tokens)
        row[c.N_MAX_SEQS] = min(instances[i].max_running_requests, node.max_running_requests)
        row[c.N_BATCH_HEAD] = row[c.N_BATCH_TAIL] = -1
    return rows


def _route(weights: Sequence[float], *, is_open: float = 0.0) -> Floats:
    rows = np.zeros((c.ROUTE_ROWS, len(weights)))
    rows[c.ROUTE_WEIGHT] = weights
    rows[c.ROUTE_OPEN] = is_open
    return rows


def _lifecycle(given: SimInput, order: Sequence[int], instances: Sequence[SimInstance]) -> Ints:
    index = {instance.name: i for i, instance in enumerate(instances)}
    groups: dict[tuple[str, str], int] = {}
    for instance in instances:
        groups.setdefault((instance.template, instance.region), len(groups))
    rows = np.zeros((len(order), c.L_COLUMNS), dtype=np.int64)
    for row, at in zip(rows, order, strict=True):
        event = given.lifecycle[at]
        row[c.L_KIND] = _KINDS[event.kind]
        is_group = event.kind is LifecycleKind.DRAIN_ONE
        row[c.L_SUBJECT] = groups[event.template, event.region] if is_group else index[event.instance]
    return rows
