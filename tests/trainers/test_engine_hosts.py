"""Which host a command acts on, before, during and after an engine's restart; and the trainer's part in a load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fsm_trainer.core.events import Command, CommandKind, Input, InputKind
from fsm_trainer.engines.base import Loaded, Snapshot
from fsm_trainer.runtime.failures import EngineDied, EngineError, HostClosed
from fsm_trainer.runtime.host import InlineHost
from fsm_trainer.trainers.engine_hosts import EngineHosts
from tests.trainers.test_rollout_operations import Host

C = CommandKind
SNAPSHOT = Snapshot(7, "nowhere", 0)


class Stage:
    def __init__(self) -> None:
        self.made: list[Host] = []
        self.posted: list[Input] = []
        self.hosts = EngineHosts(self.make, self.posted.append, None)  # type: ignore[arg-type]

    def make(self, engine: int) -> Host:
        self.made.append(Host(f"engine-{engine}"))
        return self.made[-1]

    def start(self, op: int, engine: int = 0) -> Any:
        command = Command(op, C.START_ENGINE, engine=engine)
        host = self.hosts.start(command)
        self.hosts.done(command)
        return host


@pytest.fixture
def stage() -> Stage:
    return Stage()


def generate(op: int, engine: int = 0) -> Command:
    return Command(op, C.GENERATE, engine=engine, batch_id=op)


def test_a_new_host_comes_only_after_the_end_of_the_old_one(stage: Stage) -> None:
    first = stage.start(1)
    stage.hosts._make = lambda engine: pytest.fail("not yet") if "kill" not in first.calls else stage.make(engine)  # type: ignore[assignment]
    second = stage.start(10)
    assert first.calls == ["kill"]
    assert stage.hosts.of(generate(11)) is second


@pytest.mark.parametrize("error", [None, EngineError("RuntimeError", "half of it is gone")])
def test_an_engine_of_this_process_is_closed_to_free_what_it_has(stage: Stage, error: EngineError | None) -> None:
    first = stage.start(1)
    first.pid, first.close_error = None, error
    second = stage.start(10)
    assert first.calls == ["close"]
    assert stage.hosts.of(generate(11)) is second


def test_a_command_keeps_to_the_host_that_it_began_on(stage: Stage) -> None:
    first, command = stage.start(1), generate(2)
    assert stage.hosts.used_by(command) is None
    assert stage.hosts.of(command) is first
    stage.start(10)
    assert stage.hosts.used_by(command) is first
    stage.hosts.done(command)
    assert stage.hosts.used_by(command) is None


def test_a_command_from_before_a_restart_never_reaches_the_new_engine(stage: Stage) -> None:
    stage.start(1)
    other = stage.start(2, engine=1)
    with pytest.raises(HostClosed, match="^engine-2 was started anew"):
        stage.hosts.of(generate(3, engine=2))
    stage.start(10)
    with pytest.raises(HostClosed, match="^engine-0 was started anew after this generate was ordered$"):
        stage.hosts.of(generate(9))
    assert stage.hosts.of(generate(9, engine=1)) is other


def test_nothing_reaches_an_engine_between_its_hosts(stage: Stage) -> None:
    stage.start(1)

    def make(engine: int) -> Host:
        with pytest.raises(HostClosed):
            stage.hosts.of(generate(11))
        return stage.make(engine)

    stage.hosts._make = make  # type: ignore[assignment]
    assert stage.start(10) is stage.hosts.of(generate(11))


def test_the_death_of_an_engine_that_was_replaced_is_no_news(stage: Stage) -> None:
    first, second = stage.start(1), stage.start(10)
    for host in (first, second):
        host.tell(EngineDied(host.name, 1, -9))
    (event,) = stage.posted
    assert (event.kind, event.engine) == (InputKind.ENGINE_DIED, 0)


def test_close_kills_engines_whose_work_was_given_up_and_closes_the_others(stage: Stage) -> None:
    first, second, third = stage.start(1), stage.start(2, engine=1), stage.start(3, engine=2)
    stage.hosts.of(generate(4, engine=2))
    lost = generate(5)
    assert stage.hosts.of(lost) is first
    fourth = stage.start(6)
    stage.hosts.close(30)
    assert [host.calls for host in (first, second, third, fourth)] == [["kill"], ["close"], ["kill"], ["close"]]


def load(engine: Any, transport: Any, release: threading.Event | None = None) -> Loaded:
    """One load by an engine in this process, with the trainer's part in it; then what hangs is released."""
    host = InlineHost(lambda: engine, "engine-3")
    hosts = EngineHosts(lambda _: host, lambda _: None, transport)
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(hosts.load, host, SNAPSHOT, 3).result(30)
    finally:
        if release is not None:
            release.set()
        host.close(30)
        hosts.close(30)
        assert hosts.join(30)


