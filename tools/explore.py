"""Explore all orders of completions of small runs and print what was seen: `python tools/explore.py [--plan full]`.

Ends with status 1 at the first violation, after printing the shortest schedule that leads to it as a test to paste.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable

from fsm_trainer.simulate.explore import Case, Found, explore
from fsm_trainer.simulate.explore_plan import full_plan, inflight, refresh_cases, restarted, small_plan
from fsm_trainer.simulate.explore_report import as_test, config_text, schedule_text

PLANS = {
    "small": small_plan,
    "full": full_plan,
    "refresh": refresh_cases,
    "inflight": lambda: inflight((1, 2), range(4), range(1, 4)),
    "restarted": lambda: restarted((1, 2), range(3)),
}


def search_all(cases: Iterable[Case], every_s: float) -> int:
    """Search case by case, print the progress and the totals; 1 if a rule broke."""
    begun = said = time.monotonic()
    states: Counter[str] = Counter()
    steps = runs = 0
    deepest: Found | None = None
    after_stop = after_drain = 0
    for case in cases:
        found = explore(case)
        if found.violation is not None:
            print(f"\nVIOLATION in {config_text(case.config)}: {found.violation}\n\n{as_test(found)}")
            return 1
        runs += 1
        steps += found.steps
        states[case.config.admission] += found.states
        after_stop, after_drain = max(after_stop, found.after_stop), max(after_drain, found.after_drain)
        if deepest is None or len(found.longest) > len(deepest.longest):
            deepest = found
        if time.monotonic() - said > every_s:
            said = time.monotonic()
            print(f"  {said - begun:6.0f} s  {runs} cases  {states.total():,} states", flush=True)
    spent = time.monotonic() - begun
    print(f"{runs} cases, {states.total():,} states, {steps:,} steps, no violation; {spent:.0f} s")
    print(f"{states.total() / spent:,.0f} states/s, {steps / spent:,.0f} steps/s")
    print("states by admission: " + ", ".join(f"{name} {count:,}" for name, count in sorted(states.items())))
    print(f"at most {after_drain} events after the last admission, {after_stop} once stopping")
    if deepest is not None:
        print(f"deepest schedule, {len(deepest.longest)} events, of {config_text(deepest.case.config)}:")
        print(f"  {schedule_text(deepest.longest)}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=PLANS, default="small")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th case from the K-th on")
    parser.add_argument("--progress", type=float, default=15.0, help="seconds between lines of progress")
    args = parser.parse_args(argv)
    part, parts = (int(n) for n in args.part.split("/"))
    cases = [case for i, case in enumerate(PLANS[args.plan]()) if i % parts == part - 1]
    print(f"plan {args.plan}, part {args.part}: {len(cases)} cases")
    return search_all(cases, args.progress)


if __name__ == "__main__":
    sys.exit(main())
