"""`fsm-train --simulate`: what this configuration would do with given durations, in about a second.

Runs the scheduler on the virtual clock; opens no model, dataset or reward file, and imports neither torch nor pandas.
"""

from __future__ import annotations

from dataclasses import replace

from fsm_trainer.cli.simulate_flags import DEFAULTS, SimulationRequest
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.errors import flag
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.simulate.durations import Amount, Durations, parse_amount
from fsm_trainer.simulate.faults import FaultPlan
from fsm_trainer.simulate.recorded import Recorded, recorded
from fsm_trainer.simulate.shares import Shares
from fsm_trainer.simulate.simulator import NO_DEADLINES, SimResult, simulate

DEFAULT_STEPS = 200
MAX_STEPS = 500
"""Steps simulated at most; a longer run goes on like that."""
STARVED = 0.1
"""A side that waits for more than this share of the time is said to starve."""

_BY_DESIGN = "Each side waits for the other: an async algorithm would overlap them."
_TRAINER_WAITS = {
    "generation": "generation",
    "reward": "rewards",
    "prompts": "prompts",
    "weight_sync": "engines to load new weights",
    "older_batch": "an older batch than those that are finished",
    "admission": "a batch to be admitted",
}
_ROLLOUT_WAITS = {
    "staleness_bound": "training to catch up (--async-max-staleness)",
    "queue_full": "a free place in the train queue (--async-queue-size)",
    "weight_sync": "new weights",
    "policy_version": "the weights that the next batch must be generated with",
}


def run_simulation(config: TrainConfig, request: SimulationRequest) -> str:
    """Simulate and describe. Raises ConfigError."""
    try:
        known = recorded(request.run) if request.run is not None else None
        durations = _durations(request, known)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    scheduler, asked = _scheduler_config(config, known)
    result = _simulate(scheduler, config.seed, durations, known)
    baseline = None
    if config.is_async:
        alone = replace(scheduler, admission="paced", workers=1, engines=1, max_staleness=0, sync_interval=1)
        baseline = _simulate(alone, config.seed, durations, known)
    return describe(config, request, result, baseline, asked)


def _durations(request: SimulationRequest, known: Recorded | None) -> Durations:
    """Those of the recorded run, or the defaults; what is given by hand wins."""
    amounts: dict[str, Amount] = {}
    for name, text in {**({} if known else DEFAULTS), **request.given}.items():
        try:
            amounts[name.removeprefix("simulate_")] = parse_amount(text)
        except ValueError as error:
            raise ConfigError(f"{flag(name)}: {error}") from error
    by_hand = Durations.of(**amounts) if not known else _only(amounts)
    if known is None:
        return by_hand
    return replace(known.durations, operations={**known.durations.operations, **by_hand.operations})


def _only(amounts: dict[str, Amount]) -> Durations:
    whole = Durations.of(**amounts).operations
    kinds = dict(zip(("rollout_s", "train_s", "reward_s", "sync_s"), whole, strict=True))
    return Durations({kinds[name]: amount for name, amount in amounts.items()})


def _scheduler_config(config: TrainConfig, known: Recorded | None) -> tuple[SchedulerConfig, int]:
    """The configuration to simulate, without deadlines, and the steps that were asked for."""
    scheduler = config.to_scheduler_config()
    asked = scheduler.max_steps or (known.steps if known and known.steps else DEFAULT_STEPS)
    return replace(scheduler, max_steps=min(asked, MAX_STEPS), deadlines=NO_DEADLINES), asked


def _simulate(config: SchedulerConfig, seed: int, durations: Durations, known: Recorded | None) -> SimResult:
    plan = FaultPlan(known.faults if known else ())
    return simulate(config, seed=seed, durations=durations, faults=plan, check=False)


