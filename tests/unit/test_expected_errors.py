"""Expected failures in Prefect's logs."""

from __future__ import annotations

import logging

import pytest
from prefect.logging.configuration import setup_logging

import flows
from coral_core.errors import InputError
from flows.expected_errors import LOGGERS, WithoutTraceback, leave_out_tracebacks

EXPECTED = InputError("no limit is set", where="max_nodes", fix="give one")


class Kept(logging.Handler):
    """What was logged, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture(params=LOGGERS)
def logged(request):
    """A logger of Prefect's, and what it was told."""
    logger, kept = logging.getLogger(request.param), Kept()
    before = logger.level, logger.handlers, logger.propagate
    logger.setLevel(logging.INFO)
    logger.handlers, logger.propagate = [kept], False  # Prefect's own would send it to a server
    yield logger, kept.texts
    logger.setLevel(before[0])
    logger.handlers, logger.propagate = before[1:]


def tell(logger: logging.Logger, error: Exception) -> None:
    try:
        raise error
    except type(error):
        logger.exception("Encountered exception during execution: %r", error)


def test_an_expected_failure_is_one_line_with_its_fix(logged):
    logger, texts = logged
    tell(logger, EXPECTED)
    assert texts == ["InputError: max_nodes: no limit is set (give one)"]


def test_bugs_keep_their_traceback_and_so_do_all_for_who_debugs(logged):
    logger, texts = logged
    tell(logger, ValueError("a bug"))
    logger.setLevel(logging.DEBUG)
    tell(logger, EXPECTED)
    assert ["Traceback" in text for text in texts] == [True, True]
    logger.setLevel(logging.INFO)
    logger.info("no error at all")
    assert texts[-1] == "no error at all"


def test_it_is_set_once_however_often_prefect_sets_its_logging_up():
    assert flows
    setup_logging()
    leave_out_tracebacks()
    for name in LOGGERS:
        assert sum(isinstance(found, WithoutTraceback) for found in logging.getLogger(name).filters) == 1
