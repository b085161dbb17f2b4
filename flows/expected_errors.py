"""What Prefect logs of expected failures: their one line, which names the fix, without a traceback."""

from __future__ import annotations

import logging
from typing import Final

from coral_core.errors import CoralError

LOGGERS: Final = ("prefect.flow_runs", "prefect.task_runs")
"""Where Prefect's engines log what a flow or a task raised."""


class WithoutTraceback(logging.Filter):
    """Lets all records pass; those of a CoralError lose their traceback, unless the logger is at DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, CoralError) and not logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
            record.msg, record.args, record.exc_info = "%s: %s", (type(error).__name__, error), None
        return True


def leave_out_tracebacks() -> None:
    """Have it so from now on, however often Prefect sets its logging up; doing it again changes nothing."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(found, WithoutTraceback) for found in logger.filters):
            logger.addFilter(WithoutTraceback())
