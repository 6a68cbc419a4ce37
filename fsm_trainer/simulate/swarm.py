"""One number -> one whole simulated run: its configuration, durations and faults, each kind switched on or off by it.

Switching whole kinds off makes the others meet in ways that a uniform mixture of all never reaches (swarm testing).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from fsm_trainer.core.config import Deadlines, SchedulerConfig
from fsm_trainer.core.events import NOTICES, CommandKind, Input, InputKind
from fsm_trainer.engines.fake_behaviour import Amount, Effect, Fault, Lognormal, Pareto, Uniform
from fsm_trainer.simulate.checked import input_bound
from fsm_trainer.simulate.durations import Durations, Stragglers
from fsm_trainer.simulate.faults import (
    NO_FAULTS,
    OTHER_KIND,
    Delivery,
    Disturbance,
    FaultPlan,
    Happening,
    LogFault,
    Part,
)
from fsm_trainer.simulate.simulator import NO_DEADLINES, SimResult, simulate

_C = CommandKind
_OPERATIONS = tuple(kind for kind in CommandKind if kind not in NOTICES)
_TIGHT = Deadlines(
    start_s=40.0,
    load_prompts_s=30.0,
    generate_s=30.0,
    reward_s=20.0,
    train_s=30.0,
    sync_s=20.0,
    save_s=30.0,
    queue_s=25.0,
    shutdown_s=15.0,
    interrupt_s=3.0,
)
_NO_SUCH_OP = 10**9
TICKS = 60
"""Inputs that missed deadlines may add to a run: each fails it, or gives something up."""
RESTARTED = 20
"""So many times as often if engines are restarted: each failure may cost a start, a load and a batch of each worker."""


@dataclass(frozen=True)
class Case:
    """One simulated run, ready to be run, printed and made smaller."""

    seed: int
    config: SchedulerConfig
    durations: Durations
    plan: FaultPlan
    batches: int | None

    def run(self) -> SimResult:
        """Run it; raises SimulationError for a bug of the scheduler, or if it makes no end."""
        extra = TICKS * (RESTARTED if self.config.on_engine_failure == "restart" else 1)
        bound = input_bound(self.config, batches=self.batches, unusable=len(self.plan.parts), extra=extra)
        assert bound is not None, self.config
        return simulate(
            self.config,
            seed=self.seed,
            durations=self.durations,
            faults=self.plan,
            batches=self.batches,
            max_inputs=bound + 2 * len(self.plan.parts),
        )

    @property
    def size(self) -> tuple[int, int, int, int]:
        """What a smaller case has less of, most telling first."""
        config = self.config
        return (len(self.plan.parts), config.max_steps or self.batches or 0, config.workers, config.engines)


def draw_case(seed: int) -> Case:
    """The run that a seed stands for. One of five seeds has no fault, two harmless ones only, two fatal ones too."""
    rng = random.Random(seed)
    severity = rng.choice(("none", "harmless", "harmless", "fatal", "fatal"))
    config = draw_config(rng, raise_stale=severity == "fatal")
    batches = rng.choice((0, 1, 7, 12)) if config.max_steps is None else rng.choice((None, None, None, 4))
    plan = draw_faults(rng, config, severity)
    config = _with_modes(_with_deadlines(config, severity), seed)
    if config.on_engine_failure == "restart" and severity != "none":
        plan = _with_engine_failures(plan, config, seed)
    case = Case(seed, config, draw_durations(rng), plan, batches)
    return _resumed(case) if seed % 4 == 1 else case


def _with_modes(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """With a third of the seeds engines load while they generate, with a third they are restarted; not in lockstep."""
    rng = random.Random(f"modes/{seed}")
    inflight, restart = rng.random() < 0.33, rng.random() < 0.33
    if config.admission == "lockstep":
        return config
    return replace(
        config,
        sync_mode="inflight" if inflight else "drain",
        on_engine_failure="restart" if restart else "fail",
        max_engine_restarts=rng.randint(1, 3),
    )


def _with_engine_failures(plan: FaultPlan, config: SchedulerConfig, seed: int) -> FaultPlan:
    """So that engines that may be restarted are, now and then one of them several times in a row."""
    rng = random.Random(f"engines/{seed}")
    makers = [rng.choice(_OF_ENGINES) for _ in range(rng.randint(1, 4))]
    return replace(plan, parts=(*plan.parts, *(part for make in makers for part in make(rng, config))))


def _resumed(case: Case) -> Case:
    """The same as the rest of a run that was resumed: so many steps and batches lie before it."""
    rng, config = random.Random(f"resumed/{case.seed}"), case.config
    version = rng.randint(0, 9)
    before = version + rng.randint(0, 4)
    steps = None if config.max_steps is None else config.max_steps + version
    config = replace(config, first_version=version, first_batch=before, max_steps=steps)
    return replace(case, config=config, batches=None if case.batches is None else case.batches + before)


def _with_deadlines(config: SchedulerConfig, severity: str) -> SchedulerConfig:
    return replace(config, deadlines=_TIGHT if severity == "fatal" else NO_DEADLINES)


def draw_config(rng: random.Random, *, raise_stale: bool = False) -> SchedulerConfig:
    """A configuration of any admission; with `raise_stale` a stale batch may be made to fail the run."""
    admission = rng.choice(("paced", "greedy", "lockstep"))
    staleness, workers = rng.choice((0, 1, 1, 2, 3)), rng.choice((1, 2, 2, 3, 4))
    return SchedulerConfig(
        admission=admission,
        workers=workers,
        engines=rng.randint(1, workers),
        queue_size=rng.randint(1, 3),
        prefetch=rng.choice((0, 1, 1, 3)),
        max_staleness=staleness,
        sync_interval=rng.randint(1, staleness + 1 if admission == "lockstep" else 3),
        max_steps=rng.choice((None, 1, 5, 8, 12)),
        save_interval=rng.choice((0, 0, 1, 3)),
        save_last=rng.random() < 0.9,
        drop_stale=not (raise_stale and rng.random() < 0.5),
        max_no_step_batches=50,
    )


def draw_durations(rng: random.Random) -> Durations:
    """From all alike to heavy tails; now and then every operation takes no time at all, so that ties decide."""
    shapes: tuple[Callable[[float], Amount], ...] = (
        lambda mean: mean,
        lambda mean: Uniform(0.0, 2.0 * mean),
        lambda mean: Lognormal(mean, 0.8),
        lambda mean: Pareto(0.3 * mean, 1.3),
        lambda mean: Stragglers(0.6 * mean, share=0.05),
    )
    if rng.random() < 0.1:
        return Durations()
    means = {_C.GENERATE: 1.0, _C.REWARD: 0.2, _C.TRAIN: 0.5, _C.EXPORT: 0.05, _C.LOAD_WEIGHTS: 0.1}
    means |= {_C.LOAD_PROMPTS: 0.05, _C.START_ENGINE: 0.5, _C.START_TRAINER: 0.3, _C.SAVE: 0.2}
    scale = {_C.GENERATE: rng.choice((0.2, 1.0, 3.0)), _C.LOAD_WEIGHTS: rng.choice((1.0, 8.0))}
    operations = {kind: rng.choice(shapes)(mean * scale.get(kind, 1.0)) for kind, mean in means.items()}
    handover: dict[CommandKind, Amount] = dict.fromkeys(_OPERATIONS, 0.002) if rng.random() < 0.3 else {}
    return Durations(operations, before=handover, after=handover)


def draw_faults(rng: random.Random, config: SchedulerConfig, severity: str) -> FaultPlan:
    """Faults for a run of `config`: of none, only of the harmless kinds, or of all kinds."""
    if severity == "none":
        return NO_FAULTS
    kinds = _HARMLESS if severity == "harmless" else _HARMLESS + _FATAL
    switched_on = [kind for kind in kinds if rng.random() < 0.35]
    if severity == "fatal":
        switched_on.append(rng.choice(_FATAL))
    parts = [part for kind in switched_on for part in kind(rng, config)]
    # In a run without deadlines what hangs must heal; in one with deadlines it may.
    heals = severity == "harmless" or rng.random() < 0.3
    return FaultPlan(tuple(parts), heal_at=rng.randint(1, 80) if heals else None)


_Maker = Callable[[random.Random, SchedulerConfig], list[Part]]


def _nth(rng: random.Random, kind: CommandKind) -> int:
    return 1 if kind is _C.START_TRAINER else rng.randint(1, 9)


def _any_of(rng: random.Random, kinds: tuple[CommandKind, ...] = _OPERATIONS) -> tuple[CommandKind, int]:
    kind = rng.choice(kinds)
    return kind, _nth(rng, kind)


def _disturb(delivery: Delivery) -> _Maker:
    def make(rng: random.Random, config: SchedulerConfig) -> list[Part]:
        delays = (0.0, 0.01, 1.0, 5.0)
        kinds = [_any_of(rng) for _ in range(rng.randint(1, 3))]
        return [Disturbance(kind, delivery, nth, rng.choice(delays)) for kind, nth in kinds]

    return make


def _overdue(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    """It comes after its deadline and does not heed its abort, or so late that others miss theirs."""
    kind, nth = _any_of(rng, (*_OPERATIONS, _C.TRAIN, _C.TRAIN))
    return [Disturbance(kind, Delivery.LATE, nth, rng.choice((26.0, 28.0, 35.0, 45.0)))]


def _unknown(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    """A completion of an operation that never was, or of one of another kind."""
    kinds = (InputKind.GENERATED, InputKind.TRAINED, InputKind.WEIGHTS_LOADED, InputKind.SAVED, InputKind.LOADED)
    ops = (_NO_SUCH_OP, 0, OTHER_KIND, OTHER_KIND)
    events = [Input(rng.choice(kinds), op=rng.choice(ops), train_version=1) for _ in range(rng.randint(1, 3))]
    return [Happening(rng.randint(1, 60), event) for event in events]


def _hang(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    kind, nth = _any_of(rng)
    return [Fault(kind, Effect.HANG, nth=nth)]


def _no_step(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    nths = rng.sample(range(1, 12), rng.randint(1, 4))
    return [Fault(_C.TRAIN, Effect.NO_STEP, nth=nth) for nth in nths]


def _degenerate(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    nths = rng.sample(range(1, 12), rng.randint(1, 4))
    return [Fault(_C.REWARD, Effect.DEGENERATE, nth=nth) for nth in nths]


def _stop(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    stop = Input(InputKind.STOP, reason=rng.choice(("sigint", "sigterm", "user")))
    first = rng.randint(1, 60)
    count = rng.choice((1, 1, 2, 3))
    return [Happening(first + i * rng.choice((0, 1, 10)), stop) for i in range(count)]


def _raise(*kinds: CommandKind) -> _Maker:
    def make(rng: random.Random, config: SchedulerConfig) -> list[Part]:
        kind, nth = _any_of(rng, kinds)
        return [Fault(kind, Effect.RAISE, nth=nth)]

    return make


def _die(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    kind, nth = _any_of(rng, (_C.START_ENGINE, _C.GENERATE, _C.LOAD_WEIGHTS))
    return [Fault(kind, Effect.DIE, nth=nth)]


def _die_unasked(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    death = Input(InputKind.ENGINE_DIED, engine=rng.randrange(config.engines), message="killed")
    return [Happening(rng.randint(1, 60), death)]


def _wrong_version(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    kind, nth = _any_of(rng, (_C.GENERATE, _C.LOAD_WEIGHTS, _C.TRAIN))
    return [Fault(kind, Effect.WRONG_VERSION, nth=nth)]


def _nan(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    return [Fault(_C.TRAIN, Effect.NAN, nth=rng.randint(1, 9))]


def _failure(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    """Something beside the operations fails: metrics, the display."""
    return [Happening(rng.randint(1, 60), Input(InputKind.FAILED, reason="OSError", message="metrics"))]


def _log(rng: random.Random, config: SchedulerConfig) -> list[Part]:
    return [LogFault(rng.randint(0, 400))]


_OF_ENGINES: tuple[_Maker, ...] = (_die, _die_unasked, _die_unasked, _raise(_C.LOAD_WEIGHTS), _raise(_C.START_ENGINE))
_HARMLESS: tuple[_Maker, ...] = (
    _disturb(Delivery.HELD),
    _disturb(Delivery.LATE),
    _disturb(Delivery.TWICE),
    _unknown,
    _hang,
    _no_step,
    _degenerate,
    _stop,
)
_FATAL: tuple[_Maker, ...] = (
    _raise(*_OPERATIONS),
    _raise(_C.LOAD_PROMPTS),
    _raise(_C.EXPORT, _C.LOAD_WEIGHTS),
    _raise(_C.SAVE),
    _die,
    _die_unasked,
    _wrong_version,
    _nan,
    _overdue,
    _failure,
    _log,
)
