"""The Prefect server that is set, or one of our own on this machine for as long as it is needed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import httpx
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from coral_core.errors import CoralError, InputError

HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 4200
_START_TIMEOUT_S: Final = 180.0
_STOP_TIMEOUT_S: Final = 20.0
_LOG_LINES: Final = 5


def require_server() -> str:
    """The URL of the Prefect server's API, which answers; InputError otherwise."""
    url = get_current_settings().api.url
    fix = "run `prefect server start`, and set PREFECT_API_URL=http://127.0.0.1:4200/api"
    if not url:
        raise InputError("no Prefect server is set", where="PREFECT_API_URL", fix=fix)
    try:
        httpx.get(f"{url}/health", timeout=10).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"no Prefect server answers at {url}: {error}", where="PREFECT_API_URL", fix=fix) from error
    return url


@contextmanager
def server_at_hand(port: int = DEFAULT_PORT) -> Iterator[tuple[str, bool]]:
    """The URL of the API to use in this block, and whether the server is our own.

    That of PREFECT_API_URL or of the Prefect profile where one is set; else of a server started here on loopback, with
    its user interface, which ends with the block. Raises InputError where the one that is set does not answer or the port
    is taken, CoralError where our own does not start.
    """
    if get_current_settings().api.url:
        yield require_server(), False
        return
    _require_free(port)
    url = f"http://{HOST}:{port}/api"
    log = get_current_settings().home / "coral-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with _termination_as_interrupt(), log.open("wb") as output:
        # A session of its own: Ctrl-C in a terminal reaches us, and the server outlives what is still to be told to it.
        process = subprocess.Popen(  # noqa: S603 - our own interpreter, a number as its only variable argument
            [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)],
            env=os.environ | {"PREFECT_SERVER_UI_API_URL": url, "PREFECT_UI_URL": url.removesuffix("/api")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _await_health(url, process, log)
            os.environ["PREFECT_API_URL"] = url  # what we start inherits it
            with temporary_settings({PREFECT_API_URL: url}):
                yield url, True
        finally:
            os.environ.pop("PREFECT_API_URL", None)
            _end(process)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise InputError(
                f"port {port} cannot be used: {error.strerror}",
                where="--port",
                fix=f"choose another one; if a Prefect server runs there, set PREFECT_API_URL=http://{HOST}:{port}/api",
            ) from error


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    what = "did not start in time" if process.poll() is None else f"ended at once, with code {process.returncode}"
    said = " / ".join(
        line.strip() for line in log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if line.strip()
    )
    raise CoralError(f"the Prefect server {what}: {said}", where=str(log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM is KeyboardInterrupt in this block, so that what was started is ended."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
