"""How well generation and training overlap: idle sides, what bounds the run, and the limit of what overlap can give.

Pure functions of the frames of `analysis.frames`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from fsm_trainer.analysis.frames import residency, rows_of
from fsm_trainer.analysis.source import NS

_BALANCED = 0.1
"""Sides whose busy shares differ by no more than this are balanced."""
_WORKING = ("loading", "generating", "rewarding")


@dataclass(frozen=True)
class Window:
    """The time in which the run trained: from the moment its engines served to the moment it began to stop."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Sides:
    """How busy each side was in the window, as shares of it."""

    rollout_idle: float
    """Mean over the rollout workers of the share in which one is not loading, generating or rewarding."""
    trainer_idle: float
    """Share in which the trainer waits for a batch."""
    bound: str
    """What bounds the run: generation, reward, training, sync or balanced."""


@dataclass(frozen=True)
class Overlap:
    """What overlap could give at best, and what it gave. Times are seconds per optimiser step, as measured here."""

    rollout_s: float
    """Generation and reward of the batches that a step consumes, shared out over the rollout workers. Batches dropped
    as stale do not count: a synchronous run has none."""
    reward_s: float
    """The part of rollout_s that is reward."""
    train_s: float
    sync_s: float
    """Publishing the weights, which holds the trainer, and loading them, which holds an engine."""
    synchronous_s: float
    """rollout_s + train_s + sync_s: a step without overlap."""
    busiest_s: float
    """The largest of what a step takes of a worker (generation, reward), of an engine (generation, load) and of the
    trainer (training, publishing): no overlap makes a step shorter."""
    step_s: float
    """A step of this run: from engines serving to the last optimiser step, over the steps taken. The first rollouts,
    during which the trainer must wait, are in it; checkpoints are in it and in nothing else."""
    limit: float
    """synchronous_s / busiest_s: the speed-up that perfect overlap would give."""
    speedup: float
    """synchronous_s / step_s."""
    reached: float
    """speedup / limit, which is busiest_s / step_s."""


def training_window(events: pd.DataFrame) -> Window | None:
    """When the run trained; None if it never came to that."""
    moves = rows_of(events, "transition", machine="run")
    begins = moves[moves["dest"] == "running"]
    if begins.empty:
        return None
    ends = moves[moves["dest"] == "stopping"]
    end = events["t_ns"].max() if ends.empty else ends["t_ns"].iloc[0]
    return Window(int(begins["t_ns"].iloc[0]), int(end))


def measure_sides(spans: pd.DataFrame, window: Window) -> Sides | None:
    """Idle shares and what bounds the run; None for an empty window."""
    length = window.end_ns - window.start_ns
    if length <= 0:
        return None
    spent = residency(spans, window.start_ns, window.end_ns)
    spent = spent.assign(share=spent["ns"] / length)
    trainer = spent[spent["machine"] == "trainer"].groupby("state")["share"].sum()
    rollout = spent[spent["machine"] == "rollout"]
    working = rollout[rollout["state"].isin(_WORKING)]["share"].sum()
    return Sides(
        rollout_idle=1.0 - float(working) / max(rollout["entity"].nunique(), 1),
        trainer_idle=float(trainer.get("waiting", 0.0)),
        bound=_bound(rollout, trainer),
    )


def _bound(rollout: pd.DataFrame, trainer: pd.Series) -> str:
    """The larger part of the busier side. The busiest worker stands for its side: others may idle by the bound."""
    parts = {
        "generation": rollout["state"].isin(["loading", "generating"]),
        "reward": rollout["state"] == "rewarding",
        "sync": (rollout["state"] == "ready") & (rollout["cause"] == "weight_sync"),
    }
    shares = pd.DataFrame({name: rollout["share"].where(mask, 0.0) for name, mask in parts.items()})
    workers = shares.groupby(rollout["entity"]).sum()
    busiest = workers.loc[workers.sum(axis=1).idxmax()] if len(workers) else pd.Series(0.0, index=list(parts))
    learner = pd.Series({"training": trainer.get("training", 0.0), "sync": trainer.get("syncing", 0.0)})
    saving = trainer.get("saving", 0.0)
    difference = busiest.sum() - (learner.sum() + saving)
    if abs(difference) <= _BALANCED:
        return "balanced"
    return str((busiest if difference > 0 else learner).idxmax())


def measure_overlap(
    events: pd.DataFrame, operations: pd.DataFrame, ended: pd.DataFrame, window: Window
) -> Overlap | None:
    """The limit of overlap and how much of it was reached; None before the first optimiser step."""
    steps = rows_of(events, "version", trigger="step")
    if steps.empty:
        return None
    last_ns = int(steps["t_ns"].iloc[-1])
    count = len(steps)
    inside = operations["t_ns"].between(window.start_ns, last_ns, inclusive="right")
    done = operations[inside & (operations["outcome"] != "failed")]
    consumed = ended[ended["state"].isin(["trained", "dropped"]) & (ended["reason"] != "stale").fillna(True)]
    workers = max(done[done["command"] == "generate"]["entity"].nunique(), 1)
    engines = max(done[done["command"] == "load_weights"]["engine"].nunique(), 1)
    share = len(consumed) / count / workers
    generate, reward = _mean_s(done, "generate") * share, _mean_s(done, "reward") * share
    load = _total_s(done, "load_weights") / engines / count
    train, publish = _total_s(done, "train") / count, _total_s(done, "export") / count
    synchronous = generate + reward + train + publish + load
    busiest = max(generate + reward, generate + load, train + publish)
    step = (last_ns - window.start_ns) / NS / count
    if busiest <= 0 or step <= 0:
        return None
    return Overlap(
        rollout_s=generate + reward,
        reward_s=reward,
        train_s=train,
        sync_s=publish + load,
        synchronous_s=synchronous,
        busiest_s=busiest,
        step_s=step,
        limit=synchronous / busiest,
        speedup=synchronous / step,
        reached=busiest / step,
    )


def _durations_s(operations: pd.DataFrame, command: str) -> pd.Series:
    durations: pd.Series = operations[operations["command"] == command]["duration_ns"]
    return durations.dropna().astype("int64") / NS


def _mean_s(operations: pd.DataFrame, command: str) -> float:
    durations = _durations_s(operations, command)
    return float(durations.mean()) if len(durations) else 0.0


def _total_s(operations: pd.DataFrame, command: str) -> float:
    return float(_durations_s(operations, command).sum())
