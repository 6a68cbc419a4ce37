"""`fsm-replay whatif`: what a recorded run would have been with other settings, or with a part of it quicker."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fsm_trainer.cli.replay_args import DIVERGED, OK, add_command, count, tell_problem

if TYPE_CHECKING:
    from fsm_trainer.simulate.settings import Setting
    from fsm_trainer.simulate.whatif import Prediction, WhatIf

_AXES = {
    "admission": ("--async-admission", "paced, greedy, lockstep"),
    "queue_size": ("--async-queue-size", "batches the train queue holds"),
    "max_staleness": ("--async-max-staleness", "steps a batch's weights may lag"),
    "workers": ("--async-rollout-workers", "rollout workers"),
    "sync_interval": ("--async-sync-interval-steps", "steps between weight syncs"),
    "sync_mode": ("--async-sync-mode", "drain, inflight"),
    "engines": ("--rollout-engines", "rollout engines, each on devices of its own"),
}
_SCALES = {
    "rollout": "the generation of a batch",
    "train": "an optimiser step",
    "reward": "the reward of a batch",
    "sync": "an export or load of weights",
}
_MOST_SCALE = 1000.0
_QUIET_S = 2.0
"""Nothing is said of the progress before, and then no more often."""


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = add_command(commands, "whatif", _whatif, "predict the run with other settings, from its own durations")
    for option, meaning in _AXES.values():
        parser.add_argument(option, metavar="A,B,...", help=f"values to try: {meaning} (default: as recorded)")
    for name, meaning in _SCALES.items():
        parser.add_argument(f"--{name}-scale", metavar="X", help=f"as if {meaning} took X times as long (default: 1)")
    parser.add_argument("--staleness-limit", type=int, metavar="N", help="name the best setting with no more staleness")
    parser.add_argument(
        "--rows", type=count, default=30, metavar="N", help="most rows shown, the quickest (default: 30)"
    )


def _whatif(args: argparse.Namespace) -> int:
    from fsm_trainer.eventlog.reader import read_log
    from fsm_trainer.simulate.settings import USUAL
    from fsm_trainer.simulate.whatif import Scales, whatif

    axes = {name: _values(name, text) for name, (option, _) in _AXES.items() if (text := _given(args, option))}
    scales = {name: _scale(name, text) for name in _SCALES if (text := _given(args, f"--{name}-scale")) is not None}
    if args.staleness_limit is not None and args.staleness_limit < 0:
        raise ValueError(f"--staleness-limit is {args.staleness_limit}, expected at least 0")
    asked = axes or (USUAL if not scales else {})
    log = read_log(args.run)
    found = whatif(log, asked, scales=Scales(**scales), progress=_say_progress())
    if args.json:
        print(json.dumps(_to_json(found, args.staleness_limit, log.run_config), indent=2))
    else:
        print(_render(found, args, log.run_config))
    tell_problem(log)
    return DIVERGED if log.damaged else OK


def _given(args: argparse.Namespace, option: str) -> str | None:
    text: str | None = getattr(args, option.removeprefix("--").replace("-", "_"))
    return text


def _values(name: str, text: str) -> list[int | str]:
    parts = [part.strip() for part in text.split(",")]
    if name in ("admission", "sync_mode"):
        return [*parts]
    for part in parts:
        if not part.isdecimal() or len(part) > 9:
            raise ValueError(
                f"{_AXES[name][0]} is {text[:80]!r}, expected whole numbers with commas between, such as 1,2,4"
            )
    return [int(part) for part in parts]


def _scale(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= _MOST_SCALE:
        raise ValueError(
            f"--{name}-scale is {text[:80]!r}, expected a number from 0 to {_MOST_SCALE:g}; 0.5 is twice as fast"
        )
    return value


def _say_progress() -> Callable[[int, int], None]:
    said_s = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > _QUIET_S and done < total:
            said_s = time.monotonic()
            print(f"fsm-replay: {done} of {total} settings simulated", file=sys.stderr, flush=True)

    return say


def _to_json(found: WhatIf, limit: int | None, run_config: dict[str, Any]) -> dict[str, Any]:
    best = found.best(limit)
    return {
        **asdict(found),
        "self_error": found.self_error,
        "staleness_limit": limit,
        "best": None if best is None else {**asdict(best), "flags": _flags(best, found, run_config)},
    }


def _flags(best: Prediction, found: WhatIf, run_config: dict[str, Any]) -> str:
    """What to give to `fsm-train` for it, besides the run's other flags and its rollout devices."""
    from fsm_trainer.simulate.settings import async_algo

    if not found.recorded.without_lead:
        return best.setting.flags(found.recorded)
    if _is_recorded(best, found):
        return f"--algo {run_config.get('algo', '...')}"
    return f"{async_algo(run_config)} {best.setting.flags(found.recorded)}"


def _is_recorded(p: Prediction, found: WhatIf) -> bool:
    """Whether it is the recorded setting; to a synchronous run the queue of an async one makes no difference."""
    same = p.setting == found.recorded
    return same or (found.recorded.without_lead and p.setting.synchronous and p.setting.engines == 1)


