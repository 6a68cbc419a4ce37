"""`fsm-train`: flags -> checks -> run. Exit code 0 done, 1 failed, 2 bad usage, 130 interrupted.

Knows the order of things, nothing of training: torch and transformers are imported only once a run is really asked for.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from fsm_trainer.cli.flags import Invocation, parse
from fsm_trainer.config.errors import ConfigError
from fsm_trainer.config.train_config import TrainConfig

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    try:
        invocation = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:
        # argparse's own way out of --help.
        return int(stop.code or 0)
    except ConfigError as error:
        return _refuse(error)
    try:
        prepared = _prepare(invocation)
    except ConfigError as error:
        if invocation.config.log_level == "debug":
            traceback.print_exception(error)
        return _refuse(error)
    except KeyboardInterrupt:
        print("fsm-train: interrupted before the run started", file=sys.stderr)
        return INTERRUPTED
    return 0 if prepared is None else _run(*prepared)


def _refuse(error: ConfigError) -> int:
    print(f"fsm-train: error: {error}", file=sys.stderr)
    return 2


def _prepare(invocation: Invocation) -> tuple[TrainConfig, list[str]] | None:
    """Check everything; the resolved configuration and warnings, or None when a dry run has printed its plan."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # These import datasets, and torch where devices must be looked up: not for --help.
    from fsm_trainer.cli.plan import plan_warnings, render_plan
    from fsm_trainer.config.preflight import check_inputs, check_machine, count_cuda_devices
    from fsm_trainer.config.resolve import resolve
    from fsm_trainer.presets import prepare_preset

    cuda_devices = count_cuda_devices(invocation.config)
    check_machine(invocation.config, cuda_devices)
    config = resolve(invocation.config, cuda_devices)
    check_machine(config, cuda_devices)
    with tempfile.TemporaryDirectory(prefix="fsm-train-") as scratch:
        # A preset's files are made and checked aside, so that a refused or dry run leaves nothing behind.
        made, final = Path(scratch) / "preset", Path(str(config.output_dir)) / "preset"
        trial = prepare_preset(config, made)
        inputs = check_inputs(trial)
        config = _relocated(trial, made, final)
        if invocation.dry_run:
            print(render_plan(config, inputs))
            return None
        if made.exists():
            shutil.copytree(made, final)
    return config, plan_warnings(config, inputs)


def _relocated(config: TrainConfig, old: Path, new: Path) -> TrainConfig:
    moved = {}
    for name in ("ckpt", "dataset_path", "reward_fn_path"):
        value = getattr(config, name)
        if value is not None and Path(value).is_relative_to(old):
            moved[name] = str(new / Path(value).relative_to(old))
    return config.model_copy(update=moved)


def _run(config: TrainConfig, warnings: list[str]) -> int:
    import structlog

    from fsm_trainer.cli.logging import configure_logging
    from fsm_trainer.trainers import build_trainer

    configure_logging(config)
    for warning in warnings:
        structlog.get_logger("fsm_train").warning(warning)
    result = build_trainer(config).fit()
    print(f"fsm-train: {result.message}", file=sys.stderr)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
