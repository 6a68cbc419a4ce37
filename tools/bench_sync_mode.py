"""When does in-flight sync pay? Simulated wall times of it against drained sync: `python tools/bench_sync_mode.py`.

A step takes 1 s; generation 0.5 to 4 s a batch, even or uneven; a load 0.02 to 0.5 s; staleness 1, 2 and 4. In virtual
time, so the table comes out the same on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from statistics import mean

from fsm_trainer.core.config import SYNC_MODES, SchedulerConfig
from fsm_trainer.simulate.durations import Amount, Durations, Lognormal
from fsm_trainer.simulate.simulator import simulate

CREWS = {"one worker": ((1, 1),), "workers share an engine": ((2, 1), (3, 1)), "an engine each": ((2, 2), (3, 3))}
"""(workers, engines)."""
SPEEDS = {"up to one step": (0.5, 1.0), "2 to 4 steps": (2.0, 4.0)}
LOADS_S = (0.02, 0.1, 0.5)
STALENESS = (1, 2, 4)
STEPS = 100


def wall_s(mode: str, workers: int, engines: int, staleness: int, rollout_s: Amount, load_s: float) -> float:
    """Virtual seconds of one run."""
    config = SchedulerConfig(workers=workers, engines=engines, max_staleness=staleness, max_steps=STEPS, sync_mode=mode)
    durations = Durations.of(rollout_s=rollout_s, train_s=1.0, sync_s=load_s)
    return simulate(config, durations=durations, seed=1, check=False).wall_s


def ratios(crews: tuple[tuple[int, int], ...], rollouts_s: tuple[float, ...], load_s: float) -> Iterator[float]:
    """Time of in-flight over time of drained sync, for each run of a row; no more workers than may be under way."""
    for (workers, engines), staleness, rollout_s in product(crews, STALENESS, rollouts_s):
        if workers <= staleness + 1:
            for amount in (rollout_s, Lognormal(rollout_s, 0.5)):
                drained, inflight = (wall_s(m, workers, engines, staleness, amount, load_s) for m in SYNC_MODES)
                yield inflight / drained


def main() -> None:
    """Print the table."""
    print("| engines | a batch's generation takes | a load takes | time of in-flight / drained | best | worst |")
    print("|---|---|---|---|---|---|")
    for (crew, crews), (speed, rollouts_s), load_s in product(CREWS.items(), SPEEDS.items(), LOADS_S):
        row = list(ratios(crews, rollouts_s, load_s))
        print(
            f"| {crew} | {speed} | {load_s:g} steps | {mean(row):.2f} | {min(row):.2f} | {max(row):.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