def _render(found: WhatIf, args: argparse.Namespace, run_config: dict[str, Any]) -> str:
    from fsm_trainer.simulate.settings import devices_needed

    lines = [*_render_head(found), "", *_render_table(found, args.rows)]
    best = found.best(args.staleness_limit)
    limit = "" if args.staleness_limit is None else f" with staleness of at most {args.staleness_limit}"
    lines.append("")
    if best is None:
        lines.append(f"best{limit}: none of these settings can run")
    else:
        change = _change(best, found) + ", as recorded" * _is_recorded(best, found)
        lines.append(f"best{limit}: {best.wall_s:.1f} s ({change}): {_flags(best, found, run_config)}")
        if best.setting.engines > 1:
            lines.append(f"it needs --rollout-devices with {devices_needed(best.setting, run_config)} devices")
    return "\n".join(lines)


def _render_head(found: WhatIf) -> list[str]:
    from fsm_trainer.simulate.whatif import KNOWN_ERROR, within

    until = "" if found.completed else " to the last step; the run did not complete"
    lines = [
        f"recorded    {_words(found.recorded)}",
        f"            {found.steps} steps in {found.actual_s:.2f} s{until}",
        f"self-check  {found.self_check.wall_s:.2f} s predicted for this same setting, {within(found.self_error)}",
        f"            other settings may be off by {100 * KNOWN_ERROR:.0f} % or more (docs/what-if.md says how far)",
    ]
    if found.simulated_steps < found.steps:
        lines.append(f"simulated   {found.simulated_steps} of its steps, from all of it; the rest is taken to be alike")
    scaled = [f"{name} {factor:g}x" for name, factor in asdict(found.scales).items() if factor != 1.0]
    if scaled:
        lines.append(f"as if       {', '.join(scaled)} as long as recorded")
    return lines


def _words(s: Setting) -> str:
    if s.synchronous and s.queue_size == 1:
        return "synchronous, one thing after the other"
    workers = f"{s.workers} worker{'s' * (s.workers > 1)} on {s.engines} engine{'s' * (s.engines > 1)}"
    mode = ", in flight" if s.sync_mode == "inflight" else ""
    sync = f"sync every {s.sync_interval}{mode}"
    return f"{s.admission}, queue {s.queue_size}, staleness {s.max_staleness}, {workers}, {sync}"


_HEAD = "admission queue stale workers engines sync    wall s   change   step s  trainer  rollout   staleness   drops"
_UNDER = "                                                                            idle     idle   mean  max"


def _render_table(found: WhatIf, rows: int) -> list[str]:
    able = sorted((p for p in found.predictions if p.ok), key=lambda p: p.wall_s or 0.0)
    fine = _distinct(able, found)
    lines = [_HEAD, _UNDER, *(_row(p, found) for p in fine[:rows])]
    if len(fine) > rows:
        lines.append(f"and {len(fine) - rows} slower ones (--rows)")
    if len(fine) < len(able):
        lines.append(f"and {len(able) - len(fine)} more of staleness 0, where queue, workers and sync change nothing")
    lines += [f"{_setting(p.setting)}  cannot run: {p.problem}" for p in found.predictions if not p.ok]
    return lines


def _distinct(predictions: list[Prediction], found: WhatIf) -> list[Prediction]:
    """Without those of staleness 0 that are one thing after the other as well, whatever else was asked of them."""
    groups: dict[object, list[Prediction]] = {}
    for p in predictions:
        s = p.setting
        in_turn = s.max_staleness == 0 and s.admission != "greedy"
        groups.setdefault((s.engines, round(p.wall_s or 0.0, 3)) if in_turn else s, []).append(p)
    return [
        min(same, key=lambda p: (not _is_recorded(p, found), not p.setting.synchronous)) for same in groups.values()
    ]


def _setting(s: Setting) -> str:
    return f"{s.admission:<9} {s.queue_size:>5} {s.max_staleness:>5} {s.workers:>7} {s.engines:>7} {s.sync_interval:>4}"


def _row(p: Prediction, found: WhatIf) -> str:
    marks = ["in flight"] * (p.setting.sync_mode == "inflight")
    marks += ["synchronous"] * p.setting.synchronous + ["as recorded"] * _is_recorded(p, found)
    mark = f"  {', '.join(marks)}" if marks else ""
    return (
        f"{_setting(p.setting)} {p.wall_s:>9.2f} {_change(p, found):>8} {p.step_s:>8.3f} {_percent(p.trainer_idle):>8} "
        f"{_percent(p.rollout_idle):>8} {p.staleness_mean:>6.2f} {p.staleness_max:>4} {p.drops:>7}{mark}"
    )


def _change(p: Prediction, found: WhatIf) -> str:
    """Against the recorded setting as predicted, so that the two errors cancel."""
    assert p.wall_s is not None and found.self_check.wall_s is not None
    change = round(100 * (p.wall_s / found.self_check.wall_s - 1.0), 1) + 0.0  # no -0.0
    return f"{change:+.1f} %"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
