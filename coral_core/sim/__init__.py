"""Event simulator of a fleet that serves several models: iterations on nodes, KV, hops, routing, lifecycles.

`simulate` (in `coral_core.sim.simulate`) takes a `SimInput` and gives a `SimOutcome`; `coral_core.sim.metrics` turns that
into goodput and percentiles; `coral_core.sim.fleet` makes instances from templates and the capacity model.
"""
