"""Fleet and supply in the words of the allocation problem, and its answer as a fleet plan. Pure.

A market is part of a name (`domain.hardware.market_name`), of configurations and of templates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from coral_core.cloud.fleet_view import Instance, gather
from coral_core.cloud.supply import PlanningArrays, Supply
from coral_core.domain.allocation import InstanceCount, Pool, Running
from coral_core.domain.fleet import InstanceSpec, Node, Offer, Wanted
from coral_core.domain.hardware import Market, market_name, split_market
from coral_core.errors import unknown_name


def running_of(nodes: Iterable[Node]) -> tuple[Running, ...]:
    """Whole serving instances that stand and are not being taken back, as the allocation's `running`."""
    counts = Counter(
        (market_name(instance.template_id, instance.market), instance.region)
        for instance in gather(nodes)
        if _stays(instance)
    )
    return tuple(Running(template=t, region=r, count=n) for (t, r), n in sorted(counts.items()))


def _stays(instance: Instance) -> bool:
    return (
        instance.consistent
        and not instance.missing
        and all(node.live and not node.interrupted for node in instance.nodes)
    )


def wanted_of(instances: Iterable[InstanceCount], specs: Mapping[str, InstanceSpec]) -> tuple[Wanted, ...]:
    """An allocation's instances as a fleet plan wants them; InputError for a template without a spec."""
    wanted = []
    for index, item in enumerate(instances):
        template, market = split_market(item.template)
        if template not in specs:
            raise unknown_name("template", template, specs, where=f"instances[{index}]")
        wanted.append(Wanted(spec=specs[template], region=item.region, market=market, count=item.count))
    return tuple(wanted)


def pools_of(supply: Supply, regions: Sequence[str], columns: Sequence[tuple[str, Market]]) -> tuple[Pool, ...]:
    """The quotas that several of the problem's columns share; one of a single column is in its availability already."""
    pools = []
    for pool in supply.pools:
        units = tuple(
            (market_name(config, market), float(pool.vcpus[pool.region, config, market]))
            for config, market in columns
            if (pool.region, config, market) in pool.vcpus
        )
        if pool.region in regions and len(units) > 1:
            # A quota that was lowered, or that others use up, keeps new nodes away and takes none that run.
            held = math.fsum(vcpus * supply.offers[offer].held for offer, vcpus in pool.vcpus.items())
            limit = max(pool.free_vcpus, held)
            pools.append(Pool(name=f"vCPU quota {pool.pool}", region=pool.region, limit=limit, units=units))
    return tuple(pools)


def lower(
    arrays: PlanningArrays, regions: Sequence[str], columns: Sequence[tuple[str, Market]], lowered: Mapping[Offer, int]
) -> PlanningArrays:
    """The arrays with no more available than a run has found (`ApplyReport.lowered`), to solve again at once."""
    available = arrays.available.copy()
    for r, region in enumerate(regions):
        for c, (config, market) in enumerate(columns):
            available[r, c] = min(int(available[r, c]), lowered.get((region, config, market), int(available[r, c])))
    return replace(arrays, available=available)
