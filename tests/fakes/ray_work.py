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


def add_one_in_place(array) -> float:
    array += 1
    return float(array.max())


def obey(order: Order):
    return _ACTIONS[order.action](order)


def _double(order: Order) -> int:
    return 2 * order.number


def _input_error(order: Order):
    raise InputError("no such thing", where=f"item {order.number}", fix="give another")


def _two_argument_error(order: Order):
    raise TwoArgumentError("one", "two")


def _exit(order: Order):
    raise SystemExit(3)


def _sleep(order: Order):
    time.sleep(order.number)


def _mark(order: Order) -> int:
    time.sleep(0.3)
    (Path(order.folder) / f"done-{order.number}").touch()
    return 2 * order.number


def _die(order: Order):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _die_once(order: Order) -> int:
    mark = Path(order.folder) / f"died-{order.number}"
    if not mark.exists():
        mark.touch()
        _die(order)
    return 2 * order.number


def _count_in_flight(order: Order) -> int:
    """How many of this kind run at this moment, itself included."""
    mark = Path(order.folder) / f"running-{order.number}"
    mark.touch()
    time.sleep(0.1)
    seen = len(list(Path(order.folder).glob("running-*")))
    mark.unlink()
    return seen


_ACTIONS = {
    "double": _double,
    "input-error": _input_error,
    "two-argument-error": _two_argument_error,
    "return-two-argument-error": lambda order: TwoArgumentError("one", "two"),
    "exit": _exit,
    "unpicklable": lambda order: Unpicklable(),
    "die": _die,
    "die-once": _die_once,
    "count": _count_in_flight,
    "sleep": _sleep,
    "sleep-long": lambda order: time.sleep(120),
    "mark": _mark,
}
