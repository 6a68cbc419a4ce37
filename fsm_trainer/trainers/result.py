"""How a run ended, for the caller: outcome, exit code, one line, and the numbers of its last step."""

from __future__ import annotations

from dataclasses import dataclass

from fsm_trainer.core.state import State
from fsm_trainer.runtime.loop import EventLoop
from fsm_trainer.trainers.run_directory import RunDirectory

EXIT_CODES = {"completed": 0, "failed": 1, "interrupted": 130}


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    outcome: str
    """"completed", "failed" or "interrupted"."""
    exit_code: int
    message: str
    """One line: what happened, where, and what is on disk."""
    run: RunDirectory
    train_version: int
    metrics: dict[str, float]
    """Numbers of the last step."""
    loop_busy_ns: int
    """The event loop's own time: deciding, logging and dispatching."""
    inputs: int


def run_result(
    run: RunDirectory, state: State, loop: EventLoop, last_metrics: dict[str, float], seconds: float
) -> RunResult:
    """The result of a run whose loop has ended."""
    outcome = loop.outcome
    assert outcome is not None
    return RunResult(
        outcome=outcome,
        exit_code=EXIT_CODES[outcome],
        message=_message(run, state, loop, last_metrics, seconds),
        run=run,
        train_version=state.train_version,
        metrics=dict(last_metrics),
        loop_busy_ns=loop.busy_ns,
        inputs=loop.inputs,
    )


def _message(run: RunDirectory, s: State, loop: EventLoop, last_metrics: dict[str, float], seconds: float) -> str:
    steps = f"{s.train_version} step{'' if s.train_version == 1 else 's'}"
    before = s.config.first_version
    if before:
        steps += f" ({before} before it was resumed)"
    kept = f"checkpoint {run.checkpoint(s.saved_version)}" if s.saved_version > before else "no checkpoint"
    where = f"{kept}, log {run.kept_log}"
    if loop.outcome == "completed":
        reward = f", reward of the last step {last_metrics['reward_mean']:.3f}" if last_metrics else ""
        return f"completed {steps} in {seconds:.1f} s ({s.drain_reason}){reward}; {where}"
    if loop.outcome == "interrupted":
        return f"interrupted by {s.drain_reason or 'a stop request'} after {steps}; {where}"
    return f"failed after {steps}: {loop.error}; {where}"
