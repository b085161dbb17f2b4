"""Bounded fan-out over Ray, the only file that imports it. Contract: `tasks.executor`.

Plain Ray tasks, one per chunk of items, at most `max_in_flight` submitted at a time. Ray's own retries are off: a chunk
whose worker dies is split in halves until the item to blame is alone. A node that is lost takes its chunks back to the
queue and blames nobody, up to `MAX_NODE_LOSSES`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import pickle
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Final, Literal

from coral_core.errors import CoralError, InputError
from tasks.executor import (
    MAX_DEATHS,
    Executor,
    Failure,
    InlineExecutor,
    Item,
    Outcome,
    Value,
    attempt,
    bug,
    outcome_of,
    quarantined,
)

_LOG: Final = logging.getLogger(__name__)

LOCAL: Final = "local"
MAX_NODE_LOSSES: Final = 5
"""Lost nodes an item may have been on, before it is suspected of losing them."""
NO_WORKERS_LIMIT_S: Final = 60.0
"""How long a cluster may be without any CPU (a head that waits for its nodes) before the rest is given up."""
_POLL_S: Final = 1.0
_LOCAL_SETTINGS: Final[dict[str, object]] = {
    "include_dashboard": False,
    "object_store_memory": 80 * 2**20,  # only records and shard descriptions pass; Ray's own minimum is 75 MiB
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayExecutor:
    """`fan_out` with its settings, as an `Executor`."""

    address: str = LOCAL
    workers: int | None = None
    chunk_size: int = 1
    max_in_flight: int | None = None

    def __call__(self, items: Sequence[Item], work: Callable[[Item], Value]) -> Iterator[Outcome[Value]]:
        """Outcomes as they finish."""
        return fan_out(
            items,
            work,
            address=self.address,
            workers=self.workers,
            chunk_size=self.chunk_size,
            max_in_flight=self.max_in_flight,
        )

    def session(self) -> AbstractContextManager[None]:
        """A `ray_session` for several runs."""
        return ray_session(self.address, workers=self.workers)


def choose_executor(
    kind: Literal["ray", "inline"], *, ray_address: str = LOCAL, workers: int | None = None
) -> Executor:
    """The executor by its name; `workers` are the CPUs of a local Ray (default all), or inline processes (default 1)."""
    if kind == "inline":
        return InlineExecutor(processes=workers or 1)
    return RayExecutor(address=ray_address, workers=workers)


def fan_out(
    items: Sequence[Item],
    work: Callable[[Item], Value],
    *,
    address: str = LOCAL,
    workers: int | None = None,
    chunk_size: int = 1,
    max_in_flight: int | None = None,
) -> Iterator[Outcome[Value]]:
    """Run `work` over `items` on Ray; outcomes as they finish.

    `address` is `local` (a private Ray on this machine with `workers` CPUs, ended with the run) or `host:port` of a
    running cluster, which must have this package installed. `max_in_flight` chunks are submitted at a time, by
    default twice the cluster's CPUs. Opens a `ray_session` unless the caller holds one.

    Raises InputError for a bad address or setting, a cluster that does not answer, or where Ray is not installed.
    """
    for name, value in (("chunk_size", chunk_size), ("max_in_flight", max_in_flight), ("workers", workers)):
        if value is not None and value < 1:
            raise InputError(f"{value} is too small", where=name, fix="give 1 or more")
    if not items:
        return
    with ray_session(address, workers=workers):
        yield from _Run(items, work, chunk_size, max_in_flight).outcomes()


@contextmanager
def ray_session(address: str = LOCAL, *, workers: int | None = None) -> Iterator[None]:
    """A connection to Ray for the runs inside it; nested sessions share the outermost.

    A local Ray is quiet, on the loopback interface, guarded by a token of its own, and gone afterwards with its files.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError("Ray is not installed", where="executor", fix="install coral-serve[flows], or run inline")
    if "ray" in sys.modules and _ray().is_initialized():
        yield
        return
    if address == LOCAL:
        with _local_folder() as folder, _connected(address, num_cpus=workers, **_LOCAL_SETTINGS, _temp_dir=str(folder)):
            yield
    else:
        _check_answers(address)
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # 20 by default: a quarter of an hour at a wrong port
        with _connected(address):
            yield


def _ray() -> Any:  # noqa: ANN401 - the module, absent from the base install
    return importlib.import_module("ray")


