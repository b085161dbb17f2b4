"""What makes a simulation's input wrong; every error names the record and the field."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from coral_core.domain.workload import Phase
from coral_core.errors import InputError, unknown_name
from coral_core.sim.inputs import (
    UNLIMITED,
    LifecycleKind,
    NodeTiming,
    SimInput,
    SimInstance,
    SimModel,
    SimOptions,
    SimRequests,
)

MAX_STEPS = 1024
"""Steps under way in a pipeline for which there is room."""


def check_input(given: SimInput) -> None:
    """Raises InputError for the first thing that does not make sense."""
    if not given.models:
        raise InputError("no model is given", where="models")
    _check_unique((model.name for model in given.models), "models")
    _check_unique((instance.name for instance in given.instances), "instances")
    for model in given.models:
        _check_model(model)
    for instance in given.instances:
        _check_instance(instance, given)
    _check_requests(given.requests, len(given.models))
    _check_options(given.options)
    _check_lifecycle(given)
    if len(given.requests) and given.requests.arrival_s[-1] > given.options.end_s:
        raise InputError(f"requests arrive after the end at {given.options.end_s:g} s", where="options.end_s")


def _check_unique(names: Iterable[str], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"named twice: {', '.join(sorted(twice))}", where=where)


def _check_number(value: float, where: str, *, least: float = 0.0, finite: bool = True, most: float = math.inf) -> None:
    if not least <= value <= most or (finite and math.isinf(value)):
        bounds = f"in [{least:g}, {most:g}]" if math.isfinite(most) else f"at least {least:g}"
        raise InputError(f"{value!r} is not {bounds}{' and finite' if finite else ''}", where=where)


def _check_positive(value: float, where: str, *, finite: bool = True) -> None:
    if not value > 0 or (finite and math.isinf(value)):
        raise InputError(f"{value!r} is not positive{' and finite' if finite else ''}", where=where)


def _check_model(model: SimModel) -> None:
    where = f"models[{model.name}]"
    _check_number(model.kv_bytes_per_token, f"{where}.kv_bytes_per_token")
    _check_number(model.activation_bytes_per_token, f"{where}.activation_bytes_per_token")
    _check_positive(model.window_tokens, f"{where}.window_tokens", finite=False)
    _check_number(model.window_frac, f"{where}.window_frac", most=1.0)
    _check_number(model.max_wait_s, f"{where}.max_wait_s", finite=False)
    _check_number(model.max_handover_s, f"{where}.max_handover_s", finite=False)
    _check_number(model.prompt_s, f"{where}.prompt_s")
    _check_number(model.prompt_token_s, f"{where}.prompt_token_s")
    if model.window_frac > 0 and math.isinf(model.window_tokens):
        raise InputError("some layers have a window, but no window_tokens is given", where=where)


def _check_instance(instance: SimInstance, given: SimInput) -> None:
    where = f"instances[{instance.name}]"
    names = [model.name for model in given.models]
    if instance.model not in names:
        raise unknown_name("model", instance.model, names, where=where)
    if not instance.stages or not all(stage.nodes for stage in instance.stages):
        raise InputError("an instance needs at least one stage, and every stage a node", where=where)
    _check_positive(instance.weight, f"{where}.weight")
    for name in ("max_batched_tokens", "max_running_requests", "max_outstanding_requests", "micro_batches"):
        _check_number(getattr(instance, name), f"{where}.{name}", least=1, most=UNLIMITED)
    if len(instance.stages) > 1:
        _check_number(instance.micro_batches, f"{where}.micro_batches", most=MAX_STEPS)
    _check_number(instance.hop_s, f"{where}.hop_s")
    _check_number(instance.boot_s, f"{where}.boot_s")
    for s, stage in enumerate(instance.stages):
        _check_number(stage.layers, f"{where}.stages[{s}].layers", least=1, most=UNLIMITED)
        for k, node in enumerate(stage.nodes):
            place = f"{where}.stages[{s}].nodes[{k}]"
            _check_number(node.kv_blocks, f"{place}.kv_blocks", least=1, most=UNLIMITED)
            _check_positive(node.weight, f"{place}.weight")
            for name in ("max_batched_tokens", "max_running_requests"):
                _check_number(getattr(node, name), f"{place}.{name}", least=1, most=UNLIMITED)
            _check_positive(node.nic_bytes_per_s, f"{place}.nic_bytes_per_s", finite=False)
            _check_timing(node.timing, f"{place}.timing")
    if instance.phase is Phase.PREFILL:
        _check_decodes_somewhere(instance, given)


def _check_timing(timing: NodeTiming, where: str) -> None:
    if len(timing.grid) < 2 or not all(a < b for a, b in itertools.pairwise(timing.grid)):
        raise InputError("needs at least two rising points", where=f"{where}.grid")
    for name in ("grid", "token_s", "row_s"):
        values = getattr(timing, name)
        if len(values) != len(timing.grid):
            raise InputError(f"has {len(values)} values, the grid {len(timing.grid)}", where=f"{where}.{name}")
        for value in values:
            _check_number(value, f"{where}.{name}")
        if values[-1] < values[-2]:
            raise InputError("falls at its end, so that it becomes negative beyond", where=f"{where}.{name}")
    for name in ("fixed_s", "kept_token_s", "pair_s", "inner_hop_s", "inner_hop_token_s"):
        _check_number(getattr(timing, name), f"{where}.{name}")
    _check_number(timing.depth, f"{where}.depth", least=1, most=1024)


def _check_decodes_somewhere(instance: SimInstance, given: SimInput) -> None:
    partners = [
        other
        for other in given.instances
        if other.phase is Phase.DECODE
        and other.model == instance.model
        and ((other.variant, other.region) == (instance.variant, instance.region) or not given.options.pd_same_region)
    ]
    where = f"instances[{instance.name}]"
    if not partners:
        place = f" in region {instance.region!r}" if given.options.pd_same_region else ""
        raise InputError(
            f"no decode instance of model {f'{instance.model} {instance.variant}'.rstrip()}{place} takes over its requests",
            where=where,
            fix="add one, or make it an aggregated instance",
        )
    layers = sum(stage.layers for stage in instance.stages)
    for other in partners:
        if sum(stage.layers for stage in other.stages) != layers:
            raise InputError(f"has {layers} layers, decode instance {other.name} another number", where=where)


def _check_requests(requests: SimRequests, models: int) -> None:
    arrays = {name: np.asarray(getattr(requests, name)) for name in SimRequests.__slots__}
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) != 1 or arrays["arrival_s"].ndim != 1:
        raise InputError(f"arrays differ in shape: {shapes}", where="requests")
    arrival_s = arrays["arrival_s"]
    wrong = {
        "arrival_s": ~(np.isfinite(arrival_s) & (arrival_s >= 0)),
        "model": (arrays["model"] < 0) | (arrays["model"] >= models),
        "input_tokens": (arrays["input_tokens"] < 1) | (arrays["input_tokens"] > UNLIMITED),
        "output_tokens": (arrays["output_tokens"] < 1) | (arrays["output_tokens"] > UNLIMITED),
    }
    for name, flags in wrong.items():
        if flags.any():
            at = int(flags.argmax())
            raise InputError(f"{arrays[name][at]!r} makes no sense here", where=f"requests.{name}[{at}]")
    backwards = np.diff(arrival_s) < 0
    if backwards.any():
        raise InputError(
            "requests are not in order of arrival", where=f"requests.arrival_s[{int(backwards.argmax()) + 1}]"
        )


def _check_options(options: SimOptions) -> None:
    _check_positive(options.end_s, "options.end_s")
    _check_number(options.block_tokens, "options.block_tokens", least=1, most=UNLIMITED)
    _check_number(options.max_retries, "options.max_retries", most=UNLIMITED)
    starts_s = options.epoch_starts_s
    if not starts_s or starts_s[0] != 0 or not all(a < b for a, b in itertools.pairwise(starts_s)):
        raise InputError("must begin with 0 and rise", where="options.epoch_starts_s")
    _check_number(starts_s[-1], "options.epoch_starts_s", most=options.end_s)


def _check_lifecycle(given: SimInput) -> None:
    instances = {instance.name for instance in given.instances}
    groups = {(instance.template, instance.region) for instance in given.instances}
    for at, event in enumerate(given.lifecycle):
        where = f"lifecycle[{at}]"
        _check_number(event.at_s, f"{where}.at_s")
        if event.kind is LifecycleKind.DRAIN_ONE:
            if (event.template, event.region) not in groups:
                known = [f"{template} in {region}" for template, region in groups]
                raise unknown_name("template", f"{event.template} in {event.region}", known, where=where)
        elif event.instance not in instances:
            raise unknown_name("instance", event.instance, instances, where=where)
