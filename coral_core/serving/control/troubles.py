"""What the nodes of an instance say that condemns it, or that it goes on with less."""

from __future__ import annotations

from collections.abc import Mapping

from coral_core.serving.control.held import Held, Seat, Stage
from coral_core.serving.control.messages import NodeReport, NodeState


def runs(seat: Seat) -> bool:
    """Whether something of an engine runs there, as far as is known."""
    return not seat.gone and (seat.report.alive or seat.report.state in {NodeState.STARTING, NodeState.READY})


def engine_share(one: Held) -> tuple[int, float, Mapping[str, str]] | None:
    """Of an engine that can go on without nodes: the node that serves, what is left, and which nodes it goes on without."""
    for number, seat in one.seats.items():
        report = seat.report
        if report.serves and report.weight_frac is not None and report.launch_id == one.launch_id:
            return number, report.weight_frac, report.lost_nodes
    return None


def engine_trouble(one: Held, report: NodeReport) -> str:
    """What a node says that condemns its instance; empty where it says nothing of the kind."""
    trouble = ""
    if report.state is NodeState.FAILED:
        trouble = report.reason or "its engine failed"
    elif report.weight_frac == 0 and report.launch_id == one.launch_id:
        lost = "; ".join(f"node {name}: {why}" for name, why in sorted(report.lost_nodes.items()))
        trouble = f"a stage has no node left: {lost}"
    elif one.launch_id and report.launch_id and report.launch_id != one.launch_id:
        trouble = "it runs something else than the others"
    elif report.state is NodeState.ENDED and one.stage is not Stage.LEAVING and not report.leaving:
        trouble = "its engine has ended"
    elif report.state is NodeState.IDLE and one.stage in {Stage.READY, Stage.LEAVING}:
        trouble = "its agent has started anew, without its engine"
    return trouble