@contextmanager
def _connected(address: str, **settings: object) -> Iterator[None]:
    """Connected to Ray. SIGTERM keeps the handler it has (Prefect's, to cancel a run); without one, Ray's cleans up."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    ray = _ray()
    try:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **settings)
        except Exception as error:
            raise CoralError(f"Ray did not start or let us in: {error}", where=f"ray {address}") from error
        _take_stdout_back()
        if main and callable(handler):
            signal.signal(signal.SIGTERM, handler)
        yield
    finally:
        ray.shutdown()
        if main:
            signal.signal(signal.SIGTERM, handler)


def _take_stdout_back() -> None:
    """Ray tells of lost workers on stdout, where a command's answer goes, and has no switch for it: log that instead."""

    def log(data: Mapping[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001, FBT001 - Ray's signature
        _LOG.info("ray: %s", " ".join(data["lines"]))

    importlib.import_module("ray._private.worker").__dict__["print_to_stdstream"] = log


def _check_answers(address: str) -> None:
    match = re.fullmatch(r"(?P<host>[A-Za-z0-9.\-]+):(?P<port>\d{1,5})", address)
    if match is None:
        raise InputError(
            f"{address!r} is no Ray address", where="ray address", fix="give local, or host:port of a cluster's head"
        )
    try:
        socket.create_connection((match["host"], int(match["port"])), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray head answers at {address}: {error}", where="ray address") from error


@contextmanager
def _local_folder() -> Iterator[Path]:
    """A folder for a local Ray's sockets and logs, and the environment set that Ray reads when it is imported."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # means: loopback only, on Linux too
    root = tempfile.gettempdir()
    short = root if len(root) <= 24 else "/tmp"  # noqa: S108 - unix socket paths end at 107 bytes; mkdtemp is safe
    folder = Path(tempfile.mkdtemp(prefix="coral-ray-", dir=short))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Chunk:
    indices: tuple[int, ...]
    attempts: int = 0
    deaths: int = 0
    node_losses: int = 0

    def halves(self) -> list[_Chunk]:
        middle = len(self.indices) // 2
        return [replace(self, indices=part) for part in (self.indices[:middle], self.indices[middle:])]


class _Run:
    """One fan-out: chunks waiting, chunks in flight, and what to do when a worker or a node is lost."""

    def __init__(
        self, items: Sequence[Item], work: Callable[[Item], Value], chunk_size: int, max_in_flight: int | None
    ) -> None:
        self.ray = ray = _ray()
        self.items = items
        self.waiting = deque(
            _Chunk(tuple(range(start, min(start + chunk_size, len(items)))))
            for start in range(0, len(items), chunk_size)
        )
        self.in_flight: dict[object, _Chunk] = {}
        self.max_in_flight = max_in_flight or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        self.task = ray.remote(num_cpus=1, max_retries=0)(_run_chunk)
        self.work = ray.put(work)
        self.no_workers_since_s: float | None = None

    def outcomes(self) -> Iterator[Outcome[Value]]:
        try:
            while self.waiting or self.in_flight:
                while self.waiting and len(self.in_flight) < self.max_in_flight:
                    yield from self._submit(self.waiting.popleft())
                ready, _ = self.ray.wait(list(self.in_flight), num_returns=1, timeout=_POLL_S)
                for reference in ready:
                    yield from self._settle(reference, self.in_flight.pop(reference))
                if not ready and self._without_workers():
                    yield from self._give_up()
        finally:
            for reference in self.in_flight:
                self.ray.cancel(reference, force=True)  # only force reaches into a native solver

    def _submit(self, chunk: _Chunk) -> Iterator[Outcome[Value]]:
        """Send a chunk off. Items travel as plain pickles: Ray's own would make their arrays read-only."""
        chunk = replace(chunk, attempts=chunk.attempts + 1)
        sent: dict[int, bytes] = {}
        for index in chunk.indices:
            try:
                sent[index] = pickle.dumps(self.items[index])
            except Exception as error:  # noqa: BLE001 - an item that cannot be pickled, in whatever way it fails to
                yield Outcome(index=index, value=None, failure=bug(error), attempts=chunk.attempts)
        if sent:
            reference = self.task.remote(self.work, list(sent.values()))
            self.in_flight[reference] = replace(chunk, indices=tuple(sent))

    def _settle(self, reference: object, chunk: _Chunk) -> Iterator[Outcome[Value]]:
        errors = self.ray.exceptions
        try:
            answers: list[bytes | Failure] = self.ray.get(reference)
        except (errors.NodeDiedError, errors.ObjectLostError) as error:
            chunk = replace(chunk, node_losses=chunk.node_losses + 1)
            yield from self._retry(chunk, error, split=chunk.node_losses >= MAX_NODE_LOSSES)
        except (errors.WorkerCrashedError, errors.OutOfMemoryError) as error:
            chunk = replace(chunk, deaths=chunk.deaths + (len(chunk.indices) == 1))
            yield from self._retry(chunk, error, split=True)
        except errors.RayError as error:  # the work did not reach the worker in one piece
            yield from self._retry(chunk, error, split=True, final=bug(error))
        else:
            for index, answer in zip(chunk.indices, answers, strict=True):
                yield outcome_of(index, answer, chunk.attempts)

    def _retry(
        self, chunk: _Chunk, error: Exception, *, split: bool, final: Failure | None = None
    ) -> Iterator[Outcome[Value]]:
        """Queue the chunk again, first in line; a lone item whose time is up, or whose failure is final, ends here."""
        if len(chunk.indices) > 1:
            self.waiting.extendleft(chunk.halves() if split else [chunk])
        elif final is not None:
            yield Outcome(index=chunk.indices[0], value=None, failure=final, attempts=chunk.attempts)
        elif chunk.deaths >= MAX_DEATHS or chunk.node_losses >= MAX_NODE_LOSSES:
            yield quarantined(chunk.indices[0], chunk.attempts, type(error).__name__)
        else:
            self.waiting.appendleft(chunk)

    def _without_workers(self) -> bool:
        """Whether the cluster has had no CPU for longer than the limit; a task would wait for one for ever."""
        if self.ray.cluster_resources().get("CPU", 0) >= 1:
            self.no_workers_since_s = None
            return False
        self.no_workers_since_s = self.no_workers_since_s or monotonic()
        return monotonic() - self.no_workers_since_s > NO_WORKERS_LIMIT_S

    def _give_up(self) -> Iterator[Outcome[Value]]:
        failure = Failure(kind="no_workers", message=f"the Ray cluster had no CPU for {NO_WORKERS_LIMIT_S:.0f} s")
        for chunk in (*self.in_flight.values(), *self.waiting):
            for index in chunk.indices:
                yield Outcome(index=index, value=None, failure=failure, attempts=chunk.attempts)
        self.waiting.clear()
        for reference in self.in_flight:
            self.ray.cancel(reference, force=True)
        self.in_flight.clear()


def _run_chunk(work: Callable[[Any], Value], items: Sequence[bytes]) -> list[bytes | Failure]:
    return [attempt(lambda data: work(pickle.loads(data)), item) for item in items]  # noqa: S301 - from our driver