def describe(
    config: TrainConfig, request: SimulationRequest, result: SimResult, baseline: SimResult | None, asked: int
) -> str:
    """The prediction in words."""
    rows = [
        ("simulated", _what(config, result, asked)),
        ("durations", _given(request)),
        ("wall time", _wall_time(result, asked)),
        *([("speed-up", _speed_up(result, baseline))] if baseline else []),
        ("batches", ", ".join(f"{count} {state}" for state, count in result.batches.items() if count)),
        ("drops", ", ".join(f"{count} {reason}" for reason, count in result.drops.items()) or "none"),
        ("staleness", _staleness(result.staleness)),
    ]
    if result.shares is not None:
        shares = result.shares
        rows.append(("idle", f"trainer {_percent(shares.trainer_idle)}, rollout {_percent(shares.rollout_idle)}"))
        rows.extend(("", sentence) for sentence in (starvation(shares) if config.is_async else [_BY_DESIGN]))
    if result.outcome != "completed":
        rows.insert(2, ("outcome", f"{result.outcome}: {result.error}"))
    return "\n".join(f"{name:<12}{text}" for name, text in rows)


def starvation(shares: Shares) -> list[str]:
    """Who starves, and for want of what; one sentence a side, or that neither does."""
    trainer = [
        (_TRAINER_WAITS[cause], share) for cause, share in shares.trainer_waits.items() if cause in _TRAINER_WAITS
    ]
    rollout = [
        (_ROLLOUT_WAITS[cause], share) for cause, share in shares.rollout_waits.items() if cause in _ROLLOUT_WAITS
    ]
    found = [
        *_starves("The trainer waits", trainer),
        *_starves("The rollout workers wait", rollout),
    ]
    return found or [f"Neither side starves: each waits for less than {_percent(STARVED)} of the time."]


def _starves(who: str, waits: list[tuple[str, float]]) -> list[str]:
    total = sum(share for _, share in waits)
    named = [(what, share) for what, share in waits if share >= STARVED / 2]
    if total <= STARVED or not named:
        return []
    if len(named) == 1:
        return [f"{who} {_percent(total)} of the time, for {named[0][0]}."]
    causes = ", ".join(f"{_percent(share)} for {what}" for what, share in named)
    return [f"{who} {_percent(total)} of the time: {causes}."]


def _what(config: TrainConfig, result: SimResult, asked: int) -> str:
    s = result.config
    steps = f"{result.steps} of {asked} steps" if asked > MAX_STEPS else f"{result.steps} steps"
    shape = f"{_count(s.workers, 'rollout worker')} on {_count(s.engines, 'engine')}"
    if not config.is_async:
        return f"{steps} of {config.algo}, one after the other, seed {config.seed}"
    sync = f"sync every {_steps(s.sync_interval)}{', in flight' if s.inflight else ''}"
    limits = f"queue {s.queue_size}, max staleness {s.max_staleness}, {sync}"
    return f"{steps} of {config.algo}, {s.admission}: {shape}, {limits}, seed {config.seed}"


def _given(request: SimulationRequest) -> str:
    parts = [] if request.run is None else [f"measured in {request.run}"]
    shown = {**({} if request.run else DEFAULTS), **request.given}
    return ", ".join([*parts, *(f"{flag(name)} {text}" for name, text in shown.items())])


def _wall_time(result: SimResult, asked: int) -> str:
    each = result.wall_s / max(result.steps, 1)
    if asked > MAX_STEPS:
        return f"{each * asked:.1f} s for all {asked} steps, {each:.3f} s a step"
    return f"{result.wall_s:.1f} s, {each:.3f} s a step"


def _speed_up(result: SimResult, baseline: SimResult) -> str:
    alone = baseline.wall_s / max(baseline.steps, 1)
    here = result.wall_s / max(result.steps, 1)
    ratio = f"{alone / here:.2f}x" if here else "-"
    return f"{ratio} over one step after the other ({alone:.3f} s a step)"


def _staleness(counts: dict[int, int]) -> str:
    total = sum(counts.values())
    if not total:
        return "no batch was trained"
    mean = sum(value * count for value, count in counts.items()) / total
    return f"mean {mean:.2f}, " + ", ".join(f"{count} at {value}" for value, count in counts.items())


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