def for_engine(snapshot: Snapshot, engine: int) -> Snapshot:
    return replace(snapshot, location=f"for {engine}")


def delivers(deliver: Callable[[Snapshot, int], Any], offer: Callable[..., Snapshot] = for_engine) -> Any:
    """A transport that makes of a snapshot another one for each load."""
    return SimpleNamespace(offer=offer, deliver=deliver)


def test_the_engine_and_the_trainer_take_part_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=30)
    parts: list[tuple[Snapshot, int]] = []
    loaded: list[Snapshot] = []

    def load_weights(snapshot: Snapshot) -> Loaded:
        loaded.append(snapshot)
        both.wait()
        return Loaded(snapshot.version)

    def deliver(snapshot: Snapshot, engine: int) -> None:
        parts.append((snapshot, engine))
        both.wait()

    assert load(SimpleNamespace(load_weights=load_weights), delivers(deliver)) == Loaded(7)
    assert loaded == [Snapshot(7, "for 3", 0)], "what was offered"
    assert parts == [(loaded[0], 3)]


def test_an_offer_that_fails_fails_the_load_before_either_part_begins() -> None:
    def offer(*_: Any) -> Snapshot:
        raise OSError(98, "Address already in use")

    never = delivers(lambda *_: pytest.fail("delivered"), offer)
    engine = SimpleNamespace(load_weights=lambda _: pytest.fail("loaded"))
    with pytest.raises(OSError, match="already in use"):
        load(engine, never)


@pytest.mark.parametrize(
    "transport", [None, delivers(lambda *_: pytest.fail("delivered"), offer=lambda snapshot, _: snapshot)]
)
def test_without_a_part_of_the_trainer_the_engine_loads_alone(transport: Any) -> None:
    assert load(SimpleNamespace(load_weights=lambda snapshot: Loaded(snapshot.version)), transport) == Loaded(7)


def test_a_delivery_that_fails_fails_the_load_though_the_engine_waits_for_it() -> None:
    release = threading.Event()

    def refuse(*_: Any) -> None:
        raise ConnectionError("no such receiver")

    with pytest.raises(ConnectionError, match="no such receiver"):
        load(SimpleNamespace(load_weights=lambda _: release.wait(60)), delivers(refuse), release)


def test_an_engine_that_fails_fails_the_load_though_the_trainer_waits_for_it() -> None:
    release = threading.Event()
    with pytest.raises(EngineError, match="Snapshot"):
        load(SimpleNamespace(load_weights=int), delivers(lambda *_: release.wait(60)), release)


def test_where_both_fail_the_engines_failure_is_told() -> None:
    def refuse(*_: Any) -> None:
        raise ConnectionError("the engine has gone")

    failed: list[Future[Loaded]] = []

    def submit(*_: Any) -> Future[Loaded]:
        failed.append(Future())
        failed[-1].set_exception(EngineError("ValueError", "no such tensor"))
        return failed[-1]

    hosts = EngineHosts(lambda _: pytest.fail("started"), lambda _: None, delivers(refuse))
    # The delivery has ended, too, before either is waited for.
    hosts._deliveries = SimpleNamespace(post=lambda job: job())  # type: ignore[assignment]
    for _ in range(20):  # each of its own place in memory, so that no order of a set does
        with pytest.raises(EngineError, match="no such tensor"):
            hosts.load(SimpleNamespace(submit=submit), SNAPSHOT, 3)  # type: ignore[arg-type]
