"""Which small runs are explored: the small plan runs with the tests, the full one is `make explore`.

Bounds: every admission, 1 to 3 workers on 1 or 2 engines, queue 1 to 3, staleness 0 to 3, sync interval 1 to 3,
prefetch 0 and 1, up to 6 batches, worlds with exhausted prompts and batches without a step; undisturbed in all these
combinations, and with one fault and two stop requests at any moment for fewer batches. In-flight sync for fewer still:
a generation may then end with any pair of versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fsm_trainer.core.config import SYNC_MODES, SchedulerConfig
from fsm_trainer.simulate.explore import Case
from fsm_trainer.simulate.explore_moves import World

ADMISSIONS = ("paced", "greedy", "lockstep")
CREWS = ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2))
"""(workers, engines)."""
_STEPS = {1: 6, 2: 5, 3: 4}
"""Optimiser steps of an undisturbed run, by workers."""
_GREEDY_STEPS = {1: 5, 2: 3, 3: 2}
"""The same for `greedy`, which generates more batches than it trains on."""
_DISTURBED_STEPS = {1: 3, 2: 2, 3: 2}
_UNEVEN = (
    World(degenerate=frozenset({1})),
    World(no_step=frozenset({0, 2})),
    World(degenerate=frozenset({0}), no_step=frozenset({1})),
    World(degenerate=frozenset({1, 2})),
)
"""Worlds in which some batches give no step."""


def full_plan() -> Iterator[Case]:
    """Everything within the bounds of this module."""
    yield from undisturbed(range(1, 4), range(4), range(1, 4), (0, 1))
    yield from disturbed((1,), (0, 1, 2), (1, 2), (0, 1))
    yield from resumed((1, 2), range(4), range(1, 4))
    yield from inflight((1, 2), range(4), range(1, 4))
    yield from restarted((1, 2), range(3))


def small_plan() -> Iterator[Case]:
    """A selection with few batches, searched in seconds."""
    for index, case in enumerate(undisturbed((1,), range(3), (1, 2), (0, 1), crews=((1, 1), (2, 1), (2, 2)), steps=3)):
        if index % 2 == 0:
            yield case
    for index, case in enumerate(disturbed((1,), (0, 1), (1,), (0, 1), crews=((1, 1), (2, 2)), steps=1)):
        if index % 2 == 0:
            yield case
    yield from resumed((1,), (1, 2), (1, 2), crews=((2, 1),), steps=3)
    yield from inflight((1,), (2,), (1,), crews=((2, 1),), steps=2)
    yield from restarted((1,), (1, 2), crews=((2, 1),), steps=1)


def _configs(
    queues: range | tuple[int, ...],
    bounds: range | tuple[int, ...],
    intervals: range | tuple[int, ...],
    prefetches: tuple[int, ...],
    crews: tuple[tuple[int, int], ...],
) -> Iterator[dict[str, int | str]]:
    for admission, (workers, engines), queue, bound, interval, prefetch in product(
        ADMISSIONS, crews, queues, bounds, intervals, prefetches
    ):
        if admission != "lockstep" or bound >= interval - 1:
            yield {
                "admission": admission,
                "workers": workers,
                "engines": engines,
                "queue_size": queue,
                "max_staleness": bound,
                "sync_interval": interval,
                "prefetch": prefetch,
            }


def undisturbed(
    queues: range | tuple[int, ...],
    bounds: range | tuple[int, ...],
    intervals: range | tuple[int, ...],
    prefetches: tuple[int, ...],
    *,
    crews: tuple[tuple[int, int], ...] = CREWS,
    steps: int | None = None,
) -> Iterator[Case]:
    """Each configuration in an even world, and in turn with steps missing, prompts ending, saves, or a step limit."""
    for index, values in enumerate(_configs(queues, bounds, intervals, prefetches, crews)):
        table = _GREEDY_STEPS if values["admission"] == "greedy" else _STEPS
        many = steps or table[int(values["workers"])]
        yield Case(_config(values, max_steps=many))
        kind = index % 4
        if kind in (0, 1):
            world = _UNEVEN[index // 4 % len(_UNEVEN)]
            yield Case(_config(values, max_steps=many - 1, save_interval=2 * kind), world)
        elif kind == 2:
            yield Case(_config(values), World(prompts=many - 1, no_step=frozenset({many - 2})))
        else:
            limit = 1 + index // 4 % 2
            world = World(degenerate=frozenset({1, 2}))
            yield Case(_config(values, max_steps=many - 1, max_no_step_batches=limit, drop_stale=False), world)


def disturbed(
    queues: range | tuple[int, ...],
    bounds: range | tuple[int, ...],
    intervals: range | tuple[int, ...],
    prefetches: tuple[int, ...],
    *,
    crews: tuple[tuple[int, int], ...] = CREWS,
    steps: int | None = None,
) -> Iterator[Case]:
    """Each configuration with one fault and two stops at any moment, in turn by steps, by prompts and with saves."""
    for index, values in enumerate(_configs(queues, bounds, intervals, prefetches, crews)):
        many = steps or _DISTURBED_STEPS[int(values["workers"])]
        if index % 3 == 0:
            config, world = _config(values, max_steps=many), World()
        elif index % 3 == 1:
            config, world = _config(values), World(prompts=many)
        else:
            config, world = _config(values, max_steps=many, save_interval=1), World(no_step=frozenset({0}))
        yield Case(config, world, faults=1, stops=2)


def resumed(
    queues: range | tuple[int, ...],
    bounds: range | tuple[int, ...],
    intervals: range | tuple[int, ...],
    *,
    crews: tuple[tuple[int, int], ...] = CREWS,
    steps: int | None = None,
) -> Iterator[Case]:
    """Each configuration going on from a checkpoint, of which a publication need not be due, and saving on its way."""
    for index, values in enumerate(_configs(queues, bounds, intervals, (1,), crews)):
        many = steps or _DISTURBED_STEPS[int(values["workers"])] + 1
        first_batch = 3 + index // 2 % 2
        config = _config(values, first_batch=first_batch, first_version=3, max_steps=3 + many, save_interval=2)
        yield Case(config, World(no_step=frozenset({first_batch + 1 + index % 3})))


def inflight(
    queues: range | tuple[int, ...],
    bounds: range | tuple[int, ...],
    intervals: range | tuple[int, ...],
    *,
    crews: tuple[tuple[int, int], ...] = CREWS,
    steps: int | None = None,
) -> Iterator[Case]:
    """Each configuration whose engines load while they generate, and the same with a fault and two stops."""
    for index, values in enumerate(_configs(queues, bounds, intervals, (1,), crews)):
        if values["admission"] == "lockstep":
            continue
        many = steps or _DISTURBED_STEPS[int(values["workers"])]
        more = int(values["admission"] == "paced")
        mode = {**values, "sync_mode": "inflight"}
        yield Case(_config(mode, max_steps=many + more), World(no_step=frozenset({index % 3})))
        yield Case(_config(mode, max_steps=many, save_interval=index % 2), faults=1, stops=2)


def restarted(
    queues: range | tuple[int, ...],
    bounds: range | tuple[int, ...],
    *,
    crews: tuple[tuple[int, int], ...] = CREWS,
    steps: int | None = None,
) -> Iterator[Case]:
    """Each configuration that restarts engines, in either mode of sync: with any fault and two stops at any moment, and
    with two failures of engines, which the run must survive, or one too many in a row.
    """
    for index, values in enumerate(_configs(queues, bounds, (1,), (1,), crews)):
        if values["admission"] == "lockstep":
            continue
        many = steps or _DISTURBED_STEPS[int(values["workers"])]
        modes = {**values, "sync_mode": SYNC_MODES[index % 2], "on_engine_failure": "restart"}
        yield Case(_config(modes, max_steps=many), faults=1, stops=2)
        yield Case(_config(modes, max_steps=max(1, many - 1)), faults=2, healed=True)
        modes["sync_mode"] = SYNC_MODES[1 - index % 2]
        yield Case(_config(modes), World(prompts=many), faults=1, healed=True)
        yield Case(_config(modes), World(prompts=0), faults=2, healed=True)
        yield Case(_config(modes, max_steps=1, max_engine_restarts=1), faults=2)


def refresh_cases(steps: int = 5) -> Iterator[Case]:
    """Every pair of staleness and interval for the proof that refresh is necessary and sufficient."""
    for admission, crew, bound, interval in product(("paced", "greedy"), CREWS[:3], range(4), range(1, 5)):
        values = {"workers": crew[0], "engines": crew[1], "max_staleness": bound, "sync_interval": interval}
        yield Case(_config({"admission": admission, **values}, max_steps=steps))


def _config(values: dict[str, int | str], **more: int | bool) -> SchedulerConfig:
    return SchedulerConfig(**{**values, **more})  # type: ignore[arg-type]
