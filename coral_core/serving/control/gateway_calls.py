"""What the gateway lacks of what a coordinator holds: the calls that put it right, weights and draining included. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from coral_core.domain.workload import Phase
from coral_core.errors import ServingError
from coral_core.serving.control.held import GatewayCall, GatewayRow, Held, Stage


def gateway_calls(held: Iterable[Held], rows: Mapping[str, GatewayRow]) -> list[GatewayCall]:
    """Calls in order. Instances that the gateway has from elsewhere are left alone.

    An instance is made known once it starts, as not ready, so that whoever waits for it knows that it is watched over; with weight
    0, which a reallocation sets once it is ready. One that the gateway has lost
    gets back the weight and the draining that it was last known to have. Of a degraded one the weight stays the full one, beside
    the share of it that is left. One that is over is said to have failed, so that
    it is replaced, and gets no request; it is deleted once nobody speaks for it any more.
    """
    return [call for one in held for call in _calls_of(one, rows.get(one.instance_id))]


def rows_of(document: Any) -> list[GatewayRow]:  # noqa: ANN401 - JSON
    """The gateway's answer to GET /instances. Raises ServingError where it is none."""
    try:
        return [
            GatewayRow(
                name=str(row["name"]),
                model=str(row["model"]),
                phase=Phase(row["phase"]),
                url=str(row["url"]),
                region=str(row["region"]),
                weight=float(row["weight"]),
                draining=bool(row["draining"]),
                answers=bool(row["answers"]) and not row["silent_probes"],
                reported=None if row["reported"] is None else bool(row["reported"]),
                failed=str(row["failed"]),
                in_flight=int(row["in_flight"]),
                weight_frac=float(row.get("weight_frac", 1.0)),
            )
            for row in document["instances"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ServingError(f"the gateway's list of instances cannot be read: {error!r}") from None


def _calls_of(one: Held, row: GatewayRow | None) -> list[GatewayCall]:
    over = one.stage.over
    path = f"/instances/{quote(one.instance_id, safe='')}"
    if one.forgettable:
        return [GatewayCall(method="DELETE", path=path)] if one.is_row(row) else []
    if one.stage is Stage.GATHERING:
        return []
    calls: list[GatewayCall] = []
    known = row is not None and (row.model, row.phase, row.region) == (one.model, one.phase, one.region)
    if row is None or not known or (row.url != one.address and not over):
        if not one.address:
            return []
        body = {
            "model": one.model,
            "phase": one.phase.value,
            "url": one.address,
            "region": one.region,
            "weight": one.weight or 0.0,
        }
        calls.append(GatewayCall(method="PUT", path=path, body=body))
        row = None
    drain = one.draining or one.stage is Stage.LEAVING
    if drain and not over and (row is None or not row.draining):
        calls.append(GatewayCall(method="POST", path=f"{path}/drain"))
    reason = one.reason or one.stage.value
    if over:
        wrong = row is None or row.failed != reason
        said: dict[str, object] = {"ready": False, "failed": reason}
    elif one.stage is Stage.STARTING:
        # What was seen ready serves on: a coordinator that has just begun may know less than the gateway.
        wrong = row is None or row.reported is None
        said = {"ready": False}
    else:
        whole = one.weight_frac == 1.0
        unlike = not whole if row is None else row.weight_frac != one.weight_frac
        wrong = unlike or (row is not None and bool(row.failed or row.reported is False))
        said = {"ready": True, **({} if whole else {"weight_frac": one.weight_frac})}
    if wrong:
        calls.append(GatewayCall(method="PUT", path=f"{path}/readiness", body=said))
    return calls
