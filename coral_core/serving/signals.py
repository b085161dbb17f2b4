"""SIGTERM, SIGINT and SIGHUP as events: the first asks, the second means at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_signals(first: asyncio.Event, second: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Set `first` at the first signal, call `second` at the next ones. Nothing where this is not the main thread.

    SIGHUP (its terminal is gone) counts as long as it is not ignored already, as by nohup; its default would cut every stream.
    """

    def on_signal() -> None:
        if first.is_set():
            second()
        first.set()

    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
