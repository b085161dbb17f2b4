"""Run a simulation from its input to its outcome."""

from __future__ import annotations

from dataclasses import replace

from coral_core.sim import columns as c
from coral_core.sim import loop
from coral_core.sim.checks import check_input
from coral_core.sim.inputs import SimInput
from coral_core.sim.instances import set_state
from coral_core.sim.outcome import SimOutcome, outcome_of
from coral_core.sim.pack import grown, pack

PLAIN_TOKENS = 50_000
"""Tokens to generate up to which the plain kernel takes a few seconds."""


def repays_compiling(given: SimInput) -> bool:
    """Whether a run is long enough for the compiled kernel."""
    return int(given.requests.output_tokens.sum()) > PLAIN_TOKENS


def simulate(given: SimInput) -> SimOutcome:
    """The outcome of a simulation; the same input gives the same outcome, bit by bit, with either kernel.

    Raises InputError for an input that makes no sense, ConservationError where the simulator itself is at fault.
    """
    check_input(given)
    packed = pack(given)
    if repays_compiling(given) if given.options.compiled is None else given.options.compiled:
        from coral_core.sim.compiled import compiled_run  # noqa: PLC0415 - numba takes half a second to import

        run = compiled_run()
    else:
        run = loop.run
    world = packed.world
    for i, instance in enumerate(packed.instances):
        if instance.ready_at_start:
            set_state(world, i, c.READY)
    loop.begin(world)
    while run(world, given.options.end_s) == c.NEEDS_ROOM:
        world = grown(world)
    return outcome_of(replace(packed, world=world), given.options.end_s)
