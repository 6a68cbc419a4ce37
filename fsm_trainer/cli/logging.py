"""Log lines for people, on standard error: structlog as console text or JSON. The event log is the truth, not these."""

from __future__ import annotations

import logging
import sys
from typing import TextIO, cast

import structlog

from fsm_trainer.config.train_config import TrainConfig


class _CurrentStderr:
    """Standard error as it is at each write: a live display puts itself in its place for a while."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logging(config: TrainConfig) -> None:
    """Set structlog up for the process from the run's log level and format."""
    level = getattr(logging, config.log_level.upper())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if config.log_format == "json":
        last: list[structlog.typing.Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _CurrentStderr())),
        cache_logger_on_first_use=False,
    )
