"""SIGTERM and SIGINT as events: the first asks, the second means at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_signals(first: asyncio.Event, second: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Set `first` at the first signal, call `second` at the next ones. Nothing where this is not the main thread."""

    def on_signal() -> None:
        if first.is_set():
            second()
        first.set()

    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
