"""Running one function over many items: the contract, and the executor of the base install.

Contract of every executor, whatever it runs on:

- each item has exactly one outcome, in the order in which they finish;
- an exception in the work is a failure of its item alone, and never ends the run;
- an item whose worker dies is tried again alone; one that takes its worker with it every time is *quarantined*:
  a failure of kind `worker_died`, while all other items get their result;
- a value that cannot be pickled is a failure of its item;
- closing the iterator early leaves nothing running.

Native solver calls cannot be interrupted from outside, so time limits are the work's own.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

from coral_core.errors import CoralError, InputError

Item = TypeVar("Item")
Value = TypeVar("Value")

MAX_DEATHS = 2
"""Workers an item may take with it, running alone, before it is quarantined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an item has no value.

    `kind` is the kind of the CoralError raised, or `bug` (any other exception, its traceback in the message),
    `worker_died` (quarantined) or `no_workers` (nothing is left that could run it).
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[Value]):
    """What became of `items[index]`: a value, or a failure. `attempts` counts the times its work was started."""

    index: int
    value: Value | None
    failure: Failure | None
    attempts: int = 1

    @property
    def result(self) -> Value:
        """The value of an item that did not fail."""
        if self.failure is not None:
            raise ValueError(f"item {self.index} failed: {self.failure.message}")
        return cast("Value", self.value)


class Executor(Protocol):
    """Anything that runs work over items under the contract of this module."""

    def __call__(self, items: Sequence[Item], work: Callable[[Item], Value]) -> Iterator[Outcome[Value]]:
        """Outcomes as they finish."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """What the executor runs on, kept up for several runs; a run outside a session brings its own."""
        ...


def quarantined(index: int, attempts: int, why: str) -> Outcome[Value]:
    """The outcome of an item that takes its worker with it."""
    message = f"the worker process died each of {attempts} times ({why})"
    return Outcome(index=index, value=None, failure=Failure(kind="worker_died", message=message), attempts=attempts)


def attempt(work: Callable[[Item], Value], item: Item) -> bytes | Failure:
    """Do the work on one item, in a worker: its value pickled, or why there is none. Never raises."""
    try:
        return pickle.dumps(work(item))
    except CoralError as error:
        return Failure(kind=error.kind, message=str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the work raises is its item's failure alone
        return bug(error)


def bug(error: BaseException) -> Failure:
    """An unexpected exception as a failure, its traceback kept."""
    return Failure(kind="bug", message="".join(traceback.format_exception(error)).strip())


def outcome_of(index: int, answer: bytes | Failure, attempts: int) -> Outcome[Value]:
    """The outcome that `attempt` answered."""
    if isinstance(answer, bytes):
        try:
            value = cast("Value", pickle.loads(answer))  # noqa: S301 - written by our own worker a moment ago
            return Outcome(index=index, value=value, failure=None, attempts=attempts)
        except Exception as error:  # noqa: BLE001 - a value that does not survive pickling fails in its own way
            answer = bug(error)
    return Outcome(index=index, value=None, failure=answer, attempts=attempts)


def run_inline(items: Sequence[Item], work: Callable[[Item], Value], *, processes: int = 1) -> Iterator[Outcome[Value]]:
    """Run without an orchestrator: one after the other here, or in a pool of `processes` on this machine.

    With one process the work runs in the caller's own, so that a crash of it is the caller's crash.
    """
    if processes < 1:
        raise InputError(f"{processes} processes cannot run anything", where="processes", fix="give 1 or more")
    if processes == 1:
        return (outcome_of(index, attempt(work, item), 1) for index, item in enumerate(items))
    return _run_pool(items, work, processes)


@dataclass(frozen=True, slots=True)
class InlineExecutor:
    """`run_inline` with its settings, as an `Executor`."""

    processes: int = 1

    def __call__(self, items: Sequence[Item], work: Callable[[Item], Value]) -> Iterator[Outcome[Value]]:
        """Outcomes as they finish."""
        return run_inline(items, work, processes=self.processes)

    def session(self) -> AbstractContextManager[None]:
        """Nothing to keep up."""
        return nullcontext()


def _run_pool(items: Sequence[Item], work: Callable[[Item], Value], processes: int) -> Iterator[Outcome[Value]]:
    attempts = [0] * len(items)
    deaths = [0] * len(items)
    waiting = deque(range(len(items)))
    suspects: deque[int] = deque()
    while waiting or suspects:
        # A broken pool does not tell which item broke it, so all that were in flight run again, each alone.
        queue, width = (suspects, 1) if suspects else (waiting, processes)
        alone = width == 1
        with ProcessPoolExecutor(width, mp_context=multiprocessing.get_context("spawn")) as pool:
            running: dict[Future[bytes | Failure], int] = {}
            try:
                while queue or running:
                    while queue and len(running) < width:
                        index = queue[0]
                        running[pool.submit(attempt, work, items[index])] = index  # raises where the pool is broken
                        queue.popleft()
                        attempts[index] += 1
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        answer = _answer(future)
                        index = running.pop(future)
                        yield outcome_of(index, answer, attempts[index])
            except BrokenProcessPool:
                for index in running.values():
                    deaths[index] += alone
                    if deaths[index] < MAX_DEATHS:
                        suspects.append(index)
                    else:
                        yield quarantined(index, attempts[index], "process pool broken")
            finally:
                for future in running:
                    future.cancel()


def _answer(future: Future[bytes | Failure]) -> bytes | Failure:
    try:
        return future.result()
    except BrokenProcessPool:
        raise
    except Exception as error:  # noqa: BLE001 - work or item that cannot be sent to a worker
        return bug(error)
