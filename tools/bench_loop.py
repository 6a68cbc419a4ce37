"""What the event loop costs a batch by itself: deciding, logging to a real file, dispatching; no engines, no waiting.

python tools/bench_loop.py [--steps 2000]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind
from fsm_trainer.eventlog.schema import log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.testing import FakeBehaviour, VirtualRun


def main() -> None:
    """Run in virtual time and print the loop thread's processor time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="optimiser steps (default: 2000)")
    steps = parser.parse_args().steps
    config = SchedulerConfig(max_steps=steps)
    behaviour = FakeBehaviour(durations={CommandKind.GENERATE: 0.05, CommandKind.TRAIN: 0.1})
    with tempfile.TemporaryDirectory() as folder:
        log = EventLogWriter(Path(folder) / "events.arrows", metadata=log_metadata(config, {}))
        run = VirtualRun(config, behaviour, sink=log)
        result = run.run()
        log.close()
    print(f"{run.loop.busy_ns / 1e6 / steps:.2f} ms a batch, {run.loop.busy_ns / 1e3 / result.inputs:.0f} us an input")


if __name__ == "__main__":
    main()
