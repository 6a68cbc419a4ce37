"""Simulates fresh seeds for a while and says how many, how fast and what failed.

`make soak`, or `python tools/soak.py --minutes 10 [--from SEED] [--jobs N]`. A failing seed is printed with its
smallest failing neighbour and added to tests/seeds.txt; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from fsm_trainer.simulate.shrink import SeedFailure, shrink
from fsm_trainer.simulate.simulator import SimulationError
from fsm_trainer.simulate.swarm import draw_case

SEEDS_FILE = Path(__file__).resolve().parents[1] / "tests" / "seeds.txt"
BLOCK = 200
REPORT_EVERY_S = 30.0


@dataclass
class Tally:
    """What some seeds came to."""

    seeds: int = 0
    inputs: int = 0
    events: int = 0
    cpu_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """Seed, problem, report."""

    def add(self, other: Tally) -> None:
        """Put another tally to this one."""
        self.seeds += other.seeds
        self.inputs += other.inputs
        self.events += other.events
        self.cpu_s += other.cpu_s
        self.outcomes += other.outcomes
        self.failures += other.failures

    def __str__(self) -> str:
        """One line."""
        rate = self.seeds / self.cpu_s if self.cpu_s else 0.0
        ends = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return (
            f"{self.seeds} seeds, {rate:.0f} a second and core, {self.inputs} inputs, {self.events} events; "
            f"{ends}; {len(self.failures)} broke a rule"
        )


def run_block(first: int) -> Tally:
    """Simulate one block of seeds."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    tally = Tally()
    begin = time.process_time()
    for seed in range(first, first + BLOCK):
        case = draw_case(seed)
        try:
            result = case.run()
        except SimulationError as error:
            failure: SeedFailure = shrink(case, error)
            tally.failures.append((seed, failure.problem, str(failure)))
            continue
        finally:
            tally.seeds += 1
        tally.inputs += result.inputs
        tally.events += len(result.records)
        tally.outcomes[result.outcome] += 1
    tally.cpu_s = time.process_time() - begin
    return tally


def blocks(first: int, jobs: int, deadline: float) -> Iterator[Tally]:
    """Blocks of seeds on `jobs` processes until the deadline."""
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[Tally]] = set()
        while True:
            while len(running) < jobs and time.monotonic() < deadline:
                running.add(pool.submit(run_block, first))
                first += BLOCK
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def main() -> int:
    """Soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--from", dest="first", type=int, help="first seed (default: a random one)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    options = parser.parse_args()
    first = options.first if options.first is not None else random.SystemRandom().randrange(10**9, 10**12)
    print(f"soak of {options.minutes:g} minutes on {options.jobs} processes, from seed {first}", flush=True)
    total, begin = Tally(), time.monotonic()
    reported = begin
    for tally in blocks(first, options.jobs, begin + 60 * options.minutes):
        total.add(tally)
        for seed, problem, report in tally.failures:
            print(report, flush=True)
            with SEEDS_FILE.open("a", encoding="utf-8") as file:
                file.write(f"{seed}  # {problem[:100]}\n")
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            print(f"{reported - begin:6.0f} s: {total}", flush=True)
    print(f"{time.monotonic() - begin:6.0f} s: {total}")
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
