"""`fsm-train`: flags -> checks -> run. Exit code 0 done, 1 failed, 2 bad usage, 130 interrupted.

Knows the order of things, nothing of training: torch and transformers are imported only once a run is really asked for.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from fsm_trainer.cli.flags import Invocation, parse
from fsm_trainer.cli.streams import guard_streams
from fsm_trainer.config.errors import ConfigError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    if argv is None:
        guard_streams()
    try:
        invocation = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:
        # argparse's own way out of --help.
        return int(stop.code or 0)
    except ConfigError as error:
        return _refuse(error)
    try:
        return _run(invocation)
    except ConfigError as error:
        if invocation.config.log_level == "debug":
            traceback.print_exception(error)
        return _refuse(error)
    except OSError as error:
        print(f"fsm-train: failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fsm-train: interrupted at once; what was not saved is lost", file=sys.stderr)
        return INTERRUPTED


def _refuse(error: ConfigError) -> int:
    print(f"fsm-train: error: {error}", file=sys.stderr)
    return 2


def _run(invocation: Invocation) -> int:
    """Check everything, then print the plan (--dry-run) or train; or only simulate."""
    if invocation.simulation is not None:
        from fsm_trainer.cli.simulate import run_simulation

        print(run_simulation(invocation.config, invocation.simulation))
        return 0
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # These import datasets, and torch where devices must be looked up: not for --help.
    from fsm_trainer.cli.display import make_display
    from fsm_trainer.cli.logging import configure_logging
    from fsm_trainer.cli.plan import render_plan
    from fsm_trainer.trainers import build_trainer
    from fsm_trainer.trainers.prepare import prepare

    prepared = prepare(invocation.config)
    if invocation.dry_run:
        assert prepared.inputs is not None
        print(render_plan(prepared.config, prepared.inputs, prepared.scheduler_config()))
        prepared.discard()
        return 0
    configure_logging(prepared.config)
    result = build_trainer(prepared, display=make_display(prepared.config)).fit()
    print(f"fsm-train: {result.message}", file=sys.stderr)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
