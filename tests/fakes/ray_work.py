"""Work for the executors' tests: importable by workers, misbehaving on request."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from coral_core.errors import InputError


@dataclass(frozen=True)
class Order:
    """What to do with `number`, and where to leave marks that other processes can see."""

    number: int
    action: str = "double"
    folder: str = ""


class TwoArgumentError(Exception):
    """Pickles, and then does not unpickle."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not to be pickled")


class UnpicklableOrder(Order):
    def __reduce__(self):
        raise TypeError("not to be pickled")


def double(number: int) -> int:
    return 2 * number


def obey(order: Order):
    match order.action:
        case "double":
            return 2 * order.number
        case "input-error":
            raise InputError("no such thing", where=f"item {order.number}", fix="give another")
        case "two-argument-error":
            raise TwoArgumentError("one", "two")
        case "return-two-argument-error":
            return TwoArgumentError("one", "two")
        case "exit":
            raise SystemExit(3)
        case "unpicklable":
            return Unpicklable()
        case "die":
            _die()
        case "die-once":
            return _die_once(order)
        case "count":
            return _count_in_flight(order)
        case "sleep":
            time.sleep(order.number)
            return None
    raise AssertionError(order.action)


def _die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _die_once(order: Order) -> int:
    mark = Path(order.folder) / f"died-{order.number}"
    if not mark.exists():
        mark.touch()
        _die()
    return 2 * order.number


def _count_in_flight(order: Order) -> int:
    """How many of this kind run at this moment, itself included."""
    mark = Path(order.folder) / f"running-{order.number}"
    mark.touch()
    time.sleep(0.1)
    seen = len(list(Path(order.folder).glob("running-*")))
    mark.unlink()
    return seen
