"""The end of a run's parts: worker threads, engines and the log; none may hold up or change how the run ends."""

from __future__ import annotations

import structlog

from fsm_trainer.eventlog.compact import compact
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.runtime.lanes import Lanes
from fsm_trainer.trainers.operations import RunOperations

CLOSE_TIMEOUT_S = 10.0
"""How long an engine may take to end once the run is over; then it is killed."""
LANES_TIMEOUT_S = 1.0
"""The same for worker threads: one that is busy then does what the run has waited for in vain already."""

_log = structlog.get_logger("fsm_train")


def close_lanes(lanes: Lanes) -> None:
    """A thread that does not end in time is left behind, and said."""
    late = lanes.close(LANES_TIMEOUT_S)
    if late:
        _log.warning("worker_threads_left_behind", lanes=late, waited_s=LANES_TIMEOUT_S)


def close_operations(operations: RunOperations) -> None:
    """An engine that fails to close does not change how the run ended; it is killed, and said."""
    try:
        operations.close(CLOSE_TIMEOUT_S)
    except Exception as error:  # an engine may raise anything, and the run's end is still to be told
        _log.warning("engine_close_failed", message=str(error))


def close_log(log: EventLogWriter, failures: list[OSError], *, compacts: bool) -> None:
    """A log whose last rows cannot be written has failed the run, like one that failed before.

    One that cannot be compacted is as good as it was.
    """
    try:
        log.close()
        if compacts:
            compact(log.path.parent)
    except OSError as error:
        failures.append(error)
    except ValueError as error:
        _log.warning("event_log_not_compacted", message=str(error))
