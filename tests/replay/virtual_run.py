"""A run under virtual time: fixed durations per operation, no threads; gives the records of a real scheduler."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import NOTICES, Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import write_log

MS = 1_000_000
DURATIONS_MS: dict[CommandKind, int] = {
    CommandKind.START_TRAINER: 50,
    CommandKind.START_ENGINE: 80,
    CommandKind.LOAD_PROMPTS: 0,
    CommandKind.GENERATE: 100,
    CommandKind.REWARD: 5,
    CommandKind.TRAIN: 60,
    CommandKind.EXPORT: 4,
    CommandKind.LOAD_WEIGHTS: 3,
    CommandKind.SAVE: 20,
}
_PLAIN = {
    CommandKind.START_TRAINER: InputKind.STARTED,
    CommandKind.START_ENGINE: InputKind.STARTED,
    CommandKind.EXPORT: InputKind.EXPORTED,
    CommandKind.SAVE: InputKind.SAVED,
}


def completion(
    command: Command, *, prompts: int | None, degenerate: Collection[int], no_step: Collection[int]
) -> Input:
    """What a well-behaved outside answers."""
    kind, version, batch = command.kind, command.version, command.batch_id
    if kind is CommandKind.LOAD_PROMPTS:
        assert batch is not None
        there = prompts is None or batch < prompts
        return Input(InputKind.LOADED if there else InputKind.EXHAUSTED, op=command.op)
    if kind is CommandKind.GENERATE:
        stamp = {"rollout_version_first": version, "rollout_version_last": version}
        return Input(InputKind.GENERATED, op=command.op, tokens=640, **stamp)
    if kind is CommandKind.REWARD:
        return Input(InputKind.REWARDED, op=command.op, reason="degenerate" if batch in degenerate else None)
    if kind is CommandKind.TRAIN:
        assert version is not None
        skipped = batch in no_step
        reason = "no_step" if skipped else None
        return Input(InputKind.TRAINED, op=command.op, train_version=version + (not skipped), reason=reason)
    if kind is CommandKind.LOAD_WEIGHTS:
        return Input(InputKind.WEIGHTS_LOADED, op=command.op, rollout_version_last=version)
    return Input(_PLAIN[kind], op=command.op, train_version=version)


def virtual_run(
    config: SchedulerConfig,
    durations_ms: Mapping[CommandKind, int] | None = None,
    *,
    prompts: int | None = None,
    degenerate: Collection[int] = (),
    no_step: Collection[int] = (),
    fail_generation_of: int | None = None,
    metrics: bool = False,
) -> list[Record]:
    """All records of one run."""
    durations = {**DURATIONS_MS, **(durations_ms or {})}
    scheduler = Scheduler(config)
    agenda: list[tuple[int, int, Input]] = [(7 * MS, -1, Input(InputKind.BEGIN))]
    rows: list[Record] = []
    while not scheduler.finished:
        now, _, event = heapq.heappop(agenda)
        records, commands = scheduler.step(replace(event, t_ns=now))
        rows.extend(records)
        if metrics and event.kind is InputKind.TRAINED and not scheduler.finished:
            row = Record(-1, now, RecordKind.METRIC, machine="trainer", value=float("nan"), reason="loss")
            rows.append(scheduler.annotate(row))
        for command in commands:
            if command.kind in NOTICES:
                continue
            answer = completion(command, prompts=prompts, degenerate=degenerate, no_step=no_step)
            if command.kind is CommandKind.GENERATE and command.batch_id == fail_generation_of:
                answer = Input(InputKind.FAILED, op=command.op, reason="RuntimeError", message="no memory")
            end = now + durations[command.kind] * MS
            times = {"posted_ns": now, "started_ns": now, "finished_ns": end}
            heapq.heappush(agenda, (end, command.op, replace(answer, **times)))
    return rows


def log_of(directory: Path, rows: list[Record], config: SchedulerConfig) -> Path:
    """Write the rows as the log of a run directory; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_log(directory / LOG_NAME, rows, log_metadata(config, {"seed": 3}), max_rows=64)
    return directory
